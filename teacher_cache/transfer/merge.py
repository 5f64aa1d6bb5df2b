"""Join caches without a teacher: their texts, spaces and corpora in one table.

Rows are found by the key of their text, so every source may number them as it likes. Everything that can be
known to clash is looked for before anything is written.
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
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.intake import (
    WINDOW_ROWS,
    CheckedVectors,
    ProvenTokens,
    RowList,
    checked_texts,
    difference,
    disagreeing,
    excerpt,
    fill,
    grouped,
    mapped,
    unnamed_file,
)
from teacher_cache.table.view import SpaceRecord, SpaceView
from teacher_cache.tokens.token_columns import TokenColumns, TokenRecord

_COPIED_RECORDS = 2**20
_COMMITTED = 10_000


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        rows: distinct texts of the joined cache.
        texts: of them, new to it.
        vectors: stored now, over all spaces.
        held: vectors of the sources that the cache had already.
        quarantined: refusals carried over, and vectors that the cache's number format cannot hold.
        spaces: slugs of the joined cache that the sources have too.
        corpora: names published now.
        token_texts: texts that were given token columns now, over all spaces.
        left_out: token columns that the joined cache keeps in another way, and why.
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
    """Put everything that the source caches hold into `into`, which is made if need be.

    A vector that `into` has stays; where a source has one for the same text and space, the two must agree.
    Number formats and shard sizes may differ: those of `into` stay. Cut off anywhere, the same call goes on.

    Raises:
        SpaceMismatch: two caches have different spaces of one name.
        CacheError: a cache would be merged into itself; two have different vectors for one text in one space,
            or different corpora of one name.
        DamagedCache: what would be copied is not what was written.
    """
    started = time.monotonic()
    into = Path(into)
    _check_paths(sources, into)
    with ExitStack() as stack:
        # A cache that is there is held from the start: what was compared must still be true when it is written.
        target = stack.enter_context(TeacherCache.open(into, "a")) if into.exists() else None
        parts = [_Part(stack.enter_context(TeacherCache.open(path))) for path in sources]
        caches = [*([_Part(target)] if target is not None else []), *parts]
        _check_names(caches)
        for place, part in enumerate(caches):
            for earlier in caches[:place]:
                _check_vectors(earlier, part, report)
        if target is None:
            target = stack.enter_context(TeacherCache.open(into, "a", shard_rows=parts[0].cache.shard_rows))
        before = target.rows
        joined = _Joined(target, report)
        for part in parts:
            joined.add(part, stack)
        for part in parts:  # last, so that a vector of any source counts for more than a refusal
            joined.add_refusals(part)
        return MergeReport(
            rows=target.rows,
            texts=target.rows - before,
            vectors=joined.vectors,
            held=joined.held,
            quarantined=joined.quarantined,
            spaces=sorted(joined.spaces),
            corpora=joined.corpora,
            sources=[str(path) for path in sources],
            cache=str(into),
            seconds=round(time.monotonic() - started, 3),
            token_texts=joined.token_texts,
            left_out=joined.left_out,
        )


class _Part:
    """What a cache held when the merge began; it may be growing.

    Attributes:
        new_rows: row of each of its rows in the joined cache, once its texts are there.
    """

    def __init__(self, cache: TeacherCache) -> None:
        self.cache = cache
        self.corpora = cache.corpora()
        self.spaces = cache.space_records()
        self.rows = cache.rows  # after the corpora, which name no row that is newer
        self.new_rows: RowList = np.empty(0, dtype=np.int64)

    def blocks(self) -> Iterator[RowList]:
        """The rows, a shard at a time."""
        for start in range(0, self.rows, self.cache.shard_rows):
            yield np.arange(start, min(start + self.cache.shard_rows, self.rows))


def _check_paths(sources: Sequence[str | Path], into: Path) -> None:
    if not sources:
        raise CacheError("no cache to merge: name one or more")
    seen = {os.path.realpath(into): "it is the cache that is merged into"}
    for path in sources:
        real = os.path.realpath(path)
        if real in seen:
            raise CacheError(f"{path} cannot be merged: {seen[real]}")
        seen[real] = "it is named twice"


def _check_names(parts: Sequence[_Part]) -> None:
    """No name means two things; before any vector is read."""
    spaces: dict[str, tuple[SpaceRecord, Path]] = {}
    corpora: dict[str, tuple[CorpusRecord, Path]] = {}
    for part in parts:
        path = part.cache.path
        for slug, record in part.spaces.items():
            held, where = spaces.setdefault(slug, (record, path))
            different = held.space.difference(record.space)
            if different:
                listed = "; ".join(f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in different.items())
                raise SpaceMismatch(f"{where} and {path} have different spaces named {slug}: {listed}")
        for name, corpus in part.corpora.items():
            known, where = corpora.setdefault(name, (corpus, path))
            if known.fingerprint != corpus.fingerprint:
                raise CacheError(
                    f"{where} and {path} have different corpora named {name!r} ({known.records} and "
                    f"{corpus.records} records); build one of them again with another --name"
                )
            if known.domains and corpus.domains and known.domains_fingerprint != corpus.domains_fingerprint:
                raise CacheError(
                    f"{where} and {path} have different domains of corpus {name!r} (by {known.domain_key} and by "
                    f"{corpus.domain_key}); build one of them again with the --domain-key of the other"
                )
            if corpus.domains:
                corpora[name] = corpus, path


def _check_vectors(held: _Part, given: _Part, report: Callable[[Progress], None]) -> None:
    """Compare the vectors that both have for one text in one space."""
    if not held.rows:
        return
    index = held.cache.index
    for record in given.spaces.values():
        ours = held.cache.find_space(record.space)
        theirs = given.cache.find_space(record.space)
        if ours is None or theirs is None:
            continue
        progress = Progress(phase="comparing vectors", total=given.rows, space=record.space.describe())
        mine, other = CheckedVectors(ours), CheckedVectors(theirs)
        for rows in given.blocks():
            progress.done += len(rows)
            rows = rows[theirs.present(rows)]
            keys = given.cache.texts_table.read_keys(rows)
            same = index.find([key.tobytes() for key in keys])
            both = ours.present(same)
            rows, same = rows[both], same[both]
            first, second = mine.gather(same), other.gather(rows)
            wrong = disagreeing(first, second)
            if len(wrong):
                place = wrong[0]
                (text,) = given.cache.texts(rows[place : place + 1])
                raise CacheError(
                    f"{held.cache.path} and {given.cache.path} have different vectors of space {theirs.slug} for "
                    f"{excerpt(text)}: {difference(first[place], second[place])}; one of them is wrong, build it "
                    "again"
                )
            report(progress)


class _Joined:
    """The cache that is merged into, and what came into it."""

    def __init__(self, cache: TeacherCache, report: Callable[[Progress], None]) -> None:
        self.cache = cache
        self.report = report
        self.vectors = self.held = self.quarantined = self.token_texts = 0
        self.left_out: list[str] = []
        self.spaces: set[str] = set()
        self.corpora: list[str] = []

    def add(self, part: _Part, stack: ExitStack) -> None:
        """Texts, then vectors, then corpora: nothing is published that is not there."""
        file = stack.enter_context(unnamed_file(self.cache.path))
        progress = Progress(phase="reading texts", total=part.rows)
        with self.cache.appending() as appender:
            for rows in part.blocks():
                texts, _ = checked_texts(part.cache.texts_table, rows)
                file.write(appender.add(texts).astype("<i8").data)
                progress.done += len(rows)
                self.report(progress)
        part.new_rows = mapped(file, "<i8")
        for record in part.spaces.values():
            self._add_vectors(part, record)
            if record.columns is not None:
                self._add_tokens(part, record.columns, record)
        for corpus in part.corpora.values():
            self._add_corpus(part, corpus)

    def _view(self, record: SpaceRecord) -> SpaceView:
        known = self.cache.find_space(record.space)
        view = self.cache.ensure_space(record.space, known.record.storage if known else record.storage)
        if known is None:
            # What encoding has cost is published with the first vectors.
            view.record = replace(view.record, tokens=record.tokens, seconds=record.seconds)
        self.spaces.add(view.slug)
        return view

    def _add_vectors(self, part: _Part, record: SpaceRecord) -> None:
        source = part.cache.space(record.space.slug)
        view = self._view(record)
        progress = Progress(phase="writing vectors", total=part.rows, space=record.space.describe())

        def written(done: int, total: int) -> None:
            progress.done = done
            self.report(progress)

        read = CheckedVectors(source).gather
        error = source.worst_error()
        filled = fill(view, part.new_rows, self.cache.rows, read, error=error, has=source.present, report=written)
        self.vectors += filled.stored
        self.held += filled.held
        self.quarantined += len(filled.refused)

    def _add_tokens(self, part: _Part, columns: TokenRecord, record: SpaceRecord) -> None:
        """Token columns of texts that have none here, as they are stored; what is here stays."""
        source = part.cache.space(record.space.slug).tokens
        try:
            view = self.cache.ensure_tokens(self._view(record), columns)
        except CacheError as error:
            self.left_out.append(f"{columns.describe()} of {part.cache.path}: {error}")
            return
        target = view.tokens
        if source is None or target is None:
            return
        proven = ProvenTokens(source)
        worst = source.worst_error()
        progress = Progress(phase="writing tokens", total=part.rows, space=record.space.describe())
        rows = target.shard_rows
        for places in grouped(part.new_rows, self.cache.rows, max(WINDOW_ROWS // rows, 1) * rows):
            shards = part.new_rows[places] // rows
            for old in np.split(places, np.flatnonzero(np.diff(shards)) + 1):
                self._add_token_shard(part, view, target, old, proven, worst)
                progress.done += len(old)
                self.report(progress)

    def _add_token_shard(
        self, part: _Part, view: SpaceView, target: TokenColumns, old: RowList, proven: ProvenTokens, worst: float
    ) -> None:
        source = proven.tokens
        new = part.new_rows[old]
        with_maps = source.present(old, attention=True) & ~target.present(new, attention=True)
        states_alone = source.present(old) & ~target.present(new) & ~with_maps
        stored = {
            row: text
            for mask, attention in ((states_alone, False), (with_maps, True))
            for row, text in zip(new[mask].tolist(), proven.gather_stored(old[mask], attention), strict=True)
        }
        if stored:
            number = int(new[0]) // target.shard_rows
            changes = target.write(number, stored, dict.fromkeys(stored, worst), {})
            nothing = np.empty((0, view.dims), dtype=np.float32)
            view.write(int(new[0]) // view.vectors.shard_rows, new[:0], nothing, also=changes)
            self.token_texts += len(stored)

    def _add_corpus(self, part: _Part, record: CorpusRecord) -> None:
        held = self.cache.corpora().get(record.name)
        if held is not None and (held.domains or not record.domains):
            return  # the same one: its fingerprint was compared
        manifest = part.cache.corpus(record.name)
        if manifest.record != record:
            raise CacheError(
                f"corpus {record.name!r} of {part.cache.path} changed while it was merged; run the same command again"
            )
        listed = manifest.rows
        with writing_manifest(self.cache.path, record.name, len(record.columns)) as (writer, written):
            for start in range(0, len(listed), _COPIED_RECORDS):
                writer.append(part.new_rows[listed[start : start + _COPIED_RECORDS]])
        domains = None
        if manifest.domains is not None:
            with writing_domains(self.cache.path, record.name) as (writer, domains):
                for start in range(0, len(listed), _COPIED_RECORDS):
                    writer.append(manifest.domains[start : start + _COPIED_RECORDS])
        self.cache.publish_corpus(record, written, domains)
        self.corpora.append(record.name)

    def add_refusals(self, part: _Part) -> None:
        """Rows that a source was refused a vector for, and that have none here."""
        for record in part.spaces.values():
            source = part.cache.space(record.space.slug)
            refused = source.quarantined()
            if not refused:
                continue
            view = self._view(record)
            theirs = np.fromiter((row for row in refused if row < part.rows), dtype=np.int64)
            ours = part.new_rows[theirs]
            known = view.quarantined()
            changes = [
                Change("quarantine", quarantine_key(view.slug, new), refused[old].encode())
                for old, new, present in zip(theirs.tolist(), ours.tolist(), view.present(ours).tolist(), strict=True)
                if not present and new not in known
            ]
            if changes and self.cache.index.record("spaces", view.slug) is None:
                changes.insert(0, Change("spaces", view.slug.encode(), view.record.to_json()))
            for start in range(0, len(changes), _COMMITTED):
                self.cache.index.commit(changes[start : start + _COMMITTED])
            self.quarantined += len(changes)
