"""The table: rows are distinct texts, columns are embedding spaces.

One process may write while any number of processes read. Readers see committed data only.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import (
    CacheError,
    CorpusNotFound,
    DamagedCache,
    MissingRows,
    SpaceMismatch,
    SpaceNotFound,
)
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import find_encoding
from teacher_cache.storage.files import atomic_write, make_folder
from teacher_cache.storage.index import Change, Index
from teacher_cache.storage.lock import WriterLock
from teacher_cache.storage.manifest import CorpusRecord, Manifest
from teacher_cache.storage.texts import TextAppender, TextTable
from teacher_cache.table.layout import (
    CACHE_JSON,
    CORPUS_JSON,
    INDEX,
    LOCK,
    SEALED,
    SHARD_ROWS,
    SPACE_JSON,
    check_format,
    check_index,
    create_files,
    has_shards,
    is_unfinished,
    read_cache_json,
)
from teacher_cache.table.view import SPACES, SpaceRecord, SpaceView, as_rows, as_texts, create_vectors
from teacher_cache.text_key import text_keys

if TYPE_CHECKING:
    from teacher_cache.teachers import Teacher, TeacherOptions
    from teacher_cache.tokens.token_columns import TokenRecord


class TeacherCache:
    """A cache folder: distinct texts, and their vectors in one or more embedding spaces.

    Open it with `TeacherCache.open`; it is a context manager. A pickled copy opens the cache for reading.

    Example:
        >>> with TeacherCache.open("cache") as cache:
        ...     print(len(cache), "a text" in cache, cache.space()["a text"].shape)
        360 True (384,)
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
        """Open a cache.

        Args:
            mode: "r" to read, "r+" to read and write, "a" to read and write and create the cache if it is missing.
            shard_rows: rows per shard of a new cache; an existing cache keeps its own.
            sealed: read the sealed copy of the index (`tcache seal`), as on a network file system. Without it the
                copy is read where the index itself cannot be locked: a read-only file system, or a lock file without
                write permission.

        Raises:
            CacheNotFound: there is no cache (modes "r" and "r+").
            FormatVersionError: it has another format version.
            DamagedCache: its `cache.json` is invalid or its index is missing.
            CacheLocked: another process is writing (modes "r+" and "a").
        """
        if mode not in ("r", "r+", "a"):
            raise ValueError(f"mode is {mode!r}; expected 'r', 'r+' or 'a'")
        path = Path(path)
        if mode == "r":
            check_format(path)
            if not sealed:
                check_index(path)
            return cls(path, None, sealed=sealed)
        if sealed:
            raise CacheError(f"a sealed index is read-only: open {path} without `sealed` to write")
        if mode == "r+" or (path / CACHE_JSON).exists() or has_shards(path):
            check_format(path)
            check_index(path)
        elif path.exists() and (not path.is_dir() or not is_unfinished(path)):
            raise CacheError(f"{path} is not a teacher cache and not empty; choose another folder for `cache`")
        make_folder(path)
        lock = WriterLock(path / LOCK)
        try:
            if not (path / CACHE_JSON).exists():
                create_files(path, shard_rows)
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

    def __len__(self) -> int:
        return self.rows

    def __bool__(self) -> bool:  # an empty cache is still a cache
        return True

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and bool(self.lookup([text])[0] >= 0)

    def __repr__(self) -> str:
        spaces, corpora = (", ".join(found) or "none" for found in (self.space_records(), self.corpora()))
        return f"<TeacherCache {str(self.path)!r}: {self.rows:,} texts; spaces: {spaces}; corpora: {corpora}>"

    @property
    def id(self) -> str:
        """Random id of the cache, kept in copies; "" for a cache created without one."""
        return str(read_cache_json(self.path).get("id", ""))

    @property
    def rows(self) -> int:
        """Number of distinct texts."""
        return self.index.rows()

    @property
    def shard_rows(self) -> int:
        return self.texts_table.shard_rows

    def lookup(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """`(n,)` int64 row of each of n texts; -1 for a text that is not in the cache.

        Raises:
            TypeError: one string instead of a sequence, or an item that is not a string.
        """
        return self.index.find(text_keys(as_texts(texts)))

    def texts(self, rows: npt.ArrayLike) -> list[str]:
        """The exact texts of rows, in the order given.

        Raises:
            MissingRows: a row is not in the table.
            TypeError, ValueError: `rows` is not a 1-D array of integers.
        """
        rows = as_rows(rows)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self.rows):
            raise MissingRows(
                f"{self.path} has {self.rows} rows, counted from 0; requested {rows.min()} to {rows.max()}"
                f"{self.index.as_of}"
            )
        return self.texts_table.read(rows)

    def get_or_encode(self, texts: Sequence[str], teacher: "str | TeacherOptions | Teacher") -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts; the teacher encodes those that the cache lacks, and they are stored.

        For interactive work: texts are added to the table but to no corpus, and all of them are in memory. Use
        `build` for corpora.

        Args:
            teacher: a name or `TeacherOptions`, loaded only if a vector is missing; or a loaded `Teacher`, which
                saves loading the model in every call.

        Raises:
            CacheError: a vector is missing and the cache is open for reading only.
            MissingRows: the teacher output of a text was quarantined; the message has the reason.
            TeacherError: the teacher is not found, or cannot be loaded.
        """
        from teacher_cache.teachers import TeacherOptions, TeacherSpec, load_teacher, resolve, resolve_dtype

        options = TeacherOptions(model=teacher) if isinstance(teacher, str) else teacher
        if isinstance(options, TeacherOptions):
            spec = resolve(options)
        else:
            spec = TeacherSpec(options=TeacherOptions(model=options.space.teacher), space=options.space, folder=None)
        view, rows = self.find_space(spec.space), self.lookup(texts)
        if view is not None and view.present(rows).all():
            return np.asarray(view.gather(rows))
        if self._lock is None:
            raise CacheError(
                f"{self.path} lacks vectors of {spec.space.teacher} and is open for reading: open it with mode='a'"
            )
        spec = resolve_dtype(spec, (record.space for record in self.space_records().values()))
        view = self.ensure_space(spec.space, view.record.storage if view is not None else "float16")
        with self.appending() as appender:
            rows = appender.add(list(texts))
        missing = view.missing_rows(np.unique(rows))
        if len(missing):
            loaded = load_teacher(spec) if isinstance(options, TeacherOptions) else options
            for number in np.unique(missing // self.shard_rows).tolist():
                part = missing[missing // self.shard_rows == number]
                encoded = loaded.encode_counted(self.texts(part))
                view.write(number, part, encoded.vectors, tokens=int(encoded.tokens.sum()))
        absent = np.flatnonzero(~view.present(rows))
        if len(absent):
            reason = view.quarantined()[int(rows[absent[0]])]
            raise MissingRows(f"the vector of {texts[absent[0]]!r} in space {view.slug} is quarantined: {reason}")
        return np.asarray(view.gather(rows))

    # Corpora

    def corpora(self) -> dict[str, CorpusRecord]:
        """Corpus name -> its record."""
        return {name: CorpusRecord.from_json(data) for name, data in self.index.records("corpora").items()}

    def corpus(self, name: str | None = None) -> Manifest:
        """The manifest of a corpus: the row numbers of its records, in corpus order.

        Args:
            name: None for the only corpus of the cache.

        Raises:
            CorpusNotFound: no such corpus, or several and no `name`.
        """
        known = self.corpora()
        if name is None and len(known) == 1:
            name = next(iter(known))
        if name not in known:
            if name is None and known:
                raise CorpusNotFound(
                    f"{self.path} has several corpora, name one with `corpus`: {', '.join(sorted(known))}"
                )
            problem = f"no corpus {name!r} in {self.path}" if name is not None else f"no corpus in {self.path}"
            raise CorpusNotFound(
                f"{problem}; it has: {', '.join(sorted(known)) or 'none'}; "
                f"`tcache build CORPUS --teacher T --name NAME` adds one{self.index.as_of}"
            )
        try:
            return Manifest(known[name], self.path)
        except DamagedCache as error:
            newest = self.corpora().get(name)
            if newest == known[name] or newest is None:
                raise DamagedCache(f"{error}{self.index.as_of}") from error
            return Manifest(newest, self.path)  # a writer replaced the corpus in between

    def publish_corpus(self, record: CorpusRecord, written: Path, domains: Path | None = None) -> Manifest:
        """Commit a corpus, replacing one of the same name.

        Args:
            written: durable file of its row numbers.
            domains: durable file of its domain numbers; None if it has no domains, or their file is in place already.
        """
        target, domain_list = record.file(self.path), record.domains_file(self.path)
        os.replace(written, target)
        if domains is not None and domain_list is not None:
            os.replace(domains, domain_list)
        with atomic_write(target.with_name(CORPUS_JSON)) as file:  # a lost index is rebuilt from it
            file.write(record.to_json())
        self.index.commit([Change("corpora", record.name.encode(), record.to_json())])
        for old in [*target.parent.glob("rows-*.npy"), *target.parent.glob("domains-*.npy")]:
            if old not in (target, domain_list):
                old.unlink()
        return Manifest(record, self.path)

    # Spaces

    def space_records(self) -> dict[str, SpaceRecord]:
        """Slug -> index record of each space; opens no array."""
        return {slug: SpaceRecord.from_json(data) for slug, data in self.index.records("spaces").items()}

    def spaces(self) -> dict[str, SpaceView]:
        """Slug -> space, for each space."""
        return {slug: self._view(record) for slug, record in self.space_records().items()}

    def _view(self, record: SpaceRecord) -> SpaceView:
        try:
            return SpaceView(self.path, self.index, record)
        except DamagedCache as error:
            raise DamagedCache(f"{error}{self.index.as_of}") from error

    def space(self, wanted: str | Mapping[str, Any] | None = None) -> SpaceView:
        """The space that matches `wanted`.

        Args:
            wanted: slug, fingerprint (or at least 6 leading digits) or teacher of the space; or fields it must have,
                such as `{"teacher": "all-MiniLM-L6-v2", "prompt": "query: "}`; None for the only space of the cache.

        Raises:
            SpaceNotFound: no space has that name, or several match.
            SpaceMismatch: no space has these fields; the message names the fields in which the nearest one differs.
            DamagedCache: its array cannot be opened.
        """
        return self._view(self.space_record(wanted))

    def space_record(self, wanted: str | Mapping[str, Any] | None = None) -> SpaceRecord:
        """Index record of the space that `space` would return; opens no array."""
        records = self.space_records()
        matching = [record for record in records.values() if wanted is None or _matches(record.space, wanted)]
        if len(matching) == 1:
            return matching[0]
        known = ", ".join(sorted(records)) or "none"
        if not records:
            problem = f"{self.path} has no embedding space yet"
        elif isinstance(wanted, Mapping) and not matching:
            raise self._mismatch(wanted, [record.space for record in records.values()])
        elif not matching:
            problem = f"{self.path} has no embedding space {wanted!r}"
        else:
            between = _differences([record.space for record in matching])
            names = ", ".join(sorted(record.space.slug for record in matching))
            raise SpaceNotFound(
                f"{self.path} has {len(matching)} matching spaces ({between}), name one with `space`: {names}"
            )
        raise SpaceNotFound(
            f"{problem}; it has: {known}; `tcache build CORPUS --teacher T` fills one{self.index.as_of}"
        )

    def _mismatch(self, wanted: Mapping[str, Any], spaces: Sequence[EmbeddingSpace]) -> SpaceMismatch:
        differing = [
            (space, {name: value for name, value in wanted.items() if not _matches(space, {name: value})})
            for space in spaces
        ]
        nearest, fields = min(differing, key=lambda pair: len(pair[1]))
        listed = "; ".join(
            f"{name}: wanted {value!r}, cached {getattr(nearest, name)!r}" for name, value in fields.items()
        )
        return SpaceMismatch(
            f"{self.path} has no matching space; the nearest is {nearest.slug}, which differs in {listed}; "
            f"`tcache build` with these settings fills one{self.index.as_of}"
        )

    def find_space(self, space: EmbeddingSpace) -> SpaceView | None:
        """The stored space equal to `space`, or if its dtype is "auto", one that differs in dtype alone; else None."""
        for record in self.space_records().values():
            if space.matches(record.space):
                return self._view(record)
        return None

    def ensure_space(self, space: EmbeddingSpace, storage: str) -> SpaceView:
        """The stored space equal to `space`, or a new one, which its first `write` commits.

        Raises:
            CacheError: it is stored in another encoding.
        """
        encoding = find_encoding(storage)
        view = self.find_space(space)
        if view is not None:
            if view.encoding != encoding:
                raise CacheError(
                    f"space {view.slug} is stored as {view.encoding.name}, not {encoding.name}; leave `storage` "
                    "out, or build into another cache"
                )
            return view
        folder = self.path / SPACES / space.slug
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed build, never committed
        make_folder(folder)
        record = SpaceRecord(space, encoding.name)
        create_vectors(folder / record.array, encoding, space.dims, self.shard_rows)
        with atomic_write(folder / SPACE_JSON) as file:  # for people and other tools: readers use the index
            file.write(record.to_json())
        return self._view(record)

    def ensure_tokens(self, view: SpaceView, wanted: "TokenRecord") -> SpaceView:
        """The space with token columns; the next `write` commits those that are new.

        Stored attention maps are kept if `wanted` has none.

        Raises:
            CacheError: it has token columns of another shape or encoding, or attention maps of other layers.
        """
        from teacher_cache.tokens.token_columns import create_array

        held = view.record.columns
        if held is not None:
            layers = (held.attention, wanted.attention)
            for what, stored, requested, advice in (
                ("tokens of", held.shape, wanted.shape, "use the teacher that computed them"),
                ("tokens as", held.storage, wanted.storage, "leave `token_storage` out"),
                ("attention maps of layers", *layers, "leave `attention_layers` out"),
            ):
                if stored != requested and not (what.startswith("attention") and None in layers):
                    raise CacheError(
                        f"space {view.slug} has {what} {_listed(stored)}, not {_listed(requested)}; {advice}, or use "
                        "another cache"
                    )
            wanted = replace(held, attention=held.attention or wanted.attention)
        new = [array for array in wanted.arrays if held is None or array not in held.arrays]
        if not new:
            return view
        rows = wanted.shard_rows(self.shard_rows) if view.tokens is None else view.tokens.shard_rows
        for array in new:
            shutil.rmtree(view.folder / array, ignore_errors=True)  # left by a killed build, never committed
            create_array(view.folder / array, wanted, array, rows)
        record = replace(view.record, columns=wanted)
        with atomic_write(view.folder / SPACE_JSON) as file:
            file.write(record.to_json())
        return self._view(record)

    @contextmanager
    def appending(self) -> Iterator[TextAppender]:
        """Context manager: an appender of new texts, all durable when the block ends without an error."""
        appender = TextAppender(self.texts_table)
        yield appender
        appender.flush()


def _matches(space: EmbeddingSpace, wanted: str | Mapping[str, Any]) -> bool:
    """Whether a space has a name, or all the given fields.

    Raises:
        CacheError: there is no field of that name.
    """
    if isinstance(wanted, str):
        named = wanted in (space.slug, space.teacher, space.slug.split("@")[0])
        return named or (len(wanted) >= 6 and space.fingerprint.startswith(wanted))
    fields = space.to_json()
    unknown = sorted(set(wanted) - set(fields))
    if unknown:
        raise CacheError(f"an embedding space has no field {unknown[0]!r}; its fields: {', '.join(fields)}")
    return all(fields[name] == value for name, value in wanted.items())


def _listed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _differences(spaces: Sequence[EmbeddingSpace]) -> str:
    names: list[str] = sorted({name for other in spaces[1:] for name in spaces[0].difference(other)})
    return "they differ in " + ", ".join(names)
