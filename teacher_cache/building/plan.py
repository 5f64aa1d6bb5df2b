"""Estimated cost of a build. Writes nothing to the cache, and loads no weights unless `probe` is set.

The files of a hub model are downloaded all the same: their digest decides which vectors a cache has.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.build import READ_RECORDS, resolve_with_tokens
from teacher_cache.corpus.corpus import CorpusSource, to_corpus
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import CACHE_JSON
from teacher_cache.teachers import load_teacher, load_tokenizer, resolve_dtype
from teacher_cache.teachers.base import TeacherOptions, TeacherSpec
from teacher_cache.text_key import KEY_BYTES, text_keys
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.tokens.token_columns import TOKEN_ENCODINGS, TokenRecord

# Texts whose tokens are counted, and texts that `probe` times.
SAMPLE = 2000
PROBED_TEXTS = 64


@dataclass(frozen=True)
class Plan:
    """Estimated cost of a build.

    Attributes:
        cached: distinct texts that have every requested column.
        tokens: of the texts to encode, from the mean of a sample.
        truncated: share of the sample that is longer than the space's maximum.
        bytes: of the new vectors by encoding, before compression.
        hours: None if nothing has been timed yet.
        basis: what the hours are based on.
        token_bytes: of the new token columns by encoding, before compression; empty if none are requested.
    """

    description: str
    rows: int
    distinct: int
    cached: int
    missing: int
    tokens: int
    truncated: float
    bytes: dict[str, int]
    hours: float | None
    basis: str
    token_bytes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Cached:
    """Number of texts of a corpus that a cache has, by column; `complete` ones have every requested column."""

    vectors: int = 0
    states: int = 0
    attention: int = 0
    complete: int = 0
    rate: float | None = None
    record: TokenRecord | None = None


def plan(
    corpus: CorpusSource,
    teacher: str | TeacherOptions,
    cache: str | Path,
    *,
    tokens: TokenRequest | None = None,
    probe: bool = False,
) -> Plan:
    """Read the corpus once and estimate what a build would add to the cache, which need not exist.

    Uses 16 bytes of memory per text.

    Args:
        corpus, teacher, tokens: as for `build`.
        probe: load the teacher and time it on a few texts of the corpus.
    """
    corpus = to_corpus(corpus)
    spec, shape = resolve_with_tokens(teacher, tokens)
    keys = bytearray()
    sample: list[str] = []
    draw = random.Random(0)
    rows = seen = 0
    for records in corpus.batches(READ_RECORDS):
        texts = [text for record in records for text in record]
        rows += len(records)
        keys += b"".join(text_keys(texts))
        for text in texts:  # reservoir sampling
            seen += 1
            if len(sample) < SAMPLE:
                sample.append(text)
            elif (place := draw.randrange(seen)) < SAMPLE:
                sample[place] = text
    corpus.require_records()
    distinct = np.unique(np.frombuffer(bytes(keys), dtype=f"V{KEY_BYTES}"))
    cached = _cached(distinct, spec, Path(cache), tokens)
    missing = len(distinct) - cached.complete
    counts = _token_counts(sample, spec)
    lengths = np.minimum(counts, spec.space.max_length)
    total = round(float(lengths.mean()) * missing)
    token_bytes: dict[str, int] = {}
    if tokens is not None and shape is not None:
        wanted = TokenRecord.resolve(shape, tokens, None, cached.record)
        spec = replace(spec, request=TokenRequest(wanted.attention))
        attention = np.array([wanted.attention_bytes(int(length)) for length in lengths]).mean()
        for name in TOKEN_ENCODINGS:
            states = replace(wanted, storage=name).token_bytes() * lengths.mean()
            new = states * (len(distinct) - cached.states) + attention * (len(distinct) - cached.attention)
            token_bytes[name] = round(float(new))
    rate, basis = cached.rate, "at the rate this cache was built at"
    if probe:
        timed = sample[:PROBED_TEXTS]
        rate, basis = _tokens_per_second(spec, timed), f"from {len(timed)} texts on this device"
    return Plan(
        description=spec.space.describe(),
        rows=rows,
        distinct=len(distinct),
        cached=cached.complete,
        missing=missing,
        tokens=total,
        truncated=float((counts > spec.space.max_length).mean()),
        bytes={
            name: (len(distinct) - cached.vectors) * encoding.row_bytes(spec.space.dims)
            for name, encoding in ENCODINGS.items()
        },
        hours=total / rate / 3600 if rate else None,
        basis=basis if rate else "",
        token_bytes=token_bytes,
    )


def _cached(keys: npt.NDArray[Any], spec: TeacherSpec, path: Path, tokens: TokenRequest | None) -> _Cached:
    """What the cache has of the texts with these keys in the space of `spec`."""
    if not (path / CACHE_JSON).exists():
        return _Cached()
    with TeacherCache.open(path) as cache:
        view = cache.find_space(spec.space)
        if view is None:
            return _Cached()
        rows = cache.index.find([key.tobytes() for key in keys])
        rows = rows[rows >= 0]
        none = np.zeros(len(rows), dtype=bool)
        vectors = complete = view.present(rows)
        states = none if view.tokens is None else view.tokens.present(rows)
        attention = none if view.tokens is None else view.tokens.present(rows, attention=True)
        if tokens is not None:
            complete = vectors & (states if tokens.attention is None else attention)
        return _Cached(
            vectors=int(vectors.sum()),
            states=int(states.sum()),
            attention=int(attention.sum()),
            complete=int(complete.sum()),
            rate=view.record.tokens / view.record.seconds if view.record.seconds else None,
            record=view.record.columns,
        )


def _token_counts(texts: Sequence[str], spec: TeacherSpec) -> npt.NDArray[np.int64]:
    """`(n,)` tokens of each text before truncation; words if the teacher has no tokenizer."""
    if spec.folder is None:
        return np.array([len(text.split()) for text in texts])
    prompted = [spec.space.prompt + text for text in texts]
    return np.array([len(ids) for ids in load_tokenizer(spec)(prompted, verbose=False)["input_ids"]])


def _tokens_per_second(spec: TeacherSpec, texts: Sequence[str]) -> float:
    teacher = load_teacher(resolve_dtype(spec))
    teacher.encode(texts[:2])  # warm-up
    started = time.monotonic()
    encoded = teacher.encode_counted(texts)
    return float(encoded.tokens.sum()) / (time.monotonic() - started)
