"""Import of vectors that were exported from a cache or computed elsewhere."""

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
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import checked_name
from teacher_cache.table.view import SpaceView
from teacher_cache.text_key import KEY_BYTES, text_keys
from teacher_cache.transfer import EXPORT_FORMATS
from teacher_cache.transfer.base import ReadOptions, VectorSource
from teacher_cache.transfer.foreign import foreign_space

# float16 and bfloat16 round the length of a unit vector by less.
UNIT_LENGTH_ERROR = 1e-2
_CHECKED_ROWS = 4096

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class ImportReport:
    """Result of an import. Scripts rely on the names of `to_json`.

    Attributes:
        rows: vectors of the source, one per text, duplicates included.
        distinct: distinct texts.
        stored: texts whose vector is new.
        held: texts that already had the same vector.
        quarantined: texts whose vector the encoding cannot hold.
        reasons: number of quarantined texts by reason.
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
    report: Report = lambda progress: None,
) -> ImportReport:
    """Store the vectors of `source` in `cache`, as one space and one corpus, without a teacher.

    Everything is checked before the first write. Then texts and corpus are published, and then the vectors, shard by
    shard. After an interruption, the same call resumes.

    Args:
        source: a folder or file written by `export`, any Parquet file or saved dataset with a column of texts and one
            of vectors, or a .npy file with a vector for each text of `corpus`.
        corpus: the texts of a .npy file. Read twice, so not standard input.
        teacher: name of the model, for a source that does not name it.
        fields: more fields of the space, of `foreign.FIELDS`.
        storage: encoding of a new space; None means that of the source, by default float16.
        name: of the corpus; None means that of the source.

    Raises:
        CorpusError: the source cannot be read, its vectors are not finite `(n, d)` floats, one per text, or two
            records have the same text and different vectors.
        SpaceMismatch: the source does not match the space it names.
        CacheError: the cache has a different vector for a text, or a different corpus of that name.
    """
    started = time.monotonic()
    source, cache = Path(source), Path(cache)
    if name is not None:
        checked_name(name)
    if storage is not None:
        find_encoding(storage)
    module = import_module(_module_of(source, corpus))
    with ExitStack() as stack:
        # An existing cache is locked from the start: the checks must still hold when the vectors are written.
        table = stack.enter_context(TeacherCache.open(cache, "a")) if cache.exists() else None
        spool_file, keys_file = (stack.enter_context(intake.anonymous_file(cache)) for _ in range(2))
        given: VectorSource = module.read(source, ReadOptions(corpus, text_key, vector_key, spool_file))
        _check_origin(source, given, teacher, fields)
        unit_length = _check_vectors(source, given.vectors, report)
        if given.origin is not None:
            space, default_storage, error = given.origin.space, given.origin.storage, given.origin.worst_error
        else:
            dims = given.vectors.shape[1]
            space = foreign_space(teacher or "", fields or {}, dims=dims, unit_length=unit_length)
            default_storage, error = "float16", 0.0
        known = table.find_space(space) if table is not None else None
        if known is not None:
            default_storage = known.record.storage
        texts = _check_records(source, given, known, keys_file, report)
        _check_duplicates(source, given.vectors, intake.map_file(keys_file, "|u1", KEY_BYTES))
        name = name or _corpus_name(source, given, table)
        if table is None:
            table = stack.enter_context(TeacherCache.open(cache, "a"))
        view = table.ensure_space(space, storage or default_storage)
        manifest = _publish(given.corpus, table, name, texts, report)
        progress = Progress(phase="writing", total=texts, space=space.describe())
        filled = intake.fill(
            view,
            manifest.rows.reshape(-1),
            table.rows,
            lambda records: _float32(given.vectors[records]),
            error=error,
            report=lambda done, _: report(replace(progress, done=done)),
        )
        return ImportReport(
            rows=texts,
            distinct=manifest.record.distinct,
            stored=filled.stored,
            held=filled.held,
            quarantined=len(filled.quarantined),
            reasons=dict(Counter(filled.quarantined.values())),
            space=view.slug,
            corpus=name,
            cache=str(cache),
            seconds=round(time.monotonic() - started, 3),
        )


def _module_of(source: Path, corpus: Corpus | None) -> str:
    """The module that reads the source."""
    if not source.exists():
        raise CorpusError(f"{source}: no such file or folder")
    if source.is_dir():
        form = "npy" if (source / "vectors.npy").exists() else "hf-dataset"
    else:
        form = {".npy": "npy", ".parquet": "parquet"}.get(source.suffix.lower(), "")
    if not form:
        raise CorpusError(
            f"{source}: expected a folder or .parquet file with texts and vectors, or a .npy file of vectors; "
            "numpy.save writes one (pickles and .npz are not supported)"
        )
    has_texts = source.is_dir() or form != "npy"
    if not has_texts and corpus is None:
        raise CorpusError(f"{source} has only vectors: name the files of their texts with `corpus`")
    if has_texts and corpus is not None:
        raise CorpusError(f"{source} has texts: leave `corpus` out")
    return EXPORT_FORMATS[form]


def _float32(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # float64 numbers that are too large become infinite, which is checked
        return np.asarray(vectors, dtype=np.float32)


def _check_origin(source: Path, given: VectorSource, teacher: str | None, fields: Mapping[str, Any] | None) -> None:
    """Check that the vectors are a matrix of floats and that the source or the arguments describe their space."""
    vectors, origin = given.vectors, given.origin
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or 0 in vectors.shape:
        raise CorpusError(
            f"{source} holds {vectors.dtype} of shape {vectors.shape}, expected floats of shape (texts, dims)"
        )
    if origin is None and not teacher:
        raise CorpusError(f"{source} does not name the model of its vectors: name it with `teacher`")
    if origin is not None and (teacher or fields):
        raise CorpusError(
            f"{source} describes its vectors ({origin.space.describe()}): leave `teacher` and `fields` out"
        )
    if origin is not None and origin.space.dims != vectors.shape[1]:
        raise SpaceMismatch(
            f"{source} has vectors of {vectors.shape[1]} numbers, but its space has {origin.space.dims}"
        )


def _check_vectors(source: Path, vectors: npt.NDArray[Any], report: Report) -> bool:
    """Whether all vectors, which must be finite, have unit length."""
    unit_length = True
    progress = Progress(phase="checking vectors", total=len(vectors))
    for start in range(0, len(vectors), _CHECKED_ROWS):
        block = _float32(vectors[start : start + _CHECKED_ROWS])
        invalid = np.flatnonzero(~np.isfinite(block).all(axis=1))
        if len(invalid):
            raise CorpusError(
                f"{source}: record {start + int(invalid[0]) + 1} has NaN or an infinite number in its vector; remove "
                "all such records"
            )
        lengths = np.linalg.norm(block, axis=1)
        unit_length = unit_length and bool((np.abs(lengths - 1) <= UNIT_LENGTH_ERROR).all())
        progress.done += len(block)
        report(progress)
    return unit_length


def _check_records(
    source: Path, given: VectorSource, known: SpaceView | None, keys_file: IO[bytes], report: Report
) -> int:
    """Number of texts of the source, compared with its keys and vectors and with the space; writes their keys."""
    corpus, vectors = given.corpus, given.vectors
    progress = Progress(phase="checking texts", total=len(vectors))
    for records in corpus.batches(READ_RECORDS):
        texts = [text for record in records for text in record]
        start, end = progress.done, progress.done + len(texts)
        keys = text_keys(texts)
        keys_file.write(b"".join(keys))
        if given.keys is not None and len(given.keys) >= end:
            computed = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
            wrong = np.flatnonzero((given.keys[start:end] != computed).any(axis=1))
            if len(wrong):
                place = int(wrong[0])
                raise CorpusError(
                    f"{source}: the key of record {start + place + 1} does not match its text "
                    f"{intake.excerpt(texts[place])}: texts and vectors do not belong together"
                )
        if known is not None:
            _compare(source, known, texts, keys, _float32(vectors[start:end]))
        progress.done = end
        report(progress)
    corpus.require_records()
    counts = {progress.done, len(vectors), len(vectors) if given.keys is None else len(given.keys)}
    if len(counts) > 1:
        keys_too = "" if given.keys is None else f" and {len(given.keys)} keys"
        raise CorpusError(
            f"{source}: {len(vectors)} vectors{keys_too} for {progress.done} texts "
            f"({corpus.counts['skipped_empty']} more records were skipped as empty); expected one for each text"
        )
    return progress.done


def _compare(
    source: Path, view: SpaceView, texts: Sequence[str], keys: Sequence[bytes], vectors: npt.NDArray[np.float32]
) -> None:
    """Compare the vectors of a batch, which may have fewer vectors than texts, with those in the space."""
    rows = view.index.find(keys[: len(vectors)])
    both = np.flatnonzero(view.present(rows))
    held = view.gather(rows[both])
    wrong = intake.differing_rows(held, vectors[both])
    if len(wrong):
        place = int(both[wrong[0]])
        raise CacheError(
            f"{source} and space {view.slug} have different vectors for {intake.excerpt(texts[place])}: "
            f"{intake.describe_difference(held[wrong[0]], vectors[place])}; import into another cache, or with another "
            "`teacher`"
        )


def _check_duplicates(source: Path, vectors: npt.NDArray[Any], keys: npt.NDArray[np.uint8]) -> None:
    """Check that records with the same text have the same vector; raises a CorpusError."""
    heads = keys.view("<u8")[:, 0]
    windows = -(-len(keys) // intake.WINDOW_ROWS)
    for records in intake.sorted_windows(heads, 2**64, -(-(2**64) // windows)):
        same = np.flatnonzero((keys[records[1:]] == keys[records[:-1]]).all(axis=1))
        for start in range(0, len(same), _CHECKED_ROWS):
            places = same[start : start + _CHECKED_ROWS]
            before, after = records[places], records[places + 1]
            first, second = _float32(vectors[before]), _float32(vectors[after])
            wrong = intake.differing_rows(first, second)
            if len(wrong):
                place = int(wrong[0])
                raise CorpusError(
                    f"{source}: records {before[place] + 1} and {after[place] + 1} have the same text and different "
                    f"vectors: {intake.describe_difference(first[place], second[place])}; keep one of them"
                )


def _corpus_name(source: Path, given: VectorSource, table: TeacherCache | None) -> str:
    """The name of the corpus, which no different corpus in the cache may have."""
    corpus = given.corpus
    name = corpus.name
    if given.origin is not None and given.origin.corpus is not None:
        name = checked_name(given.origin.corpus)
    elif source.is_dir():  # the corpus only knows the file in it
        name = corpus_name(source.resolve().name) or name
    held = None if table is None else table.corpora().get(name)
    if held is None or held.fingerprint == corpus.fingerprint or held.shares_source(corpus.origins):
        return name
    raise CacheError(f"the cache has another corpus {name!r}, from {held.sources[0].name}; give this one a `name`")


def _publish(corpus: Corpus, table: TeacherCache, name: str, texts: int, report: Report) -> Manifest:
    """Write the corpus, unless the cache has one of that name with the same texts."""
    fingerprint = corpus.fingerprint
    held = table.corpora().get(name)
    if held is not None and held.fingerprint == fingerprint:
        return table.corpus(name)
    manifest = ingest(corpus, table, name, lambda progress: report(replace(progress, total=texts)))
    if manifest.record.fingerprint != fingerprint:
        raise CorpusError(f"{corpus.origins[0]} changed while it was imported; import it again")
    return manifest
