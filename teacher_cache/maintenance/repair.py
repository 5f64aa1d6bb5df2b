"""Mend what a deep check finds, without guessing.

Vectors are kept where their shard's digest proves them. Where it does not, the file is set aside and its rows are
missing again, so that the next build encodes those and no others. A text is proven by its key, which the index
has: what a damaged shard has lost is read again from the corpus files. Keys are the hashes of proven texts. A row
list is proven by its corpus's fingerprint. What cannot be proven is left as it is and named.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.corpus.sources import MEMORY, STDIN
from teacher_cache.errors import CacheNotFound, DamagedCache, KnownError
from teacher_cache.maintenance.inspection import Damage, Inspection, wrong_domains
from teacher_cache.maintenance.metadata import restore_metadata
from teacher_cache.storage.column import Column
from teacher_cache.storage.files import make_folder, sync_folder
from teacher_cache.storage.index import Change, ShardRecord, shard_key
from teacher_cache.storage.manifest import CorpusRecord, domain_numbers, writing_domains, writing_manifest
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY, TextTable
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.text_key import KEY_BYTES, text_keys
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES

# Files that were damaged, for a look; `tcache gc` removes them.
DAMAGED = "damaged"
# Text shards that are restored in one pass over the corpus files: their texts are in memory together.
SHARDS_AT_A_TIME = 128
FROM_A_COPY = "no shard proves what its zarr.json was: put that back from a copy"
AS_WRITTEN = "nothing is thrown away, as this is what was written; `tcache verify --teacher T` compares it"
REINDEX = "`tcache reindex` makes the index anew from the texts and their keys"
_READ_RECORDS = 8192


@dataclass(frozen=True)
class Mend:
    """One damage, and what was done about it or has to be.

    Attributes:
        kind, where: as `verify` says.
        rows: that it touches.
    """

    kind: str
    where: str
    rows: int
    action: str


@dataclass(frozen=True)
class RepairReport:
    """What a repair did.

    Attributes:
        missing: rows that have lost their vector, their tokens or their attention, which the next build encodes;
            a row counts for each of these.
    """

    mended: list[Mend]
    unmended: list[Mend]
    missing: int

    @property
    def ok(self) -> bool:
        return not self.unmended

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def repair(
    path: str | Path,
    corpus: Corpus | None = None,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> RepairReport:
    """Check a cache deep and mend what can be proven.

    Args:
        corpus: where lost texts and row lists are looked for first; then in the files that the cache's corpora came
            from, where those are still in their place.
        report: called after every shard with how many are checked and how many there are.

    Raises:
        CacheNotFound, FormatVersionError, CacheLocked: it cannot be opened for writing.
        DamagedCache: its index is gone or cannot be opened; `reindex` is for that.
        CorpusError: `corpus` cannot be read.
    """
    path = Path(path)
    mended, unmended = _metadata(path)
    if any(mend.kind == "damaged_cache" for mend in unmended):
        return RepairReport(mended, unmended, 0)
    with TeacherCache.open(path, "r+") as cache:
        mending = _Mending(cache, corpus)
        mending.run(report)
        return RepairReport(mended + mending.mended, mending.unmended, mending.missing)


def set_aside(cache: Path, path: Path, *, keep: bool = False) -> str:
    """Put a file or folder of the cache below `damaged/`, where nothing reads it; nothing happens if it is gone.

    Args:
        keep: copy it; the caller replaces it.

    Returns:
        Where it is, for a message; "" if it is gone.
    """
    if not path.exists():
        return ""
    target = cache / DAMAGED / path.relative_to(cache)
    make_folder(target.parent)
    tries = 0
    while target.exists():
        tries += 1
        target = target.with_name(f"{path.name}.{tries}")
    if keep:
        shutil.copyfile(path, target)
    else:
        shutil.move(path, target)
        sync_folder(path.parent)
    sync_folder(target.parent)
    return f"is kept as {target.relative_to(cache)}"


def _metadata(path: Path) -> tuple[list[Mend], list[Mend]]:
    """What was written anew of the metadata, and what could not be."""
    found = restore_metadata(path)
    done = "written anew; what is read with it is what was written"
    return (
        [Mend(lost.kind, lost.where, 0, done) for lost in found if lost.restored],
        [Mend(lost.kind, lost.where, 0, FROM_A_COPY) for lost in found if not lost.restored],
    )


class _Mending:
    """One repair of a cache that is open for writing."""

    def __init__(self, cache: TeacherCache, corpus: Corpus | None) -> None:
        self.cache = cache
        self.corpus = corpus
        self.mended: list[Mend] = []
        self.unmended: list[Mend] = []
        self.missing = 0

    def run(self, report: Callable[[int, int], None]) -> None:
        inspection = Inspection(self.cache, deep=True, report=report)
        self._texts(list(inspection.texts()), inspection)
        inspection.texts_sound = not self.unmended
        for slug in self.cache.space_records():
            self._vectors(slug, list(inspection.space(slug)))
        for damage in list(inspection.corpora()):
            self._row_list(damage)

    def _done(self, damage: Damage, action: str, rows: int | None = None) -> None:
        self.mended.append(Mend(damage.kind, damage.where, damage.rows if rows is None else rows, action))

    def _left(self, damage: Damage, action: str, rows: int | None = None) -> None:
        self.unmended.append(Mend(damage.kind, damage.where, damage.rows if rows is None else rows, action))

    # Vectors

    def _vectors(self, slug: str, found: Sequence[Damage]) -> None:
        """Forget whole shards: a digest covers all of one's rows, so it proves none of them alone."""
        by_shard: dict[tuple[str, int], Damage] = {}
        for damage in found:
            if damage.shard is None:
                self._left(damage, FROM_A_COPY)
            elif damage.kind == "norm":  # its digest holds: this is what was written
                self._left(damage, AS_WRITTEN)
            else:
                by_shard.setdefault((damage.array, damage.shard), damage)
        if not by_shard:
            return
        view = self.cache.space(slug)
        changes: list[Change] = []
        dropped: set[tuple[str, int]] = set()
        # Files first: one that is left behind without a record could be taken for a good one when the index has
        # to be rebuilt, a record without its file only for what it is.
        for (name, number), damage in by_shard.items():
            columns, option = _together(view, name)
            records = [column.record(number) for column in columns if (column.name, number) not in dropped]
            rows = max((int(record.present.sum()) for record in records if record is not None), default=0)
            kept = [set_aside(self.cache.path, column.array.shard_path(number)) for column in columns]
            self.missing += rows
            action = f"its {rows} rows are missing now: the next `tcache build{option}` encodes them"
            told = [f"the file {file}" for file in kept if file]
            self._done(damage, "; ".join([*told, action]), rows)
            dropped |= {(column.name, number) for column in columns}
        changes += [Change("shards", shard_key(name, number), None) for name, number in sorted(dropped)]
        self.cache.index.commit(changes)

    # Texts and keys

    def _texts(self, found: Sequence[Damage], inspection: Inspection) -> None:
        by_shard: dict[int, list[Damage]] = defaultdict(list)
        for damage in found:
            # The index itself is wrong, and the texts and keys that would prove it better are sound.
            if damage.shard is None or damage.kind == "index":
                self._left(damage, REINDEX)
            else:
                by_shard[damage.shard].append(damage)
        numbers = sorted(by_shard)
        for start in range(0, len(numbers), SHARDS_AT_A_TIME):
            shards = [
                _TextShard(self.cache, number, by_shard[number]) for number in numbers[start : start + SHARDS_AT_A_TIME]
            ]
            unread = self._read_again({shard.number: shard for shard in shards if shard.lacking})
            for shard in shards:
                if shard.lacking:
                    self._left(
                        shard.damage[0],
                        f"{shard.lacking} texts are lost: name the corpus files that hold them with --corpus; nothing "
                        f"was changed{unread}",
                        shard.lacking,
                    )
                    continue
                action = shard.write()
                for damage in shard.damage:
                    self._done(damage, action)
                for damage in inspection.text_shard(shard.number):
                    self._left(damage, REINDEX)

    def _read_again(self, shards: dict[int, "_TextShard"]) -> str:
        """Look for lost texts in corpus files; says which could not be read."""
        unread = []
        if not shards:
            return ""
        if self.corpus is not None:
            self._take_from(self.corpus, shards)
        for record in self.cache.corpora().values():
            for source in record.sources:
                if not any(shard.lacking for shard in shards.values()):
                    return ""
                try:
                    self._take_from(Corpus.open([_file(source.name)], record.columns), shards)
                except (KnownError, OSError) as error:
                    unread.append(f"; {error}")
        return "".join(unread)

    def _take_from(self, corpus: Corpus, shards: dict[int, "_TextShard"]) -> None:
        index, shard_rows = self.cache.index, self.cache.shard_rows
        wanted = np.array(sorted(shards))
        for records in corpus.batches(_READ_RECORDS):
            texts = [text for record in records for text in record]
            rows = index.find(text_keys(texts))
            for place in np.flatnonzero(np.isin(rows // shard_rows, wanted)).tolist():
                row = int(rows[place])
                shards[row // shard_rows].restore(row, texts[place])

    # Row lists

    def _row_list(self, damage: Damage) -> None:
        record = self.cache.corpora()[damage.array.partition("/")[2]]
        names = [source.name for source in record.sources]
        files = not {STDIN, MEMORY} & set(names)
        unread = ""
        try:
            if self._make_list(Corpus.open([_file(name) for name in names], record.columns, record.domain_key), record):
                self._done(damage, "made again from its sources", record.records)
                return
            unread = "; its sources hold other texts by now"
        except (KnownError, OSError) as error:
            unread = f"; {error}"
        if self.corpus is not None and self._make_list(self.corpus, record):
            self._done(damage, "made again from --corpus", record.records)
            return
        domains = f" --domain-key {record.domain_key}" if record.domains else ""
        given = f"{' '.join(names)} --text-key {','.join(record.columns)}{domains}" if files else "CORPUS"
        command = f"`tcache build {given} --teacher T --name {record.name} --cache {self.cache.path}`"
        if not files:
            command = f"pass its texts as `corpus`; or {command}"
        self._left(damage, f"{command} makes it again and encodes nothing that is there{unread}", record.records)

    def _make_list(self, corpus: Corpus, record: CorpusRecord) -> bool:
        """Publish the rows and domains of `corpus` as those of `record`, if they have the record's fingerprints."""
        if len(corpus.columns) != len(record.columns):
            return False
        known = True
        with (
            writing_manifest(self.cache.path, record.name, len(record.columns)) as (writer, written),
            writing_domains(self.cache.path, record.name) as (domain_writer, domains),
        ):
            for records, numbers in corpus.batches_with_domains(_READ_RECORDS):
                domain_writer.append(np.array(numbers))
                rows = self.cache.index.find(text_keys([text for one in records for text in one]))
                writer.append(rows.reshape(len(records), -1))
                known = known and bool((rows >= 0).all())
        if not known or corpus.fingerprint != record.fingerprint or not self._domains_proven(corpus, record):
            written.unlink()
            domains.unlink()
            return False
        for file in (record.file(self.cache.path), record.domains_file(self.cache.path)):
            if file is not None:
                set_aside(self.cache.path, file, keep=True)
        if corpus.domain_key is None:
            domains.unlink()  # none, or those that are in place
        self.cache.publish_corpus(record, written, domains if corpus.domain_key is not None else None)
        return True

    def _domains_proven(self, corpus: Corpus, record: CorpusRecord) -> bool:
        """Whether the record's domains are those of `corpus`, or, where it was read without, those that are there."""
        if not record.domains or corpus.domain_key is not None:
            return corpus.domains_fingerprint == record.domains_fingerprint
        try:
            held = domain_numbers(record, self.cache.path)
        except DamagedCache:
            return False
        return held is not None and not wrong_domains(record, held.values, deep=True)


def _together(view: SpaceView, name: str) -> tuple[list[Column], str]:
    """The columns that lose a shard with that array, and what a build has to be told to fill them."""
    if name == view.array_name or view.tokens is None:
        return [view.column], ""
    columns = view.tokens.columns
    if ATTENTION in columns and name == columns[ATTENTION].name:
        return [columns[ATTENTION]], " --columns vectors,tokens,attention"
    return [columns[STATES], columns[PIECES]], " --columns vectors,tokens"


class _TextShard:
    """The texts of a damaged shard as far as they are proven.

    Attributes:
        damage: what was found in it.
        lacking: how many texts are not proven.
    """

    def __init__(self, cache: TeacherCache, number: int, damage: list[Damage]) -> None:
        self.cache = cache
        self.number = number
        self.damage = damage
        table = cache.texts_table
        self.first = number * table.shard_rows
        self.count = min(table.shard_rows, cache.rows - self.first)
        # Where key and text differ though both are what was written, the index has to tell which one is right.
        unpaired = any(found.kind == "key" for found in damage)
        self.text_sound = not unpaired and all(found.array != TEXT_ARRAY for found in damage)
        self.keys_sound = not unpaired and all(found.array != KEY_ARRAY for found in damage)
        self.texts = _readable(table.text, number, self.count)
        if not self.text_sound:
            self._keep_the_proven(table)

    def _keep_the_proven(self, table: TextTable) -> None:
        places = [place for place, text in enumerate(self.texts) if text is not None]
        keys = text_keys(self.texts[places].tolist())
        proven = self.cache.index.find(keys) == np.array(places, dtype=np.int64) + self.first
        if self.keys_sound:
            stored = [key.tobytes() for key in table.read_keys(np.arange(self.first, self.first + self.count))]
            proven |= np.array([stored[place] == key for place, key in zip(places, keys, strict=True)], dtype=bool)
        for place, sound in zip(places, proven.tolist(), strict=True):
            if not sound:
                self.texts[place] = None

    @property
    def lacking(self) -> int:
        return sum(text is None for text in self.texts)

    def restore(self, row: int, text: str) -> None:
        """Take a text that the index says belongs to that row."""
        if row - self.first < self.count:
            self.texts[row - self.first] = text

    def write(self) -> str:
        """Put what was damaged in place anew and publish it; says what was done."""
        table = self.cache.texts_table
        keys = np.frombuffer(b"".join(text_keys(self.texts.tolist())), dtype=np.uint8).reshape(-1, KEY_BYTES)
        present = np.arange(table.shard_rows) < self.count
        changes, done = [], []
        for column, values, sound in ((table.text, self.texts, self.text_sound), (table.keys, keys, self.keys_sound)):
            if sound:
                continue
            path = column.array.shard_path(self.number)
            set_aside(self.cache.path, path, keep=True)
            receipt = column.array.write_shard(self.number, values, present[: self.count])
            column.array.grow(self.first + self.count)
            record = ShardRecord(receipt.digest, 0.0, receipt.size, present)
            changes.append(Change("shards", shard_key(column.name, self.number), record.pack()))
            done.append(str(path.relative_to(self.cache.path)))
        self.cache.index.commit(changes)
        return f"written anew: {' and '.join(done)}, every text proven by its key"


def _readable(column: Column, number: int, count: int) -> npt.NDArray[np.object_]:
    """The first texts of a shard, None where a chunk cannot be read; no record is asked."""
    array = column.array
    texts: npt.NDArray[np.object_] = np.full(count, None, dtype=object)
    for start in range(0, count, array.chunk_rows):
        places = np.arange(array.shard_rows)
        within = (places >= start) & (places < min(start + array.chunk_rows, count))
        try:
            texts[within[:count]] = array.read_shard(number, within)
        except DamagedCache:
            continue
    return texts


def _file(name: str) -> str:
    """The name of a recorded source, if it is that of a file that is still there.

    Raises:
        CacheNotFound: it is not; without this a vanished file with a `*` in its name would be taken for a pattern.
    """
    if name == STDIN:
        raise CacheNotFound("standard input cannot be read again")
    if name == MEMORY:
        raise CacheNotFound("these texts came from memory and cannot be read again")
    if not Path(name).exists():
        raise CacheNotFound(f"{name} is gone")
    return name
