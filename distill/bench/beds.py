"""The texts that methods are measured on, each set in a cache of its own: the user's, or one that is made for it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from distill.bench.settings import CORPUS, BenchSettings
from distill.bench.synthetic import BACKEND, MadeUpAnswers, model_config, write_student, write_teacher
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

# Batches of texts of one length, and texts of a corpus that a made-up teacher answers.
BATCHES, CORPUS_TEXTS = 8, 4096
# Words that texts of a wanted length are made of.
WORDS = 2000
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SEED = 42
# Of a teacher of whom only the width of its vectors is known: blocks, and numbers a head of attention.
LAYERS, HEAD = 12, 64


@dataclass(frozen=True)
class Bed:
    """What all rows of one table are measured on.

    Attributes:
        lengths: tokens of every text, or "corpus".
        teacher: whom online rows ask; "" is nobody.
    """

    lengths: int | str
    cache: str
    space: str | None
    corpus: str | None
    student: StudentConfig
    teacher: str = ""
    teacher_device: str | None = None

    def configured(self, config: RunConfig, online: bool) -> RunConfig:
        """`config` on these texts.

        Raises:
            NeedsNotMet: an online row, and nobody to ask.
        """
        if online and not self.teacher:
            raise NeedsNotMet("the teacher is asked at every step: name it with --teacher, or use --random-weights")
        teacher = TeacherConfig("online", self.teacher, self.teacher_device) if online else TeacherConfig()
        return replace(
            config, cache=self.cache, space=self.space, corpus=self.corpus, student=self.student, teacher=teacher
        )


@contextmanager
def beds(settings: BenchSettings) -> Iterator[list[Bed]]:
    """One for each of `settings.lengths`, in order; what is made for them is gone afterwards.

    Raises:
        KnownError: cache, student or teacher is not there, or a length that the student cannot have.
    """
    with TemporaryDirectory(prefix="distill-bench-") as scratch:
        maker = _Maker(settings, Path(scratch))
        yield [maker.bed(lengths) for lengths in settings.lengths]


class _Maker:
    def __init__(self, settings: BenchSettings, scratch: Path) -> None:
        from transformers import AutoTokenizer

        self.settings, self.scratch = settings, scratch
        config = settings.run_config()
        if settings.cache:  # what is not there is told before anything is made
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

    def bed(self, lengths: int | str) -> Bed:
        settings = self.settings
        if lengths == CORPUS and not settings.random_weights:
            return Bed(
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
                raise ConfigError(f"--lengths {lengths}: the student has positions for {self.positions} tokens")
            student = replace(student, max_length=lengths)
            texts = texts_of(self.tokenizer, lengths, BATCHES * settings.batch_size)
        else:
            texts = self._corpus_texts()
        options, workers = self._teacher(lengths)
        source = self.scratch / f"texts-{lengths}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        cache = self.scratch / f"cache-{lengths}"
        spec = resolve(options)
        said = token_shape(spec)
        shape = TeacherShape(
            spec.space.dims,
            spec.space.normalize,
            token_dim=said.width,
            layers=said.layers,
            heads=said.heads,
            causal=said.causal,
        )
        build(Corpus.open(source), options, cache, workers=workers, tokens=self._tokens(self.shape, shape))
        asked = options.model if settings.teacher or settings.random_weights else ""
        return Bed(lengths, str(cache), None, None, student, asked, settings.teacher_device)

    def _teacher(self, lengths: int | str) -> tuple[TeacherOptions, Workers]:
        """Who fills a cache that is made: the cache's own teacher, else one that is made up."""
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
            MadeUpAnswers(),
        )

    def _tokens(self, student: StudentShape, teacher: TeacherShape) -> TokenRequest | None:
        """What the methods compare token by token, of all of them together."""
        base, needs, layers = self.settings.run_config(), [], set[int]()
        for method in self.settings.rows():
            config = method.configured(base)
            preset = method.kind.presets.get(config.objective.preset or "", {})
            options = {**preset, **config.objective.options}
            try:
                objective = construct(method.kind, f"objective {method.objective}", student, teacher, options=options)
            except DistillError:  # its row will say why
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
    """A configuration of the sizes that a space tells of its teacher; usual ones where it knows its vectors alone."""
    from transformers import BertConfig, Qwen3Config

    known = teacher_shape(space)
    width, heads = known.token_dim or known.dim, known.heads or max(1, known.dim // HEAD)
    kind = Qwen3Config if known.causal else BertConfig
    return kind(hidden_size=width, num_hidden_layers=known.layers or LAYERS, num_attention_heads=heads)


def texts_of(tokenizer: Any, length: int, count: int) -> list[str]:
    """Distinct texts of exactly `length` tokens, specials included, out of words that are one token each.

    Raises:
        ConfigError: this tokenizer's words make no such texts.
    """
    random = np.random.default_rng(SEED)
    inside = length - tokenizer.num_special_tokens_to_add()
    words = _words(tokenizer, random)
    found: dict[str, None] = {}
    for _ in range(8):
        if not words or inside < 1 or len(found) >= count:
            break
        drawn = [" ".join(random.choice(words, size=inside)) for _ in range(count)]
        counts = [len(ids) for ids in tokenizer(drawn)["input_ids"]]
        found |= dict.fromkeys(text for text, tokens in zip(drawn, counts, strict=True) if tokens == length)
    if len(found) < count:
        raise ConfigError(
            f"--lengths {length}: of the student's words only {len(found)} distinct texts of {length} tokens could be "
            f"made, {count} are needed; name a longer length"
        )
    return list(found)[:count]


def _words(tokenizer: Any, random: np.random.Generator) -> Sequence[str]:
    pieces = (piece.lstrip("Ġ▁") for piece in sorted(tokenizer.get_vocab()) if not piece.startswith("##"))
    plain = list(dict.fromkeys(piece for piece in pieces if piece.isascii() and piece.isalnum()))
    drawn = [str(word) for word in random.permutation(plain)[: 4 * WORDS]]
    if not drawn:
        return []
    counts = [
        len(ids) for ids in tokenizer([f"{word} {word}" for word in drawn], add_special_tokens=False)["input_ids"]
    ]
    return [word for word, tokens in zip(drawn, counts, strict=True) if tokens == 2][:WORDS]
