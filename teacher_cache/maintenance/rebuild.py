"""Builds a new index from the shards of a cache whose index is missing or cannot be opened.

Texts and keys confirm each other, and a fingerprint confirms a corpus. Nothing confirms vectors, because their digests
were in the index: they are taken if they decode and are valid vectors of their space, with new digests. `tcache verify
--teacher` compares some of them with the teacher. Whatever is not taken stays on disk and is reported.

The new index grows in a temporary folder and is renamed when it is complete. A kill leaves the old index, the new one,
or, between two renames, none.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, FormatVersionError
from teacher_cache.maintenance.metadata import restore_cache_json
from teacher_cache.maintenance.repair import move_to_damaged
from teacher_cache.maintenance.walk import (
    manifest_faults,
    pair_texts,
    read_shard,
    shard_files,
    subfolders,
    valid_vectors,
)
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.column import Column
from teacher_cache.storage.files import TEMPORARY_SUFFIX, sync_path
from teacher_cache.storage.index import Change, Index, ShardRecord, shard_key
from teacher_cache.storage.lock import WriterLock
from teacher_cache.storage.manifest import CORPORA, CorpusRecord, Manifest
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import TextTable
from teacher_cache.table.layout import CORPUS_JSON, INDEX, LOCK, SPACE_JSON, check_format
from teacher_cache.table.view import SPACES, SpaceRecord, SpaceView
from teacher_cache.text_key import KEY_BYTES
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES, StoredTokens, TokenColumns

# Text shards of one transaction: keys are random, and the more go in together, the more share a page.
SHARDS_AT_A_TIME = 16


@dataclass(frozen=True)
class LeftOut:
    """Something on disk that the new index does not have."""

    where: str
    why: str


@dataclass
class ReindexReport:
    """What the new index has.

    Attributes:
        spaces: vectors by slug.
        tokens: texts with token columns by slug.
        old: where the old index was moved to, relative to the cache; "" if there was none.
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
    """Replace the index of a cache by a new one built from its shards; the old one is moved to `damaged/`.

    Quarantined rows and the cost of encoding are lost with the old index, so the next build encodes those rows again.

    Args:
        report: called after every shard with how many are read and how many there are.

    Raises:
        DamagedCache: `cache.json` and the metadata of the texts are missing; restore them first.
    """
    path = Path(path)
    restore_cache_json(path)
    check_format(path)
    lock = WriterLock(path / LOCK)
    new = path / f"{INDEX}.{os.getpid()}{TEMPORARY_SUFFIX}"
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        index = Index(new, writable=True)
        try:
            index.commit([])
            rebuild = _Rebuild(path, index, report)
            rebuild.texts()
            rebuild.spaces()
            rebuild.corpora()
        finally:
            index.close()
        sync_path(new)
        rebuild.result.old = move_to_damaged(path, path / INDEX)
        os.rename(new, path / INDEX)
        sync_path(path)
        return rebuild.result
    finally:
        shutil.rmtree(new, ignore_errors=True)
        lock.release()


class ShardRows(NamedTuple):
    """The rows of one text shard, their keys (none if these are unknown), and its new records."""

    rows: int
    keys: list[bytes]
    changes: list[Change]


class _Rebuild:
    """Fills a new index from the shards of a cache."""

    def __init__(self, path: Path, index: Index, report: Callable[[int, int], None]) -> None:
        self.path = path
        self.index = index
        self.table = TextTable(path, index)
        self.shard_rows = self.table.shard_rows
        self.result = ReindexReport()
        self._report = report
        self._done = 0
        shards = [*path.glob(f"{SPACES}/*/vectors*.zarr/c/*"), *path.glob(f"{SPACES}/*/{STATES}/c/*")]
        self._total = len(shards) + len(shard_files(self.table.text.array))

    def _leave_out(self, where: Path, why: object) -> None:
        self.result.left_out.append(LeftOut(str(where.relative_to(self.path)), str(why)))

    def _step(self) -> None:
        self._done += 1
        self._report(self._done, max(self._done, self._total))

    def _stored(self, array: ShardedArray, number: int) -> Rows | None:
        """All rows of a shard, blank if absent; None if it is missing or damaged."""
        contents = read_shard(array, number)
        if contents.error is not None:
            self._leave_out(array.shard_path(number), contents.error)
            return None
        return contents.values

    # Texts

    def texts(self) -> None:
        """Index the rows up to the last whose text and key match; a damaged shard before it leaves a gap."""
        numbers = sorted({*shard_files(self.table.text.array), *shard_files(self.table.keys.array)})
        end, last = 0, ShardRows(0, [], [])
        while numbers and not last.rows:  # a shard whose keys were never written has no rows
            end = numbers.pop()
            last = self._text_shard(end, last=True)
        self.result.rows = end * self.shard_rows + last.rows
        first, keys, changes = 0, list[bytes](), list[Change]()
        for number in range(end + 1):
            shard = last if number == end else self._text_shard(number, last=False)
            keys += shard.keys
            changes += shard.changes
            # Rows of one transaction follow each other, so a gap ends it.
            if number == end or len(shard.keys) < self.shard_rows or number + 1 - first == SHARDS_AT_A_TIME:
                self.index.commit(changes, keys=keys, first_row=first * self.shard_rows)
                first, keys, changes = number + 1, [], []

    def _text_shard(self, number: int, *, last: bool) -> ShardRows:
        """The rows of one shard; the last shard ends with its last row whose text and key match."""
        table = self.table
        texts, keys = self._stored(table.text.array, number), self._stored(table.keys.array, number)
        written_texts = np.empty(0, object) if texts is None else texts[: _filled(np.asarray(texts != ""))]
        written_keys = (
            np.empty((0, KEY_BYTES), np.uint8) if keys is None else keys[: _filled(np.asarray(keys.any(axis=1)))]
        )
        hashes, same = pair_texts(written_texts, written_keys)
        known = hashes if keys is None else [key.tobytes() for key in written_keys]
        if texts is None or keys is None:
            rows = len(known) if last else self.shard_rows
            paired = min(len(known), rows)
        else:
            rows = _filled(same) if last else self.shard_rows
            paired = int(same[:rows].sum())
        if known and (paired < rows or (hashes and not rows)):
            unpaired = max(rows, len(hashes)) - paired
            where = table.text.array.shard_path(number)
            self._leave_out(where, f"{unpaired} of its rows have no text whose hash is their key")
            texts = None
        present = np.arange(self.shard_rows) < rows
        changes = [
            _change(column, number, values[:rows], present)
            for column, values in ((table.text, texts), (table.keys, keys))
            if values is not None and len(known) >= rows > 0
        ]
        self._step()
        return ShardRows(rows, known[:rows], changes)

    # Spaces

    def spaces(self) -> None:
        for folder in subfolders(self.path / SPACES):
            try:
                record = SpaceRecord.from_json((folder / SPACE_JSON).read_bytes())
                if record.space.slug != folder.name:
                    raise ValueError(f"it describes {record.space.slug}")
                self._space(self._view(record))
            except (OSError, ValueError, KeyError, TypeError, DamagedCache, FormatVersionError) as error:
                if any(folder.glob("*/c/*")):  # otherwise it never held a vector
                    self._leave_out(folder, f"its space.json or zarr.json is not valid: {error}")

    def _view(self, record: SpaceRecord) -> SpaceView:
        """The space, without its token columns if these cannot be opened: the next build creates them again."""
        view = SpaceView(self.path, self.index, record)
        try:
            view.tokens  # noqa: B018
        except (DamagedCache, FormatVersionError) as error:
            self._leave_out(view.folder / STATES, error)
            return SpaceView(self.path, self.index, replace(record, columns=None))
        return view

    def _space(self, view: SpaceView) -> None:
        count = 0
        for number in shard_files(view.vectors):
            values = self._stored(view.vectors, number)
            present = np.zeros(self.shard_rows, dtype=bool) if values is None else self._valid(view, number, values)
            self._step()
            if values is None or not present.any():
                continue
            bound = view.encoding.max_cosine_error
            changes = [_change(view.column, number, values[present], present, bound)]
            if not count:
                changes.append(Change("spaces", view.slug.encode(), view.record.to_json()))
            self.index.commit(changes)
            count += int(present.sum())
        if not count:
            return
        self.result.spaces[view.slug] = count
        if view.tokens is not None:
            for number in shard_files(view.tokens.columns[STATES].array):
                self._tokens(view.slug, view.tokens, number)
                self._step()

    def _valid(self, view: SpaceView, number: int, values: Rows) -> npt.NDArray[np.bool_]:
        """`(shard_rows,)`: rows of a shard that are vectors of this space and have a text."""
        places = np.flatnonzero(~view.encoding.is_blank(values))
        finite, valid_length = valid_vectors(view, values[places])
        good = finite & valid_length & (places + number * self.shard_rows < self.result.rows)
        if not good.all():
            reason = f"{int((~good).sum())} of its rows are not vectors of this space, or have no text"
            self._leave_out(view.vectors.shard_path(number), reason)
        present = np.zeros(self.shard_rows, dtype=bool)
        present[places[good]] = True
        return present

    def _tokens(self, slug: str, tokens: TokenColumns, number: int) -> None:
        """Take the texts of one shard whose states and pieces match, and their attention if it matches too."""
        columns = tokens.columns
        values = {
            array: self._stored(column.array, number) if column.array.shard_path(number).is_file() else None
            for array, column in columns.items()
        }
        states, pieces, attention = (values.get(array) for array in (STATES, PIECES, ATTENTION))
        path = columns[STATES].array.shard_path(number)
        if states is None or pieces is None:
            self._leave_out(path, "its states or its pieces are missing, and one cannot be used without the other")
            return
        present = {array: np.zeros(tokens.shard_rows, dtype=bool) for array in columns}
        bad = 0
        for place in np.flatnonzero((states != b"") | (pieces != b"")).tolist():
            text = StoredTokens(states[place], pieces[place])
            row = number * tokens.shard_rows + place
            if row >= self.result.rows or tokens.inconsistency(text) or not tokens.is_finite(text):
                bad += 1
                continue
            present[STATES][place] = present[PIECES][place] = True
            if attention is not None and attention[place] != b"":
                text = replace(text, attention=attention[place])
                present[ATTENTION][place] = not tokens.inconsistency(text) and tokens.is_finite(text)
                bad += not present[ATTENTION][place]
        if bad:
            self._leave_out(path, f"{bad} of its rows do not match their pieces or attention, or have no text")
        changes = []
        for array, column in columns.items():
            stored, mask = values[array], present[array]
            if stored is not None and mask.any():
                bound = tokens.encoding.max_cosine_error if array == STATES else 0.0
                changes.append(_change(column, number, stored[mask], mask, bound))
        self.index.commit(changes)
        self.result.tokens[slug] = self.result.tokens.get(slug, 0) + int(present[STATES].sum())

    # Corpora

    def corpora(self) -> None:
        for folder in subfolders(self.path / CORPORA):
            try:
                record = CorpusRecord.from_json((folder / CORPUS_JSON).read_bytes())
                if record.name != folder.name:
                    raise ValueError(f"it describes {record.name}")
                self._check(Manifest(record, self.path))
            except (OSError, ValueError, KeyError, TypeError, DamagedCache) as error:
                if any(folder.glob("rows-*.npy")):
                    why = f"its {CORPUS_JSON} and its manifest do not match: {error}"
                    self._leave_out(folder, f"{why}; `tcache build` from its files rewrites it")
                continue
            self.index.commit([Change("corpora", record.name.encode(), record.to_json())])
            self.result.corpora.append(record.name)

    def _check(self, manifest: Manifest) -> None:
        faults = manifest_faults(manifest, self.result.rows, self.table, deep=True)
        try:
            fault = next(faults, None)
        except DamagedCache:
            return  # some of its texts are lost, and `repair` may restore them
        if fault is not None:
            raise ValueError(fault[0])


def _change(column: Column, number: int, values: Rows, present: npt.NDArray[np.bool_], worst: float = 0.0) -> Change:
    """The record of a shard whose present rows have those values."""
    size = column.array.shard_path(number).stat().st_size
    record = ShardRecord(column.array.codec.digest(values), worst, size, present)
    return Change("shards", shard_key(column.name, number), record.pack())


def _filled(mask: npt.NDArray[np.bool_]) -> int:
    """Places up to the last that is true."""
    return int(np.flatnonzero(mask).max(initial=-1)) + 1
