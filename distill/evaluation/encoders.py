"""What gives the vectors that tasks ask for: a model, or a cache that a model fills once."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.config import resolve_precision
from distill.errors import ConfigError, EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEXT, Encoder
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
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
    prompts_of,
    resolve,
    resolve_as,
)

# Of a space that an evaluation makes: what is read back is what the model said, so scores do not change by keeping.
STORAGE = "float32"
# Texts in one call of the encoder: enough to sort by length within, few enough to hold tokenised.
CHUNK = 4096
DOCUMENT_PROMPTS = ("document", "passage", "corpus")

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

Announce = Callable[[str], None]


class CachedEncoder:
    """Vectors of one embedding space of a cache; what it lacks is asked of the model once and kept.

    Without missing texts no model is loaded, and nothing is written.

    Args:
        cache: its folder; one that is not there is made, if there is a model to fill it.
        space: which one, as `TeacherCache.space` takes it; None is the space of `teacher` or, without one, the only
            one of the cache.
        teacher: the model that is asked for missing texts; None asks nobody. With a `space` only the model and where
            it runs count: it is asked as the space was.
        announce: is told what is missing, before it is asked for.

    Attributes:
        space: the vectors' space; its precision is "auto" until the first missing text settles it.
        asked: texts that the model was asked for so far.

    Raises:
        CacheError: no such cache or space; a `SpaceMismatch` if the model is another than the space's.
        TeacherError: no such model.
    """

    def __init__(
        self,
        cache: str | Path,
        space: str | Mapping[str, Any] | None = None,
        teacher: TeacherOptions | None = None,
        announce: Announce = lambda line: None,
    ) -> None:
        self.cache = Path(cache)
        self.asked = 0
        self._announce = announce
        self._spec: TeacherSpec | None = None
        if teacher is not None and space is None:
            self._spec = resolve(teacher)
            self.space = self._held_space(self._spec.space) or self._spec.space
        else:
            with TeacherCache.open(self.cache) as table:
                self.space = table.space_record(space).space
            self._spec = None if teacher is None else resolve_as(self.space, teacher)

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts, in order; see `fill` for what it raises."""
        self.fill(texts)
        if not texts:
            return np.empty((0, self.space.dims), dtype=np.float32)
        vectors = np.empty((len(texts), self.space.dims), dtype=np.float32)
        with TeacherCache.open(self.cache) as table:
            table.space(self.space.slug).gather(table.lookup(texts), out=vectors)
        return vectors

    def fill(self, texts: Sequence[str]) -> int:
        """Make sure that the space has every one of these texts, and say how many the model was asked for.

        A model is loaded once a call: an encoder that will be asked in parts is told the whole before.

        Raises:
            MissingRows: it lacks some, and there is no model to ask.
            EvaluationError: a text is empty or no Unicode text, which a cache does not keep, or the model gives it a
                vector that cannot be kept.
        """
        distinct = list(dict.fromkeys(texts))
        _refuse_unkept(distinct)
        missing = self._missing(distinct)
        if not missing:
            return 0
        count = f"{len(missing):,} of {len(distinct):,} texts"
        if self._spec is None:
            raise MissingRows(
                f"space {self.space.slug} of {self.cache} has no vector for {count}, first {excerpt(missing[0])}; name "
                "the model that the space is of (--teacher MODEL), so that they are asked once and kept"
            )
        self._announce(f"{self.cache} lacks {count} in space {self.space.slug}; asking {self._spec.options.model}")
        asked = self._ask(self._spec, distinct)
        self.asked += asked
        return asked

    def _held_space(self, space: EmbeddingSpace) -> EmbeddingSpace | None:
        """The cache's space that `space` means, precision settled; None where there is none."""
        try:
            with TeacherCache.open(self.cache) as table:
                known = table.find_space(space)
        except CacheNotFound:
            return None
        return None if known is None else known.space

    def _missing(self, distinct: Sequence[str]) -> list[str]:
        try:
            with TeacherCache.open(self.cache) as table:
                view = table.find_space(self.space)
                if view is None:
                    return list(distinct)
                rows = table.lookup(distinct)
                there = rows >= 0
                there[there] = view.present(rows[there])
        except CacheNotFound:
            return list(distinct)
        return [text for text, held in zip(distinct, there.tolist(), strict=True) if not held]

    def _ask(self, spec: TeacherSpec, distinct: Sequence[str]) -> int:
        """Give a vector to each text that has none; no corpus of the cache lists them."""
        with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
            name = Path(folder).name  # one that no corpus of a user has
            path = Path(folder) / "texts.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in distinct)
            storage = None if self._held_space(self.space) else STORAGE
            try:
                report = build(Corpus.open(path), spec.options, self.cache, name=name, storage=storage)
            finally:
                # Runs that name no corpus go on finding the only one. What stopped the build may stop this too.
                with suppress(CacheError):
                    forget_corpus(self.cache, name)
        self.space = self._held_space(self.space) or self.space
        if report.quarantined:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in report.reasons.items())
            raise EvaluationError(
                f"{report.quarantined} of {len(distinct)} texts have no vector in space {report.space} of {self.cache} "
                f"({reasons}); ask the model in float32, or leave these texts out"
            )
        if report.truncated:
            self._announce(f"{report.truncated:,} of them were cut at {self.space.max_length} tokens")
        return report.encoded


class ModelEncoder:
    """A model that keeps nothing: loaded when first asked, and let go when `room` is given to another.

    Args:
        room: what encoders share that are not to be in memory side by side, such as one model under two prompts.
    """

    def __init__(self, spec: TeacherSpec, room: "Room | None" = None) -> None:
        self.space = spec.space
        self._spec = spec
        self._room = room or Room()

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts, in order."""
        return self._room.teacher(self._spec).encode(texts)


class Room:
    """Holds the one model that was asked last."""

    def __init__(self) -> None:
        self._held: tuple[TeacherSpec, Teacher] | None = None

    def teacher(self, spec: TeacherSpec) -> Teacher:
        """The loaded teacher of `spec`, in place of another."""
        if self._held is None or self._held[0] != spec:
            self._held = None  # before the next one is loaded
            self._held = (spec, load_teacher(spec))
        return self._held[1]


def asked_by_role(
    options: TeacherOptions, query_prompt: str | None = None, document_prompt: str | None = None
) -> dict[str, TeacherOptions]:
    """How a model is asked for a plain text, a query and a document.

    A prompt that is given counts. Without one, the model's own: sentence-transformers' prompts named query, and
    document, passage or corpus, or those of its family; where it names one for one side alone, the other has none.
    A model without any is asked as for a plain text, and so is one that the options name a prompt for.

    Raises:
        TeacherError: no such model.
    """
    named: Mapping[str, str] = {}
    if options.prompt is None and options.prompt_name is None:
        named = prompts_of(options)
    own = {
        QUERY: named.get("query", ""),
        DOCUMENT: next((named[name] for name in DOCUMENT_PROMPTS if named.get(name)), ""),
    }
    asked = {TEXT: options}
    for role, given in ((QUERY, query_prompt), (DOCUMENT, document_prompt)):
        # Empty ones alone are what sentence-transformers writes where nobody chose any.
        prompt = given if given is not None else own[role] if any(own.values()) else None
        asked[role] = options if prompt is None else replace(options, prompt=prompt, prompt_name=None)
    return asked


def _refuse_unkept(texts: Sequence[str]) -> None:
    empty = sum(not text.strip() for text in texts)
    if empty:
        raise EvaluationError(
            f"{empty} of {len(texts)} texts are empty, and a cache keeps no vector of such; leave them out"
        )
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise EvaluationError(
                f"the text {excerpt(text)} holds half a surrogate pair, and a cache keeps Unicode alone; mend it"
            ) from None


def resolved_dtype(dtype: str) -> str:
    """`auto` as bfloat16 where this machine multiplies in it, else float32.

    A rule and no measurement: students that are compared must be scored alike, also on a busy machine.

    Raises:
        ConfigError: neither auto, fp32 nor bf16.
    """
    if dtype == "auto":
        return "bfloat16" if resolve_precision("auto") == "bf16" else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected auto, {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def encode_all(encoder: Encoder, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """`(n, d)` vectors of n >= 1 texts, encoded `CHUNK` at a time into one matrix.

    Raises:
        EvaluationError: the encoder gives a wrong number of vectors, or another width than before.
    """
    if isinstance(encoder, CachedEncoder):
        encoder.fill(texts)  # all at once: a model is loaded for each time that something is missing
    matrix: npt.NDArray[np.float32] | None = None
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        vectors = np.asarray(encoder.encode(chunk), dtype=np.float32)
        if matrix is None:
            width = vectors.shape[-1] if vectors.ndim == 2 else 0
            matrix = np.empty((len(texts), width), dtype=np.float32)
        expected = (len(chunk), matrix.shape[1])
        if vectors.shape != expected or expected[1] == 0:
            raise EvaluationError(
                f"the encoder gave an array of shape {vectors.shape} for {len(chunk)} texts, expected "
                f"({len(chunk)}, {expected[1] or 'd'})"
            )
        matrix[start : start + len(chunk)] = vectors
    if matrix is None:
        raise EvaluationError("nothing to encode: the tasks list no texts")
    return matrix
