"""What travels between a cache and a file of another format."""

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
from teacher_cache.table.intake import mapped


@dataclass(frozen=True)
class Origin:
    """Where exported vectors come from; travels with them.

    Attributes:
        storage: number format of the space in its cache.
        corpus: the corpus that was exported, None for a whole table.
        worst_error: largest 1 - cos of a vector of the space against what the teacher said.
    """

    space: EmbeddingSpace
    storage: str
    corpus: str | None
    worst_error: float

    @property
    def dtype(self) -> str:
        """Of exported vectors: half precision is kept, everything else is told in float32."""
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
        """Inverse of `to_json`.

        Raises:
            CorpusError: it does not describe a space.
            SpaceMismatch: its fields do not make the fingerprint that stands beside them.
        """
        try:
            record = json.loads(data)
            space = EmbeddingSpace.from_json(record["space"])
            storage = find_encoding(record["storage"]).name
            found = cls(space, storage, record["corpus"], float(record["worst_error"]))
            fingerprint = record["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{where} does not describe an embedding space: {error}; export it again, or take it away and "
                "say with --teacher what the vectors are"
            ) from error
        if fingerprint != found.space.fingerprint:
            raise SpaceMismatch(
                f"{where} names fingerprint {fingerprint}, its fields make {found.space.fingerprint}: it was "
                "changed after the export; export it again"
            )
        return found


@dataclass(frozen=True)
class Block:
    """Some exported rows.

    Attributes:
        keys: `(n, 16)` uint8.
        vectors: `(n, dims)` of `Origin.dtype`.
    """

    texts: list[str]
    keys: npt.NDArray[np.uint8]
    vectors: npt.NDArray[Any]


@dataclass(frozen=True)
class Given:
    """Vectors to import, none of them checked yet.

    Attributes:
        corpus: the texts; row i of the vectors belongs to its i-th text, record by record.
        vectors: `(n, d)` of any float type, mapped.
        keys: `(n, 16)` uint8, where the source has them.
    """

    corpus: Corpus
    vectors: npt.NDArray[Any]
    keys: npt.NDArray[np.uint8] | None = None
    origin: Origin | None = None


@dataclass(frozen=True)
class Asked:
    """How a source is to be read.

    Attributes:
        corpus: texts of a source that has none.
        text_key, vector_key: columns of a source that has both.
        file: without a name, for vectors that cannot be mapped where they are.
    """

    corpus: Corpus | None
    text_key: str | Sequence[str]
    vector_key: str
    file: IO[bytes]


def spooled(matrices: Iterator[npt.NDArray[Any]], file: IO[bytes], where: str) -> npt.NDArray[Any]:
    """`(n, d)` vectors that come in pieces, as one mapped array.

    Raises:
        CorpusError: the pieces differ in width or type.
    """
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
    return mapped(file, first.dtype.str, first.shape[1])


def read_origin(path: Path) -> Origin | None:
    """The `space.json` of an exported folder, if it has one."""
    try:
        return Origin.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
