"""Stored alignments of a teacher's and a student's tokens.

An alignment depends only on stored data and the student's tokenizer, so a lost one can be computed again without the
teacher. Each alignment method and set of tokenizer settings has one array. A row of it holds the pairs
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

from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.storage.chunks import BLOBS
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, shard_key
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, load_tokenizer, resolve
from teacher_cache.teachers.token_offsets import ignores_case, tokenize_with_offsets
from teacher_cache.tokens.alignment import Alignment, align, check_method
from teacher_cache.tokens.request import OTHER, ROLE
from teacher_cache.tokens.token_columns import PIECES

# Default maximum length of a student's texts, in tokens.
STUDENT_LENGTH = 256
# Texts tokenized and aligned at a time.
ALIGNED_TEXTS = 1024
CHUNK_ROWS = 64
_PAIR = np.dtype("<u4")


@dataclass(frozen=True)
class AlignmentSettings:
    """Everything that an alignment depends on, besides the space and the text.

    Attributes:
        tokenizer: digest of the student's tokenizer files.
        max_length: most tokens of a text that the student reads, including special tokens and prompt.
        lower: whether the student ignores case.
    """

    method: str
    tokenizer: str
    max_length: int
    prompt: str
    lower: bool

    @property
    def array(self) -> str:
        """Name of the array's folder inside the space's folder."""
        settings = json.dumps([self.tokenizer, self.max_length, self.prompt, self.lower]).encode()
        return f"alignment-{self.method}-{blake2b(settings, digest_size=4).hexdigest()}.zarr"

    def column_name(self, view: SpaceView) -> str:
        """Name of the array in the index."""
        return f"{view.record.name}/{self.array}"


class AlignmentColumn(Column):
    """The stored alignments of one space, method and student tokenizer."""

    def gather(self, rows: npt.NDArray[np.int64]) -> list[Alignment]:
        """Alignments of n rows, in the order of `rows`."""
        try:
            blobs = self.read(np.asarray(rows, dtype=np.int64))
        except DamagedCache as error:
            raise self.damaged(error) from error
        return [
            Alignment.from_pairs(np.frombuffer(blob, dtype=_PAIR).reshape(-1, 2).astype(np.int32)) for blob in blobs
        ]

    def damaged(self, error: DamagedCache) -> DamagedCache:
        """`error`, with advice."""
        return DamagedCache(f"{error}; remove {self.array.folder} and run `tcache align` again to compute it again")


def stored_alignments(view: SpaceView, settings: AlignmentSettings) -> AlignmentColumn | None:
    """The stored alignments of a space and a student; None if `tcache align` was never run for them."""
    name, folder = settings.column_name(view), view.folder / settings.array
    committed = any(True for _ in view.index.iter_shards(name))
    return AlignmentColumn(view.index, name, folder) if committed and (folder / "zarr.json").exists() else None


@dataclass(frozen=True)
class AlignReport:
    """Result of `align_corpus`.

    Attributes:
        rows: distinct texts of the corpus.
        without_tokens: texts without token columns in the space, not aligned.
        student_tokens: student tokens of the texts aligned now, without those of the prompt.
        mapped: of these, tokens with a counterpart.
        array: name of the array's folder inside the space's folder.
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
    """Store the alignments of a corpus with a student's tokens; existing ones are kept.

    Killing it loses at most the shard in memory.

    Args:
        method: a name of `teacher_cache.tokens.alignment.METHODS`.
        student: model folder, hub id or known name; only its tokenizer is loaded.
        max_length: None uses the model's own, but at most `STUDENT_LENGTH`.
        report: called with the number of texts done and the total.
    """
    started = time.monotonic()
    check_method(method)
    spec = resolve(
        TeacherOptions(
            model=student,
            backend="transformer",
            prompt=prompt,
            max_length=max_length,
            dtype="float32",
            trust_remote_code=trust_remote_code,
        )
    )
    length = spec.space.max_length if max_length else min(spec.space.max_length, STUDENT_LENGTH)
    with TeacherCache.open(path, "r+") as cache:
        view = cache.space(space)
        tokens = view.tokens
        if tokens is None:
            raise MissingRows(
                f"space {view.slug} has no token columns to align; `tcache build --columns vectors,tokens` with the "
                "same teacher adds them"
            )
        manifest = cache.corpus(corpus)
        tokenizer = load_tokenizer(spec)
        settings = AlignmentSettings(method, spec.space.tokenizer, length, prompt, ignores_case(tokenizer))
        column = stored_alignments(view, settings) or _new_column(cache, view, settings)
        rows = manifest.distinct_rows(cache.rows)
        cached = column.present(rows)
        has_tokens = tokens.columns[PIECES].present(rows)
        missing = rows[~cached & has_tokens]
        done = student_tokens = mapped = 0
        for number in np.unique(missing // column.shard_rows).tolist():
            shard = missing[missing // column.shard_rows == number]
            blobs = np.empty(len(shard), dtype=object)
            for start in range(0, len(shard), ALIGNED_TEXTS):
                part = shard[start : start + ALIGNED_TEXTS]
                texts, teacher_pieces = cache.texts(part), tokens.gather_pieces(part)
                student_pieces = tokenize_with_offsets(tokenizer, texts, prompt=prompt, max_length=length)
                pieces = zip(texts, teacher_pieces, student_pieces, strict=True)
                for place, (text, teacher, one) in enumerate(pieces, start):
                    found = align(text, teacher, one, method, lower=settings.lower)
                    blobs[place] = np.stack([found.student, found.teacher], axis=1).astype(_PAIR).tobytes()
                    student_tokens += int((one[:, ROLE] != OTHER).sum())
                    mapped += len(np.unique(found.student))
                done += len(part)
                report(done, len(missing))
            try:
                cache.index.commit(column.write(number, shard, blobs, 0.0))
            except DamagedCache as error:
                raise column.damaged(error) from error
        return AlignReport(
            space=view.slug,
            corpus=manifest.record.name,
            method=method,
            array=settings.array,
            rows=len(rows),
            cached=int(cached.sum()),
            aligned=done,
            without_tokens=int((~has_tokens & ~cached).sum()),
            student_tokens=student_tokens,
            mapped=mapped,
            seconds=round(time.monotonic() - started, 3),
        )


def _new_column(cache: TeacherCache, view: SpaceView, settings: AlignmentSettings) -> AlignmentColumn:
    """A new, empty array in place of what is left of an older one."""
    name, folder = settings.column_name(view), view.folder / settings.array
    cache.index.commit([Change("shards", shard_key(name, number), None) for number, _ in cache.index.iter_shards(name)])
    shutil.rmtree(folder, ignore_errors=True)
    ShardedArray.create(
        folder,
        dtype=BLOBS,
        shard_rows=cache.shard_rows,
        chunk_rows=math.gcd(CHUNK_ROWS, cache.shard_rows),
        itemsize=_PAIR.itemsize,
        compressed=True,
    )
    return AlignmentColumn(cache.index, name, folder)
