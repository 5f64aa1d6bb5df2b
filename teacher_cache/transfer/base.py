"""What an export format writes and reads."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError, SpaceMismatch
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import find_encoding, stored_name
from teacher_cache.table.intake import map_file


@dataclass(frozen=True)
class Origin:
    """The origin of exported vectors, written next to them."""

    space: EmbeddingSpace
    storage: str  # encoding of the space in its cache
    corpus: str | None  # name of the exported corpus; None for a whole table
    worst_error: float  # largest 1 - cos between a vector of the space and the teacher output

    @property
    def dtype(self) -> str:
        """Of exported vectors: float16 for float16 encodings, float32 for all others."""
        return "<f2" if find_encoding(self.storage).dtype == "<f2" else "<f4"

    def to_json(self) -> str:
        record = {
            "space": self.space.to_json(),
            "fingerprint": self.space.fingerprint,
            "storage": stored_name(self.storage),
            "corpus": self.corpus,
            "worst_error": self.worst_error,
        }
        return json.dumps(record, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, data: str | bytes, where: str) -> "Origin":
        """Inverse of `to_json`, compared with the fingerprint."""
        try:
            record = json.loads(data)
            space = EmbeddingSpace.from_json(record["space"])
            storage = find_encoding(record["storage"]).name
            found = cls(space, storage, record["corpus"], float(record["worst_error"]))
            fingerprint = record["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{where} does not describe an embedding space: {error}; export it again, or remove it and name the "
                "model of the vectors with `teacher`"
            ) from error
        if fingerprint != found.space.fingerprint:
            raise SpaceMismatch(
                f"{where} has fingerprint {fingerprint}, its fields give {found.space.fingerprint}: it was changed "
                "after the export; export it again"
            )
        return found


@dataclass(frozen=True)
class Block:
    """A batch of exported rows."""

    texts: list[str]
    keys: npt.NDArray[np.uint8]  # (n, 16)
    vectors: npt.NDArray[Any]  # (n, dims) of `Origin.dtype`


@dataclass(frozen=True)
class VectorSource:
    """Vectors to import, not yet checked; row i belongs to the i-th text of the corpus, record by record."""

    corpus: Corpus
    vectors: npt.NDArray[Any]  # (n, d) of any float type, memory-mapped
    keys: npt.NDArray[np.uint8] | None = None  # (n, 16)
    origin: Origin | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How to read a source."""

    corpus: Corpus | None  # texts of a source without texts
    text_key: str | Sequence[str]  # columns of a source with both
    vector_key: str
    file: IO[bytes]  # temporary, for vectors that cannot be memory-mapped in place


def spool(matrices: Iterator[npt.NDArray[Any]], file: IO[bytes], where: str) -> npt.NDArray[Any]:
    """`(n, d)` vectors from matrices of one width, written to `file` and memory-mapped."""
    first: npt.NDArray[Any] | None = None
    row = 0
    for matrix in matrices:
        if first is None:
            first = matrix[:0]
        if matrix.shape[1] != first.shape[1]:
            raise CorpusError(
                f"{where}: row {row + 1} has a vector of {matrix.shape[1]} numbers, row 1 one of {first.shape[1]}"
            )
        file.write(np.ascontiguousarray(matrix, dtype=first.dtype).data)
        row += len(matrix)
    if first is None:
        raise CorpusError(f"{where} holds no rows")
    return map_file(file, first.dtype.str, first.shape[1])


def read_origin(path: Path) -> Origin | None:
    """The `space.json` of an exported folder; None if it has none."""
    try:
        return Origin.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
