"""A corpus: texts read as a stream from files, in order, in flat memory.

The policy on what a text is. Everything that reads a corpus relies on it:

- A text is kept exactly as it stands: no stripping, no normalisation, no guessing of types. "NA", "null",
  "nan", "007" and " x " are texts.
- A text is a string. In JSON a number, null, boolean, list or missing key is an error, in Parquet and saved
  datasets a null or a column of another type. A fault raises `CorpusError` at its file and line (or row; both
  counted from 1); nothing is skipped silently.
- A record with an empty text (no characters, or only white space) is skipped and counted in
  `skipped_empty`; so is a blank line. In a record of several texts one empty text is enough.
- Duplicates are kept.
- A domain, where `domain_key` asks for one, is a string that is not empty, or in JSON, Parquet and saved datasets a
  whole number, whose digits are its name; anything else is an error at its line or row. It belongs to the record:
  one text may stand in two domains.
- Files are UTF-8; other bytes are an error. A byte order mark at the start of a file is dropped (`bom` counts
  files). A lone surrogate, which JSON can spell but UTF-8 cannot, becomes U+FFFD (`replaced_surrogates`
  counts texts). U+0000 is kept (`nul` counts texts).
- A line ends with LF or CRLF (`crlf` counts the lines, in CSV the records, that ended with CRLF) and with
  nothing else: U+2028, U+0085 or a lone CR do not end a line. Inside a JSON string or a quoted CSV field a
  line end belongs to the text.
- CSV and TSV have a header line and follow RFC 4180 strictly: a field that holds the delimiter, a line end or
  starts with a quote stands in double quotes, its own quotes doubled. TSV differs in the delimiter alone.
- A text file has one text a line. Standard input is JSON lines when its first non-blank line starts with "{",
  else one text a line.
"""

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from teacher_cache.corpus.formats import (
    LIBRARIES,
    Columns,
    Record,
    Source,
    check_single_column,
    empty,
    find_sources,
    read_records,
)
from teacher_cache.errors import CorpusError, MissingDependency

# Their numbers are 16 bits wide.
MAX_DOMAINS = 2**16
COUNTS = ("records", "skipped_empty", "replaced_surrogates", "nul", "bom", "crlf")

_SURROGATE = re.compile("[\ud800-\udfff]")
# What `checked_name` refuses in the name of a corpus.
_NOT_IN_A_NAME = re.compile("[^A-Za-z0-9._-]+")

T = TypeVar("T")


class SourceRange(NamedTuple):
    """Which records of a corpus came from one source; skipped records have no number.

    Attributes:
        name: absolute path, or "stdin".
    """

    name: str
    first_record: int
    n_records: int


class Fingerprint:
    """What tells one corpus from another: its texts in order, whatever file they stand in.

    Lengths in front of the texts keep ("ab", "c") and ("a", "bc") apart, the number of columns keeps pairs and
    single texts apart.
    """

    def __init__(self, columns: int) -> None:
        self._digest = blake2b(columns.to_bytes(8, "little"), digest_size=16)

    def add(self, text: bytes) -> None:
        """The next text, as UTF-8."""
        self._digest.update(len(text).to_bytes(8, "little"))
        self._digest.update(text)

    @property
    def value(self) -> str:
        """32 hex digits."""
        return self._digest.hexdigest()


class _Domains:
    """The domains of a corpus, numbered as they appear.

    Attributes:
        records: of each domain, in that order.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._numbers: dict[str, int] = {}
        self._digest = Fingerprint(1)
        self.records: dict[str, int] = {}

    def add(self, name: str, source: str) -> int:
        """The number of the next record's domain."""
        name = _SURROGATE.sub("\ufffd", name)
        number = self._numbers.get(name)
        if number is None:
            number = len(self._numbers)
            if number == MAX_DOMAINS:
                raise CorpusError(
                    f"{source}: {self._key!r} has more than {MAX_DOMAINS:,} different values, expected the names of "
                    "some parts of the corpus; name another column with domain_key"
                )
            self._numbers[name] = number
            self.records[name] = 0
        self.records[name] += 1
        self._digest.add(name.encode())
        return number

    @property
    def fingerprint(self) -> str:
        return "" if self._key is None else self._digest.value


class Corpus:
    """Records in corpus order, each with one text per column; opened with `Corpus.open`.

    Attributes:
        columns: the keys (JSON) or column names a record's texts come from.
        domain_key: key or column of a record's domain; None where none are read.
        domains: of the latest iteration, filled while it runs: records by domain, in order of first appearance; the
            number of a domain is its place.
        counts: of the latest iteration, filled while it runs: `records`, `skipped_empty`,
            `replaced_surrogates`, `nul`, `bom`, `crlf` (see the module's policy).
    """

    def __init__(self, sources: Sequence[Source], columns: tuple[str, ...], domain_key: str | None = None) -> None:
        self.columns = columns
        self.domain_key = domain_key
        self.domains: dict[str, int] = {}
        self.counts = dict.fromkeys(COUNTS, 0)
        self._inputs = tuple(sources)
        self._stdin_used = False
        self._ranges: list[SourceRange] | None = None
        self._fingerprint: str | None = None
        self._domains_fingerprint: str | None = None

    @classmethod
    def open(
        cls,
        paths: str | Path | Sequence[str | Path],
        text_key: str | Sequence[str] = "text",
        domain_key: str | None = None,
    ) -> Self:
        """A corpus over `paths` in the order given; a glob stands for its matches, sorted.

        Args:
            paths: files (.jsonl .ndjson .json-lines .csv .tsv .txt, each also .gz or .zst; .parquet),
                folders written by `datasets.Dataset.save_to_disk`, globs, or "-" for standard input.
            text_key: the key or column that holds the text; for pairs several keys, or "a,b". A text file
                has one unnamed column and takes any single key.
            domain_key: the key or column that says which part of the corpus a record is from; a text file has none.

        Raises:
            CorpusError: a path does not exist, matches nothing or has no known format; the keys are empty
                or repeat; a text file is asked for domains.
            MissingDependency: a format's library is not installed.
        """
        columns = tuple(text_key.split(",") if isinstance(text_key, str) else text_key)
        if not columns or "" in columns or len(set(columns)) < len(columns):
            raise CorpusError(f"text_key {text_key!r}: expected one or more distinct names, such as 'a,b'")
        if domain_key is not None and domain_key in ("", *columns):
            raise CorpusError(f"domain_key {domain_key!r}: expected the name of another column than the text's")
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        sources = [source for path in given for source in find_sources(str(path))]
        if not sources:
            raise CorpusError("no corpus given: pass files, globs, saved datasets, or '-' for standard input")
        if sum(source.path is None for source in sources) > 1:
            raise CorpusError("'-' is given more than once: standard input can be read only once")
        for source in sources:
            if source.format == "txt":
                check_single_column(source.name, Columns(columns, domain_key))
            library = LIBRARIES.get(source.compression) or LIBRARIES.get(source.format)
            if library and find_spec(library) is None:
                raise MissingDependency.of(f"reading {source.name}", library)
        return cls(sources, columns, domain_key)

    def batches(self, n: int) -> Iterator[list[Record]]:
        """Lists of at most `n` records in corpus order; batches run on across the sources' borders.

        May be called again for another pass, except when the corpus holds standard input.

        Raises:
            ValueError: `n` is below 1.
            CorpusError: while iterating, at the first fault.
        """
        return (records for records, _ in self.batches_with_domains(n))

    def batches_with_domains(self, n: int) -> Iterator[tuple[list[Record], list[int]]]:
        """`batches`, each with the numbers of its records' domains; without a `domain_key` those are none.

        Raises:
            ValueError: `n` is below 1.
            CorpusError: while iterating, at the first fault.
        """
        if n < 1:
            raise ValueError(f"batches of {n} records: expected 1 or more")
        return self._batches(n)

    def _batches(self, n: int) -> Iterator[tuple[list[Record], list[int]]]:
        if self._stdin_used:
            raise CorpusError("standard input cannot be read twice: save it to a file and pass that")
        self._stdin_used = any(source.path is None for source in self._inputs)
        self._ranges = self._fingerprint = self._domains_fingerprint = None
        counts = self.counts = dict.fromkeys(COUNTS, 0)
        ranges: list[SourceRange] = []
        digest = Fingerprint(len(self.columns))
        domains = _Domains(self.domain_key)
        self.domains = domains.records
        batch: list[Record] = []
        numbers: list[int] = []
        width = len(self.columns)
        for source in self._inputs:
            first = counts["records"]
            for record in read_records(source, Columns(self.columns, self.domain_key), counts):
                texts = record[:width]
                if empty(texts):
                    counts["skipped_empty"] += 1
                    continue
                kept = []
                for text in texts:
                    try:
                        encoded = text.encode("utf-8")
                    except UnicodeEncodeError:
                        text = _SURROGATE.sub("\ufffd", text)
                        encoded = text.encode("utf-8")
                        counts["replaced_surrogates"] += 1
                    counts["nul"] += "\0" in text
                    digest.add(encoded)
                    kept.append(text)
                counts["records"] += 1
                batch.append(tuple(kept))
                if self.domain_key is not None:
                    numbers.append(domains.add(record[width], source.name))
                if len(batch) == n:
                    yield batch, numbers
                    batch, numbers = [], []
            ranges.append(SourceRange(source.origin, first, counts["records"] - first))
        if batch:
            yield batch, numbers
        self._ranges, self._fingerprint = ranges, digest.value
        self._domains_fingerprint = domains.fingerprint

    @property
    def name(self) -> str:
        """What a cache calls this corpus unless told otherwise.

        The first file's name without its endings, with "-" for what cannot be in the name of a folder; "stdin"
        for standard input, "corpus" when nothing is left.
        """
        first = self._inputs[0]
        name = Path(first.origin).name
        if first.path is not None and first.format != "dataset":
            name = Path(name.removesuffix(first.path.suffix) if first.compression else name).stem
        return corpus_name(name) or "corpus"

    @property
    def origins(self) -> list[str]:
        """Absolute path of every source, or "stdin", in corpus order; known before anything is read."""
        return [source.origin for source in self._inputs]

    def require_records(self) -> None:
        """To be called after an iteration.

        Raises:
            CorpusError: it found no record.
        """
        if not self.counts["records"]:
            others = f" and {len(self._inputs) - 1} more" if len(self._inputs) > 1 else ""
            raise CorpusError(
                f"{self._inputs[0].name}{others}: no texts, {self.counts['skipped_empty']} records were skipped as "
                "empty; pass a file that holds some"
            )

    @property
    def sources(self) -> list[SourceRange]:
        """`(name, first_record, n_records)` of every source, in corpus order.

        Raises:
            CorpusError: the latest iteration has not reached the end.
        """
        return list(self._read_through(self._ranges, "sources"))

    @property
    def fingerprint(self) -> str:
        """32 hex digits (BLAKE2b-128) over the records' texts in order.

        Equal records have equal fingerprints whatever the format, compression, column names, split into
        files, skipped records and batch size.

        Raises:
            CorpusError: the latest iteration has not reached the end.
        """
        return self._read_through(self._fingerprint, "fingerprint")

    @property
    def domains_fingerprint(self) -> str:
        """32 hex digits (BLAKE2b-128) over the records' domains in order; "" without a `domain_key`.

        Raises:
            CorpusError: the latest iteration has not reached the end.
        """
        return self._read_through(self._domains_fingerprint, "fingerprint of domains")

    @staticmethod
    def _read_through(value: T | None, what: str) -> T:
        if value is None:
            raise CorpusError(f"the corpus's {what} is known only after an iteration over all of its batches")
        return value


def corpus_name(text: str) -> str:
    """What is left of a text as the name of a corpus, with "-" for what cannot be in the name of a folder."""
    return _NOT_IN_A_NAME.sub("-", text)[:100].strip("-._")
