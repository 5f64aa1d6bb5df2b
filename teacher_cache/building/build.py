"""Compute the missing vectors, and optionally token columns, of a corpus in one space.

A build has two passes. Each can be killed at any moment and run again. The first gives every text a row and writes
the manifest. The second encodes the rows that the space lacks, shard by shard; committed rows are never encoded
again.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.pending import (
    BuildCounts,
    PendingShard,
    PendingTokens,
    batches,
    missing_by_shard,
    new_vectors,
)
from teacher_cache.building.workers import LocalWorkers, Workers
from teacher_cache.corpus.corpus import TEXTS, Corpus, CorpusSource, to_corpus
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
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import checked_name
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import resolve, resolve_dtype, token_shape
from teacher_cache.teachers.base import TeacherOptions, TeacherSpec
from teacher_cache.tokens.request import TokenRequest, TokenShape
from teacher_cache.tokens.token_columns import ATTENTION, STATES, TokenRecord, checked_layers, token_encoding

# Records read at a time, and texts given to a worker at a time.
READ_RECORDS = 8192
BATCH_ROWS = 1024
# Seconds between commits of unfinished shards, so that stopping a slow teacher loses little.
COMMIT_SECONDS = 10.0


@dataclass
class Progress:
    """State of a running build, passed to the `report` callback after every batch.

    Attributes:
        phase: "reading" (the corpus), "loading" (the teacher) or "encoding" (the missing rows).
        done, total: records read (total 0 while unknown), or distinct texts encoded.
        cached: distinct texts of the corpus that had all columns before.
        tokens, tokens_per_second: encoded in this build.
        bytes: of the vectors encoded in this build, before compression.
        space: one-line description of the space, once known.
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
    """Result of a build. Scripts rely on the names of `to_json`.

    Attributes:
        rows: records of the corpus, duplicates included; a pair is one record.
        cached: distinct texts that had a vector, and every other requested column, before.
        encoded: texts encoded and stored now.
        truncated: of the encoded texts, those longer than the space's maximum.
        repaired: of the encoded texts, those recomputed in float32 because their vector was not finite.
        quarantined: distinct texts of the corpus that lack a requested column because it was refused.
        tokens: encoded by the teacher.
        counts: how the corpus was read, as `Corpus.counts`.
        reasons: number of quarantined texts by reason.
        token_texts: texts given token columns now.
        token_bytes: of these columns, before compression.
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
    corpus: CorpusSource,
    teacher: str | TeacherOptions,
    cache: str | Path | TeacherCache,
    *,
    name: str | None = None,
    workers: Workers | None = None,
    storage: str | None = None,
    tokens: TokenRequest | None = None,
    token_storage: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> BuildReport:
    """Store a vector of `teacher`, and the requested token columns, for every text of `corpus` in `cache`.

    Existing vectors and columns are kept; only missing ones are computed. The corpus is read once.

    Args:
        corpus: a `Corpus`, texts (an iterable of strings, or of tuples of strings), a path, a list of `Path`s, or a
            `datasets.Dataset` with a column "text"; see `to_corpus`.
        teacher: its options, or its name: a hub id, model folder, known short name or "toy".
        cache: path of the cache, created if missing, or a cache open for writing, which stays open.
        name: of the corpus in the cache. An existing corpus of that name is replaced. None uses `corpus.name`,
            "texts" for texts in memory; then only a corpus from the same files, or also from memory, is replaced.
        storage: encoding of a new space; None uses "float16", or the encoding of an existing space.
        tokens: requested token columns; `attention=()` uses the layers that the space has, or the last one. None
            requests vectors only.
        token_storage: encoding of new token states, as `storage`.
        report: called with the progress after every batch.

    Raises:
        TeacherError, CorpusError, CacheError: what was committed before is kept.
        SpaceMismatch: a stored vector differs from what the teacher computes now.

    Example:
        >>> report = build(["first text", "second text"], teacher="sentence-transformers/all-MiniLM-L6-v2", cache="c")
        >>> report.encoded, report.cached
        (2, 0)
    """
    started = time.monotonic()
    corpus = to_corpus(corpus, TEXTS if name is None else name)
    # All checks come before the first write: an error leaves no folder.
    checked_name(corpus.name if name is None else name)
    if storage is not None:
        find_encoding(storage)
    if token_storage is not None:
        token_encoding(token_storage)
    spec, shape = resolve_with_tokens(teacher, tokens)
    if isinstance(cache, TeacherCache) and not cache.index.writable:
        raise CacheError(f"{cache.path} is open for reading only: open it with mode='a'")
    with nullcontext(cache) if isinstance(cache, TeacherCache) else TeacherCache.open(cache, "a") as table:
        if name is None:
            name = _default_name(corpus, table)
        manifest = ingest(corpus, table, name, report)
        report(Progress(phase="loading"))
        used = used_rows(manifest.rows, table.rows)
        distinct = int(used.sum())
        spec = resolve_dtype(spec, (record.space for record in table.space_records().values()))
        known = table.find_space(spec.space)
        view = table.ensure_space(spec.space, storage or (known.record.storage if known else "float16"))
        if tokens is not None and shape is not None:
            wanted = TokenRecord.resolve(shape, tokens, token_storage, view.record.columns)
            view = table.ensure_tokens(view, wanted)
            spec = replace(spec, request=TokenRequest(wanted.attention))
        request = spec.request
        columns = () if request is None else ("tokens", "attention") if request.attention else ("tokens",)
        counts = _encode_missing(table, view, used, spec, workers or LocalWorkers(), report)
        reasons = Counter(reason for row, reason in _quarantined(view, request).items() if used[row])
        return BuildReport(
            rows=len(manifest),
            distinct=distinct,
            cached=distinct - reasons.total() - counts.stored,
            encoded=counts.stored,
            truncated=counts.truncated,
            repaired=counts.repaired,
            quarantined=reasons.total(),
            tokens=counts.tokens,
            seconds=round(time.monotonic() - started, 3),
            space=view.slug,
            corpus=name,
            cache=str(table.path),
            counts=manifest.record.counts,
            reasons=dict(reasons),
            columns=("vectors", *columns),
            token_texts=counts.token_texts,
            token_bytes=counts.token_bytes,
        )


def resolve_with_tokens(
    teacher: str | TeacherOptions, tokens: TokenRequest | None
) -> tuple[TeacherSpec, TokenShape | None]:
    """The resolved teacher, and the sizes of its token columns if `tokens` are requested."""
    spec = resolve(TeacherOptions(model=teacher) if isinstance(teacher, str) else teacher)
    if tokens is None:
        return spec, None
    shape = token_shape(spec)
    if tokens.attention:
        checked_layers(tokens.attention, shape)
    return spec, shape


def _quarantined(view: SpaceView, request: TokenRequest | None) -> dict[int, str]:
    """Reason by quarantined row, over all requested columns; the reason of the vector takes precedence."""
    if request is None or view.tokens is None:
        return view.quarantined()
    attention = view.tokens.quarantined(ATTENTION) if request.attention else {}
    return attention | view.tokens.quarantined(STATES) | view.quarantined()


def _default_name(corpus: Corpus, table: TeacherCache) -> str:
    """The corpus's own name."""
    known = table.corpora().get(corpus.name)
    if known is not None and not known.shares_source(corpus.origins):
        raise CacheError(
            f"corpus {corpus.name!r} of {table.path} came from {known.sources[0].name}, this one from "
            f"{corpus.origins[0]}; give it another `name` (or the same to replace it)"
        )
    return corpus.name


def ingest(corpus: Corpus, table: TeacherCache, name: str, report: Callable[[Progress], None]) -> Manifest:
    """Give every text of the corpus a row, and publish the manifest and any domains under `name`.

    If the corpus is read without domains and `name` has the same texts with domains, these are kept. A corpus with an
    invalid record, or with no record, is not published.
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
    previous = table.corpora().get(name)
    if previous is not None and previous.fingerprint == record.fingerprint:
        record = record.with_domains_of(previous)
    return table.publish_corpus(record, written)


def _encode_missing(
    table: TeacherCache,
    view: SpaceView,
    used: npt.NDArray[np.bool_],
    spec: TeacherSpec,
    workers: Workers,
    report: Callable[[Progress], None],
) -> BuildCounts:
    """Encode the used rows that lack a column; commit each shard, with its token shards, after its last batch."""
    counts = BuildCounts()
    columns = view.tokens if spec.request is not None else None
    total = sum(map(len, missing_by_shard(view, used, spec.request)))
    progress = Progress(phase="encoding", total=total, cached=int(used.sum()) - total, space=view.space.describe())
    report(progress)
    if not total:
        return counts
    shard_rows = view.vectors.shard_rows
    shards: dict[int, PendingShard] = {}
    batch_rows: dict[int, npt.NDArray[np.int64]] = {}
    started = committed = time.monotonic()
    # Time and tokens of the previous commit: each shard records what it took.
    cost_from, tokens_from = started, 0

    def parts() -> Iterator[npt.NDArray[np.int64]]:
        for rows in missing_by_shard(view, used, spec.request):
            shard = shards[int(rows[0] // shard_rows)] = PendingShard(len(rows))
            if columns is None:
                yield rows
                continue
            numbers, sizes = np.unique(rows // columns.shard_rows, return_counts=True)
            shard.tokens = {int(n): PendingTokens(int(size)) for n, size in zip(numbers, sizes, strict=True)}
            yield from np.split(rows, np.cumsum(sizes)[:-1])

    def commit(number: int) -> None:
        nonlocal cost_from, tokens_from
        shard = shards[number]
        if columns is not None:
            for part, pending in shard.tokens.items():
                shard.written += pending.write(columns, part)
        now = time.monotonic()
        _, quarantined = view.write(
            number,
            np.concatenate([np.empty(0, dtype=np.int64), *shard.rows]),
            np.concatenate([np.empty((0, view.dims), dtype=np.float32), *shard.vectors]),
            tokens=counts.tokens - tokens_from,
            seconds=now - cost_from,
            also=shard.written,
        )
        cost_from, tokens_from = now, counts.tokens
        shard.rows.clear()
        shard.vectors.clear()
        shard.written.clear()
        counts.quarantined |= quarantined.keys()
        progress.quarantined = len(counts.quarantined)

    # Closed after errors, too: workers in other processes must not outlive the build.
    with closing(workers.encode(spec, batches(table, parts(), batch_rows, spec, BATCH_ROWS))) as results:
        for number, encoded in results:
            rows = batch_rows.pop(number)
            shard_number = int(rows[0] // shard_rows)
            shard = shards[shard_number]
            if columns is None:
                new, vectors = rows, encoded.vectors
            else:
                new, vectors = new_vectors(table, view, rows, encoded.vectors)
                part = int(rows[0] // columns.shard_rows)
                shard.tokens[part].add(columns, rows, encoded, spec, counts)
                if shard.tokens[part].waiting == 0:
                    shard.written += shard.tokens.pop(part).write(columns, part)
            if len(new):
                shard.rows.append(new)
                shard.vectors.append(vectors)
            shard.waiting -= len(rows)
            counts.add(encoded)
            del encoded  # frees the token outputs before the next batch
            if shard.waiting == 0:
                commit(shard_number)
                del shards[shard_number]
                committed = time.monotonic()
            elif time.monotonic() - committed > COMMIT_SECONDS:
                for unfinished in [key for key, pending in shards.items() if pending.has_data]:
                    commit(unfinished)
                committed = time.monotonic()
            progress.done += len(rows)
            progress.tokens = counts.tokens
            progress.tokens_per_second = counts.tokens / (time.monotonic() - started)
            progress.bytes += len(rows) * view.encoding.row_bytes(view.dims)
            report(progress)
    return counts
