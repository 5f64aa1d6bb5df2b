"""A corpus in the table: an array of row numbers in corpus order.

Training reads the manifest and neither hashes texts nor opens the corpus file. The array is a plain, memory-mapped
.npy file whose name contains the corpus's fingerprint: a changed corpus of the same name is published by one index
transaction, and open readers keep the old file. Optional domains are in a second file, named after their own
fingerprint.
"""

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError, DamagedCache
from teacher_cache.storage.files import atomic_write
from teacher_cache.storage.shard_files import consecutive_runs, read_all

CORPORA = "corpora"


@dataclass(frozen=True)
class SourceRecord:
    """The file of records `[first, first + records)` of a corpus; `name` is its absolute path, or "stdin"."""

    name: str
    first: int
    records: int


@dataclass(frozen=True)
class CorpusRecord:
    """Committed record of one corpus.

    Attributes:
        columns: keys of a record; two for pairs.
        records: M, records in the corpus, duplicates included.
        distinct: distinct texts among them.
        counts: records affected by each reading policy, by its name.
        domains: names, in order of first appearance; a domain's number is its position. Empty without domains.
        domain_records: records of each domain.
        domain_key: key or column of the domains.
        domains_fingerprint: of the records' domains in order.
    """

    name: str
    fingerprint: str
    columns: tuple[str, ...]
    records: int
    distinct: int
    sources: tuple[SourceRecord, ...]
    counts: dict[str, int] = field(default_factory=dict)
    domains: tuple[str, ...] = ()
    domain_records: tuple[int, ...] = ()
    domain_key: str | None = None
    domains_fingerprint: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "CorpusRecord":
        fields: dict[str, Any] = json.loads(data)
        for name in ("columns", "domains", "domain_records"):  # older versions wrote no domains
            fields[name] = tuple(fields.get(name, ()))
        fields["sources"] = tuple(SourceRecord(**source) for source in fields["sources"])
        return cls(**fields)

    def shares_source(self, origins: Sequence[str]) -> bool:
        """Whether any of these files is one of its sources."""
        return not {source.name for source in self.sources}.isdisjoint(origins)

    def file(self, cache: Path) -> Path:
        return cache / CORPORA / self.name / f"rows-{self.fingerprint[:16]}.npy"

    def domains_file(self, cache: Path) -> Path | None:
        """None without domains."""
        return cache / CORPORA / self.name / f"domains-{self.domains_fingerprint[:16]}.npy" if self.domains else None

    def with_domains_of(self, other: "CorpusRecord") -> "CorpusRecord":
        """This corpus with the domains of another."""
        return replace(
            self,
            domains=other.domains,
            domain_records=other.domain_records,
            domain_key=other.domain_key,
            domains_fingerprint=other.domains_fingerprint,
        )


class RecordNumbers:
    """Numbers of each record, from a .npy file; `values` is `(M, ...)`, memory-mapped, read-only."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: str, name: str, advice: str) -> None:
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
            # Kept open: a writer that replaces the corpus deletes the file.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        except (OSError, ValueError) as error:
            raise DamagedCache(f"{name} ({path}) cannot be read: {error}; {advice}") from error
        if values.shape != shape or values.dtype != np.dtype(dtype):
            raise DamagedCache(
                f"{name} ({path}) has {values.dtype} of shape {values.shape}, expected {np.dtype(dtype)} of shape "
                f"{shape}; {advice}"
            )
        self.values: npt.NDArray[Any] = values
        self._offset = values.offset

    def read(self, records: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """`(n, ...)` values of existing records.

        Read from the file, because pages of the memory map would count as this process's memory.
        """
        out = np.empty((len(records), *self.values.shape[1:]), dtype=self.values.dtype)
        if len(records):
            size = self.values.strides[0]
            runs = consecutive_runs(records)
            read_all([(self._file, self._offset + size * int(records[i]), out[i:j]) for i, j in runs])
        return out


class Manifest:
    """The row numbers of one corpus, and optionally its records' domains.

    Attributes:
        rows: `(M, k)` int64, memory-mapped, read-only; k texts per record.
        domains: `(M,)` uint16 numbers of domains, memory-mapped, read-only; None without domains.

    Raises:
        DamagedCache: a file is missing or does not match the record.
    """

    def __init__(self, record: CorpusRecord, cache: Path) -> None:
        self.record = record
        shape = (record.records, len(record.columns))
        name = f"the manifest of corpus {record.name!r}"
        self._rows = RecordNumbers(record.file(cache), shape, "<i8", name, "build it again")
        self.rows: npt.NDArray[np.int64] = self._rows.values
        self._domains = domain_numbers(record, cache)
        self.domains: npt.NDArray[np.uint16] | None = None if self._domains is None else self._domains.values

    def rows_of(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`(n, k)` rows of records."""
        return self._rows.read(self._checked(records))

    def domains_of(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`(n,)` numbers of the domains of records; `record.domains` has their names.

        Raises:
            CacheError: the corpus has no domains.
        """
        if self._domains is None:
            raise CacheError(
                f"corpus {self.record.name!r} was built without domains: `tcache build ... --name {self.record.name} "
                "--domain-key COLUMN` adds them without encoding any text again"
            )
        return self._domains.read(self._checked(records)).astype(np.int64)

    def _checked(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(records) and (int(records.min()) < 0 or int(records.max()) >= len(self)):
            raise IndexError(
                f"corpus {self.record.name!r} has {len(self)} records, counted from 0; requested {records.min()} to "
                f"{records.max()}"
            )
        return records

    def __len__(self) -> int:
        return len(self.rows)

    def distinct_rows(self, table_rows: int) -> npt.NDArray[np.int64]:
        """The distinct rows, ascending. Takes up to 9 bytes of memory per row of the table."""
        return np.flatnonzero(used_rows(self.rows, table_rows))


def domain_numbers(record: CorpusRecord, cache: Path) -> RecordNumbers | None:
    """The domains of a corpus's records; None without domains."""
    path = record.domains_file(cache)
    if path is None:
        return None
    advice = f"build it again with `tcache build ... --name {record.name} --domain-key {record.domain_key}`"
    return RecordNumbers(path, (record.records,), "<u2", f"the domain list of corpus {record.name!r}", advice)


def used_rows(rows: npt.NDArray[np.int64], table_rows: int) -> npt.NDArray[np.bool_]:
    """`(table_rows,)`: which rows of the table `(M, k)` row numbers contain; read in parts, as they may be mapped."""
    used = np.zeros(table_rows, dtype=bool)
    for start in range(0, len(rows), 2**20):
        used[rows[start : start + 2**20]] = True
    return used


class NumbersWriter:
    """Writes numbers of records to a .npy file as they come, so that a corpus of any length takes no memory."""

    def __init__(self, file: Any, dtype: str, columns: tuple[int, ...]) -> None:
        self._file = file
        self._dtype = dtype
        self._columns = columns
        self.records = 0
        self.write_header()

    def write_header(self) -> None:
        """Write the header for the records so far; call it again after the last one."""
        self._file.seek(0)
        # numpy pads the header, so a longer first axis fits in the same bytes.
        shape = (self.records, *self._columns)
        np.lib.format.write_array_header_1_0(self._file, {"descr": self._dtype, "fortran_order": False, "shape": shape})

    def append(self, values: npt.NDArray[Any]) -> None:
        """Append the `(n, ...)` numbers of n records."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self.records += len(values)


def writing_manifest(cache: Path, name: str, columns: int) -> AbstractContextManager[tuple[NumbersWriter, Path]]:
    """A writer of `(n, columns)` rows, and its durable file, to be renamed once the fingerprint is known."""
    return _writing(cache / CORPORA / name / "rows.new", "<i8", (columns,))


def writing_domains(cache: Path, name: str) -> AbstractContextManager[tuple[NumbersWriter, Path]]:
    """As `writing_manifest`, for `(n,)` numbers of domains."""
    return _writing(cache / CORPORA / name / "domains.new", "<u2", ())


@contextmanager
def _writing(path: Path, dtype: str, columns: tuple[int, ...]) -> Iterator[tuple[NumbersWriter, Path]]:
    with atomic_write(path) as file:
        writer = NumbersWriter(file, dtype, columns)
        yield writer, path
        writer.write_header()
