"""Readers of every format of a corpus. `teacher_cache.corpus.corpus` describes the policy on texts."""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import chain
from reprlib import repr as shortened
from typing import Any, TypeVar

from teacher_cache.corpus.sources import Columns, Source
from teacher_cache.errors import CorpusError

Record = tuple[str, ...]

_BOM = b"\xef\xbb\xbf"
_ARROW_ROWS = 1024
# The csv module's own limit of 131,072 characters refuses long documents. Without any limit an unclosed quote
# would read the rest of the file into memory.
_CSV_FIELD_LIMIT = 2**27
_JSON_NAMES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}

T = TypeVar("T")
# The number of a line, row or record, counted from 1, and the unchecked values of all columns; None if it is blank.
Rows = Iterator[tuple[int, Sequence[Any] | None]]


def read_records(source: Source, columns: Columns, counts: dict[str, int]) -> Iterator[tuple[Record, str]]:
    """Texts and domain ("" without a domain column) of each record of a source.

    Records with an empty text are skipped and counted in `counts`, as are byte order marks and CRLF line ends.
    """
    width = len(columns.texts)
    for number, values in _rows(source, columns, counts):
        if values is None:
            counts["skipped_empty"] += 1
            continue
        texts = tuple(values[:width])
        skipped = False
        for text in texts:
            if not isinstance(text, str):
                raise CorpusError(
                    f"{source.position(number)}: {columns.texts[texts.index(text)]!r} is {_json_name(text)}, expected "
                    "a string; make it a string or remove the record"
                )
            skipped = skipped or not text or text.isspace()
        if skipped:
            counts["skipped_empty"] += 1
        elif columns.domain is None:
            yield texts, ""
        else:
            yield texts, _domain(values[width], columns.domain, source.position(number))


def check_single_column(name: str, columns: Columns) -> None:
    """Refuse columns that a text file does not have."""
    if len(columns.texts) > 1:
        raise CorpusError(
            f"{name}: a text file has one text a line, `text_key` names {len(columns.texts)} "
            f"({_listed(columns.texts)}); pass JSON lines, CSV, TSV or Parquet for records of several texts"
        )
    if columns.domain is not None:
        raise CorpusError(
            f"{name}: a text file has one text a line and no column {columns.domain!r}; pass JSON lines, CSV, TSV or "
            "Parquet to keep domains"
        )


def _rows(source: Source, columns: Columns, counts: dict[str, int]) -> Rows:
    if source.format == "texts":
        return _read_iterable(source, len(columns.texts))
    if source.format in ("parquet", "dataset"):
        return _read_arrow(source, columns)
    lines = _lines(source, counts)
    if source.format == "stdin":
        return _read_stdin(lines, source.name, columns, counts)
    if source.format == "jsonl":
        return _read_jsonl(lines, source.name, columns, counts)
    if source.format == "txt":
        return _read_text(lines, counts)
    return _read_csv(lines, source.name, columns, counts, "\t" if source.format == "tsv" else ",")


def _read_iterable(source: Source, width: int) -> Rows:
    for number, record in enumerate(source.data, start=1):
        texts = (record,) if isinstance(record, str) else record
        valid = isinstance(texts, tuple | list) and len(texts) == width and all(isinstance(text, str) for text in texts)
        if not valid:
            raise CorpusError(
                f"{source.position(number)}: found {shortened(record)}, expected "
                f"{'a string' if width == 1 else f'a tuple of {width} strings'}"
            )
        yield number, texts


def _lines(source: Source, counts: dict[str, int]) -> Iterator[str]:
    """Decoded lines with their line ends. Bytes are split, so that only LF ends a line."""
    for number, raw in enumerate(_with_corpus_errors(_raw_lines(source), source.name), start=1):
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
    with _open(source) as lines:
        yield from lines


def _open(source: Source) -> Any:
    """A context manager that gives the decompressed bytes of a source, line by line."""
    if source.path is None:
        return nullcontext(sys.stdin.buffer)
    if source.compression == ".gz":
        return gzip.open(source.path, "rb")
    if source.compression == ".zst":
        # Arrow's reader detects a truncated file; zstandard's stream does not.
        raw = import_module("pyarrow").input_stream(str(source.path), compression="zstd")
        return io.BufferedReader(raw, buffer_size=2**20)
    return source.path.open("rb")


def _with_corpus_errors(items: Iterator[T], name: str) -> Iterator[T]:
    """`items`, with errors of the disk, decompressor or Arrow raised as `CorpusError`."""
    try:
        yield from items
    except CorpusError:
        raise
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{name}: cannot be read ({reason}); check that the file is complete and in the format of its name"
        ) from error


def _without_end(line: str, counts: dict[str, int]) -> str:
    if line.endswith("\r\n"):
        counts["crlf"] += 1
        return line[:-2]
    return line.removesuffix("\n")


def _read_stdin(lines: Iterator[str], name: str, columns: Columns, counts: dict[str, int]) -> Rows:
    start = []
    for line in lines:
        start.append(line)
        if line.strip():
            break
    lines = chain(start, lines)
    if start and start[-1].lstrip().startswith("{"):
        return _read_jsonl(lines, name, columns, counts)
    check_single_column(name, columns)
    return _read_text(lines, counts)


def _read_text(lines: Iterable[str], counts: dict[str, int]) -> Rows:
    return ((number, (_without_end(line, counts),)) for number, line in enumerate(lines, start=1))


def _read_jsonl(lines: Iterable[str], name: str, columns: Columns, counts: dict[str, int]) -> Rows:
    for number, line in enumerate(lines, start=1):
        line = _without_end(line, counts)
        if _is_empty(line):
            yield number, None
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
                    f"name the right key with {columns.option(column)}, or fix the line"
                )
        yield number, [found[column] for column in columns.names]


def _read_csv(lines: Iterable[str], name: str, columns: Columns, counts: dict[str, int], delimiter: str) -> Rows:
    # The limit is global to the process, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), _CSV_FIELD_LIMIT))
    last = ""

    def remembered() -> Iterator[str]:
        nonlocal last
        for line in lines:
            last = line
            yield line

    header: list[str] = []
    places: list[int] = []
    reader = csv.reader(remembered(), delimiter=delimiter, strict=True)
    start = 1
    try:
        for row in reader:
            counts["crlf"] += last.endswith("\r\n")
            if not row:
                yield start, None
            elif not header:
                header = row
                places = [_position(column, header, name, columns.option(column)) for column in columns.names]
            elif len(row) != len(header):
                raise CorpusError(
                    f"{name}:{start}: {len(row)} fields, the header has {len(header)}; "
                    "put fields that hold the delimiter or a line end in double quotes"
                )
            else:
                yield start, [row[place] for place in places]
            start = reader.line_num + 1
    except csv.Error as error:
        raise CorpusError(
            f"{name}:{start}: not {'TSV' if delimiter == chr(9) else 'CSV'} ({error}); put a field that holds a "
            "line end or starts with a quote in double quotes, with its own quotes doubled"
        ) from error
    if not header:
        raise CorpusError(f"{name}: no header line; expected one with the column {_listed(columns.names)}")


def _read_arrow(source: Source, columns: Columns) -> Rows:
    row = 0
    for table in _with_corpus_errors(_tables(source, columns), source.name):
        values = [_values(table.column(i), column, source.name, row) for i, column in enumerate(columns.names)]
        yield from enumerate(zip(*values, strict=True), start=row + 1)
        row += table.num_rows


def _tables(source: Source, columns: Columns) -> Iterator[Any]:
    """Arrow tables of the given columns, in their order."""
    names = list(columns.names)
    if source.format == "dataset":
        dataset = source.data
        if dataset is None:
            dataset = import_module("datasets").load_from_disk(str(source.path), keep_in_memory=False)
        _check_schema(dataset.features.arrow_schema, columns, source.name)
        tables = dataset.select_columns(names).with_format("arrow").iter(batch_size=_ARROW_ROWS)
        yield from (table.select(names) for table in tables)
        return
    # Buffered and without read-ahead; otherwise whole column chunks, or whole files, are held in memory.
    options = {"pre_buffer": False, "buffer_size": 2**20}
    with import_module("pyarrow.parquet").ParquetFile(str(source.path), **options) as file:
        _check_schema(file.schema_arrow, columns, source.name)
        for table in file.iter_batches(batch_size=_ARROW_ROWS, columns=names):
            yield table.select(names)


def _check_schema(schema: Any, columns: Columns, name: str) -> None:
    for column in columns.names:
        found = str(schema.field(_position(column, schema.names, name, columns.option(column))).type)
        # Text may be plain or dictionary-encoded, with 32-bit or 64-bit offsets, or views.
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


def _is_empty(text: str) -> bool:
    """Whether a text has no characters, or only white space."""
    return not text or text.isspace()


def _domain(value: object, column: str, position: str) -> str:
    """The name of a domain."""
    if type(value) is int:  # a bool is an int, too
        return str(value)
    if isinstance(value, str) and not _is_empty(value):
        return value
    found = "empty" if isinstance(value, str) else _json_name(value)
    raise CorpusError(
        f"{position}: {column!r} is {found}, expected the name of a domain (a string or a whole number); "
        "name one or remove the record"
    )


def _position(column: str, names: Sequence[str], name: str, option: str) -> int:
    if names.count(column) == 1:
        return names.index(column)
    if column in names:
        raise CorpusError(f"{name}: the column {column!r} occurs {names.count(column)} times; rename all but one")
    raise CorpusError(f"{name}: no column {column!r}, found {_listed(names)}; name the right column with {option}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _json_name(value: object) -> str:
    return _JSON_NAMES.get(type(value), "a string" if isinstance(value, str) else "an object")
