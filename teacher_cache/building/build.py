"""Fill the missing rows of one space: texts first, then vectors, and where asked for what is said token by token.

Two passes, each of which can be killed at any moment and run again. The first gives every text of the corpus
a row and leaves the corpus as a list of rows. The second asks the teacher for the rows that the space lacks,
shard by shard; what was committed is never asked for again.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.pending import OpenShard, OpenTokens, batches, missing_by_shard, new_vectors
from teacher_cache.building.workers import LocalWorkers, Workers
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CacheError
from teacher_cache.storage.codec import find_encoding
from teacher_cache.storage.manifest import (
    CorpusRecord,
    Manifest,
    SourceRecord,
    used_rows,
    writing_domains,
    writing_manifest,
)
from teacher_cache.table.cache import TeacherCache, checked_name
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import resolve, resolve_dtype, token_shape
from teacher_cache.teachers.base import Encoded, TeacherOptions, TeacherSpec
from teacher_cache.tokens.request import TokenRequest, TokenShape
from teacher_cache.tokens.token_columns import (
    ATTENTION,
    STATES,
    TokenRecord,
    checked_layers,
    token_encoding,
)

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
        bytes: of what was encoded in this build, before compression.
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
        cached: distinct texts that had a vector, and every other column that was asked for, before.
        encoded: texts the teacher was asked for and that are stored now.
        truncated: of those, texts longer than the space's maximum.
        repaired: of those, rows that came out non-finite and were recomputed in float32.
        quarantined: distinct texts of the corpus that lack a vector, or another column that was asked for, because
            theirs was refused.
        tokens, seconds: seen by the teacher; whole build.
        columns: that were asked for.
        token_texts: that were given token columns now.
        token_bytes: of these, before compression.
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
    columns: tuple[str, ...] = ("vectors",)
    token_texts: int = 0
    token_bytes: int = 0

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
    tokens: TokenRequest | None = None,
    token_storage: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> BuildReport:
    """Make sure that every text of `corpus` has a vector of `teacher` in `cache`, and the columns that are asked for.

    A vector that is there stays, and so does every column that is not asked for.

    Args:
        name: under which the corpus is kept, in place of an older one; None takes `corpus.name`.
        storage: number format of a new space; None takes "float16", or what the space has.
        tokens: what is wanted token by token, `attention=()` for the layers that the space has, or the last one; None
            for vectors alone.
        token_storage: number format of new token states, as `storage`.
        report: called with the progress after every batch.

    Raises:
        TeacherError, CorpusError, CacheError: nothing half-done is left, what was committed stays.
        SpaceMismatch: the teacher says something else of a text than the vector that is stored.
    """
    started = time.monotonic()
    if name is not None:
        checked_name(name)
    # Before anything is written: a mistake leaves no folder behind.
    if storage is not None:
        find_encoding(storage)
    if token_storage is not None:
        token_encoding(token_storage)
    spec = resolve(teacher)
    shape = None if tokens is None else token_shape(spec)
    if tokens is not None and tokens.attention and shape is not None:
        checked_layers(tokens.attention, shape)
    with TeacherCache.open(cache, "a") as table:
        if name is None:
            name = _default_name(corpus, table)
        manifest = ingest(corpus, table, name, report)
        used = manifest.used_rows(table.rows)
        distinct = int(used.sum())
        spec = resolve_dtype(spec, (record.space for record in table.space_records().values()))
        known = table.find_space(spec.space)
        view = table.ensure_space(spec.space, storage or (known.record.storage if known else "float16"))
        if tokens is not None and shape is not None:
            view, request = _with_tokens(table, view, shape, tokens, token_storage)
            spec = replace(spec, request=request)
        filled = _fill(table, view, used, spec, workers or LocalWorkers(), report)
        refused = _refused(view, spec.request)
        why = Counter(reason for row, reason in refused.items() if used[row])
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
            columns=_columns(spec.request),
            token_texts=filled.token_texts,
            token_bytes=filled.token_bytes,
        )


def _with_tokens(
    table: TeacherCache, view: SpaceView, shape: TokenShape, tokens: TokenRequest, storage: str | None
) -> tuple[SpaceView, TokenRequest]:
    """The space with columns for what is asked, and the request with its layers settled."""
    wanted = TokenRecord.wanted(shape, tokens, storage, view.record.columns)
    return table.ensure_tokens(view, wanted), TokenRequest(wanted.attention)


def _columns(request: TokenRequest | None) -> tuple[str, ...]:
    return ("vectors", *(("tokens",) if request else ()), *(("attention",) if request and request.attention else ()))


def _refused(view: SpaceView, request: TokenRequest | None) -> dict[int, str]:
    """Row -> why it lacks a column that was asked for; the vector's reason counts most."""
    if request is None or view.tokens is None:
        return view.quarantined()
    maps = view.tokens.quarantined(ATTENTION) if request.attention else {}
    return maps | view.tokens.quarantined(STATES) | view.quarantined()


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
    """Give every text of the corpus a row and publish its row list under `name`, and its domains where it has some.

    Domains that the same texts have under that name stay where the corpus is read without.

    Raises:
        CorpusError: a fault, or no record at all; the corpus is not published.
    """
    progress = Progress()
    columns = len(corpus.columns)
    with ExitStack() as stack:
        writer, written = stack.enter_context(writing_manifest(table.path, name, columns))
        domains = None if corpus.domain_key is None else stack.enter_context(writing_domains(table.path, name))
        appender = stack.enter_context(table.appending())
        for records, numbers in corpus.batches_with_domains(READ_RECORDS):
            if domains is not None:
                domains[0].append(np.array(numbers))
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
        sources=tuple(SourceRecord(*source) for source in corpus.sources),
        counts=dict(corpus.counts),
        domains=tuple(corpus.domains),
        domain_records=tuple(corpus.domains.values()),
        domain_key=corpus.domain_key,
        domains_fingerprint=corpus.domains_fingerprint,
    )
    if domains is not None:
        return table.publish_corpus(record, written, domains[1])
    held = table.corpora().get(name)
    if held is not None and held.fingerprint == record.fingerprint:
        record = record.with_domains_of(held)
    return table.publish_corpus(record, written)


@dataclass
class _Filled:
    """What came of a build; `refused` are rows that lack a column now."""

    asked: int = 0
    refused: set[int] = field(default_factory=set)
    truncated: int = 0
    repaired: int = 0
    tokens: int = 0
    token_texts: int = 0
    token_bytes: int = 0

    @property
    def stored(self) -> int:
        return self.asked - len(self.refused)


def _fill(
    table: TeacherCache,
    view: SpaceView,
    used: npt.NDArray[np.bool_],
    spec: TeacherSpec,
    workers: Workers,
    report: Callable[[Progress], None],
) -> _Filled:
    """Ask for the used rows that lack a column and commit them, each shard as soon as its last batch is back.

    Token shards hold fewer rows and are written as soon as they are complete; they become true together with the
    vectors of their rows.
    """
    filled = _Filled()
    columns = view.tokens if spec.request is not None else None
    total = sum(map(len, missing_by_shard(view, used, spec.request)))
    progress = Progress(phase="encoding", total=total, cached=int(used.sum()) - total, space=view.space.describe())
    report(progress)
    if not total:
        return filled
    shard_rows = view.vectors.shard_rows
    shards: dict[int, OpenShard] = {}
    batch_rows: dict[int, npt.NDArray[np.int64]] = {}
    started = committed = time.monotonic()
    cost_from, tokens_from = started, 0

    def opened() -> Iterator[npt.NDArray[np.int64]]:
        for rows in missing_by_shard(view, used, spec.request):
            shard = shards[int(rows[0] // shard_rows)] = OpenShard(len(rows))
            if columns is None:
                yield rows
                continue
            numbers, counts = np.unique(rows // columns.shard_rows, return_counts=True)
            shard.tokens = {int(n): OpenTokens(int(count)) for n, count in zip(numbers, counts, strict=True)}
            yield from np.split(rows, np.cumsum(counts)[:-1])

    def commit(number: int) -> None:
        nonlocal cost_from, tokens_from
        shard = shards[number]
        for part, pending in shard.tokens.items():
            if columns is not None:
                shard.written += pending.write(columns, part)
        now = time.monotonic()
        _, refused = view.write(
            number,
            np.concatenate([np.empty(0, dtype=np.int64), *shard.rows]),
            np.concatenate([np.empty((0, view.dims), dtype=np.float32), *shard.vectors]),
            tokens=filled.tokens - tokens_from,
            seconds=now - cost_from,
            also=shard.written,
        )
        cost_from, tokens_from = now, filled.tokens
        shard.rows.clear()
        shard.vectors.clear()
        shard.written.clear()
        filled.refused |= refused.keys()
        progress.quarantined = len(filled.refused)

    # Closed here even after an error: workers of other processes must not outlive the build.
    with closing(workers.encode(spec, batches(table, opened(), batch_rows, spec, BATCH_ROWS))) as answers:
        for number, encoded in answers:
            rows = batch_rows.pop(number)
            shard_number = int(rows[0] // shard_rows)
            shard = shards[shard_number]
            if columns is None:
                new, vectors = rows, encoded.vectors
            else:
                new, vectors = new_vectors(table, view, rows, encoded.vectors)
                part = int(rows[0] // columns.shard_rows)
                taken = shard.tokens[part].take(columns, rows, encoded, spec)
                filled.refused |= taken.refused
                filled.token_texts += taken.texts
                filled.token_bytes += taken.bytes
                if shard.tokens[part].waiting == 0:
                    shard.written += shard.tokens.pop(part).write(columns, part)
            if len(new):
                shard.rows.append(new)
                shard.vectors.append(vectors)
            shard.waiting -= len(rows)
            _count(filled, encoded)
            del encoded  # what was said token by token, before the next batch comes
            if shard.waiting == 0:
                commit(shard_number)
                del shards[shard_number]
                committed = time.monotonic()
            elif time.monotonic() - committed > COMMIT_SECONDS:
                for unfinished in [key for key, open_shard in shards.items() if open_shard.begun]:
                    commit(unfinished)
                committed = time.monotonic()
            progress.done += len(rows)
            progress.tokens = filled.tokens
            progress.tokens_per_second = filled.tokens / (time.monotonic() - started)
            progress.bytes += len(rows) * view.encoding.row_bytes(view.dims)
            report(progress)
    return filled


def _count(filled: _Filled, encoded: Encoded) -> None:
    filled.asked += len(encoded.vectors)
    filled.truncated += int(encoded.truncated.sum())
    filled.repaired += int(encoded.repaired.sum())
    filled.tokens += int(encoded.tokens.sum())
