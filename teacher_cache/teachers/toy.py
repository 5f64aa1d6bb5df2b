"""A teacher without a model: every text gets its own random but fixed direction.

For tests and first runs. Vectors depend on the bytes of the text alone: they are the same on every machine,
in every process and under every PYTHONHASHSEED.
"""

from collections.abc import Sequence
from hashlib import blake2b, shake_128
from pathlib import Path

import numpy as np

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.settings import chosen_pooling, chosen_prompt, normal_dtype

_DIMS = 32
_MAX_LENGTH = 512


class ToyTeacher(Teacher):
    """`(n, dims)` vectors seeded by a hash of prompt and text; a token is a word between spaces."""

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        if folder is not None or options.model != "toy":
            raise TeacherError(f"the toy back end has one teacher, 'toy', not {options.model!r}")
        if normal_dtype(options.dtype) not in ("auto", "float32"):
            raise TeacherError(f"the toy teacher computes in float32 only, not {options.dtype}")
        for name, number in (("dims", options.dims), ("max length", options.max_length)):
            if number is not None and number < 1:
                raise TeacherError(f"{name} of the toy teacher is {number}, expected at least 1")
        prompt = chosen_prompt(options, {"query": "query: ", "passage": "passage: "}) or ""
        max_length = options.max_length or _MAX_LENGTH
        if len(prompt.split()) >= max_length:
            raise TeacherError(f"the prompt of the toy teacher fills its max length of {max_length} words")
        space = EmbeddingSpace(
            teacher="toy",
            revision="",
            backend="toy",
            weights=blake2b(b"toy weights 2", digest_size=16).hexdigest(),
            tokenizer=blake2b(b"words between spaces", digest_size=16).hexdigest(),
            pooling=chosen_pooling(options) or "mean",
            padding_side=options.padding_side or "right",
            prompt=prompt,
            max_length=max_length,
            truncation_side="right",
            normalize=True if options.normalize is None else options.normalize,
            dims=options.dims or _DIMS,
            dtype="float32",
        )
        return TeacherSpec(options=options, space=space, folder=None)

    def __init__(self, spec: TeacherSpec) -> None:
        self.space = spec.space

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
        raw = np.frombuffer(b"".join(streams), dtype="<u8").reshape(len(texts), space.dims)
        vectors = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
        if space.normalize:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return Encoded(
            vectors=vectors.astype(np.float32),
            tokens=tokens,
            truncated=truncated,
            repaired=np.zeros(len(texts), dtype=np.bool_),
        )
