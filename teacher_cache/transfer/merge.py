"""Merge of caches: their texts, spaces and corpora in one table, without a teacher.

Texts are matched by key, so each source may number its rows differently. All conflicts that can be found are found
before the first write.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.building.build import Progress
from teacher_cache.errors import CacheError, SpaceMismatch
from teacher_cache.storage.index import Change, quarantine_key
from teacher_cache.storage.manifest import CorpusRecord, writing_domains, writing_manifest
from teacher_cache.table import intake
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceRecord, SpaceView

_COPIED_RECORDS = 2**20
_COMMITTED = 10_000


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge. Scripts rely on the names of `to_json`.

    Attributes:
        rows: distinct texts of the merged cache.
        texts: new texts among them.
        vectors: stored now, over all spaces.
        held: vectors of the sources that the cache already had.
        quarantined: quarantined rows copied, and vectors that the cache's encoding cannot hold.
        spaces: slugs of the spaces of the sources.
        corpora: names published now.
        token_texts: texts that got token columns, over all spaces.
        left_out: token columns that do not fit those of the merged cache, and why.
    """

    rows: int
    texts: int
    vectors: int
    held: int
    quarantined: int
    spaces: list[str]
    corpora: list[str]
    sources: list[str]
    cache: str
    seconds: float
    token_texts: int = 0
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def merge(
    sources: Sequence[str | Path],
    into: str | Path,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
) -> MergeReport:
    """Copy everything in the source caches to `into`, which is created if it does not exist.

    Vectors in `into` are not changed; where a source has one for the same text and space, the two must be equal up to
    rounding. Encodings and shard sizes may differ: those of `into` are kept. After an interruption, the same call
    resumes.

    Raises:
        SpaceMismatch: two caches have different spaces of one name.
        CacheError: a cache would be merged into itself, or two have different vectors for one text in one space, or
            different corpora of one name.
        DamagedCache: stored values do not match their digest or key.
    """
    started = time.monotonic()
    into = Path(into)
    _check_paths(sources, into)
    with ExitStack() as stack:
        # An existing cache is locked from the start: the checks must still hold when the vectors are written.
        target = stack.enter_context(TeacherCache.open(into, "a")) if into.exists() else None
        parts = [_Source(stack.enter_context(TeacherCache.open(path))) for path in sources]
        caches = [*([_Source(target)] if target is not None else []), *parts]
        _check_names(caches)
        for place, part in enumerate(caches):
            for earlier in caches[:place]:
                _check_vectors(earlier, part, report)
        if target is None:
            target = stack.enter_context(TeacherCache.open(into, "a", shard_rows=parts[0].cache.shard_rows))
        before = target.rows
        merger = _Merger(target, report)
        for part in parts:
            merger.add(part, stack)
        for part in parts:  # last, because a row with a vector from any source is not quarantined
            merger.add_quarantined(part)
        return MergeReport(
            rows=target.rows,
            texts=target.rows - before,
            vectors=merger.vectors,
            held=merger.held,
            quarantined=merger.quarantined,
            spaces=sorted(merger.spaces),
            corpora=merger.corpora,
            sources=[str(path) for path in sources],
            cache=str(into),
            seconds=round(time.monotonic() - started, 3),
            token_texts=merger.token_texts,
            left_out=merger.left_out,
        )


class _Source:
    """A cache as it was when the merge began; a build may be adding to it."""

    def __init__(self, cache: TeacherCache) -> None:
        self.cache = cache
        self.corpora = cache.corpora()
        self.spaces = cache.space_records()
        self.rows = cache.rows  # read after the corpora, whose rows are all older
        self.new_rows: intake.Rows = np.empty(0, dtype=np.int64)  # in the merged cache, once its texts are there

    def blocks(self) -> Iterator[intake.Rows]:
        """All rows, one shard at a time."""
        for start in range(0, self.rows, self.cache.shard_rows):
            yield np.arange(start, min(start + self.cache.shard_rows, self.rows))


def _check_paths(sources: Sequence[str | Path], into: Path) -> None:
    if not sources:
        raise CacheError("no cache to merge: name at least one")
    seen = {os.path.realpath(into): "it is the cache that is merged into"}
    for path in sources:
        real = os.path.realpath(path)
        if real in seen:
            raise CacheError(f"{path} cannot be merged: {seen[real]}")
        seen[real] = "it is named twice"


def _check_names(parts: Sequence[_Source]) -> None:
    """Check that spaces of one name, and corpora of one name, are equal in all caches."""
    spaces: dict[str, tuple[SpaceRecord, Path]] = {}
    corpora: dict[str, tuple[CorpusRecord, Path]] = {}
    for part in parts:
        path = part.cache.path
        for slug, record in part.spaces.items():
            first, first_path = spaces.setdefault(slug, (record, path))
            different = first.space.difference(record.space)
            if different:
                listed = "; ".join(f"{name}: {one!r} and {other!r}" for name, (one, other) in different.items())
                raise SpaceMismatch(f"{first_path} and {path} have different spaces named {slug}: {listed}")
        for name, corpus in part.corpora.items():
            known, known_path = corpora.setdefault(name, (corpus, path))
            if known.fingerprint != corpus.fingerprint:
                raise CacheError(
                    f"{known_path} and {path} have different corpora named {name!r} ({known.records} and "
                    f"{corpus.records} records); build one of them again with `tcache build --name`"
                )
            if known.domains and corpus.domains and known.domains_fingerprint != corpus.domains_fingerprint:
                raise CacheError(
                    f"{known_path} and {path} have different domains of corpus {name!r} (by {known.domain_key} and by "
                    f"{corpus.domain_key}); build one of them again with `tcache build --domain-key` of the other"
                )
            if corpus.domains:
                corpora[name] = corpus, path


def _check_vectors(first: _Source, second: _Source, report: Callable[[Progress], None]) -> None:
    """Compare the vectors that two caches have for the same text and space."""
    if not first.rows:
        return
    for record in second.spaces.values():
        view = first.cache.find_space(record.space)
        other_view = second.cache.find_space(record.space)
        if view is None or other_view is None:
            continue
        progress = Progress(phase="comparing vectors", total=second.rows, space=record.space.describe())
        reader, other_reader = intake.CheckedReader(view), intake.CheckedReader(other_view)
        for block in second.blocks():
            progress.done += len(block)
            other_rows = block[other_view.present(block)]
            keys = second.cache.texts_table.read_keys(other_rows)
            rows = first.cache.index.find([key.tobytes() for key in keys])
            both = view.present(rows)
            rows, other_rows = rows[both], other_rows[both]
            vectors, other_vectors = reader.gather(rows), other_reader.gather(other_rows)
            wrong = intake.differing_rows(vectors, other_vectors)
            if len(wrong):
                place = wrong[0]
                (text,) = second.cache.texts(other_rows[place : place + 1])
                raise CacheError(
                    f"{first.cache.path} and {second.cache.path} have different vectors of space {other_view.slug} for "
                    f"{intake.excerpt(text)}: {intake.describe_difference(vectors[place], other_vectors[place])}; one "
                    "of them is wrong, build it again"
                )
            report(progress)


class _Merger:
    """Copies sources to the merged cache and counts what was copied."""

    def __init__(self, cache: TeacherCache, report: Callable[[Progress], None]) -> None:
        self.cache = cache
        self.report = report
        self.vectors = self.held = self.quarantined = self.token_texts = 0
        self.left_out: list[str] = []
        self.spaces: set[str] = set()
        self.corpora: list[str] = []

    def add(self, part: _Source, stack: ExitStack) -> None:
        """Copy texts, then vectors, then corpora, so that a published corpus is complete."""
        file = stack.enter_context(intake.anonymous_file(self.cache.path))
        progress = Progress(phase="reading texts", total=part.rows)
        with self.cache.appending() as appender:
            for rows in part.blocks():
                texts, _ = intake.checked_texts(part.cache.texts_table, rows)
                file.write(appender.add(texts).astype("<i8").data)
                progress.done += len(rows)
                self.report(progress)
        part.new_rows = intake.map_file(file, "<i8")
        for record in part.spaces.values():
            source = part.cache.space(record.space.slug)
            self._add_vectors(part, source, record)
            self._add_tokens(part, source, record)
        for corpus in part.corpora.values():
            self._add_corpus(part, corpus)

    def _view(self, record: SpaceRecord) -> SpaceView:
        known = self.cache.find_space(record.space)
        view = self.cache.ensure_space(record.space, known.record.storage if known else record.storage)
        if known is None:
            # The cost of encoding is published with the first vectors.
            view.record = replace(view.record, tokens=record.tokens, seconds=record.seconds)
        self.spaces.add(view.slug)
        return view

    def _add_vectors(self, part: _Source, source: SpaceView, record: SpaceRecord) -> None:
        progress = Progress(phase="writing vectors", total=part.rows, space=record.space.describe())
        filled = intake.fill(
            self._view(record),
            part.new_rows,
            self.cache.rows,
            intake.CheckedReader(source).gather,
            error=source.worst_error(),
            has=source.present,
            report=lambda done, _: self.report(replace(progress, done=done)),
        )
        self.vectors += filled.stored
        self.held += filled.held
        self.quarantined += len(filled.quarantined)

    def _add_tokens(self, part: _Source, source: SpaceView, record: SpaceRecord) -> None:
        """Copy the stored token columns of texts that have none in the merged cache."""
        if record.columns is None or source.tokens is None:
            return
        try:
            view = self.cache.ensure_tokens(self._view(record), record.columns)
        except CacheError as error:
            self.left_out.append(f"{record.columns.describe()} of {part.cache.path}: {error}")
            return
        target = view.tokens
        if target is None:
            return
        reader, worst = intake.CheckedReader(source), source.tokens.worst_error()
        progress = Progress(phase="writing tokens", total=part.rows, space=record.space.describe())
        for old in intake.by_shard(part.new_rows, self.cache.rows, target.shard_rows):
            new = part.new_rows[old]
            with_attention = source.tokens.present(old, attention=True) & ~target.present(new, attention=True)
            only_states = source.tokens.present(old) & ~target.present(new) & ~with_attention
            stored = {
                row: text
                for mask, attention in ((only_states, False), (with_attention, True))
                for row, text in zip(new[mask].tolist(), reader.gather_tokens(old[mask], attention), strict=True)
            }
            if stored:
                changes = target.write(int(new[0]) // target.shard_rows, stored, dict.fromkeys(stored, worst), {})
                no_vectors = np.empty((0, view.dims), dtype=np.float32)
                view.write(int(new[0]) // view.vectors.shard_rows, new[:0], no_vectors, also=changes)
                self.token_texts += len(stored)
            progress.done += len(old)
            self.report(progress)

    def _add_corpus(self, part: _Source, record: CorpusRecord) -> None:
        held = self.cache.corpora().get(record.name)
        if held is not None and (held.domains or not record.domains):
            return  # the same corpus: `_check_names` has compared the fingerprints
        manifest = part.cache.corpus(record.name)
        if manifest.record != record:
            raise CacheError(
                f"corpus {record.name!r} of {part.cache.path} changed while it was merged; run the same command again"
            )
        blocks = [slice(start, start + _COPIED_RECORDS) for start in range(0, len(manifest), _COPIED_RECORDS)]
        with writing_manifest(self.cache.path, record.name, len(record.columns)) as (writer, written):
            for block in blocks:
                writer.append(part.new_rows[manifest.rows[block]])
        domains = None
        if manifest.domains is not None:
            with writing_domains(self.cache.path, record.name) as (writer, domains):
                for block in blocks:
                    writer.append(manifest.domains[block])
        self.cache.publish_corpus(record, written, domains)
        self.corpora.append(record.name)

    def add_quarantined(self, part: _Source) -> None:
        """Copy the quarantined rows of a source that have no vector in the merged cache."""
        for record in part.spaces.values():
            quarantined = part.cache.space(record.space.slug).quarantined()
            if not quarantined:
                continue
            view = self._view(record)
            old_rows = np.fromiter((row for row in quarantined if row < part.rows), dtype=np.int64)
            new_rows = part.new_rows[old_rows]
            known = view.quarantined()
            absent = ~view.present(new_rows)
            changes = [
                Change("quarantine", quarantine_key(view.slug, new), quarantined[old].encode())
                for old, new in zip(old_rows[absent].tolist(), new_rows[absent].tolist(), strict=True)
                if new not in known
            ]
            if changes and self.cache.index.record("spaces", view.slug) is None:
                changes.insert(0, Change("spaces", view.slug.encode(), view.record.to_json()))
            for start in range(0, len(changes), _COMMITTED):
                self.cache.index.commit(changes[start : start + _COMMITTED])
            self.quarantined += len(changes)
