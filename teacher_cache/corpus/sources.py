"""Sources of a corpus: files, saved datasets, standard input, and texts in memory."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from teacher_cache.errors import CorpusError, MissingDependency

STDIN = "stdin"
MEMORY = "memory"

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json-lines": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")
LIBRARIES = {"parquet": "pyarrow", "dataset": "datasets", ".zst": "pyarrow"}


class Columns(NamedTuple):
    """Keys or column names of a record's texts and, optionally, of its domain."""

    texts: tuple[str, ...]
    domain: str | None = None

    @classmethod
    def parse(cls, text_key: str | Sequence[str], domain_key: str | None = None) -> "Columns":
        """The columns that `text_key` ("a", "a,b" or several names) and `domain_key` name."""
        texts = tuple(text_key.split(",") if isinstance(text_key, str) else text_key)
        if not texts or "" in texts or len(set(texts)) < len(texts):
            raise CorpusError(f"`text_key` {text_key!r}: expected one or more distinct names, such as 'a,b'")
        if domain_key is not None and domain_key in ("", *texts):
            raise CorpusError(f"`domain_key` {domain_key!r}: expected the name of a column that is not a text's")
        return cls(texts, domain_key)

    @property
    def names(self) -> tuple[str, ...]:
        return self.texts if self.domain is None else (*self.texts, self.domain)

    def option(self, column: str) -> str:
        """The argument that names `column`, for messages."""
        return "`domain_key`" if column == self.domain else "`text_key`"


@dataclass(frozen=True)
class Source:
    """One file, saved dataset, standard input, or texts in memory.

    Attributes:
        name: the path as given, "stdin", or the name of the texts in memory; messages start with it.
        format: a value of `FORMATS`, "dataset", "stdin" or "texts".
        path: None for standard input and for texts in memory.
        data: an iterable of records, or a `datasets.Dataset`; None for what is not in memory.
    """

    name: str
    format: str
    path: Path | None = None
    compression: str = ""
    data: Any = None

    @property
    def origin(self) -> str:
        """Absolute path, "stdin" or "memory"."""
        if self.path is not None:
            return os.path.abspath(self.path)
        return STDIN if self.format == "stdin" else MEMORY

    @property
    def single_use(self) -> bool:
        """Whether it can be read only once."""
        return self.format == "stdin" or isinstance(self.data, Iterator)

    def position(self, number: int) -> str:
        """Where record `number` (from 1) is, for messages."""
        if self.format == "texts":
            return f"{self.name}: record {number}"
        return f"{self.name}: row {number}" if self.format in ("parquet", "dataset") else f"{self.name}:{number}"


def find_sources(given: str) -> list[Source]:
    """Sources of one path, glob or "-"."""
    if given == "-":
        return [Source(STDIN, "stdin")]
    # A file may have glob characters in its name.
    if not os.path.exists(given) and has_magic(given):
        matches = sorted(glob(given, recursive=True))
        if not matches:
            raise CorpusError(f"{given}: the pattern matches no file; check the path")
        return [_file_source(Path(match)) for match in matches]
    return [_file_source(Path(given))]


def _file_source(path: Path) -> Source:
    if os.path.isdir(path):
        _check_saved_dataset(path)
        source = Source(str(path), "dataset", path)
    elif os.path.exists(path):
        compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
        suffix = (Path(path.stem) if compression else path).suffix.lower()
        known = FORMATS.get(suffix)
        if known is None or (known == "parquet" and compression):
            raise CorpusError(
                f"{path}: unknown format {suffix + compression!r}; known are {' '.join(FORMATS)}, "
                f"each but .parquet also with {' or '.join(COMPRESSIONS)}, and folders written by save_to_disk"
            )
        source = Source(str(path), known, path, compression)
    else:
        raise CorpusError(f"{path}: no such file")
    library = LIBRARIES.get(source.compression) or LIBRARIES.get(source.format)
    if library and find_spec(library) is None:
        raise MissingDependency.of(f"reading {source.name}", library)
    return source


def _check_saved_dataset(path: Path) -> None:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(str(state.parent) for state in sorted(path.glob("*/state.json")))
        raise CorpusError(f"{path}: a DatasetDict; pass one or more of its splits instead: {splits}")
    if not (path / "state.json").is_file():
        raise CorpusError(
            f"{path}: a folder that save_to_disk did not write (no state.json); "
            f"pass files, or a glob such as '{path}/*.jsonl'"
        )


def texts_source(texts: Any, name: str) -> tuple[Source, Columns]:
    """Source and columns of an iterable of strings or of tuples of strings; the first record is read."""
    if isinstance(texts, str | bytes | Mapping) or getattr(texts, "ndim", 1) != 1 or not isinstance(texts, Iterable):
        raise TypeError(
            f"expected an iterable of strings or of tuples of strings, found {type(texts).__name__}; put a single "
            "text into a list, pass one column of a table, open files with Corpus.open"
        )
    iterator = iter(texts)
    first = list(islice(iterator, 1))
    width = len(first[0]) if first and isinstance(first[0], tuple | list) else 1
    columns = ("text",) if width <= 1 else tuple(f"text_{number}" for number in range(1, width + 1))
    # An iterator has lost its first record.
    data = chain(first, iterator) if iterator is texts else texts
    return Source(name, "texts", data=data), Columns(columns)


def is_dataset(value: object) -> bool:
    """Whether `value` is a `datasets.Dataset`; does not import datasets."""
    return isinstance(value, getattr(sys.modules.get("datasets"), "Dataset", ()))
