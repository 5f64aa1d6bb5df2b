"""Fill the missing rows of one space: texts first, then vectors.

Two passes, each of which can be killed at any moment and run again. The first gives every text of the corpus
a row and leaves the corpus as a list of rows. The second asks the teacher for the rows that the space lacks,
shard by shard; what was committed is never asked for again.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.cache import TeacherCache, checked_name
from teacher_cache.corpus import Corpus
from teacher_cache.errors import CacheError
from teacher_cache.storage.codec import number_format
from teacher_cache.storage.manifest import CorpusRecord, Manifest, Source, used_rows, writing_manifest
from teacher_cache.teachers import resolve, settle_dtype
from teacher_cache.teachers.base import Encoded, TeacherOptions, TeacherSpec
from teacher_cache.view import SpaceView
from teacher_cache.workers import LocalWorkers, Workers

# Records read at a time, and texts given to a worker at a time.
READ_RECORDS = 8192
BATCH_ROWS = 1024
# An unfinished shard is committed after this long, so that a slow teacher loses little when it is stopped.
COMMIT_SECONDS = 10.0


@dataclass
class Progress:
    """How far a build is; handed to the caller's callback after every batch.

    Attributes:
        phase: "reading" the corpus or "encoding" its missing rows.
        done, total: records read (total 0 while unknown), or distinct texts encoded.
        cached: distinct texts of the corpus that were there before.
        tokens, tokens_per_second: that the teacher has seen in this build.
        bytes: of the vectors encoded in this build, before compression.
        space: one line on the teacher and how it is asked, once that is settled.
    """

    phase: str = "reading"
    done: int = 0
    total: int = 0
    cached: int = 0
    tokens: int = 0
    bytes: int = 0
    quarantined: int = 0
    tokens_per_second: float = 0.0
    space: str = ""


@dataclass(frozen=True)
class BuildReport:
    """What a build did; `to_json` has the names that scripts rely on.

    Attributes:
        rows: records of the corpus, duplicates included (for pairs, records, not texts).
        distinct: distinct texts.
        cached: distinct texts that had a vector before.
        encoded: texts the teacher was asked for and that are stored now.
        truncated: of those, texts longer than the space's maximum.
        repaired: of those, rows that came out non-finite and were recomputed in float32.
        quarantined: distinct texts of the corpus that have no vector because theirs was refused.
        tokens, seconds: seen by the teacher; whole build.
    """

    rows: int
    distinct: int
    cached: int
    encoded: int
    truncated: int
    repaired: int
    quarantined: int
    tokens: int
    seconds: float
    space: str
    corpus: str
    cache: str
    counts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(
    corpus: Corpus,
    teacher: TeacherOptions,
    cache: str | Path,
    *,
    name: str | None = None,
    workers: Workers | None = None,
    storage: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> BuildReport:
    """Make sure that every text of `corpus` has a vector of `teacher` in `cache`.

    Args:
        name: under which the corpus is kept, in place of an older one; None takes `corpus.name`.
        storage: number format of a new space; None takes "float16", or what the space has.
        report: called with the progress after every batch.

    Raises:
        TeacherError, CorpusError, CacheError: nothing half-done is left, what was committed stays.
    """
    started = time.monotonic()
    if name is not None:
        checked_name(name)
    # Before anything is written: a mistake leaves no folder behind.
    if storage is not None:
        number_format(storage)
    spec = resolve(teacher)
    with TeacherCache.open(cache, "a") as table:
        if name is None:
            name = _default_name(corpus, table)
        manifest = ingest(corpus, table, name, report)
        used = manifest.used_rows(table.rows)
        distinct = int(used.sum())
        spec = settle_dtype(spec, (record.space for record in table.space_records().values()))
        known = table.find_space(spec.space)
        view = table.ensure_space(spec.space, storage or (known.record.storage if known else "float16"))
        filled = _fill(table, view, used, spec, workers or LocalWorkers(), report)
        why = Counter(reason for row, reason in view.quarantined().items() if used[row])
        quarantined = why.total()
        return BuildReport(
            rows=len(manifest),
            distinct=distinct,
            cached=distinct - quarantined - filled.stored,
            encoded=filled.stored,
            truncated=filled.truncated,
            repaired=filled.repaired,
            quarantined=quarantined,
            tokens=filled.tokens,
            seconds=round(time.monotonic() - started, 3),
            space=view.slug,
            corpus=name,
            cache=str(cache),
            counts=manifest.record.counts,
            reasons=dict(why),
        )


def _default_name(corpus: Corpus, table: TeacherCache) -> str:
    """The corpus's own name, unless the cache has a corpus of that name from other files.

    Raises:
        CacheError: it has.
    """
    known = table.corpora().get(corpus.name)
    if known is not None and not known.shares_source(corpus.origins):
        raise CacheError(
            f"corpus {corpus.name!r} of {table.path} came from {known.sources[0].name}, this one from "
            f"{corpus.origins[0]}; give it another --name (or the same to replace it)"
        )
    return corpus.name


def ingest(corpus: Corpus, table: TeacherCache, name: str, report: Callable[[Progress], None]) -> Manifest:
    """Give every text of the corpus a row and publish its row list under `name`.

    Raises:
        CorpusError: a fault, or no record at all; the corpus is not published.
    """
    progress = Progress()
    columns = len(corpus.columns)
    with writing_manifest(table.path, name, columns) as (writer, written), table.appending() as appender:
        for records in corpus.batches(READ_RECORDS):
            rows = appender.add([text for record in records for text in record])
            writer.append(rows.reshape(len(records), columns))
            progress.done += len(records)
            report(progress)
        corpus.require_records()
    rows = np.load(written, mmap_mode="r", allow_pickle=False)
    record = CorpusRecord(
        name=name,
        fingerprint=corpus.fingerprint,
        columns=tuple(corpus.columns),
        records=writer.records,
        distinct=int(used_rows(rows, table.rows).sum()),
        sources=tuple(Source(*source) for source in corpus.sources),
        counts=dict(corpus.counts),
    )
    return table.publish_corpus(record, written)


@dataclass
class _Filled:
    stored: int = 0
    truncated: int = 0
    repaired: int = 0
    tokens: int = 0


@dataclass
class _OpenShard:
    """Vectors of one shard that are not committed yet."""

    waiting: int
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    vectors: list[npt.NDArray[np.float32]] = field(default_factory=list)


def _fill(
    table: TeacherCache,
    view: SpaceView,
    used: npt.NDArray[np.bool_],
    spec: TeacherSpec,
    workers: Workers,
    report: Callable[[Progress], None],
) -> _Filled:
    """Ask for the used rows that are missing and commit them, each shard as soon as its last batch is back."""
    filled = _Filled()
    total = sum(map(len, _missing_by_shard(view, used)))
    progress = Progress(phase="encoding", total=total, cached=int(used.sum()) - total, space=view.space.describe())
    report(progress)
    if not total:
        return filled
    shard_rows = view.vectors.shard_rows
    shards: dict[int, _OpenShard] = {}
    batch_rows: dict[int, npt.NDArray[np.int64]] = {}
    started = committed = time.monotonic()
    cost_from, tokens_from = started, 0

    def opened() -> Iterator[npt.NDArray[np.int64]]:
        for rows in _missing_by_shard(view, used):
            shards[int(rows[0] // shard_rows)] = _OpenShard(len(rows))
            yield rows

    def commit(number: int) -> None:
        nonlocal cost_from, tokens_from
        shard = shards[number]
        now = time.monotonic()
        stored, refused = view.write(
            number,
            np.concatenate(shard.rows),
            np.concatenate(shard.vectors),
            tokens=filled.tokens - tokens_from,
            seconds=now - cost_from,
        )
        cost_from, tokens_from = now, filled.tokens
        shard.rows.clear()
        shard.vectors.clear()
        filled.stored += stored
        progress.quarantined += len(refused)

    # Closed here even after an error: workers of other processes must not outlive the build.
    with closing(workers.encode(spec, _batches(table, opened(), batch_rows))) as answers:
        for number, encoded in answers:
            rows = batch_rows.pop(number)
            shard_number = int(rows[0] // shard_rows)
            shard = shards[shard_number]
            shard.rows.append(rows)
            shard.vectors.append(encoded.vectors)
            shard.waiting -= len(rows)
            _count(filled, encoded)
            if shard.waiting == 0:
                commit(shard_number)
                del shards[shard_number]
                committed = time.monotonic()
            elif time.monotonic() - committed > COMMIT_SECONDS:
                for unfinished in [key for key, open_shard in shards.items() if open_shard.rows]:
                    commit(unfinished)
                committed = time.monotonic()
            progress.done += len(rows)
            progress.tokens = filled.tokens
            progress.tokens_per_second = filled.tokens / (time.monotonic() - started)
            progress.bytes += len(encoded.vectors) * view.form.row_bytes(view.dims)
            report(progress)
    return filled


def _count(filled: _Filled, encoded: Encoded) -> None:
    filled.truncated += int(encoded.truncated.sum())
    filled.repaired += int(encoded.repaired.sum())
    filled.tokens += int(encoded.tokens.sum())


def _missing_by_shard(view: SpaceView, used: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.int64]]:
    """The used rows that have no vector, ascending, a shard at a time."""
    shard_rows = view.vectors.shard_rows
    for first in range(0, len(used), shard_rows):
        missing = view.missing_rows(first + np.flatnonzero(used[first : first + shard_rows]))
        if len(missing):
            yield missing


def _batches(
    table: TeacherCache,
    by_shard: Iterator[npt.NDArray[np.int64]],
    batch_rows: dict[int, npt.NDArray[np.int64]],
) -> Iterator[list[str]]:
    """Texts of the missing rows, shard by shard; within a shard sorted by length, so batches pad little.

    The rows of each batch are noted in `batch_rows`, by the batch's number, before its texts are handed out.
    """
    handed_out = 0
    for rows in by_shard:
        texts = table.texts(rows)
        order = np.argsort([len(text) for text in texts], kind="stable")
        for start in range(0, len(rows), BATCH_ROWS):
            chosen = order[start : start + BATCH_ROWS]
            batch_rows[handed_out] = rows[chosen]
            handed_out += 1
            yield [texts[place] for place in chosen.tolist()]
