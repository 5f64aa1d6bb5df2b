"""The table: rows are distinct texts, columns are embedding spaces.

One process may write, any number may read while it does. Readers see what the index says and nothing else.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import (
    CacheError,
    CacheNotFound,
    CorpusNotFound,
    DamagedCache,
    FormatVersionError,
    MissingRows,
    SpaceMismatch,
    SpaceNotFound,
)
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import find_encoding
from teacher_cache.storage.files import TEMPORARY_SUFFIX, make_folder, replacing
from teacher_cache.storage.index import Change, Index
from teacher_cache.storage.lock import WriterLock
from teacher_cache.storage.manifest import CORPORA, CorpusRecord, Manifest
from teacher_cache.storage.texts import TEXT_ARRAY, TextAppender, TextTable
from teacher_cache.table.view import SPACES, SpaceRecord, SpaceView, create_vectors
from teacher_cache.text_key import KEY_RULE, text_keys
from teacher_cache.tokens.token_columns import TokenRecord, create_array

FORMAT_VERSION = 2
SHARD_ROWS = 8192
CACHE_JSON = "cache.json"
CORPUS_JSON = "corpus.json"
SPACE_JSON = "space.json"
INDEX = "index.lmdb"
SEALED = "index.sealed"
LOCK = "writer.lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_name(name: str) -> str:
    """`name`, if it can be a corpus's folder inside the cache and nowhere else.

    Raises:
        CacheError: it could leave the folder, or is empty.
    """
    if not _NAME.fullmatch(name):
        raise CacheError(
            f"{name!r} cannot name a corpus: give --name up to 100 letters, digits, '.', '_' and '-', starting "
            "with a letter or digit"
        )
    return name


class TeacherCache:
    """A cache folder. Use `TeacherCache.open`; it is a context manager.

    Pickles as its path: a copy in another process opens its own index, for reading.
    """

    def __init__(self, path: Path, lock: WriterLock | None, *, sealed: bool = False) -> None:
        self.path = path
        self._lock = lock
        self._sealed = sealed
        self.index = Index(path / INDEX, writable=True) if lock is not None else self._readable_index()
        self.texts_table = TextTable(path, self.index)

    @classmethod
    def open(
        cls,
        path: str | Path,
        mode: Literal["r", "r+", "a"] = "r",
        *,
        shard_rows: int = SHARD_ROWS,
        sealed: bool = False,
    ) -> Self:
        """Open a cache to read ("r"), to write one that is there ("r+"), or to write ("a") and make it if need be.

        Args:
            shard_rows: rows of a shard in a new cache; an existing one keeps its own.
            sealed: read the copy of the index that `tcache seal` made, as on a network file system one must.
                It is read without a word where the index itself cannot be: on a read-only file system, or by
                somebody who may not write to its lock file.

        Raises:
            CacheNotFound: no cache there (modes "r" and "r+").
            FormatVersionError: written by another version of the format.
            DamagedCache: it does not say its format, or its index is gone.
            CacheLocked: someone else is writing (modes "r+" and "a").
        """
        path = Path(path)
        if mode == "r":
            check_format(path)
            if not sealed:
                _check_index(path)
            return cls(path, None, sealed=sealed)
        if sealed:
            raise CacheError(f"a sealed index is for readers: open {path} for writing without it")
        if mode == "r+" or (path / CACHE_JSON).exists() or _has_shards(path):
            check_format(path)
            _check_index(path)
        elif path.exists() and (not path.is_dir() or not _is_half_made(path)):
            raise CacheError(f"{path} is not a teacher cache and not empty; choose another folder for --cache")
        make_folder(path)
        lock = WriterLock(path / LOCK)
        try:
            if not (path / CACHE_JSON).exists():
                _make(path, shard_rows)
            return cls(path, lock)
        except BaseException:
            lock.release()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "sealed": self._sealed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], None, sealed=state["sealed"])  # type: ignore[misc]

    def _readable_index(self) -> Index:
        live, copy = self.path / INDEX, self.path / SEALED
        if self._sealed or (Index.exists(copy) and not Index.lockable(live)):
            return Index(copy, writable=False, sealed_copy_of=self.id)
        return Index(live, writable=False)

    def close(self) -> None:
        self.index.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        """Tells this cache from others, wherever it is copied to; "" of one that was made without."""
        return str(_described(self.path).get("id", ""))

    @property
    def rows(self) -> int:
        """How many distinct texts the table has."""
        return self.index.rows()

    @property
    def shard_rows(self) -> int:
        return self.texts_table.shard_rows

    def lookup(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Row of each text, -1 where the table does not have it."""
        return self.index.find(text_keys(texts))

    def texts(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """The exact texts of rows, in the order asked for.

        Raises:
            MissingRows: a row is not in the table.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self.rows):
            raise MissingRows(
                f"{self.path} has {self.rows} rows, counted from 0; asked for {rows.min()} to {rows.max()}"
                f"{self.index.as_of}"
            )
        return self.texts_table.read(rows)

    # Corpora

    def corpora(self) -> dict[str, CorpusRecord]:
        return {name: CorpusRecord.from_json(data) for name, data in self.index.records("corpora").items()}

    def corpus(self, name: str | None = None) -> Manifest:
        """The row list of a corpus; without a name, of the only one.

        Raises:
            CorpusNotFound: no such corpus, or several and no name.
        """
        known = self.corpora()
        if name is None and len(known) == 1:
            name = next(iter(known))
        if name not in known:
            if name is None and known:
                raise CorpusNotFound(
                    f"{self.path} has several corpora, say with --corpus which: {', '.join(sorted(known))}"
                )
            asked = f"no corpus {name!r} in {self.path}" if name is not None else f"no corpus in {self.path}"
            raise CorpusNotFound(
                f"{asked}; it has: {', '.join(sorted(known)) or 'none'}; "
                f"`tcache build CORPUS --teacher T --name NAME` adds one{self.index.as_of}"
            )
        try:
            return Manifest(known[name], self.path)
        except DamagedCache as error:
            newest = self.corpora().get(name)
            if newest == known[name] or newest is None:
                raise DamagedCache(f"{error}{self.index.as_of}") from error
            return Manifest(newest, self.path)  # a writer replaced the corpus between our two looks

    def publish_corpus(self, record: CorpusRecord, written: Path, domains: Path | None = None) -> Manifest:
        """Make a durable row list the corpus of that name, in place of an older one.

        Args:
            domains: a durable domain list; None where the record has no domains, or their list is in place.
        """
        target, domain_list = record.file(self.path), record.domains_file(self.path)
        os.replace(written, target)
        if domains is not None and domain_list is not None:
            os.replace(domains, domain_list)
        with replacing(target.with_name(CORPUS_JSON)) as file:  # what a lost index is made again from
            file.write(record.to_json())
        self.index.commit([Change("corpora", record.name.encode(), record.to_json())])
        for old in [*target.parent.glob("rows-*.npy"), *target.parent.glob("domains-*.npy")]:
            if old not in (target, domain_list):
                old.unlink()
        return Manifest(record, self.path)

    # Spaces

    def space_records(self) -> dict[str, SpaceRecord]:
        """What the index knows of every space, by slug; opens none of them."""
        return {slug: SpaceRecord.from_json(data) for slug, data in self.index.records("spaces").items()}

    def spaces(self) -> dict[str, SpaceView]:
        """Every space by its slug."""
        return {slug: self._view(record) for slug, record in self.space_records().items()}

    def _view(self, record: SpaceRecord) -> SpaceView:
        try:
            return SpaceView(self.path, self.index, record)
        except DamagedCache as error:
            raise DamagedCache(f"{error}{self.index.as_of}") from error

    def space(self, wanted: str | Mapping[str, Any] | None = None) -> SpaceView:
        """The one space that is wanted.

        Args:
            wanted: its slug, fingerprint (or the start of one) or teacher; or fields that it must have, such as
                `{"teacher": "all-MiniLM-L6-v2", "prompt": "query: "}`; None when the cache has one space.

        Raises:
            SpaceNotFound: no space of that name, or several fit.
            SpaceMismatch: no space has these fields; the message names those in which the nearest one differs.
            DamagedCache: its array cannot be opened.
        """
        return self._view(self.space_record(wanted))

    def space_record(self, wanted: str | Mapping[str, Any] | None = None) -> SpaceRecord:
        """What the index knows of the one space that is wanted, as `space` finds it; opens nothing of it."""
        records = self.space_records()
        fitting = [record for record in records.values() if wanted is None or _fits(record.space, wanted)]
        if len(fitting) == 1:
            return fitting[0]
        known = ", ".join(sorted(records)) or "none"
        if not records:
            problem = f"{self.path} has no embedding space yet"
        elif isinstance(wanted, Mapping) and not fitting:
            raise self._mismatch(wanted, [record.space for record in records.values()])
        elif not fitting:
            problem = f"{self.path} has no embedding space {wanted!r}"
        else:
            between = _differences([record.space for record in fitting])
            names = ", ".join(sorted(record.space.slug for record in fitting))
            raise SpaceNotFound(
                f"{self.path} has {len(fitting)} spaces that fit ({between}): say with --space which, {names}"
            )
        raise SpaceNotFound(
            f"{problem}; it has: {known}; `tcache build CORPUS --teacher T` fills one{self.index.as_of}"
        )

    def _mismatch(self, wanted: Mapping[str, Any], spaces: Sequence[EmbeddingSpace]) -> SpaceMismatch:
        differing = [
            (space, {name: value for name, value in wanted.items() if not _fits(space, {name: value})})
            for space in spaces
        ]
        nearest, fields = min(differing, key=lambda pair: len(pair[1]))
        listed = "; ".join(
            f"{name}: wanted {value!r}, cached {getattr(nearest, name)!r}" for name, value in fields.items()
        )
        return SpaceMismatch(
            f"{self.path} has no space that fits; the nearest is {nearest.slug}, which differs in {listed}; "
            f"`tcache build` with these settings fills one{self.index.as_of}"
        )

    def find_space(self, space: EmbeddingSpace) -> SpaceView | None:
        """The stored space equal to `space`; if its dtype is "auto", one that differs in nothing else."""
        for record in self.space_records().values():
            if space.matches(record.space):
                return self._view(record)
        return None

    def ensure_space(self, space: EmbeddingSpace, storage: str) -> SpaceView:
        """The stored space equal to `space`; a new one is an empty folder that its first `write` publishes.

        Raises:
            CacheError: it is there in another number format.
        """
        encoding = find_encoding(storage)
        view = self.find_space(space)
        if view is not None:
            if view.encoding != encoding:
                raise CacheError(
                    f"space {view.slug} is stored as {view.encoding.name}, not {encoding.name}; leave --storage "
                    "out, or build into another cache"
                )
            return view
        folder = self.path / SPACES / space.slug
        shutil.rmtree(folder, ignore_errors=True)  # a leftover that was never published
        make_folder(folder)
        record = SpaceRecord(space, encoding.name)
        create_vectors(folder / record.array, encoding, space.dims, self.shard_rows)
        with replacing(folder / SPACE_JSON) as file:  # for people and other tools; the index is what counts
            file.write(record.to_json())
        return self._view(record)

    def ensure_tokens(self, view: SpaceView, wanted: TokenRecord) -> SpaceView:
        """The space with these token columns; what is new is an empty folder that the next `write` publishes.

        Attention that `wanted` leaves out stays.

        Raises:
            CacheError: it has them of another shape or number format, or attention of other layers.
        """
        held = view.record.columns
        if held is not None:
            layers = (held.attention, wanted.attention)
            for what, there, asked, option in (
                ("tokens of", held.shape, wanted.shape, "take the teacher that made them"),
                ("tokens as", held.storage, wanted.storage, "leave --token-storage out"),
                ("attention of layers", *layers, "leave --attention-layers out"),
            ):
                if there != asked and not (what.startswith("attention") and None in layers):
                    raise CacheError(
                        f"space {view.slug} keeps {what} {_told(there)}, not {_told(asked)}; {option}, or use another "
                        "cache"
                    )
            wanted = replace(held, attention=held.attention or wanted.attention)
        new = [array for array in wanted.arrays if held is None or array not in held.arrays]
        if not new:
            return view
        rows = wanted.shard_rows(self.shard_rows) if view.tokens is None else view.tokens.shard_rows
        for array in new:
            shutil.rmtree(view.folder / array, ignore_errors=True)  # a leftover that was never published
            create_array(view.folder / array, wanted, array, rows)
        record = replace(view.record, columns=wanted)
        with replacing(view.folder / SPACE_JSON) as file:
            file.write(record.to_json())
        return self._view(record)

    @contextmanager
    def appending(self) -> Iterator[TextAppender]:
        """An appender of new texts; all of them are durable when the block ends well."""
        appender = TextAppender(self.texts_table)
        yield appender
        appender.flush()


def _fits(space: EmbeddingSpace, wanted: str | Mapping[str, Any]) -> bool:
    """Whether a space has that name, or all these fields.

    Raises:
        CacheError: a field that no space has.
    """
    if isinstance(wanted, str):
        named = wanted in (space.slug, space.teacher, space.slug.split("@")[0])
        return named or (len(wanted) >= 6 and space.fingerprint.startswith(wanted))
    fields = space.to_json()
    unknown = sorted(set(wanted) - set(fields))
    if unknown:
        raise CacheError(f"an embedding space has no field {unknown[0]!r}; its fields: {', '.join(fields)}")
    return all(fields[name] == value for name, value in wanted.items())


def _told(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _differences(spaces: Sequence[EmbeddingSpace]) -> str:
    names: list[str] = sorted({name for other in spaces[1:] for name in spaces[0].difference(other)})
    return "they differ in " + ", ".join(names)


def _described(path: Path) -> dict[str, Any]:
    """What `cache.json` says.

    Raises:
        DamagedCache: it does not say which format the cache is in.
    """
    try:
        record: dict[str, Any] = json.loads((path / CACHE_JSON).read_bytes())
        record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCache(
            f"{path / CACHE_JSON} does not say which format it is: {error!r}; `tcache repair {path}` writes it anew"
        ) from error
    return record


def check_format(path: Path) -> None:
    """Make sure that there is a cache, in the format of this version.

    Raises:
        CacheNotFound, DamagedCache, FormatVersionError: there is none, it does not say, it is another.
    """
    if not (path / CACHE_JSON).exists():
        if _has_shards(path):
            raise DamagedCache(f"{path / CACHE_JSON} is gone: `tcache repair {path}` writes it anew")
        raise CacheNotFound(
            f"no teacher cache at {path}: it has no {CACHE_JSON}; make one with "
            f"`tcache build CORPUS --teacher T --cache {path}`"
        )
    version = _described(path)["format"]
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} is in cache format {version}, this version reads format {FORMAT_VERSION}; use the "
            "release that wrote it, or build a new cache"
        )


def _check_index(path: Path) -> None:
    # LMDB would make an empty one for a writer, and everything stored would be written over.
    if not Index.exists(path / INDEX):
        raise DamagedCache(
            f"the index at {path / INDEX} is gone: `tcache reindex {path}` makes it again from the shards"
        )


def _has_shards(path: Path) -> bool:
    """Whether texts were written here, so that it was a cache once, whatever it lacks now."""
    return (path / LOCK).exists() and (path / TEXT_ARRAY / "c").is_dir()


def _is_half_made(path: Path) -> bool:
    """Empty, or what a first build leaves when it is killed before its first commit.

    The lock comes first of all, so a folder without it is someone's own, whatever its entries are called.
    """
    names = {entry.name for entry in path.iterdir() if not entry.name.endswith(TEMPORARY_SUFFIX)}
    return not names or (LOCK in names and names <= {INDEX, "texts", CORPORA, SPACES, LOCK})


def _make(path: Path, shard_rows: int) -> None:
    if shard_rows < 8 or shard_rows % 8:
        raise CacheError(f"shards of {shard_rows} rows: expected a positive multiple of 8")
    shutil.rmtree(path / "texts", ignore_errors=True)
    shutil.rmtree(path / INDEX, ignore_errors=True)
    TextTable.create(path, shard_rows)
    (path / CORPORA).mkdir(exist_ok=True)
    (path / SPACES).mkdir(exist_ok=True)
    (path / INDEX).mkdir()
    index = Index(path / INDEX, writable=True)
    index.commit([])
    index.close()
    write_cache_json(path, shard_rows)  # last: from here on it is a cache


def write_cache_json(path: Path, shard_rows: int) -> None:
    """Say what the cache is, under a new id."""
    record = {"format": FORMAT_VERSION, "id": secrets.token_hex(16), "key": KEY_RULE, "shard_rows": shard_rows}
    with replacing(path / CACHE_JSON) as file:
        file.write(json.dumps(record).encode())
