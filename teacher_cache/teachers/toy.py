"""A teacher without a model, for tests and first runs: each text gets a fixed random direction.

Vectors depend only on the bytes of the text: they are the same on every machine, in every process and for every
PYTHONHASHSEED.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b, shake_128
from pathlib import Path

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.settings import check_pooling, choose_prompt, dtype_name
from teacher_cache.teachers.token_offsets import word_pieces
from teacher_cache.tokens.request import TextTokens, TokenRequest, TokenShape

_DIMS = 32
_MAX_LENGTH = 512
_TOKENS = TokenShape(width=24, layers=3, heads=2, causal=False)


class ToyTeacher(Teacher):
    """`(n, dims)` vectors seeded by a hash of prompt and text; a token is a word between spaces.

    A token state is seeded by the word and its position. In layer l every row of attention gives token j a weight
    proportional to j + l, with j from 0 and l from 1.
    """

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        if folder is not None or options.model != "toy":
            raise TeacherError(f"`model` is {options.model!r}, but the toy backend has one teacher, 'toy'")
        if dtype_name(options.dtype) not in ("auto", "float32"):
            raise TeacherError(f"`dtype` is {options.dtype}, but the toy teacher computes in float32 only")
        for name, number in (("dims", options.dims), ("max_length", options.max_length)):
            if number is not None and number < 1:
                raise TeacherError(f"`{name}` of the toy teacher is {number}, expected at least 1")
        prompt = choose_prompt(options, {"query": "query: ", "passage": "passage: "}) or ""
        max_length = options.max_length or _MAX_LENGTH
        if len(prompt.split()) >= max_length:
            raise TeacherError(
                f"the prompt of the toy teacher fills its `max_length` of {max_length} words: use a larger one"
            )
        space = EmbeddingSpace(
            teacher="toy",
            revision="",
            backend="toy",
            weights=blake2b(b"toy weights 2", digest_size=16).hexdigest(),
            tokenizer=blake2b(b"words between spaces", digest_size=16).hexdigest(),
            pooling=check_pooling(options) or "mean",
            padding_side=options.padding_side or "right",
            prompt=prompt,
            max_length=max_length,
            truncation_side="right",
            normalize=True if options.normalize is None else options.normalize,
            dims=options.dims or _DIMS,
            dtype="float32",
        )
        return TeacherSpec(options=options, space=space, folder=None)

    @classmethod
    def token_shape(cls, spec: TeacherSpec) -> TokenShape:
        return _TOKENS

    def __init__(self, spec: TeacherSpec) -> None:
        self.space = spec.space
        self._request = spec.request

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        space = self.space
        streams = []
        tokens = np.empty(len(texts), dtype=np.int32)
        truncated = np.zeros(len(texts), dtype=np.bool_)
        for row, text in enumerate(texts):
            whole = space.prompt + text
            words = whole.split()
            if len(words) > space.max_length:
                truncated[row] = True
                words = words[: space.max_length]
                whole = " ".join(words)
            tokens[row] = len(words)
            streams.append(shake_128(f"{space.pooling}\0{whole}".encode()).digest(8 * space.dims))
        vectors = _numbers(streams, space.dims)
        if space.normalize:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return Encoded(
            vectors=vectors.astype(np.float32),
            tokens=tokens,
            truncated=truncated,
            repaired=np.zeros(len(texts), dtype=np.bool_),
            by_token=None if self._request is None else [self._tokens(text, self._request) for text in texts],
        )

    def _tokens(self, text: str, request: TokenRequest) -> TextTokens:
        words = list(re.finditer(r"\S+", self.space.prompt + text))[: self.space.max_length]
        count = len(words)
        names = [f"{place}\0{word.group()}".encode() for place, word in enumerate(words)]
        ids = [int.from_bytes(blake2b(word.group().encode(), digest_size=4).digest()) >> 1 for word in words]
        shares = (np.arange(count) + np.arange(1, _TOKENS.layers + 1)[:, None]).astype(np.float32)
        shares /= shares.sum(axis=1, keepdims=True)
        maps = np.repeat(shares[:, None], count, axis=1)
        layers = request.attention
        states = _numbers([shake_128(name).digest(8 * _TOKENS.width) for name in names], _TOKENS.width)
        return TextTokens(
            states=states.astype(np.float32),
            pieces=word_pieces([word.span() for word in words], np.zeros(count), ids, len(self.space.prompt)),
            importance=None if layers is None else maps[-1].sum(axis=0),
            attention=None if layers is None else maps[np.array(layers, dtype=np.int64) - 1],
        )


def _numbers(streams: Sequence[bytes], width: int) -> npt.NDArray[np.float64]:
    """`(len(streams), width)` numbers in [-1, 1), from 8 bytes each."""
    raw = np.frombuffer(b"".join(streams), dtype="<u8").reshape(len(streams), width)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
