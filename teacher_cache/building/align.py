"""Alignments of a teacher's and a student's tokens, computed once and kept beside the teacher's columns.

They follow from what is stored and from the student's tokenizer: losing them costs the time to compute them again,
and no teacher. One array holds those of one method and one way of cutting texts; a row of it is the pairs
`(student token, teacher token)` of a text as little-endian uint32.
"""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, MissingRows, TeacherError, optional_import
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, shard_key
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, TeacherSpec, resolve
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.pieces import ignores_case, text_pieces
from teacher_cache.tokens.alignment import Alignment, align, check_method, of_pairs
from teacher_cache.tokens.request import OTHER, ROLE
from teacher_cache.tokens.token_columns import PIECES, TokenColumns

# Longest text of a student that nobody names a length for: what students are trained with by default.
STUDENT_LENGTH = 256
# Texts tokenized and aligned at a time.
ALIGNED_TEXTS = 1024
CHUNK_ROWS = 64
_PAIR = np.dtype("<u4")


@dataclass(frozen=True)
class AlignmentSettings:
    """Everything that could change an alignment, given the space and the text.

    Attributes:
        method: a name of `teacher_cache.tokens.alignment.METHODS`.
        tokenizer: digest of the student's tokenizer files.
        max_length: tokens that the student reads of a text, specials and prompt included.
        prompt: in front of the student's texts.
        lower: the student cannot tell the cases apart.
    """

    method: str
    tokenizer: str
    max_length: int
    prompt: str
    lower: bool

    @property
    def array(self) -> str:
        """Folder of the alignments inside the space's."""
        told = json.dumps([self.tokenizer, self.max_length, self.prompt, self.lower]).encode()
        return f"alignment-{self.method}-{blake2b(told, digest_size=4).hexdigest()}.zarr"


class AlignmentColumn:
    """Reads the kept alignments of one space, method and student tokenizer."""

    def __init__(self, view: SpaceView, settings: AlignmentSettings) -> None:
        self.settings = settings
        self.column = Column(view.index, column_name(view, settings), view.folder / settings.array)

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)`: of which rows an alignment is kept."""
        return self.column.present(rows)

    def gather(self, rows: npt.NDArray[np.int64]) -> list[Alignment]:
        """The alignments of n rows, in the order asked for.

        Raises:
            MissingRows: none is kept of a row.
            DamagedCache: a shard is not what was written.
        """
        try:
            return [_restored(pairs) for pairs in self.column.read(np.asarray(rows, dtype=np.int64))]
        except DamagedCache as error:
            raise _derived(self.column, error) from error


def kept_alignments(view: SpaceView, settings: AlignmentSettings) -> AlignmentColumn | None:
    """Where the alignments of a space and a student are kept; None where `tcache align` was never run for them."""
    promised = any(True for _ in view.index.iter_shards(column_name(view, settings)))
    return (
        AlignmentColumn(view, settings) if promised and (view.folder / settings.array / "zarr.json").exists() else None
    )


@dataclass(frozen=True)
class AlignReport:
    """What `align_corpus` did.

    Attributes:
        rows: distinct texts of the corpus.
        cached: whose alignment was kept before.
        aligned: whose alignment is kept now.
        without_tokens: that the space has no tokens of.
        student_tokens, mapped: tokens of the texts aligned now that are no prompt's, and those with a counterpart.
        array: folder of the alignments inside the space's.
    """

    space: str
    corpus: str
    method: str
    array: str
    rows: int
    cached: int
    aligned: int
    without_tokens: int
    student_tokens: int
    mapped: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def align_corpus(
    path: str | Path,
    student: str,
    method: str,
    *,
    space: str | None = None,
    corpus: str | None = None,
    prompt: str = "",
    max_length: int | None = None,
    trust_remote_code: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> AlignReport:
    """Keep the alignment of every text of a corpus with a student's tokens; what is kept already stays.

    A kill at any moment loses at most the shard in memory.

    Args:
        path: of the cache.
        student: model folder, hub id or known name; only its tokenizer is loaded.
        method: a name of `teacher_cache.tokens.alignment.METHODS`.
        max_length: None takes the model's own, but at most `STUDENT_LENGTH`.
        report: called with texts done and in all.

    Raises:
        TeacherError: an unknown method, or a student without a fast tokenizer.
        MissingRows: the space has no token columns.
        MissingDependency: transformers is not installed.
    """
    started = time.monotonic()
    check_method(method)
    options = TeacherOptions(
        model=student,
        backend="transformer",
        prompt=prompt,
        max_length=max_length,
        dtype="float32",
        trust_remote_code=trust_remote_code,
    )
    spec = resolve(options)
    length = spec.space.max_length if max_length else min(spec.space.max_length, STUDENT_LENGTH)
    with TeacherCache.open(path, "r+") as cache:
        view = cache.space(space)
        tokens = _token_columns(view)
        manifest = cache.corpus(corpus)
        tokenizer = _tokenizer(spec)
        settings = AlignmentSettings(method, spec.space.tokenizer, length, prompt, ignores_case(tokenizer))
        column = _column(cache, view, settings)
        rows = manifest.distinct_rows(cache.rows)
        kept = column.present(rows)
        there = tokens.columns[PIECES].present(rows)
        wanted = rows[~kept & there]
        done = student_tokens = mapped = 0
        for number in np.unique(wanted // column.shard_rows).tolist():
            shard = wanted[wanted // column.shard_rows == number]
            blobs = np.empty(len(shard), dtype=object)
            for start in range(0, len(shard), ALIGNED_TEXTS):
                part = shard[start : start + ALIGNED_TEXTS]
                texts, theirs = cache.texts(part), tokens.gather_pieces(part)
                ours = text_pieces(tokenizer, texts, prompt=prompt, max_length=length)
                for place, (text, teacher, mine) in enumerate(zip(texts, theirs, ours, strict=True), start):
                    found = align(text, teacher, mine, method, lower=settings.lower)
                    blobs[place] = np.stack([found.student, found.teacher], axis=1).astype(_PAIR).tobytes()
                    student_tokens += int((mine[:, ROLE] != OTHER).sum())
                    mapped += len(np.unique(found.student))
                done += len(part)
                report(done, len(wanted))
            try:
                cache.index.commit([column.write(number, shard, blobs, 0.0)])
            except DamagedCache as error:
                raise _derived(column, error) from error
        return AlignReport(
            space=view.slug,
            corpus=manifest.record.name,
            method=method,
            array=settings.array,
            rows=len(rows),
            cached=int(kept.sum()),
            aligned=done,
            without_tokens=int((~there & ~kept).sum()),
            student_tokens=student_tokens,
            mapped=mapped,
            seconds=round(time.monotonic() - started, 3),
        )


def column_name(view: SpaceView, settings: AlignmentSettings) -> str:
    """Of the alignments in the index."""
    return f"{view.record.name}/{settings.array}"


def _token_columns(view: SpaceView) -> TokenColumns:
    if view.tokens is None:
        raise MissingRows(
            f"space {view.slug} keeps sentence vectors alone, and tokens are aligned with tokens; `tcache build "
            "--columns vectors,tokens` with the same teacher fills them"
        )
    return view.tokens


def _column(cache: TeacherCache, view: SpaceView, settings: AlignmentSettings) -> Column:
    """The column to write to; made anew where its folder is gone or was never published."""
    name, folder = column_name(view, settings), view.folder / settings.array
    known = [number for number, _ in cache.index.iter_shards(name)]
    if not known or not (folder / "zarr.json").exists():
        cache.index.commit([Change("shards", shard_key(name, number), None) for number in known])
        shutil.rmtree(folder, ignore_errors=True)
        ShardedArray.create_blobs(
            folder,
            shard_rows=cache.shard_rows,
            chunk_rows=math.gcd(CHUNK_ROWS, cache.shard_rows),
            itemsize=_PAIR.itemsize,
            compressed=True,
        )
    return Column(cache.index, name, folder)


def _tokenizer(spec: TeacherSpec) -> Any:
    if spec.folder is None:
        raise TeacherError(f"student {spec.space.teacher} has no folder to load a tokenizer from")
    with optional_import("the student's tokenizer"):
        from transformers import AutoTokenizer

        from teacher_cache.teachers.loading import loading
    folder = ModelFolder(spec.folder).encoder
    with loading(folder):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=spec.options.trust_remote_code
        )


def _restored(blob: bytes) -> Alignment:
    return of_pairs(np.frombuffer(blob, dtype=_PAIR).reshape(-1, 2).astype(np.int32))


def _derived(column: Column, error: DamagedCache) -> DamagedCache:
    return DamagedCache(
        f"{error}; alignments follow from what is stored: remove {column.array.folder} and run `tcache align` again"
    )
