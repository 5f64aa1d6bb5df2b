"""Files of texts in every format that a corpus takes, read as records; the policy on texts is `corpus`'s."""

import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from glob import glob, has_magic
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from teacher_cache.errors import CorpusError

Record = tuple[str, ...]

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

_BOM = b"\xef\xbb\xbf"
_ARROW_ROWS = 1024
# The csv module's own limit of 131,072 characters refuses long documents. Some limit must stay: a quote that
# is never closed would otherwise read the rest of the file into memory.
_CSV_FIELD_LIMIT = 2**27
_JSON_NAMES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}

T = TypeVar("T")


class Columns(NamedTuple):
    """Keys or column names that a record is read from; its domain, where one is kept, stands behind its texts."""

    texts: tuple[str, ...]
    domain: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.texts if self.domain is None else (*self.texts, self.domain)

    def option(self, column: str) -> str:
        """What a user names the column with."""
        return "domain_key" if column == self.domain else "text_key"


@dataclass(frozen=True)
class Source:
    """One file, saved dataset or standard input (`path` None)."""

    name: str
    path: Path | None
    format: str
    compression: str = ""

    @property
    def origin(self) -> str:
        """Absolute path, so that it means the same file from every folder, or "stdin"."""
        return self.name if self.path is None else os.path.abspath(self.path)


def find_sources(given: str) -> list[Source]:
    """The sources that one given path, glob or "-" stands for."""
    if given == "-":
        return [Source("stdin", None, "stdin")]
    path = Path(given)
    # A file whose name happens to hold glob characters is itself.
    if not os.path.exists(path) and has_magic(given):
        matches = sorted(glob(given, recursive=True))
        if not matches:
            raise CorpusError(f"{given}: the pattern matches no file; check the path")
        return [_source(Path(match)) for match in matches]
    return [_source(path)]


def _source(path: Path) -> Source:
    if os.path.isdir(path):
        return _saved_dataset(path)
    if not os.path.exists(path):
        raise CorpusError(f"{path}: no such file")
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    suffix = (Path(path.stem) if compression else path).suffix.lower()
    known = FORMATS.get(suffix)
    if known is None or (known == "parquet" and compression):
        raise CorpusError(
            f"{path}: unknown format {suffix + compression!r}; known are {' '.join(FORMATS)}, "
            f"each but .parquet also with {' or '.join(COMPRESSIONS)}, and folders written by save_to_disk"
        )
    return Source(str(path), path, known, compression)


def _saved_dataset(path: Path) -> Source:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(str(state.parent) for state in sorted(path.glob("*/state.json")))
        raise CorpusError(f"{path}: a DatasetDict; pass the splits you mean instead: {splits}")
    if not (path / "state.json").is_file():
        raise CorpusError(
            f"{path}: a folder that save_to_disk did not write (no state.json); "
            f"pass files, or a glob such as '{path}/*.jsonl'"
        )
    return Source(str(path), path, "dataset")


def read_records(source: Source, columns: Columns, counts: dict[str, int]) -> Iterator[Record]:
    """The records of one source as they stand, those with an empty text included (their domain may be, too)."""
    if source.format in ("parquet", "dataset"):
        return _read_arrow(source, columns)
    lines = _lines(source, counts)
    if source.format == "stdin":
        return _read_stdin(lines, source.name, columns, counts)
    if source.format == "jsonl":
        return _read_jsonl(lines, source.name, columns, counts)
    if source.format == "txt":
        return ((_without_end(line, counts),) for line in lines)
    return _read_csv(lines, source.name, columns, counts, "\t" if source.format == "tsv" else ",")


def _lines(source: Source, counts: dict[str, int]) -> Iterator[str]:
    """Decoded lines with their ends; bytes are split, so that LF alone splits."""
    for number, raw in enumerate(_reported(_raw_lines(source), source.name), start=1):
        if number == 1 and raw.startswith(_BOM):
            counts["bom"] += 1
            raw = raw.removeprefix(_BOM)
            if not raw:
                return
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{source.name}:{number}: byte {error.start + 1} of the line, 0x{raw[error.start]:02x}, "
                "is not UTF-8; convert the file to UTF-8, for example with iconv"
            ) from error
        yield line


def _raw_lines(source: Source) -> Iterator[bytes]:
    with _opened(source) as lines:
        yield from lines


def _opened(source: Source) -> Any:
    """A context manager around the source's decompressed bytes, line by line."""
    if source.path is None:
        return nullcontext(sys.stdin.buffer)
    if source.compression == ".gz":
        return gzip.open(source.path, "rb")
    if source.compression == ".zst":
        # Arrow's reader tells a file that was cut off from one that ended; zstandard's stream does not.
        raw = import_module("pyarrow").input_stream(str(source.path), compression="zstd")
        return io.BufferedReader(raw, buffer_size=2**20)
    return source.path.open("rb")


def _reported(items: Iterator[T], name: str) -> Iterator[T]:
    """`items`, with what goes wrong below it (disk, decompressor, Arrow) told as a corpus error."""
    try:
        yield from items
    except CorpusError:
        raise
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{name}: cannot be read ({reason}); check that the file is whole and what its name says"
        ) from error


def _without_end(line: str, counts: dict[str, int]) -> str:
    if line.endswith("\r\n"):
        counts["crlf"] += 1
        return line[:-2]
    return line.removesuffix("\n")


def _read_stdin(lines: Iterator[str], name: str, columns: Columns, counts: dict[str, int]) -> Iterator[Record]:
    held = []
    for line in lines:
        held.append(line)
        if line.strip():
            break
    lines = chain(held, lines)
    if held and held[-1].lstrip().startswith("{"):
        yield from _read_jsonl(lines, name, columns, counts)
        return
    check_single_column(name, columns)
    for line in lines:
        yield (_without_end(line, counts),)


def _read_jsonl(lines: Iterable[str], name: str, columns: Columns, counts: dict[str, int]) -> Iterator[Record]:
    blank = ("",) * len(columns.names)
    for number, line in enumerate(lines, start=1):
        line = _without_end(line, counts)
        if not line or line.isspace():
            yield blank
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).replace("line 1 column", "character")
            raise CorpusError(
                f"{name}:{number}: not JSON ({reason}); expected one JSON object on every line"
            ) from error
        if not isinstance(found, dict):
            raise CorpusError(
                f"{name}:{number}: found {_json_name(found)}, expected a JSON object with the key "
                f"{_listed(columns.names)}"
            )
        for column in columns.names:
            if column not in found:
                raise CorpusError(
                    f"{name}:{number}: no key {column!r}, found {_listed(found)}; "
                    f"name the right key with {columns.option(column)}, or mend the line"
                )
        for column in columns.texts:
            if not isinstance(found[column], str):
                raise CorpusError(
                    f"{name}:{number}: {column!r} is {_json_name(found[column])}, expected a string; "
                    "make it a string or take the line out"
                )
        texts = tuple(found[column] for column in columns.texts)
        yield (
            texts if columns.domain is None else _with_domain(texts, found[columns.domain], columns, f"{name}:", number)
        )


def _read_csv(
    lines: Iterable[str], name: str, columns: Columns, counts: dict[str, int], delimiter: str
) -> Iterator[Record]:
    # The limit belongs to the whole process, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), _CSV_FIELD_LIMIT))
    last = [""]

    def remembered() -> Iterator[str]:
        for line in lines:
            last[0] = line
            yield line

    blank = ("",) * len(columns.names)
    header: list[str] = []
    where: list[int] = []
    texts: list[int] = []
    reader = csv.reader(remembered(), delimiter=delimiter, strict=True)
    start = 1
    try:
        for row in reader:
            counts["crlf"] += last[0].endswith("\r\n")
            if not row:
                yield blank
            elif not header:
                header = row
                where = [_position(column, header, name, columns.option(column)) for column in columns.names]
                texts = where[: len(columns.texts)]
            elif len(row) != len(header):
                raise CorpusError(
                    f"{name}:{start}: {len(row)} fields, the header has {len(header)}; "
                    "put fields that hold the delimiter or a line end in double quotes"
                )
            else:
                record = tuple(row[i] for i in texts)
                yield (
                    record
                    if columns.domain is None
                    else _with_domain(record, row[where[-1]], columns, f"{name}:", start)
                )
            start = reader.line_num + 1
    except csv.Error as error:
        raise CorpusError(
            f"{name}:{start}: not {'TSV' if delimiter == chr(9) else 'CSV'} ({error}); a field that holds a "
            "line end or starts with a quote must stand in double quotes, its own quotes doubled"
        ) from error
    if not header:
        raise CorpusError(f"{name}: no header line; expected one with the column {_listed(columns.names)}")


def _read_arrow(source: Source, columns: Columns) -> Iterator[Record]:
    row = 0
    for table in _reported(_tables(source, columns), source.name):
        values = [_values(table.column(i), column, source.name, row) for i, column in enumerate(columns.names)]
        for column, texts in zip(columns.texts, values, strict=False):
            if None in texts:
                raise CorpusError(
                    f"{source.name}: row {row + texts.index(None) + 1}: {column!r} is null, expected a string; "
                    "make it a string or take the row out"
                )
        if columns.domain is None:
            yield from zip(*values, strict=True)
        else:
            for number, (*record, domain) in enumerate(zip(*values, strict=True), start=row + 1):
                yield _with_domain(tuple(record), domain, columns, f"{source.name}: row ", number)
        row += table.num_rows


def _tables(source: Source, columns: Columns) -> Iterator[Any]:
    """Arrow tables of the wanted columns alone, in their order."""
    names = list(columns.names)
    if source.format == "dataset":
        dataset = import_module("datasets").load_from_disk(str(source.path), keep_in_memory=False)
        _check_schema(dataset.features.arrow_schema, columns, source.name)
        tables = dataset.select_columns(names).with_format("arrow").iter(batch_size=_ARROW_ROWS)
        yield from (table.select(names) for table in tables)
        return
    # Buffered and not read ahead: otherwise whole column chunks, or whole files, are held in memory.
    options = {"pre_buffer": False, "buffer_size": 2**20}
    with import_module("pyarrow.parquet").ParquetFile(str(source.path), **options) as file:
        _check_schema(file.schema_arrow, columns, source.name)
        for table in file.iter_batches(batch_size=_ARROW_ROWS, columns=names):
            yield table.select(names)


def _check_schema(schema: Any, columns: Columns, name: str) -> None:
    for column in columns.names:
        found = str(schema.field(_position(column, schema.names, name, columns.option(column))).type)
        # Text may be stored plain or dictionary-encoded, with 32-bit or 64-bit offsets, or as views.
        if re.fullmatch(r"(dictionary<values=)?(large_)?string(_view)?\b.*", found):
            continue
        if column != columns.domain:
            raise CorpusError(f"{name}: column {column!r} is {found}, expected strings; convert it first")
        if not re.fullmatch(r"u?int\d+", found):
            raise CorpusError(
                f"{name}: column {column!r} is {found}, expected strings or whole numbers for domains; convert it first"
            )


def _values(array: Any, column: str, name: str, rows_before: int) -> list[Any]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{name}: column {column!r} is not UTF-8 ({error.reason}) in rows {rows_before + 1} to "
            f"{rows_before + len(array)}; write the texts as UTF-8"
        ) from error


def empty(texts: Iterable[str]) -> bool:
    """Whether one of the texts has no characters, or only white space."""
    return any(not text or text.isspace() for text in texts)


def _with_domain(texts: Record, domain: object, columns: Columns, where: str, number: int) -> Record:
    """The record with its domain behind its texts; `where` and `number` say where it stands."""
    if type(domain) is int:  # not a boolean, which is an int, too
        return (*texts, str(domain))
    if isinstance(domain, str) and not empty([domain]):
        return (*texts, domain)
    if empty(texts):  # skipped, whatever its domain
        return (*texts, "")
    found = "empty" if isinstance(domain, str) else _json_name(domain)
    raise CorpusError(
        f"{where}{number}: {columns.domain!r} is {found}, expected the name of a domain (a string or a whole number); "
        "name one or take the record out"
    )


def _position(column: str, names: Sequence[str], name: str, option: str) -> int:
    if names.count(column) == 1:
        return names.index(column)
    if column in names:
        raise CorpusError(f"{name}: the column {column!r} occurs {names.count(column)} times; rename all but one")
    raise CorpusError(f"{name}: no column {column!r}, found {_listed(names)}; name the right column with {option}")


def check_single_column(name: str, columns: Columns) -> None:
    """To be called for a text file.

    Raises:
        CorpusError: more is asked for than its lines.
    """
    if len(columns.texts) > 1:
        raise CorpusError(
            f"{name}: a text file has one text a line, text_key asks for {len(columns.texts)} "
            f"({_listed(columns.texts)}); pass JSON lines, CSV, TSV or Parquet for records of several texts"
        )
    if columns.domain is not None:
        raise CorpusError(
            f"{name}: a text file has one text a line and no column {columns.domain!r}; pass JSON lines, CSV, TSV or "
            "Parquet to keep domains"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _json_name(value: object) -> str:
    return _JSON_NAMES.get(type(value), "a string" if isinstance(value, str) else "an object")
