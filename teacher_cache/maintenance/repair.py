"""Repairs what a deep check finds, without guessing.

Vectors stay if the digest of their shard is right. Otherwise the file is moved to `damaged/` and its rows are missing:
the next build encodes exactly those. A text is confirmed by its key, which the index has: texts lost with a shard
are read again from the corpus files. Keys are the hashes of confirmed texts. A manifest is confirmed by the fingerprint
of its corpus. What cannot be confirmed is reported and not changed.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.building.build import READ_RECORDS
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.corpus.sources import MEMORY, STDIN
from teacher_cache.errors import CacheNotFound, DamagedCache, KnownError
from teacher_cache.maintenance.check import Check, Damage
from teacher_cache.maintenance.metadata import restore_metadata
from teacher_cache.maintenance.walk import domain_fault, key_matrix, read_shard
from teacher_cache.storage.column import Column
from teacher_cache.storage.files import make_folder, sync_path
from teacher_cache.storage.index import Change, ShardRecord, shard_key
from teacher_cache.storage.manifest import CorpusRecord, domain_numbers, writing_domains, writing_manifest
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.text_key import text_keys
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES

# Damaged files, for inspection; `tcache gc` removes them.
DAMAGED = "damaged"
# Text shards restored in one pass over the corpus files: their texts are in memory together.
SHARDS_AT_A_TIME = 128
RESTORED = "rewritten; the shards that are read with it are the ones that were written"
RESTORE_A_COPY = "no shard confirms what its zarr.json was: restore that file from a backup"
AS_WRITTEN = "not changed, because these are the values that were written; `tcache verify --teacher T` compares them"
REINDEX = "`tcache reindex` rebuilds the index from the texts and their keys"


@dataclass(frozen=True)
class RepairAction:
    """One damage, and what was done about it or what you can do."""

    kind: str
    where: str
    rows: int
    action: str


@dataclass(frozen=True)
class RepairReport:
    """The result of a repair.

    Attributes:
        missing: rows that have lost their vector, their tokens or their attention, and that the next build encodes; a
            row counts once for each.
    """

    repaired: list[RepairAction]
    unrepaired: list[RepairAction]
    missing: int

    @property
    def ok(self) -> bool:
        return not self.unrepaired

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def repair(
    path: str | Path, corpus: Corpus | None = None, *, report: Callable[[int, int], None] = lambda done, total: None
) -> RepairReport:
    """Run a deep check of a cache, and repair what can be confirmed.

    Args:
        corpus: searched for lost texts and manifests first; then the files that the cache's corpora came from, if they
            still exist.
        report: called after every shard with how many are checked and how many there are.

    Raises:
        DamagedCache: its index is missing or cannot be opened; run `reindex`.
    """
    path = Path(path)
    restored, lost = restore_metadata(path)
    repaired = [_action(damage, RESTORED) for damage in restored]
    if any(damage.kind == "damaged_cache" for damage in lost):
        return RepairReport(repaired, [_action(damage, RESTORE_A_COPY) for damage in lost], 0)
    with TeacherCache.open(path, "r+") as cache:
        run = _Repair(cache, corpus)
        run.run(report)
        return RepairReport(repaired + run.repaired, run.unrepaired, run.missing)


def move_to_damaged(cache: Path, path: Path, *, copy: bool = False) -> str:
    """Move, or copy, a file or folder of the cache below `damaged/`, where nothing reads it.

    Returns its new path relative to the cache; "" if it did not exist.
    """
    if not path.exists():
        return ""
    target = cache / DAMAGED / path.relative_to(cache)
    make_folder(target.parent)
    tries = 0
    while target.exists():
        tries += 1
        target = target.with_name(f"{path.name}.{tries}")
    if copy:
        shutil.copyfile(path, target)
    else:
        shutil.move(path, target)
        sync_path(path.parent)
    sync_path(target.parent)
    return str(target.relative_to(cache))


def _action(damage: Damage, action: str, rows: int | None = None) -> RepairAction:
    return RepairAction(damage.kind, damage.where, damage.rows if rows is None else rows, action)


class _Repair:
    """One repair of a cache that is open for writing."""

    def __init__(self, cache: TeacherCache, corpus: Corpus | None) -> None:
        self.cache = cache
        self.corpus = corpus
        self.repaired: list[RepairAction] = []
        self.unrepaired: list[RepairAction] = []
        self.missing = 0

    def run(self, report: Callable[[int, int], None]) -> None:
        check = Check(self.cache, deep=True, report=report)
        self._texts(list(check.texts()), check)
        check.texts_ok = not self.unrepaired
        for slug in self.cache.space_records():
            self._space(slug, list(check.space(slug)))
        for damage in list(check.corpora()):
            self._corpus(damage)

    # Vectors and tokens

    def _space(self, slug: str, found: Sequence[Damage]) -> None:
        """Drop damaged shards as a whole: one digest covers all rows of a shard, so it confirms none of them alone."""
        by_shard: dict[tuple[str, int], Damage] = {}
        for damage in found:
            if damage.shard is None:
                self.unrepaired.append(_action(damage, RESTORE_A_COPY))
            elif damage.kind == "norm":  # its digest is right
                self.unrepaired.append(_action(damage, AS_WRITTEN))
            else:
                by_shard.setdefault((damage.array, damage.shard), damage)
        if not by_shard:
            return
        view = self.cache.space(slug)
        dropped: set[tuple[str, int]] = set()
        # Files first: `reindex` would take a damaged file without a record for a valid one, while a record without its
        # file is found by every check.
        for (name, number), damage in by_shard.items():
            columns, option = _dropped_together(view, name)
            records = [column.record(number) for column in columns if (column.name, number) not in dropped]
            rows = max((int(record.present.sum()) for record in records if record is not None), default=0)
            moved = [move_to_damaged(self.cache.path, column.array.shard_path(number)) for column in columns]
            self.missing += rows
            action = f"its {rows} rows are missing now: the next `tcache build{option}` encodes them"
            steps = [f"the file was moved to {file}" for file in moved if file]
            self.repaired.append(_action(damage, "; ".join([*steps, action]), rows))
            dropped |= {(column.name, number) for column in columns}
        self.cache.index.commit([Change("shards", shard_key(name, number), None) for name, number in sorted(dropped)])

    # Texts and keys

    def _texts(self, found: Sequence[Damage], check: Check) -> None:
        by_shard: dict[int, list[Damage]] = defaultdict(list)
        for damage in found:
            # The index is wrong, and the texts and keys that a new one is built from are valid.
            if damage.shard is None or damage.kind == "index":
                self.unrepaired.append(_action(damage, REINDEX))
            else:
                by_shard[damage.shard].append(damage)
        numbers = sorted(by_shard)
        for start in range(0, len(numbers), SHARDS_AT_A_TIME):
            shards = [
                _TextShard(self.cache, number, by_shard[number]) for number in numbers[start : start + SHARDS_AT_A_TIME]
            ]
            unread = self._read_again({shard.number: shard for shard in shards if shard.lost})
            for shard in shards:
                if shard.lost:
                    action = (
                        f"{shard.lost} texts are lost and nothing was changed: `tcache repair {self.cache.path} "
                        f"--corpus FILE` restores them from files that contain them{unread}"
                    )
                    self.unrepaired.append(_action(shard.damage[0], action, shard.lost))
                    continue
                action = shard.write()
                self.repaired += [_action(damage, action) for damage in shard.damage]
                self.unrepaired += [_action(damage, REINDEX) for damage in check.text_shard(shard.number)]

    def _read_again(self, shards: dict[int, "_TextShard"]) -> str:
        """Search corpus files for lost texts; returns which files could not be read, for a message."""
        unread = []
        if not shards:
            return ""
        if self.corpus is not None:
            self._take_from(self.corpus, shards)
        for record in self.cache.corpora().values():
            for source in record.sources:
                if not any(shard.lost for shard in shards.values()):
                    return ""
                try:
                    self._take_from(Corpus.open([_existing(source.name)], record.columns), shards)
                except (KnownError, OSError) as error:
                    unread.append(f"; {error}")
        return "".join(unread)

    def _take_from(self, corpus: Corpus, shards: dict[int, "_TextShard"]) -> None:
        index, shard_rows = self.cache.index, self.cache.shard_rows
        wanted = np.array(sorted(shards))
        for records in corpus.batches(READ_RECORDS):
            texts = [text for record in records for text in record]
            rows = index.find(text_keys(texts))
            for place in np.flatnonzero(np.isin(rows // shard_rows, wanted)).tolist():
                row = int(rows[place])
                shards[row // shard_rows].restore(row, texts[place])

    # Corpora

    def _corpus(self, damage: Damage) -> None:
        """Rewrite the manifest of a corpus from its sources, or from the given corpus."""
        record = self.cache.corpora()[damage.array.partition("/")[2]]
        names = [source.name for source in record.sources]
        try:
            corpus = Corpus.open([_existing(name) for name in names], record.columns, record.domain_key)
            if self._write_manifest(corpus, record):
                self.repaired.append(_action(damage, "rewritten from its sources", record.records))
                return
            unread = "; its sources contain other texts now"
        except (KnownError, OSError) as error:
            unread = f"; {error}"
        if self.corpus is not None and self._write_manifest(self.corpus, record):
            self.repaired.append(_action(damage, "rewritten from the given corpus", record.records))
            return
        domains = f" --domain-key {record.domain_key}" if record.domains else ""
        files = not {STDIN, MEMORY} & set(names)
        given = f"{' '.join(names)} --text-key {','.join(record.columns)}{domains}" if files else "CORPUS"
        command = f"`tcache build {given} --teacher T --name {record.name} --cache {self.cache.path}`"
        if not files:
            command = f"pass its texts as `corpus`; or {command}"
        action = f"{command} rewrites it and encodes only texts without a vector{unread}"
        self.unrepaired.append(_action(damage, action, record.records))

    def _write_manifest(self, corpus: Corpus, record: CorpusRecord) -> bool:
        """Publish the rows and domains of `corpus` as those of `record`, if they have the record's fingerprints."""
        if len(corpus.columns) != len(record.columns):
            return False
        known = True
        with (
            writing_manifest(self.cache.path, record.name, len(record.columns)) as (writer, written),
            writing_domains(self.cache.path, record.name) as (domain_writer, domains),
        ):
            for records, numbers in corpus.batches_with_domains(READ_RECORDS):
                domain_writer.append(np.array(numbers))
                rows = self.cache.index.find(text_keys([text for one in records for text in one]))
                writer.append(rows.reshape(len(records), -1))
                known = known and bool((rows >= 0).all())
        if not known or corpus.fingerprint != record.fingerprint or not self._same_domains(corpus, record):
            written.unlink()
            domains.unlink()
            return False
        for file in (record.file(self.cache.path), record.domains_file(self.cache.path)):
            if file is not None:
                move_to_damaged(self.cache.path, file, copy=True)
        if corpus.domain_key is None:
            domains.unlink()  # the record has none, or their file is valid
        self.cache.publish_corpus(record, written, domains if corpus.domain_key is not None else None)
        return True

    def _same_domains(self, corpus: Corpus, record: CorpusRecord) -> bool:
        """Whether the domains of `record` are those of `corpus`, or, if `corpus` was read without, are stored."""
        if not record.domains or corpus.domain_key is not None:
            return corpus.domains_fingerprint == record.domains_fingerprint
        try:
            stored = domain_numbers(record, self.cache.path)
        except DamagedCache:
            return False
        return stored is not None and not domain_fault(record, stored.values, deep=True)


def _dropped_together(view: SpaceView, name: str) -> tuple[list[Column], str]:
    """The columns that lose a shard if that array does, and the options with which a build fills them."""
    if name == view.array_name or view.tokens is None:
        return [view.column], ""
    columns = view.tokens.columns
    if ATTENTION in columns and name == columns[ATTENTION].name:
        return [columns[ATTENTION]], " --columns vectors,tokens,attention"
    return [columns[STATES], columns[PIECES]], " --columns vectors,tokens"


class _TextShard:
    """The texts of a damaged shard: those that are confirmed, and None for the others."""

    def __init__(self, cache: TeacherCache, number: int, damage: list[Damage]) -> None:
        self.cache = cache
        self.number = number
        self.damage = damage
        table = cache.texts_table
        self.first = number * table.shard_rows
        self.count = min(table.shard_rows, cache.rows - self.first)
        # Where key and text differ though both are what was written, only the index can confirm one of them.
        unpaired = any(found.kind == "key" for found in damage)
        self.valid = {
            name: not unpaired and all(found.array != name for found in damage) for name in (TEXT_ARRAY, KEY_ARRAY)
        }
        contents = read_shard(table.text.array, number, np.arange(table.shard_rows) < self.count)
        self.texts = contents.values[: self.count]
        self.texts[~contents.read[: self.count]] = None
        if not self.valid[TEXT_ARRAY]:
            self._keep_confirmed()

    def _keep_confirmed(self) -> None:
        """Remove every text whose hash neither the index nor an undamaged array of keys has under its row."""
        places = np.flatnonzero([text is not None for text in self.texts])
        hashes = text_keys(self.texts[places].tolist())
        confirmed = self.cache.index.find(hashes) == self.first + places
        if self.valid[KEY_ARRAY]:
            stored = self.cache.texts_table.read_keys(self.first + places)
            confirmed |= (key_matrix(hashes) == stored).all(axis=1)
        self.texts[places[~confirmed]] = None

    @property
    def lost(self) -> int:
        """How many texts are not confirmed."""
        return sum(text is None for text in self.texts)

    def restore(self, row: int, text: str) -> None:
        """Take a text whose key has that row in the index."""
        if row - self.first < self.count:
            self.texts[row - self.first] = text

    def write(self) -> str:
        """Replace the damaged arrays of this shard and publish them; returns what was done."""
        table = self.cache.texts_table
        keys = key_matrix(text_keys(self.texts.tolist()))
        present = np.arange(table.shard_rows) < self.count
        changes, written = [], []
        for column, values in ((table.text, self.texts), (table.keys, keys)):
            if self.valid[column.name]:
                continue
            path = column.array.shard_path(self.number)
            move_to_damaged(self.cache.path, path, copy=True)
            receipt = column.array.write_shard(self.number, values, present[: self.count])
            column.array.grow(self.first + self.count)
            record = ShardRecord(receipt.digest, 0.0, receipt.size, present)
            changes.append(Change("shards", shard_key(column.name, self.number), record.pack()))
            written.append(str(path.relative_to(self.cache.path)))
        self.cache.index.commit(changes)
        return f"rewritten: {' and '.join(written)}, every text confirmed by its key"


def _existing(name: str) -> str:
    """The name of a recorded source, if its file still exists."""
    if name == STDIN:
        raise CacheNotFound("standard input cannot be read again")
    if name == MEMORY:
        raise CacheNotFound("these texts came from memory and cannot be read again")
    if not Path(name).exists():  # `Corpus.open` would take a name with a `*` in it for a pattern
        raise CacheNotFound(f"{name} does not exist any more")
    return name
