"""What a build would cost, without building: nothing goes into the cache, no weights are loaded unless asked.

The files of a hub model are downloaded all the same: which vectors a cache has is a matter of their digest.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table.cache import CACHE_JSON, TeacherCache
from teacher_cache.teachers import load_teacher, resolve, resolve_dtype, token_shape
from teacher_cache.teachers.base import TeacherOptions, TeacherSpec
from teacher_cache.text_key import KEY_BYTES, text_keys
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.tokens.token_columns import TOKEN_ENCODINGS, TokenRecord, checked_layers

READ_RECORDS = 8192
# Texts whose tokens are counted to estimate those of all, and texts that `probe` times.
SAMPLE = 2000
PROBED_TEXTS = 64


@dataclass(frozen=True)
class Plan:
    """The foretold cost.

    Attributes:
        tokens: of the texts to encode, from the mean of a sample.
        truncated: share of the sample that is longer than the maximum.
        missing: texts to encode: those that lack a vector, or another column that is asked for.
        bytes: of the new vectors by number format, before compression.
        token_bytes: of the new token columns, the same; empty where none are asked for.
        hours: None when nothing has been timed yet.
        basis: where the hours come from.
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
class _Held:
    """What a cache has of the texts: how many vectors, states and attention, and all that is asked for.

    Attributes:
        rate: tokens a second of past builds.
    """

    vectors: int = 0
    states: int = 0
    attention: int = 0
    complete: int = 0
    rate: float | None = None
    record: TokenRecord | None = None


def plan(
    corpus: Corpus,
    teacher: TeacherOptions,
    cache: str | Path,
    *,
    tokens: TokenRequest | None = None,
    probe: bool = False,
) -> Plan:
    """Read the corpus once, look its texts up in the cache, if there is one, and count.

    Takes 16 bytes of memory a text. With `probe` the teacher is loaded and timed on a few texts of this corpus.

    Args:
        tokens: as for `build`.

    Raises:
        TeacherError, CorpusError: as `build` would.
    """
    spec = resolve(teacher)
    shape = None if tokens is None else token_shape(spec)
    if tokens is not None and tokens.attention and shape is not None:
        checked_layers(tokens.attention, shape)
    keys = bytearray()
    sample: list[str] = []
    draw = random.Random(0)
    rows = seen = 0
    for records in corpus.batches(READ_RECORDS):
        texts = [text for record in records for text in record]
        rows += len(records)
        keys += b"".join(text_keys(texts))
        for text in texts:  # reservoir sampling: every text is as likely to be in the sample
            seen += 1
            if len(sample) < SAMPLE:
                sample.append(text)
            elif (place := draw.randrange(seen)) < SAMPLE:
                sample[place] = text
    corpus.require_records()
    distinct = np.unique(np.frombuffer(bytes(keys), dtype=f"V{KEY_BYTES}"))
    held = _in_cache(distinct, spec, Path(cache), tokens)
    missing = len(distinct) - held.complete
    counts = _token_counts(sample, spec)
    lengths = np.minimum(counts, spec.space.max_length)
    total = round(float(lengths.mean()) * missing) if len(counts) else 0
    token_bytes: dict[str, int] = {}
    if tokens is not None and shape is not None and len(counts):
        wanted = TokenRecord.wanted(shape, tokens, None, held.record)
        spec = replace(spec, request=TokenRequest(wanted.attention))
        maps = np.array([wanted.attention_bytes(int(length)) for length in lengths]).mean()
        for name in TOKEN_ENCODINGS:
            states = replace(wanted, storage=name).token_bytes() * lengths.mean()
            new = states * (len(distinct) - held.states) + maps * (len(distinct) - held.attention)
            token_bytes[name] = round(float(new))
    rate = held.rate
    basis = "at the rate this cache was built at"
    if probe and sample:
        rate, basis = (
            _timed(spec, sample[:PROBED_TEXTS]),
            f"from {min(len(sample), PROBED_TEXTS)} texts on this device",
        )
    return Plan(
        description=spec.space.describe(),
        rows=rows,
        distinct=len(distinct),
        cached=held.complete,
        missing=missing,
        tokens=total,
        truncated=float((counts > spec.space.max_length).mean()) if len(counts) else 0.0,
        bytes={
            name: (len(distinct) - held.vectors) * encoding.row_bytes(spec.space.dims)
            for name, encoding in ENCODINGS.items()
        },
        hours=total / rate / 3600 if rate else None,
        basis=basis if rate else "",
        token_bytes=token_bytes,
    )


def _in_cache(distinct: Any, spec: TeacherSpec, path: Path, tokens: TokenRequest | None) -> _Held:
    """What the cache has of these texts in this space."""
    if not (path / CACHE_JSON).exists():
        return _Held()
    with TeacherCache.open(path) as cache:
        view = cache.find_space(spec.space)
        if view is None:
            return _Held()
        rows = cache.index.find([key.tobytes() for key in distinct])
        rows = rows[rows >= 0]
        nothing = np.zeros(len(rows), dtype=bool)
        vectors = complete = view.present(rows)
        states = nothing if view.tokens is None else view.tokens.present(rows)
        attention = nothing if view.tokens is None else view.tokens.present(rows, attention=True)
        if tokens is not None:
            complete = vectors & (states if tokens.attention is None else attention)
        rate = view.record.tokens / view.record.seconds if view.record.seconds else None
        return _Held(
            vectors=int(vectors.sum()),
            states=int(states.sum()),
            attention=int(attention.sum()),
            complete=int(complete.sum()),
            rate=rate,
            record=view.record.columns,
        )


def _token_counts(texts: Sequence[str], spec: TeacherSpec) -> np.ndarray[Any, Any]:
    """Tokens of each text before truncation; words for a teacher without a tokenizer."""
    if spec.folder is None:
        return np.array([len(text.split()) for text in texts])
    from transformers import AutoTokenizer

    from teacher_cache.teachers.folder import ModelFolder

    folder = ModelFolder(spec.folder).encoder
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=spec.options.trust_remote_code
    )
    prompted = [spec.space.prompt + text for text in texts]
    return np.array([len(ids) for ids in tokenizer(prompted, verbose=False)["input_ids"]])


def _timed(spec: TeacherSpec, texts: Sequence[str]) -> float:
    """Tokens a second of the loaded teacher."""
    if spec.space.dtype == "auto":
        spec = resolve_dtype(spec)
    loaded = load_teacher(spec)
    loaded.encode(texts[:2])  # the first call pays for set-up
    started = time.monotonic()
    encoded = loaded.encode_counted(texts)
    return float(encoded.tokens.sum()) / (time.monotonic() - started)
