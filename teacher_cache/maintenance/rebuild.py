"""Make the index anew from what lies on disk, for a cache whose index is gone or cannot be opened.

Texts and keys prove each other, and a corpus is proven by its fingerprint. Vectors are not: the digests that did
were in the index. They are taken as they are found, where they decode and are vectors of their space, with digests
computed anew; `verify --teacher` compares some of them with the teacher. What cannot be taken is named, and left.

The new index grows in a temporary folder and takes its place when it is complete: a kill leaves what was there, or
the new one, or, between the two renames, none, as before.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, FormatVersionError
from teacher_cache.maintenance.inspection import fingerprint_of, vectors_sound, wrong_domains
from teacher_cache.maintenance.metadata import restore_cache_json
from teacher_cache.maintenance.repair import set_aside
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.files import TEMPORARY_SUFFIX, sync_folder
from teacher_cache.storage.index import Change, Index, ShardRecord, shard_key
from teacher_cache.storage.lock import WriterLock
from teacher_cache.storage.manifest import CORPORA, CorpusRecord, Manifest
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY, TextTable
from teacher_cache.table.cache import CORPUS_JSON, INDEX, LOCK, SPACE_JSON, check_format
from teacher_cache.table.view import SPACES, SpaceRecord, SpaceView
from teacher_cache.text_key import text_keys
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES, StoredTokens, TokenColumns

# Text shards of one transaction: keys are random, and the more go in together, the more share a page.
SHARDS_AT_A_TIME = 16


@dataclass(frozen=True)
class LeftOut:
    """Something on disk that the new index does not promise."""

    where: str
    why: str


@dataclass
class ReindexReport:
    """What the new index has.

    Attributes:
        rows: texts.
        spaces: vectors by slug.
        tokens: texts with token columns by slug.
        corpora: names.
        old: what became of the index that was there.
    """

    rows: int = 0
    spaces: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    corpora: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    old: str = ""

    @property
    def ok(self) -> bool:
        return not self.left_out

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def reindex(path: str | Path, *, report: Callable[[int, int], None] = lambda done, total: None) -> ReindexReport:
    """Replace the index of a cache by one that is made from its shards; the old one is set aside.

    Refused vectors are forgotten, so the next build asks for them again; so is what encoding has cost.

    Args:
        report: called after every shard with how many are read and how many there are.

    Raises:
        CacheNotFound, FormatVersionError: no cache of this version.
        CacheLocked: someone is writing to it.
        DamagedCache: `cache.json` or the metadata of the texts are gone; put them back first.
    """
    path = Path(path)
    restore_cache_json(path)
    check_format(path)
    lock = WriterLock(path / LOCK)
    fresh = path / f"{INDEX}.{os.getpid()}{TEMPORARY_SUFFIX}"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        index = Index(fresh, writable=True)
        try:
            index.commit([])
            made = _Making(path, index, report)
            made.texts()
            made.spaces()
            made.corpora()
        finally:
            index.close()
        sync_folder(fresh)
        made.result.old = set_aside(path, path / INDEX)
        os.rename(fresh, path / INDEX)
        sync_folder(path)
        return made.result
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        lock.release()


class _Making:
    """One new index, filled from the shards of a cache."""

    def __init__(self, path: Path, index: Index, report: Callable[[int, int], None]) -> None:
        self.path = path
        self.index = index
        self.table = TextTable(path, index)
        self.shard_rows = self.table.shard_rows
        self.result = ReindexReport()
        self._report = report
        self._done = 0
        shards = [*path.glob(f"{SPACES}/*/vectors*.zarr/c/*"), *path.glob(f"{SPACES}/*/{STATES}/c/*")]
        self._total = len(shards) + len(_numbers(self.table.text.array))

    def _leave_out(self, where: Path | str, why: object) -> None:
        name = where if isinstance(where, str) else str(where.relative_to(self.path))
        self.result.left_out.append(LeftOut(name, str(why)))

    def _step(self) -> None:
        self._done += 1
        self._report(self._done, max(self._done, self._total))

    def _stored(self, array: ShardedArray, number: int) -> Rows | None:
        """All rows of a shard, blank where none is stored; None where it is gone or does not decode."""
        try:
            stored = np.repeat(array.open_shard(number).stored, array.chunk_rows)
            body = array.codec.blank(array.shard_rows)
            body[stored] = array.read_shard(number, stored)
            return body
        except DamagedCache as error:
            self._leave_out(array.shard_path(number), error)
            return None
        finally:
            array.forget(number)

    # Texts

    def texts(self) -> None:
        """Rows up to the last whose text and key belong together; a damaged shard before it leaves a gap."""
        numbers = sorted({*_numbers(self.table.text.array), *_numbers(self.table.keys.array)})
        tail = None
        while numbers and (tail is None or not tail.rows):  # a shard whose keys were never written has no rows
            tail = self._text_shard(numbers.pop(), last=True)
        if tail is None:
            return
        self.result.rows = tail.first + tail.rows
        pending: list[_TextShard] = []
        for number in range(tail.first // self.shard_rows):
            shard = self._text_shard(number, last=False)
            pending.append(shard)
            if len(pending) == SHARDS_AT_A_TIME or len(shard.keys) < self.shard_rows:
                self._commit(pending)
        self._commit([*pending, tail])

    def _text_shard(self, number: int, *, last: bool) -> "_TextShard":
        """What is to be said of one shard; the last one of the table ends where it proves to."""
        text, keys = self.table.text.array, self.table.keys.array
        texts, stored = self._stored(text, number), self._stored(keys, number)
        hashes = [] if texts is None else text_keys(texts[: _filled(np.asarray(texts != ""))].tolist())
        kept = [] if stored is None else [key.tobytes() for key in stored[: _filled(np.asarray(stored.any(axis=1)))]]
        found = hashes if stored is None else kept
        if texts is None or stored is None:
            rows = len(found) if last else self.shard_rows
            paired = min(len(found), rows)
        else:
            same = np.array([one == other for one, other in zip(hashes, kept, strict=False)], dtype=bool)
            rows = _filled(same) if last else self.shard_rows
            paired = int(same[:rows].sum())
        if found and (paired < rows or (hashes and not rows)):
            where = text.shard_path(number)
            self._leave_out(
                where, f"{max(rows, len(hashes)) - paired} of its rows have no text whose hash is their key"
            )
            texts = None
        shard = _TextShard(number * self.shard_rows, rows, found[:rows])
        present = np.arange(self.shard_rows) < rows
        for array, name, values in ((text, TEXT_ARRAY, texts), (keys, KEY_ARRAY, stored)):
            if values is not None and len(found) >= rows > 0:
                size = array.shard_path(number).stat().st_size
                record = ShardRecord(array.codec.digest(values[:rows]), 0.0, size, present)
                shard.changes.append(Change("shards", shard_key(name, number), record.pack()))
        self._step()
        return shard

    def _commit(self, pending: list["_TextShard"]) -> None:
        """Publish neighbouring shards in one transaction; only the last may lack keys."""
        if pending:
            changes = [change for shard in pending for change in shard.changes]
            keys = [key for shard in pending for key in shard.keys]
            self.index.commit(changes, keys=keys, first_row=pending[0].first)
            pending.clear()

    # Vectors

    def spaces(self) -> None:
        for folder in _folders(self.path / SPACES):
            try:
                record = SpaceRecord.from_json((folder / SPACE_JSON).read_bytes())
                if record.space.slug != folder.name:
                    raise ValueError(f"it describes {record.space.slug}")
                self._space(self._view(record))
            except (OSError, ValueError, KeyError, TypeError, DamagedCache, FormatVersionError) as error:
                if any(folder.glob("*/c/*")):  # otherwise it never held a vector
                    self._leave_out(folder, f"its space.json or zarr.json does not say what it is: {error}")

    def _view(self, record: SpaceRecord) -> SpaceView:
        """The space, without its token columns where these cannot be opened: the next build makes them anew."""
        view = SpaceView(self.path, self.index, record)
        try:
            view.tokens  # noqa: B018
        except (DamagedCache, FormatVersionError) as error:
            self._leave_out(view.folder / STATES, error)
            return SpaceView(self.path, self.index, replace(record, columns=None))
        return view

    def _space(self, view: SpaceView) -> None:
        count = 0
        for number in _numbers(view.vectors):
            record = self._vectors(view, number)
            self._step()
            if record is None:
                continue
            changes = [Change("shards", shard_key(view.array_name, number), record.pack())]
            if not count:
                changes.append(Change("spaces", view.slug.encode(), view.record.to_json()))
            self.index.commit(changes)
            count += int(record.present.sum())
        if not count:
            return
        self.result.spaces[view.slug] = count
        if view.tokens is not None:
            for number in _numbers(view.tokens.columns[STATES].array):
                self._tokens(view.slug, view.tokens, number)
                self._step()

    def _tokens(self, slug: str, tokens: TokenColumns, number: int) -> None:
        """Take the texts of one shard whose columns go together; attention where it goes with the rest."""
        columns = tokens.columns
        bodies = {}
        for array, column in columns.items():
            there = column.array.shard_path(number).is_file()
            bodies[array] = self._stored(column.array, number) if there else None
        states, pieces, maps = (bodies.get(array) for array in (STATES, PIECES, ATTENTION))
        path = columns[STATES].array.shard_path(number)
        if states is None or pieces is None:
            self._leave_out(path, "its states or its pieces are gone, and one without the other says nothing")
            return
        present = {array: np.zeros(tokens.shard_rows, dtype=bool) for array in columns}
        bad = 0
        for place in np.flatnonzero((states != b"") | (pieces != b"")).tolist():
            text = StoredTokens(states[place], pieces[place])
            row = number * tokens.shard_rows + place
            if row >= self.result.rows or tokens.wrong(text) or not tokens.finite(text):
                bad += 1
                continue
            present[STATES][place] = present[PIECES][place] = True
            if maps is not None and maps[place] != b"":
                whole = replace(text, attention=maps[place])
                present[ATTENTION][place] = not tokens.wrong(whole) and tokens.finite(whole)
                bad += not present[ATTENTION][place]
        if bad:
            self._leave_out(path, f"{bad} of its rows do not go with their pieces or attention, or are of no text")
        changes = []
        for array, column in columns.items():
            body, mask = bodies[array], present[array]
            if body is not None and mask.any():
                worst = tokens.encoding.max_cosine_error if array == STATES else 0.0
                size = column.array.shard_path(number).stat().st_size
                record = ShardRecord(column.array.codec.digest(body[mask]), worst, size, mask)
                changes.append(Change("shards", shard_key(column.name, number), record.pack()))
        self.index.commit(changes)
        self.result.tokens[slug] = self.result.tokens.get(slug, 0) + int(present[STATES].sum())

    def _vectors(self, view: SpaceView, number: int) -> ShardRecord | None:
        values = self._stored(view.vectors, number)
        if values is None:
            return None
        path = view.vectors.shard_path(number)
        places = np.flatnonzero(~view.encoding.is_blank(values))
        finite, sound = vectors_sound(view, values[places])
        good = finite & sound & (places + number * self.shard_rows < self.result.rows)
        if not good.all():
            self._leave_out(path, f"{int((~good).sum())} of its rows are no vectors of this space, or of no text")
        if not good.any():
            return None
        present = np.zeros(self.shard_rows, dtype=bool)
        present[places[good]] = True
        digest = view.vectors.codec.digest(values[present])
        return ShardRecord(digest, view.encoding.max_cosine_error, path.stat().st_size, present)

    # Corpora

    def corpora(self) -> None:
        for folder in _folders(self.path / CORPORA):
            try:
                record = CorpusRecord.from_json((folder / CORPUS_JSON).read_bytes())
                if record.name != folder.name:
                    raise ValueError(f"it describes {record.name}")
                self._check_rows(Manifest(record, self.path))
            except (OSError, ValueError, KeyError, TypeError, DamagedCache) as error:
                if any(folder.glob("rows-*.npy")):
                    why = f"its {CORPUS_JSON} and its row list do not prove each other: {error}"
                    self._leave_out(folder, f"{why}; `tcache build` from its files makes it again")
                continue
            self.index.commit([Change("corpora", record.name.encode(), record.to_json())])
            self.result.corpora.append(record.name)

    def _check_rows(self, manifest: Manifest) -> None:
        for start in range(0, len(manifest), 2**20):
            part = manifest.rows[start : start + 2**20]
            if ((part < 0) | (part >= self.result.rows)).any():
                raise ValueError(f"its row list names rows outside the table of {self.result.rows}")
        wrong = wrong_domains(manifest.record, manifest.domains, deep=True)
        if wrong:
            raise ValueError(wrong)
        try:
            made = fingerprint_of(self.table, manifest.rows)
        except DamagedCache:
            return  # some of its texts are lost; nothing speaks against the list, and its sources may bring them back
        if made != manifest.record.fingerprint:
            raise ValueError(f"its row list leads to texts with the fingerprint {made}, not to its own")


@dataclass
class _TextShard:
    """What the new index says of the texts of one shard: `keys` of `rows` rows, or of none."""

    first: int
    rows: int
    keys: list[bytes]
    changes: list[Change] = field(default_factory=list)


def _filled(mask: npt.NDArray[np.bool_]) -> int:
    """Places up to the last that is true."""
    return int(np.flatnonzero(mask).max(initial=-1)) + 1


def _numbers(array: ShardedArray) -> list[int]:
    """Shards of which there is a file, ascending."""
    folder = array.folder / "c"
    if not folder.is_dir():
        return []
    numbers = [int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()]
    return sorted(number for number in numbers if array.shard_path(number).is_file())


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(entry for entry in folder.iterdir() if entry.is_dir())
