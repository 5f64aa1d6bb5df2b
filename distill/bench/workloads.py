"""The texts that methods are measured on, each set in a cache: the user's, or a temporary one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from distill.bench.settings import CORPUS, BenchSettings
from distill.bench.synthetic import BACKEND, SyntheticOutputs, model_config, write_student, write_teacher
from distill.config import RunConfig, StudentConfig, TeacherConfig, resolve_precision
from distill.errors import ConfigError, DistillError, NeedsNotMet
from distill.objectives.base import StudentShape, TeacherShape
from distill.registry import construct
from distill.student.shapes import find_shape, is_shape
from distill.student.student import student_shape
from distill.training.targets import attention_layers, teacher_shape
from teacher_cache.building.build import build
from teacher_cache.building.workers import LocalWorkers, Workers
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, resolve, token_shape
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.settings import options_for_space
from teacher_cache.tokens.request import TokenRequest

# Batches of uniform length, and texts of a corpus for which a synthetic teacher's outputs are drawn.
BATCHES, CORPUS_TEXTS = 8, 4096
# Vocabulary of texts of uniform length.
WORDS = 2000
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SEED = 42
# Sizes of a teacher of which only the width is known: blocks, and width of an attention head.
LAYERS, HEAD = 12, 64


@dataclass(frozen=True)
class Workload:
    """The texts and models that all rows of one table are measured on.

    Attributes:
        lengths: tokens of every text, or "corpus".
        teacher: the online teacher of rows that need one; "" for none.
    """

    lengths: int | str
    cache: str
    space: str | None
    corpus: str | None
    student: StudentConfig
    teacher: str = ""
    teacher_device: str | None = None

    def configure(self, config: RunConfig, online: bool) -> RunConfig:
        """`config` on this workload.

        Raises:
            NeedsNotMet: `online`, and there is no teacher.
        """
        if online and not self.teacher:
            raise NeedsNotMet("an online teacher is needed: give `teacher`, or `random_weights`")
        teacher = TeacherConfig("online", self.teacher, self.teacher_device) if online else TeacherConfig()
        return replace(
            config, cache=self.cache, space=self.space, corpus=self.corpus, student=self.student, teacher=teacher
        )


@contextmanager
def workloads(settings: BenchSettings) -> Iterator[list[Workload]]:
    """One workload for each of `settings.lengths`, in order; temporary caches are removed afterwards.

    Raises:
        KnownError: cache, student or teacher does not exist, or a length that the student does not support.
    """
    with TemporaryDirectory(prefix="distill-bench-") as scratch:
        factory = _WorkloadFactory(settings, Path(scratch))
        yield [factory.create(lengths) for lengths in settings.lengths]


class _WorkloadFactory:
    def __init__(self, settings: BenchSettings, scratch: Path) -> None:
        from transformers import AutoTokenizer

        self.settings, self.scratch = settings, scratch
        config = settings.run_config()
        if settings.cache:  # fail early
            with TeacherCache.open(settings.cache) as cache:
                cache.space(settings.space)
                cache.corpus(settings.corpus)
        if settings.random_weights:
            model_config(settings.random_weights)
        if is_shape(settings.student):
            made = write_student(settings.student, scratch / "student")
            self.student = replace(config.student, model=made.model, pooling=config.student.pooling or made.pooling)
        else:
            self.student = replace(config.student, model=settings.student)
        self.shape = student_shape(self.student)
        folder = ModelFolder(Path(resolve(TeacherOptions(model=self.student.model)).folder or self.student.model))
        self.tokenizer = AutoTokenizer.from_pretrained(folder.encoder, local_files_only=True)
        self.positions = folder.positions
        self.dtype = DTYPES[resolve_precision(settings.precision)]

    def create(self, lengths: int | str) -> Workload:
        settings = self.settings
        if lengths == CORPUS and not settings.random_weights:
            return Workload(
                CORPUS,
                settings.cache,
                settings.space,
                settings.corpus,
                self.student,
                settings.teacher,
                settings.teacher_device,
            )
        student, texts = self.student, []
        if isinstance(lengths, int):
            if self.positions is not None and lengths > self.positions:
                raise ConfigError(f"`lengths` {lengths}: the student has positions for {self.positions} tokens")
            student = replace(student, max_length=lengths)
            texts = synthetic_texts(self.tokenizer, lengths, BATCHES * settings.batch_size)
        else:
            texts = self._corpus_texts()
        options, workers = self._teacher(lengths)
        source = self.scratch / f"texts-{lengths}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        cache = self.scratch / f"cache-{lengths}"
        spec = resolve(options)
        tokens = token_shape(spec)
        shape = TeacherShape(
            spec.space.dims,
            spec.space.normalize,
            token_dim=tokens.width,
            layers=tokens.layers,
            heads=tokens.heads,
            causal=tokens.causal,
        )
        build(Corpus.open(source), options, cache, workers=workers, tokens=self._tokens(self.shape, shape))
        online = options.model if settings.teacher or settings.random_weights else ""
        return Workload(lengths, str(cache), None, None, student, online, settings.teacher_device)

    def _teacher(self, lengths: int | str) -> tuple[TeacherOptions, Workers]:
        """The teacher of a temporary cache: the one of `settings.cache` if named, else a synthetic one."""
        settings = self.settings
        if settings.random_weights:
            config, dims, pooling = model_config(settings.random_weights), None, None
            if not Path(settings.random_weights).is_dir():
                pooling = find_shape(settings.random_weights).pooling
        else:
            with TeacherCache.open(settings.cache) as cache:
                space = cache.space(settings.space)
                if settings.teacher:
                    options = TeacherOptions(model=settings.teacher, device=settings.teacher_device)
                    return options_for_space(space.space, options), LocalWorkers()
                config, dims, pooling = _sizes(space), space.dims, None
        folder = self.scratch / "random-teacher"
        if not folder.exists():
            write_teacher(config, self.tokenizer, folder)
        return (
            TeacherOptions(
                model=str(folder), backend=BACKEND, dims=dims, pooling=pooling, dtype=self.dtype, normalize=True
            ),
            SyntheticOutputs(),
        )

    def _tokens(self, student: StudentShape, teacher: TeacherShape) -> TokenRequest | None:
        """The token data that the methods need together; None if none compares tokens."""
        base, needs, layers = self.settings.run_config(), [], set[int]()
        for method in self.settings.rows():
            config = method.configure(base)
            preset = method.kind.presets.get(config.objective.preset or "", {})
            options = {**preset, **config.objective.options}
            try:
                objective = construct(method.kind, f"objective {method.objective}", student, teacher, options=options)
            except DistillError:  # the method's row reports the error
                continue
            needs.append(objective.needs)
            layers |= {*attention_layers(objective)}
        if not any(need.tokens for need in needs):
            return None
        if any(need.importance for need in needs) and not layers:
            layers = {teacher.layers or 1}
        return TokenRequest(tuple(sorted(layers)) or None)

    def _corpus_texts(self) -> list[str]:
        with TeacherCache.open(self.settings.cache) as cache:
            rows = cache.corpus(self.settings.corpus).distinct_rows(cache.rows)
            chosen = np.random.default_rng(SEED).permutation(rows)[:CORPUS_TEXTS]
            return cache.texts(np.sort(chosen))


def _sizes(space: SpaceView) -> Any:
    """A configuration with the sizes of a space's teacher; defaults where only the width is known."""
    from transformers import BertConfig, Qwen3Config

    known = teacher_shape(space)
    width, heads = known.token_dim or known.dim, known.heads or max(1, known.dim // HEAD)
    kind = Qwen3Config if known.causal else BertConfig
    return kind(hidden_size=width, num_hidden_layers=known.layers or LAYERS, num_attention_heads=heads)


def synthetic_texts(tokenizer: Any, length: int, count: int) -> list[str]:
    """`count` distinct texts of exactly `length` tokens, special tokens included, from words of one token each.

    Raises:
        ConfigError: the tokenizer's words do not allow it.
    """
    random = np.random.default_rng(SEED)
    inside = length - tokenizer.num_special_tokens_to_add()
    words = _words(tokenizer, random)
    found: dict[str, None] = {}
    for _ in range(8):
        if not words or inside < 1 or len(found) >= count:
            break
        texts = [" ".join(random.choice(words, size=inside)) for _ in range(count)]
        found |= dict.fromkeys(
            text for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True) if len(ids) == length
        )
    if len(found) < count:
        raise ConfigError(
            f"`lengths` {length}: only {len(found)} distinct texts of {length} tokens can be made of the student's "
            f"words, {count} are needed; give a longer length"
        )
    return list(found)[:count]


def _words(tokenizer: Any, random: np.random.Generator) -> Sequence[str]:
    """Up to `WORDS` words of the vocabulary that are one token each, also after another word."""
    pieces = (piece.lstrip("Ġ▁") for piece in sorted(tokenizer.get_vocab()) if not piece.startswith("##"))
    plain = list(dict.fromkeys(piece for piece in pieces if piece.isascii() and piece.isalnum()))
    drawn = [str(word) for word in random.permutation(plain)[: 4 * WORDS]]
    if not drawn:
        return []
    twice = tokenizer([f"{word} {word}" for word in drawn], add_special_tokens=False)["input_ids"]
    return [word for word, ids in zip(drawn, twice, strict=True) if len(ids) == 2][:WORDS]
