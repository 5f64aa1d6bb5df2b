"""A corpus as the table sees it: an array of row numbers in corpus order.

Training walks over a manifest; it never hashes a text and never opens the corpus file again. The array is a
plain .npy file that is mapped, not loaded, and named after the corpus's fingerprint: publishing a changed
corpus of the same name is one index transaction, and whoever reads the old one keeps reading it.
"""

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache
from teacher_cache.storage.files import replacing
from teacher_cache.storage.positioned import read_all, runs

CORPORA = "corpora"


@dataclass(frozen=True)
class Source:
    """Records `[first, first + records)` of a corpus came from this file.

    Attributes:
        name: absolute path, or "stdin".
    """

    name: str
    first: int
    records: int


@dataclass(frozen=True)
class CorpusRecord:
    """What the index knows of one corpus.

    Attributes:
        columns: the keys of a record; two for pairs.
        records: M, records in the corpus, duplicates included.
        distinct: distinct texts among them.
        counts: what the reading policies did, by name.
    """

    name: str
    fingerprint: str
    columns: tuple[str, ...]
    records: int
    distinct: int
    sources: tuple[Source, ...]
    counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "CorpusRecord":
        fields: dict[str, Any] = json.loads(data)
        fields["columns"] = tuple(fields["columns"])
        fields["sources"] = tuple(Source(**source) for source in fields["sources"])
        return cls(**fields)

    def shares_source(self, origins: Sequence[str]) -> bool:
        """Whether it came from one of these files, among others."""
        return not {source.name for source in self.sources}.isdisjoint(origins)

    def file(self, cache: Path) -> Path:
        return cache / CORPORA / self.name / f"rows-{self.fingerprint[:16]}.npy"


class Manifest:
    """The row numbers of one corpus.

    Attributes:
        rows: `(M, k)` int64, mapped read-only; k texts a record.
    """

    def __init__(self, record: CorpusRecord, cache: Path) -> None:
        self.record = record
        path = record.file(cache)
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
            # Kept open: a writer that replaces the corpus removes the name.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        except (OSError, ValueError) as error:
            raise DamagedCache(
                f"the row list of corpus {record.name!r} ({path}) cannot be read: {error}; build it again"
            ) from error
        if rows.shape != (record.records, len(record.columns)) or rows.dtype != np.int64:
            raise DamagedCache(
                f"the row list of corpus {record.name!r} ({path}) has shape {rows.shape}, the index says "
                f"({record.records}, {len(record.columns)}); build it again"
            )
        self.rows: npt.NDArray[np.int64] = rows
        self._offset = rows.offset

    def rows_of(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`(n, k)` rows of records by their number.

        By reads and not through the map, whose pages would count as this process's memory.
        """
        width = self.rows.shape[1]
        out = np.empty((len(records), width), dtype=np.int64)
        if len(records):
            if int(records.min()) < 0 or int(records.max()) >= len(self):
                raise IndexError(
                    f"corpus {self.record.name!r} has {len(self)} records, counted from 0; asked for "
                    f"{records.min()} to {records.max()}"
                )
            read_all(
                [
                    (self._file, self._offset + 8 * width * int(records[start]), out[start:stop])
                    for start, stop in runs(records)
                ]
            )
        return out

    def __len__(self) -> int:
        return len(self.rows)

    def used_rows(self, table_rows: int) -> npt.NDArray[np.bool_]:
        """`(table_rows,)`: which rows of the table the corpus names."""
        return used_rows(self.rows, table_rows)

    def distinct_rows(self, table_rows: int) -> npt.NDArray[np.int64]:
        """The distinct rows, ascending: up to 9 bytes of memory for each row of the table."""
        return np.flatnonzero(self.used_rows(table_rows))


def used_rows(rows: npt.NDArray[np.int64], table_rows: int) -> npt.NDArray[np.bool_]:
    """`(table_rows,)`: which values a row list `(M, k)` has; read in pieces, as it may be mapped and long."""
    used = np.zeros(table_rows, dtype=bool)
    for start in range(0, len(rows), 2**20):
        used[rows[start : start + 2**20]] = True
    return used


class ManifestWriter:
    """Collects row numbers in a temporary file: a corpus of any length takes no memory."""

    def __init__(self, file: Any, columns: int) -> None:
        self._file = file
        self._columns = columns
        self.records = 0
        self._write_header()

    def _write_header(self) -> None:
        # numpy pads the header so that a first axis of any length fits in the same bytes.
        shape = (self.records, self._columns)
        np.lib.format.write_array_header_1_0(self._file, {"descr": "<i8", "fortran_order": False, "shape": shape})

    def append(self, rows: npt.NDArray[np.int64]) -> None:
        """Add `(n, k)` row numbers."""
        self._file.write(np.ascontiguousarray(rows, dtype="<i8").tobytes())
        self.records += len(rows)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.seek(0, os.SEEK_END)


@contextmanager
def writing_manifest(cache: Path, name: str, columns: int) -> Iterator[tuple[ManifestWriter, Path]]:
    """A writer and the durable file it leaves, to be renamed once the corpus's fingerprint is known."""
    path = cache / CORPORA / name / "rows.new"
    with replacing(path) as file:
        writer = ManifestWriter(file, columns)
        yield writer, path
        writer.finish()
