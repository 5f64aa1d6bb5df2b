"""A corpus: texts from files or from memory, read as a stream, in order, in flat memory.

Every source of a corpus follows one policy on what a text is:

- A text is kept exactly as it is: no stripping, normalization or guessing of types. "NA", "null", "nan", "007" and
  " x " are texts.
- A text is a string. In JSON a number, null, boolean, list or missing key is an error; in Parquet and datasets a null
  or a column of another type; in memory None, NaN or any other object. Such an error is a `CorpusError` that names
  the file and line, row or record, counted from 1. No invalid record is skipped.
- A record with an empty text (no characters, or only white space) is skipped and counted in `skipped_empty`; so is a
  blank line. One empty text is enough to skip a record of several texts.
- Duplicates are kept.
- A domain, read with `domain_key`, is a non-empty string, or in JSON, Parquet and datasets an integer, whose digits
  become its name; anything else is an error at its line or row. It belongs to the record: the same text can be in
  two domains.
- Files are UTF-8; other bytes are an error. A byte order mark at the start of a file is dropped (`bom` counts
  files). A lone surrogate, which JSON can spell but UTF-8 cannot, becomes U+FFFD (`replaced_surrogates` counts
  texts). U+0000 is kept (`nul` counts texts).
- A line ends with LF or CRLF (`crlf` counts lines, in CSV records, that ended with CRLF) and with nothing else:
  U+2028, U+0085 and a lone CR do not end a line. Inside a JSON string or a quoted CSV field a line end is part of
  the text.
- CSV and TSV have a header line and follow RFC 4180 strictly: a field that holds the delimiter or a line end, or
  starts with a quote, is in double quotes, with its own quotes doubled. TSV differs only in the delimiter.
- A text file has one text a line. Standard input is JSON lines if its first non-blank line starts with "{", else one
  text a line.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

from teacher_cache.corpus.formats import Record, check_single_column, read_records
from teacher_cache.corpus.sources import Columns, Source, find_sources, is_dataset, texts_source
from teacher_cache.errors import CorpusError

if TYPE_CHECKING:
    from datasets import Dataset

# Domain numbers are stored as uint16.
MAX_DOMAINS = 2**16
COUNTS = ("records", "skipped_empty", "replaced_surrogates", "nul", "bom", "crlf")
# Name of a corpus from memory.
TEXTS = "texts"

_SURROGATE = re.compile("[\ud800-\udfff]")
# Characters that `checked_name` refuses in the name of a corpus.
_NOT_IN_A_NAME = re.compile("[^A-Za-z0-9._-]+")

T = TypeVar("T")


class Fingerprint:
    """Digest of texts in order, independent of the files they are in.

    Each text is preceded by its length, so that ("ab", "c") and ("a", "bc") differ; the number of columns comes
    first, so that pairs and single texts differ.
    """

    def __init__(self, columns: int) -> None:
        self._digest = blake2b(columns.to_bytes(8, "little"), digest_size=16)

    def add(self, text: bytes) -> None:
        """Add the next text, as UTF-8."""
        self._digest.update(len(text).to_bytes(8, "little"))
        self._digest.update(text)

    @property
    def value(self) -> str:
        """32 hex digits."""
        return self._digest.hexdigest()


class _Domains:
    """The domains of a corpus, numbered in order of first appearance; `records` counts their records."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._numbers: dict[str, int] = {}
        self._digest = Fingerprint(1)
        self.records: dict[str, int] = {}

    def add(self, name: str, source: str) -> int:
        """Number of the domain of the next record."""
        name = _SURROGATE.sub("\ufffd", name)
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == MAX_DOMAINS:
            raise CorpusError(
                f"{source}: {self._key!r} has more than {MAX_DOMAINS:,} different values, expected the names of "
                "some parts of the corpus; name another column with `domain_key`"
            )
        self.records[name] = self.records.get(name, 0) + 1
        self._digest.add(name.encode())
        return number

    @property
    def fingerprint(self) -> str:
        return "" if self._key is None else self._digest.value


class Corpus:
    """Records in corpus order, each with one text per column.

    Made by `Corpus.open`, `Corpus.from_texts` or `Corpus.from_dataset`.

    Attributes:
        columns: keys (JSON) or column names of a record's texts.
        domain_key: key or column of a record's domain; None if no domains are read.
        domains: records by domain, in order of first appearance, which is the order of domain numbers. Updated while
            the corpus is read.
        counts: `records`, `skipped_empty`, `replaced_surrogates`, `nul`, `bom` and `crlf` (see the policy of this
            module). Updated while the corpus is read.
        sources, fingerprint, domains_fingerprint: known after a pass over all batches, `CorpusError` before.
    """

    def __init__(self, sources: Sequence[Source], columns: Columns) -> None:
        self.columns = columns.texts
        self.domain_key = columns.domain
        self.domains: dict[str, int] = {}
        self.counts = dict.fromkeys(COUNTS, 0)
        self._inputs = tuple(sources)
        self._single_use = next((source for source in sources if source.single_use), None)
        self._started = False
        self._ranges: list[tuple[str, int, int]] | None = None
        self._fingerprint: str | None = None
        self._domains_fingerprint: str | None = None

    @classmethod
    def open(
        cls,
        paths: str | Path | Sequence[str | Path],
        text_key: str | Sequence[str] = "text",
        domain_key: str | None = None,
    ) -> Self:
        """Corpus of files, in the order of `paths`; the matches of a glob are sorted.

        Args:
            paths: files (.jsonl .ndjson .json-lines .csv .tsv .txt, each also .gz or .zst; .parquet),
                folders written by `datasets.Dataset.save_to_disk`, globs, or "-" for standard input.
            text_key: key or column of the text; for pairs several names, or "a,b". A text file has one unnamed column
                and takes any single name.
            domain_key: key or column that names the part of the corpus a record is from. A text file has none.

        Raises:
            CorpusError: a path does not exist, matches nothing or has an unknown format; a name is empty or repeats;
                a text file is opened with several names or a domain.
            MissingDependency: a format's library is not installed.
        """
        columns = Columns.parse(text_key, domain_key)
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        sources = [source for path in given for source in find_sources(str(path))]
        if not sources:
            raise CorpusError("no corpus given: pass files, globs, saved datasets, or '-' for standard input")
        if sum(source.path is None for source in sources) > 1:
            raise CorpusError("'-' is given more than once: standard input can be read only once")
        for source in sources:
            if source.format == "txt":
                check_single_column(source.name, columns)
        return cls(sources, columns)

    @classmethod
    def from_texts(cls, texts: Iterable[str] | Iterable[Sequence[str]], name: str = TEXTS) -> Self:
        """Corpus of texts in memory.

        Args:
            texts: strings, or tuples of as many strings as the first one. An iterable that starts over is read again
                for each pass, an iterator or generator only once. Columns are called "text", or "text_1", "text_2"
                and so on.
            name: of the corpus. In a cache it replaces an older corpus from memory with the same name.

        Raises:
            TypeError: `texts` is a single string, a mapping or a table, or cannot be iterated.
        """
        source, columns = texts_source(texts, name)
        return cls([source], columns)

    @classmethod
    def from_dataset(
        cls,
        dataset: "Dataset",
        text_key: str | Sequence[str] = "text",
        domain_key: str | None = None,
        *,
        name: str = TEXTS,
    ) -> Self:
        """Corpus of a `datasets.Dataset`; keys as in `Corpus.open`."""
        if not is_dataset(dataset):
            raise TypeError(
                f"expected a `datasets.Dataset`, found {type(dataset).__name__}; choose one split of a DatasetDict, "
                "pass the texts of an IterableDataset to Corpus.from_texts"
            )
        return cls([Source(name, "dataset", data=dataset)], Columns.parse(text_key, domain_key))

    def batches(self, n: int) -> Iterator[list[Record]]:
        """Lists of at most `n` records in corpus order; a batch can span sources.

        Can be called again for another pass, except for standard input and iterators.

        Raises:
            ValueError: `n` is below 1.
            CorpusError: while iterating, at the first invalid record.
        """
        return (records for records, _ in self.batches_with_domains(n))

    def batches_with_domains(self, n: int) -> Iterator[tuple[list[Record], list[int]]]:
        """`batches`, each with the domain numbers of its records; empty lists without a `domain_key`."""
        if n < 1:
            raise ValueError(f"batches of {n} records: expected 1 or more")
        return self._batches(n)

    def _batches(self, n: int) -> Iterator[tuple[list[Record], list[int]]]:
        if self._started and self._single_use is not None:
            if self._single_use.data is None:
                raise CorpusError("standard input cannot be read twice: save it to a file and pass that")
            raise CorpusError(
                f"{self._single_use.name}: an iterator can be read only once: pass a list, or an object whose "
                "__iter__ starts over"
            )
        self._started = True
        self._ranges = self._fingerprint = self._domains_fingerprint = None
        counts = self.counts = dict.fromkeys(COUNTS, 0)
        ranges: list[tuple[str, int, int]] = []
        digest = Fingerprint(len(self.columns))
        domains = _Domains(self.domain_key)
        self.domains = domains.records
        batch: list[Record] = []
        numbers: list[int] = []
        for source in self._inputs:
            first = counts["records"]
            for texts, domain in read_records(source, Columns(self.columns, self.domain_key), counts):
                try:
                    encoded = [text.encode() for text in texts]
                except UnicodeEncodeError:
                    counts["replaced_surrogates"] += sum(_SURROGATE.search(text) is not None for text in texts)
                    texts = tuple(_SURROGATE.sub("\ufffd", text) for text in texts)
                    encoded = [text.encode() for text in texts]
                for data in encoded:
                    counts["nul"] += b"\0" in data
                    digest.add(data)
                counts["records"] += 1
                batch.append(texts)
                if self.domain_key is not None:
                    numbers.append(domains.add(domain, source.name))
                if len(batch) == n:
                    yield batch, numbers
                    batch, numbers = [], []
            ranges.append((source.origin, first, counts["records"] - first))
        if batch:
            yield batch, numbers
        self._ranges, self._fingerprint = ranges, digest.value
        self._domains_fingerprint = domains.fingerprint

    @property
    def name(self) -> str:
        """Default name of this corpus in a cache.

        The name of the first file without its suffixes, with "-" for characters that a corpus name cannot have, or
        "corpus" if none are left; "stdin" for standard input; the given name of texts in memory.
        """
        first = self._inputs[0]
        if first.path is None:
            return first.name
        name = Path(first.origin).name
        if first.format != "dataset":
            name = Path(name.removesuffix(first.path.suffix) if first.compression else name).stem
        return corpus_name(name) or "corpus"

    @property
    def origins(self) -> list[str]:
        """Absolute path of every source, "stdin" or "memory", in corpus order; known before anything is read."""
        return [source.origin for source in self._inputs]

    def require_records(self) -> None:
        """Raise a `CorpusError` if the latest pass found no record."""
        if not self.counts["records"]:
            others = f" and {len(self._inputs) - 1} more" if len(self._inputs) > 1 else ""
            raise CorpusError(
                f"{self._inputs[0].name}{others}: no texts, {self.counts['skipped_empty']} records were skipped as "
                "empty; pass a corpus that has texts"
            )

    @property
    def sources(self) -> list[tuple[str, int, int]]:
        """`(origin, first record, number of records)` of every source, in corpus order, without skipped records."""
        return list(self._after_a_pass(self._ranges, "sources"))

    @property
    def fingerprint(self) -> str:
        """32 hex digits (BLAKE2b-128) of the records' texts in order.

        Equal records have equal fingerprints for every format, compression, column name, split into files, set of
        skipped records and batch size.
        """
        return self._after_a_pass(self._fingerprint, "fingerprint")

    @property
    def domains_fingerprint(self) -> str:
        """32 hex digits (BLAKE2b-128) of the records' domains in order; "" without a `domain_key`."""
        return self._after_a_pass(self._domains_fingerprint, "fingerprint of domains")

    @staticmethod
    def _after_a_pass(value: T | None, what: str) -> T:
        if value is None:
            raise CorpusError(f"the corpus's {what} is known only after an iteration over all of its batches")
        return value


CorpusSource: TypeAlias = "Corpus | Dataset | str | Path | Sequence[Path] | Iterable[str] | Iterable[Sequence[str]]"


def to_corpus(source: CorpusSource, name: str = TEXTS) -> Corpus:
    """`source` as a corpus.

    Args:
        source: a corpus; a string or `Path` (file, saved dataset, glob or "-"); a list of `Path`s; a
            `datasets.Dataset` with a column "text"; or an iterable of texts, or of tuples of texts. Strings in a list
            are texts, not paths.
    """
    if isinstance(source, Corpus):
        return source
    if isinstance(source, str | Path):
        return Corpus.open(source)
    if isinstance(source, Sequence) and source and isinstance(source[0], Path):
        return Corpus.open(source)
    if is_dataset(source):
        return Corpus.from_dataset(source, name=name)
    return Corpus.from_texts(source, name)  # type: ignore[arg-type]  # only an empty list of paths is left


def corpus_name(text: str) -> str:
    """`text` as the name of a corpus, with "-" for characters that a corpus name cannot have; "" if none are left."""
    return _NOT_IN_A_NAME.sub("-", text)[:100].strip("-._")
