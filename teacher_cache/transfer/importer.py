"""Bring vectors into a cache that were computed elsewhere: a cache's export, or what people have on disk."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.build import READ_RECORDS, Progress, ingest
from teacher_cache.corpus.corpus import Corpus, corpus_name
from teacher_cache.errors import CacheError, CorpusError, SpaceMismatch
from teacher_cache.storage.codec import find_encoding
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table import intake
from teacher_cache.table.cache import TeacherCache, checked_name
from teacher_cache.table.intake import RowList, difference, disagreeing, excerpt, fill, grouped, mapped, unnamed_file
from teacher_cache.table.view import SpaceView
from teacher_cache.text_key import KEY_BYTES, text_keys
from teacher_cache.transfer import EXPORT_FORMATS
from teacher_cache.transfer.base import Asked, Given
from teacher_cache.transfer.foreign import foreign_space

# float16 and bfloat16 round the length of a unit vector by less.
UNIT_LENGTH_ERROR = 1e-2
_CHECKED_ROWS = 4096


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        rows: vectors of the source, one a text, duplicates included.
        distinct: distinct texts.
        stored: texts that have a vector now and had none.
        held: texts that had the same vector before.
        quarantined: texts whose vector the number format cannot hold.
        reasons: why, with how many.
    """

    rows: int
    distinct: int
    stored: int
    held: int
    quarantined: int
    reasons: dict[str, int]
    space: str
    corpus: str
    cache: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def import_vectors(
    source: str | Path,
    cache: str | Path,
    *,
    corpus: Corpus | None = None,
    text_key: str = "text",
    vector_key: str = "label",
    teacher: str | None = None,
    fields: Mapping[str, Any] | None = None,
    storage: str | None = None,
    name: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> ImportReport:
    """Put the vectors of `source` into `cache`, as one space and one corpus, without a teacher.

    Everything is checked before the first write; then texts and corpus are published, then the vectors, shard
    by shard. Cut off anywhere, the same call goes on.

    Args:
        source: a folder or file that `export` wrote, any Parquet file or saved dataset with a column of texts
            and one of vectors, or a .npy file whose rows are those of `corpus`.
        corpus: the texts of a .npy file; read twice, so not standard input.
        teacher: what the vectors are, for a source that does not say it itself.
        fields: more about it, by the names of `foreign.FIELDS`.
        storage: number format of a new space; None takes the exported one, or "float16".
        name: of the corpus; None takes the exported one's, or that of the source.

    Raises:
        CorpusError: the source cannot be read, or its vectors are no finite `(n, d)` floats, one a text; two
            of its records have one text and different vectors.
        SpaceMismatch: it is not the space that it says it is.
        CacheError: the cache has another vector for one of the texts, or another corpus of that name.
    """
    started = time.monotonic()
    source, cache = Path(source), Path(cache)
    if name is not None:
        checked_name(name)
    if storage is not None:
        find_encoding(storage)
    module = import_module(_module_of(source, corpus))
    with ExitStack() as stack:
        # A cache that is there is held from the start: what was compared must still be true when it is written.
        table = stack.enter_context(TeacherCache.open(cache, "a")) if cache.exists() else None
        spool, keys_file = (stack.enter_context(unnamed_file(cache)) for _ in range(2))
        given = module.read(source, Asked(corpus, text_key, vector_key, spool))
        _check_origin(source, given, teacher, fields)
        unit_length = _check_vectors(source, given.vectors, report)
        if given.origin is not None:
            space, usual = given.origin.space, given.origin.storage
        else:
            dims = given.vectors.shape[1]
            space = foreign_space(teacher or "", fields or {}, dims=dims, unit_length=unit_length)
            usual = "float16"
        known = table.find_space(space) if table is not None else None
        if known is not None:
            usual = known.record.storage
        texts = _check_records(source, given, known, keys_file, report)
        _check_duplicates(source, given.vectors, mapped(keys_file, "|u1", KEY_BYTES))
        name = name or _name(source, given, table)
        if table is None:
            table = stack.enter_context(TeacherCache.open(cache, "a"))
        view = table.ensure_space(space, storage or usual)
        manifest = _published(given.corpus, table, name, texts, report)
        progress = Progress(phase="writing", total=texts, space=space.describe())

        def written(done: int, total: int) -> None:
            progress.done = done
            report(progress)

        rows = manifest.rows.reshape(-1)
        error = 0.0 if given.origin is None else given.origin.worst_error

        def read(records: RowList) -> npt.NDArray[np.float32]:
            return _float32(given.vectors[records])

        filled = fill(view, rows, table.rows, read, error=error, report=written)
        return ImportReport(
            rows=texts,
            distinct=manifest.record.distinct,
            stored=filled.stored,
            held=filled.held,
            quarantined=len(filled.refused),
            reasons=dict(Counter(filled.refused.values())),
            space=view.slug,
            corpus=name,
            cache=str(cache),
            seconds=round(time.monotonic() - started, 3),
        )


def _module_of(source: Path, corpus: Corpus | None) -> str:
    """The module that reads the source.

    Raises:
        CorpusError: none does, or it lacks texts, or has some of its own.
    """
    if not source.exists():
        raise CorpusError(f"{source}: no such file or folder")
    if source.is_dir():
        form = "npy" if (source / "vectors.npy").exists() else "hf-dataset"
        bare = False
    else:
        known = {".npy": "npy", ".parquet": "parquet"}
        if source.suffix.lower() not in known:
            raise CorpusError(
                f"{source}: expected a folder or .parquet file with texts and vectors, or a .npy file of vectors; "
                "numpy.save writes one (pickles and .npz are not read)"
            )
        form = known[source.suffix.lower()]
        bare = form == "npy"
    if bare and corpus is None:
        raise CorpusError(f"{source} holds vectors alone: name the files of their texts with --corpus")
    if corpus is not None and not bare:
        raise CorpusError(f"{source} has texts of its own: leave --corpus out")
    return EXPORT_FORMATS[form]


def _float32(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a float64 too large becomes infinite, and is found then
        return np.asarray(vectors, dtype=np.float32)


def _check_origin(source: Path, given: Given, teacher: str | None, fields: Mapping[str, Any] | None) -> None:
    """
    Raises:
        CorpusError: the vectors are no matrix of floats, or nobody says what they are, or two do.
        SpaceMismatch: they are of another width than their space.
    """
    vectors, origin = given.vectors, given.origin
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or 0 in vectors.shape:
        raise CorpusError(
            f"{source} holds {vectors.dtype} of shape {vectors.shape}, expected floats of shape (texts, dims)"
        )
    if origin is None and not teacher:
        raise CorpusError(f"{source} does not say what its vectors are: name their model with --teacher")
    if origin is not None and (teacher or fields):
        raise CorpusError(
            f"{source} says itself what its vectors are ({origin.space.describe()}): leave --teacher and --field out"
        )
    if origin is not None and origin.space.dims != vectors.shape[1]:
        raise SpaceMismatch(f"{source}: vectors of {vectors.shape[1]} numbers, its space says {origin.space.dims}")


def _check_vectors(source: Path, vectors: npt.NDArray[Any], report: Callable[[Progress], None]) -> bool:
    """Whether all vectors have unit length.

    Raises:
        CorpusError: one is not finite.
    """
    unit_length = True
    progress = Progress(phase="checking vectors", total=len(vectors))
    for start in range(0, len(vectors), _CHECKED_ROWS):
        block = _float32(vectors[start : start + _CHECKED_ROWS])
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
        if len(bad):
            raise CorpusError(
                f"{source}: record {start + int(bad[0]) + 1} has NaN or an infinite number in its vector; take it "
                "out, and others like it"
            )
        lengths = np.linalg.norm(block, axis=1)
        unit_length = unit_length and bool((np.abs(lengths - 1) <= UNIT_LENGTH_ERROR).all())
        progress.done += len(block)
        report(progress)
    return unit_length


def _check_records(
    source: Path,
    given: Given,
    known: SpaceView | None,
    keys_file: IO[bytes],
    report: Callable[[Progress], None],
) -> int:
    """How many texts the source has; their keys go to a file.

    Raises:
        CorpusError: there is not one vector a text, or a key is not that of its text.
        CacheError: the space has another vector for a text.
    """
    corpus, vectors = given.corpus, given.vectors
    progress = Progress(phase="checking texts", total=len(vectors))
    for records in corpus.batches(READ_RECORDS):
        texts = [text for record in records for text in record]
        start, end = progress.done, progress.done + len(texts)
        keys = b"".join(text_keys(texts))
        keys_file.write(keys)
        made = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
        if given.keys is not None and len(given.keys) >= end:
            wrong = np.flatnonzero((given.keys[start:end] != made).any(axis=1))
            if len(wrong):
                place = int(wrong[0])
                raise CorpusError(
                    f"{source}: the key of record {start + place + 1} is not that of its text "
                    f"{excerpt(texts[place])}: texts and vectors do not belong together"
                )
        if known is not None:
            _compare(source, known, texts, made, _float32(vectors[start:end]))
        progress.done = end
        report(progress)
    corpus.require_records()
    counts = {progress.done, len(vectors), len(vectors) if given.keys is None else len(given.keys)}
    if len(counts) > 1:
        keys_too = "" if given.keys is None else f" and {len(given.keys)} keys"
        raise CorpusError(
            f"{source}: {len(vectors)} vectors{keys_too} for {progress.done} texts "
            f"({corpus.counts['skipped_empty']} more records were skipped as empty); there has to be one for each"
        )
    return progress.done


def _compare(
    source: Path,
    view: SpaceView,
    texts: Sequence[str],
    keys: npt.NDArray[np.uint8],
    vectors: npt.NDArray[np.float32],
) -> None:
    """Compare the first vectors of a batch with those that the space has for the same texts."""
    rows = view.index.find([key.tobytes() for key in keys[: len(vectors)]])
    both = np.flatnonzero(view.present(rows))
    held = view.gather(rows[both])
    wrong = disagreeing(held, vectors[both])
    if len(wrong):
        place = int(both[wrong[0]])
        raise CacheError(
            f"{source} and space {view.slug} have different vectors for {excerpt(texts[place])}: "
            f"{difference(held[wrong[0]], vectors[place])}; import into another cache, or under another --teacher"
        )


def _check_duplicates(source: Path, vectors: npt.NDArray[Any], keys: npt.NDArray[np.uint8]) -> None:
    """
    Raises:
        CorpusError: two records of one text have different vectors.
    """
    heads = keys.view("<u8")[:, 0]
    windows = -(-len(keys) // intake.WINDOW_ROWS)
    for records in grouped(heads, 2**64, -(-(2**64) // windows)):
        same = np.flatnonzero((keys[records[1:]] == keys[records[:-1]]).all(axis=1))
        for start in range(0, len(same), _CHECKED_ROWS):
            places = same[start : start + _CHECKED_ROWS]
            before, after = records[places], records[places + 1]
            first, second = _float32(vectors[before]), _float32(vectors[after])
            wrong = disagreeing(first, second)
            if len(wrong):
                place = int(wrong[0])
                raise CorpusError(
                    f"{source}: records {before[place] + 1} and {after[place] + 1} have the same text and different "
                    f"vectors: {difference(first[place], second[place])}; keep one of them"
                )


def _name(source: Path, given: Given, table: TeacherCache | None) -> str:
    """What to call the corpus, unless the cache has another one of that name.

    Raises:
        CacheError: it has.
    """
    corpus = given.corpus
    name = corpus.name
    if given.origin is not None and given.origin.corpus is not None:
        name = checked_name(given.origin.corpus)
    elif source.is_dir():  # of an exported folder the corpus knows one file alone
        name = corpus_name(source.resolve().name) or name
    held = None if table is None else table.corpora().get(name)
    if held is None or held.fingerprint == corpus.fingerprint:
        return name
    if not held.shares_source(corpus.origins):
        raise CacheError(f"the cache has another corpus {name!r}, from {held.sources[0].name}; give this one a --name")
    return name


def _published(
    corpus: Corpus, table: TeacherCache, name: str, texts: int, report: Callable[[Progress], None]
) -> Manifest:
    """The corpus in the cache; one of that name with the same texts stays as it is.

    Raises:
        CorpusError: its files changed since they were checked.
    """
    fingerprint = corpus.fingerprint
    held = table.corpora().get(name)
    if held is not None and held.fingerprint == fingerprint:
        return table.corpus(name)
    manifest = ingest(corpus, table, name, lambda progress: report(replace(progress, total=texts)))
    if manifest.record.fingerprint != fingerprint:
        raise CorpusError(f"{corpus.origins[0]} changed while it was imported; import it again")
    return manifest
