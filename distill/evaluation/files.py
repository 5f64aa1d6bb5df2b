"""Rows of CSV, TSV and JSON-lines files, with the line in every error."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.errors import EvaluationError


def read_columns(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> Iterator[list[Any]]:
    """The named cells of every row of a UTF-8 file, each parsed by its column's parser.

    A file is CSV unless its name ends in .tsv, or in .jsonl or .ndjson (JSON lines, whose numbers are read as they are
    written). The csv module and not pandas: "NA" and "null" are texts here. Blank lines are skipped. A parser rejects a
    cell with a ValueError that holds the cell and what was expected.

    Raises:
        EvaluationError: the file cannot be read, lacks a column or has no rows; a row has too few or too many cells, or
            a cell is invalid: the message has the line on which the row starts.
    """
    json_lines = path.suffix in (".jsonl", ".ndjson")
    empty = True
    for where, cells in (_json_cells if json_lines else _csv_cells)(path, list(columns)):
        yield [
            _parsed(parse, cell, f"{where}: {column}")
            for (column, parse), cell in zip(columns.items(), cells, strict=True)
        ]
        empty = False
    if empty:
        raise EvaluationError(f"{path}: no rows" + ("" if json_lines else " below the header"))


def read_json_lines(path: Path, **numbers: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """`FILE:LINE` and the JSON object of every line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    record = json.loads(line, **numbers)
                except json.JSONDecodeError as error:
                    raise EvaluationError(f"{where} is not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise EvaluationError(f"{where}: a JSON {type(record).__name__}, expected an object")
                yield where, record
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as JSON lines in UTF-8: {error}") from error


def _csv_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """`FILE:LINE` on which each row starts, and the row's cells of `columns`."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True, delimiter=delimiter)
            header = next(reader, [])
            _require_columns(path, columns, header)
            places = [header.index(column) for column in columns]
            # A quoted cell may hold line breaks, and the reader counts the lines it has consumed.
            line = reader.line_num + 1
            for row in reader:
                where = f"{path}:{line}"
                line = reader.line_num + 1
                if row:
                    if len(row) != len(header):
                        raise EvaluationError(f"{where}: {len(row)} cells, expected {len(header)} as in the header")
                    yield where, [row[place] for place in places]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        kind = "TSV" if delimiter == "\t" else "CSV"
        raise EvaluationError(f"{path}: cannot be read as {kind} in UTF-8: {error}") from error


def _json_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """As `_csv_cells`, of a file of JSON lines."""
    # Numbers stay as they are written: a label 1 is not 1.0, and 0.1 has no further digits.
    for where, record in read_json_lines(path, parse_int=str, parse_float=str):
        _require_columns(where, columns, record)
        for column in columns:
            if not isinstance(record[column], str):
                raise EvaluationError(f"{where}: {column} is {json.dumps(record[column])}, expected a text or a number")
        yield where, [record[column] for column in columns]


def _require_columns(where: object, columns: Iterable[str], found: Iterable[str]) -> None:
    present = list(found)
    absent = [column for column in columns if column not in present]
    if absent:
        raise EvaluationError(
            f"{where}: no column {', '.join(map(repr, absent))}; found: {', '.join(present) or 'none'}"
        )


def _parsed(parse: Callable[[str], Any], cell: str, where: str) -> Any:
    try:
        return parse(cell)
    except ValueError as error:
        raise EvaluationError(f"{where} is {error}") from error
