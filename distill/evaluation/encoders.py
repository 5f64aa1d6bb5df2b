"""Encoders that evaluations use: a model, or a cache that a model fills."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from distill.config import resolve_precision
from distill.errors import ConfigError, EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEXT, Announce, Encoder, Progress, no_progress, silent
from teacher_cache.building.build import build
from teacher_cache.errors import CacheError, CacheNotFound, MissingRows
from teacher_cache.maintenance.gc import forget_corpus
from teacher_cache.space import EmbeddingSpace
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.intake import excerpt
from teacher_cache.teachers import (
    Teacher,
    TeacherOptions,
    TeacherSpec,
    load_teacher,
    model_prompts,
    resolve,
    resolve_for_space,
)

# Encoding of a space that an evaluation creates: lossless, so that caching does not change scores.
STORAGE = "float32"
# Texts per call of the encoder: enough to sort by length, few enough to hold tokenized.
CHUNK = 4096
DOCUMENT_PROMPTS = ("document", "passage", "corpus")

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class CachedEncoder:
    """Vectors of one space of a cache; missing ones are encoded once and stored.

    Without missing texts no model is loaded and nothing is written.

    Args:
        cache: its folder; created if there is a model to fill it.
        space: as `TeacherCache.space` takes it; None is the space of `teacher` or, without one, the cache's only one.
        teacher: the model that encodes missing texts; None raises for them. With a `space` only the model and where it
            runs are used: it encodes as the space defines.

    Attributes:
        space: the vectors' space; its precision is "auto" until the first missing text resolves it.
        encoded: number of texts that the model encoded so far.
    """

    def __init__(
        self,
        cache: str | Path,
        space: str | Mapping[str, Any] | None = None,
        teacher: TeacherOptions | None = None,
        announce: Announce = silent,
    ) -> None:
        self.cache = Path(cache)
        self.encoded = 0
        self._announce = announce
        self._spec: TeacherSpec | None = None
        if teacher is not None and space is None:
            self._spec = resolve(teacher)
            self.space = self._cached_space(self._spec.space) or self._spec.space
        else:
            with TeacherCache.open(self.cache) as table:
                self.space = table.space_record(space).space
            self._spec = None if teacher is None else resolve_for_space(self.space, teacher)

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts, in order; raises as `fill`."""
        self.fill(texts)
        vectors = np.empty((len(texts), self.space.dims), dtype=np.float32)
        if texts:
            with TeacherCache.open(self.cache) as table:
                table.space(self.space.slug).gather(table.lookup(texts), out=vectors)
        return vectors

    def fill(self, texts: Sequence[str], progress: Progress = no_progress) -> int:
        """Encode and store those of the texts that the space lacks; returns their number.

        A call loads the model once: pass all texts before encoding them in chunks.

        Raises:
            MissingRows: texts are missing, and there is no model.
            EvaluationError: a text is empty or not valid Unicode, which a cache does not store, or its vector is not
                finite.
        """
        distinct = list(dict.fromkeys(texts))
        _check_storable(distinct)
        missing = self._missing(distinct)
        if not missing:
            return 0
        count = f"{len(missing):,} of {len(distinct):,} texts"
        if self._spec is None:
            raise MissingRows(
                f"space {self.space.slug} of {self.cache} has no vector for {count}, first {excerpt(missing[0])}; name "
                "the model of the space (`teacher`) to encode and store them"
            )
        self._announce(
            f"{self.cache} lacks {count} in space {self.space.slug}; encoding them with {self._spec.options.model}"
        )
        encoded = self._build(self._spec, distinct, progress)
        self.encoded += encoded
        return encoded

    def _cached_space(self, space: EmbeddingSpace) -> EmbeddingSpace | None:
        """The cache's space that equals `space` in all but an open precision; None if there is none."""
        with suppress(CacheNotFound), TeacherCache.open(self.cache) as table:
            known = table.find_space(space)
            return None if known is None else known.space
        return None

    def _missing(self, distinct: Sequence[str]) -> list[str]:
        with suppress(CacheNotFound), TeacherCache.open(self.cache) as table:
            if (view := table.find_space(self.space)) is not None:
                rows = table.lookup(distinct)
                cached = rows >= 0
                cached[cached] = view.present(rows[cached])
                return [text for text, known in zip(distinct, cached.tolist(), strict=True) if not known]
        return list(distinct)

    def _build(self, spec: TeacherSpec, distinct: Sequence[str], progress: Progress) -> int:
        """Encode the texts that have no vector; the temporary corpus is removed from the cache afterwards."""
        name = f"evaluation-{uuid4().hex}"
        try:
            report = build(
                distinct,
                spec.options,
                self.cache,
                name=name,
                storage=None if self._cached_space(self.space) else STORAGE,
                report=lambda state: progress(state.phase, state.done, state.total, "missing texts"),
            )
        finally:
            # Runs that name no corpus must still find the only one. The error of the build may recur here.
            with suppress(CacheError):
                forget_corpus(self.cache, name)
        self.space = self._cached_space(self.space) or self.space
        if report.quarantined:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in report.reasons.items())
            raise EvaluationError(
                f"{report.quarantined} of {len(distinct)} texts have no vector in space {report.space} of {self.cache} "
                f"({reasons}); encode in float32, or leave these texts out"
            )
        if report.truncated:
            self._announce(f"{report.truncated:,} of them were truncated to {self.space.max_length} tokens")
        return report.encoded


class ModelEncoder:
    """A model whose vectors are not cached; it is loaded at first use.

    Args:
        slot: shared by encoders that must not be in memory together, such as one model with two prompts.
    """

    def __init__(self, spec: TeacherSpec, slot: "ModelSlot | None" = None) -> None:
        self.space = spec.space
        self._spec = spec
        self._slot = slot or ModelSlot()

    def load(self) -> Teacher:
        return self._slot.load(self._spec)

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts, in order."""
        return self.load().encode(texts)


class ModelSlot:
    """Memory for one loaded model: loading another one frees it."""

    def __init__(self) -> None:
        self._loaded: tuple[TeacherSpec, Teacher] | None = None

    def load(self, spec: TeacherSpec) -> Teacher:
        """The loaded teacher of `spec`."""
        if self._loaded is None or self._loaded[0] != spec:
            self._loaded = None  # free it before the next one is loaded
            self._loaded = (spec, load_teacher(spec))
        return self._loaded[1]


def options_by_role(
    options: TeacherOptions, query_prompt: str | None = None, document_prompt: str | None = None
) -> dict[str, TeacherOptions]:
    """Options with the prompt of a plain text, a query and a document.

    A given prompt takes precedence. The default is the model's own: sentence-transformers' prompts named query, and
    document, passage or corpus, or those of its family; if only one of them is named, the other is empty. A model
    without any, or options that name a prompt, use the same prompt for all roles.
    """
    named = model_prompts(options) if options.prompt is None and options.prompt_name is None else {}
    own = {
        QUERY: named.get("query", ""),
        DOCUMENT: next((named[name] for name in DOCUMENT_PROMPTS if named.get(name)), ""),
    }
    by_role = {TEXT: options}
    for role, given in ((QUERY, query_prompt), (DOCUMENT, document_prompt)):
        # sentence-transformers writes empty prompts where none were set.
        prompt = given if given is not None else own[role] if any(own.values()) else None
        by_role[role] = options if prompt is None else replace(options, prompt=prompt, prompt_name=None)
    return by_role


def _check_storable(texts: Sequence[str]) -> None:
    empty = sum(not text.strip() for text in texts)
    if empty:
        raise EvaluationError(f"{empty} of {len(texts)} texts are empty, which a cache does not store; leave them out")
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise EvaluationError(
                f"the text {excerpt(text)} holds half a surrogate pair, which a cache does not store; repair it"
            ) from None


def resolved_dtype(dtype: str) -> str:
    """`auto` as bfloat16 if this machine multiplies in it, else float32.

    A rule and not a measurement: students that are compared must be scored alike, also on a busy machine.
    """
    if dtype == "auto":
        return "bfloat16" if resolve_precision("auto") == "bf16" else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected auto, {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def encode_all(
    encoder: Encoder, texts: Sequence[str], progress: Progress = no_progress, phase: str = "encoding texts"
) -> npt.NDArray[np.float32]:
    """`(n, d)` vectors of n >= 1 texts, encoded `CHUNK` at a time into one matrix."""
    if isinstance(encoder, CachedEncoder):
        # All texts at once: every call with missing texts loads the model.
        encoder.fill(texts, progress)
        phase = f"reading vectors of {encoder.space.teacher}"
    elif isinstance(encoder, ModelEncoder):
        progress("loading model", 0, 1, encoder.space.teacher)
        encoder.load()
        progress("loading model", 1, 1, encoder.space.teacher)
    matrix: npt.NDArray[np.float32] | None = None
    for start in range(0, len(texts), CHUNK):
        progress(phase, start, len(texts), "")
        chunk = texts[start : start + CHUNK]
        vectors = np.asarray(encoder.encode(chunk), dtype=np.float32)
        if matrix is None:
            width = vectors.shape[-1] if vectors.ndim == 2 else 0
            matrix = np.empty((len(texts), width), dtype=np.float32)
        expected = (len(chunk), matrix.shape[1])
        if vectors.shape != expected or expected[1] == 0:
            raise EvaluationError(
                f"the encoder returned an array of shape {vectors.shape} for {len(chunk)} texts, expected "
                f"({len(chunk)}, {expected[1] or 'd'})"
            )
        matrix[start : start + len(chunk)] = vectors
    if matrix is None:
        raise EvaluationError("nothing to encode: the tasks list no texts")
    progress(phase, len(texts), len(texts), "")
    return matrix
