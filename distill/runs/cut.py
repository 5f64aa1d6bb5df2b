"""`distill cut`: a smaller model out of a larger one, chosen and measured without labels.

Layers are chosen by what each candidate's vectors already know of the teacher's (`fitted_agreement`), before any
training. The tokens are those of a corpus. The result is a sentence-transformers folder, whose root is a transformers
folder.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from distill.config import StudentConfig
from distill.errors import StudentError
from distill.evaluation.agreement import FittedAgreement
from distill.export.sentence_transformer import export
from distill.runs.cut_layers import CachedTexts, Candidate, choose_layers
from distill.runs.cut_vocabulary import VocabularyCut, check_vocabulary, with_prompts
from distill.student.cut_spec import EVERY_TOKEN, CutSpec
from distill.student.cutting import cut_layers
from distill.student.student import Student, resolve_student, student_shape
from distill.student.vocabulary import BATCH, choose_tokens, count_tokens, cut_vocabulary
from teacher_cache.corpus.corpus import Corpus, CorpusSource, to_corpus
from teacher_cache.storage.files import atomic_path
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers.folder import weight_files

RECORD = "cut.json"
# Texts that are timed, and those that the written folder must encode as before.
TIMED_TEXTS = 32
EXPORTED_TEXTS = 50

Batches = Callable[[], Iterator[Sequence[str]]]


@dataclass(frozen=True)
class Size:
    """What a model costs.

    Attributes:
        bytes: of its folder on disk.
        texts_per_second: measured in this process, on texts of the corpus.
    """

    layers: int
    vocabulary: int
    parameters: int
    bytes: int
    texts_per_second: float


@dataclass(frozen=True)
class CutResult:
    """The result of a cut.

    Attributes:
        model: the larger model, as it was named.
        output_dir: folder of the smaller one.
        layers: numbers of the kept blocks, from 0.
        candidates: sets of layers that were compared; empty if they were not chosen.
        vocabulary: None if it was not cut.
        score: agreement of the smaller model with the teacher before training; None without a cache.
        score_before: that of the larger model; None for the student of a run.
        seconds: of the whole cut.
    """

    model: str
    output_dir: str
    layers: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    vocabulary: VocabularyCut | None
    before: Size
    after: Size
    score_before: FittedAgreement | None
    score: FittedAgreement | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cut(
    model: StudentConfig | str,
    output_dir: str | Path,
    *,
    layers: Sequence[int] | None = None,
    depth: int | None = None,
    words: "CorpusSource | None" = None,
    keep: int | str | None = None,
    cache: str | Path | None = None,
    space: str | None = None,
    corpus: str | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> CutResult:
    """Write a model with fewer layers, fewer tokens or both to `output_dir`.

    Args:
        model: a local folder or hub id, or a `StudentConfig` with its pooling, prompt and maximum length.
        layers: numbers of the blocks to keep, from 0.
        depth: number of blocks to keep. With a cache the best of some sets is kept (`layer_candidates`), otherwise
            the first ones and the last one.
        words: texts whose tokens are kept, as `teacher_cache.build` takes them. Without `words` they are the texts of
            the corpus in the cache, if `keep` is given.
        keep: number of tokens to keep, the most frequent ones, or "all" tokens of the texts, the default with `words`.
        cache: folder of a teacher cache; the score before training is that on its texts.
        space: slug, fingerprint or teacher of a space of the cache.
        corpus: name of a corpus of the cache.
        announce: called with a line about each candidate.

    Raises:
        StudentError: nothing is to be cut, the folder exists, or the model does not allow the cut.
        KnownError: of cache or corpus.
    """
    config = StudentConfig(model=model) if isinstance(model, str) else model
    keep = EVERY_TOKEN if keep is None and words is not None else keep
    spec = CutSpec(config.model, None if layers is None else tuple(layers), depth, keep)
    if spec.layers is None and spec.depth is None and spec.keep is None:
        raise StudentError("nothing to cut: give `layers`, `depth`, `words` or `keep`")
    if spec.keep is not None and words is None and cache is None:
        raise StudentError("`keep` needs texts whose tokens are counted: give `words`, or `cache`")
    if cache is None and (space is not None or corpus is not None):
        raise StudentError("`space` and `corpus` are parts of a cache: give `cache` too, or leave them out")
    batches = None if words is None else corpus_batches(to_corpus(words))
    if cache is None:
        return cut_to(spec, config, Path(output_dir), None, batches, announce=announce)
    with TeacherCache.open(cache) as opened:
        cached = CachedTexts.of(opened, opened.space(space), corpus)
        return cut_to(spec, config, Path(output_dir), cached, batches or cached.batches, announce=announce)


def corpus_batches(corpus: Corpus) -> Batches:
    """A function that reads the texts of a corpus."""
    return lambda: ([text for record in records for text in record] for records in corpus.batches(BATCH))


def cut_to(
    spec: CutSpec,
    config: StudentConfig,
    folder: Path,
    cached: CachedTexts | None,
    batches: Batches | None,
    *,
    score_before: bool = True,
    announce: Callable[[str], None] = lambda line: None,
) -> CutResult:
    """`cut`, from opened parts; `folder` appears when it is complete.

    Args:
        config: of the larger model.
        cached: to score with.
        batches: texts whose tokens are counted, which are also timed.
        score_before: also score the larger model.
    """
    start = time.monotonic()
    if folder.exists():
        raise StudentError(f"{folder} already exists; choose another folder, or remove it")
    spec.layer_count(student_shape(config).layers)
    resolved = resolve_student(config)
    source = resolved.model_folder
    student = Student.load(config)
    student.max_length = resolved.space.max_length  # a student of a run is shorter by default, a model is not
    student.to("cuda" if torch.cuda.is_available() else "cpu")
    scoring = cached if cached is not None and cached.can_score else None
    candidates = choose_layers(spec, student, scoring, announce)
    layers = candidates[0].layers
    smaller = student if len(layers) == student.shape.layers else cut_layers(student, layers)
    kept = found = None
    sample = _first_texts(batches)
    if spec.keep is not None and batches is not None:
        counts = count_tokens(student, batches())
        kept = choose_tokens(student, with_prompts(counts, student, source.usage_config), _number(spec.keep))
        whole, smaller = smaller, cut_vocabulary(smaller, kept)
        found = check_vocabulary(whole, smaller, kept, batches())
    score = None
    if scoring is not None:
        same = found is None and candidates[0].score is not None
        score = candidates[0].score if same else scoring.score(smaller)
    speeds = texts_per_second([student, smaller], sample)
    with atomic_path(folder) as writing:
        normalize = "Normalize" in source.module_kinds()
        export(smaller, None, normalize, writing, sample[:EXPORTED_TEXTS])
        _keep_usage(source.usage_config, writing)
        result = CutResult(
            model=config.model,
            output_dir=str(folder),
            layers=layers,
            candidates=candidates if spec.depth is not None else (),
            vocabulary=found,
            before=_size(student, _model_bytes(source.parts), speeds[0]),
            after=_size(smaller, _model_bytes([writing, *writing.iterdir()]), speeds[1]),
            score_before=scoring.score(student) if scoring is not None and score_before else None,
            score=score,
            seconds=round(time.monotonic() - start, 3),
        )
        (writing / RECORD).write_text(json.dumps(result.to_json(), indent=2, ensure_ascii=False), encoding="utf-8")
    return result


def _number(keep: int | str) -> int | None:
    return None if isinstance(keep, str) else keep


def _first_texts(batches: Batches | None) -> list[str]:
    """Texts to time: the first ones of the corpus, otherwise of the demo's."""
    if batches is None:
        return (files("distill.runs") / "demo_corpus.txt").read_text(encoding="utf-8").splitlines()[:TIMED_TEXTS]
    texts: list[str] = []
    for batch in batches():
        texts += batch
        if len(texts) >= TIMED_TEXTS:
            break
    if not texts:
        raise StudentError("`words`: no texts, whose tokens could be counted; pass a corpus that has texts")
    return texts[:TIMED_TEXTS]


def texts_per_second(students: Sequence[Student], texts: Sequence[str], rounds: int = 5) -> list[float]:
    """Texts that each student encodes in a second: the best of some rounds, in which they take turns."""
    best = [float("inf")] * len(students)
    for student in students:
        student.encode(texts[:8])
    for _ in range(rounds):
        for number, student in enumerate(students):
            start = time.perf_counter()
            student.encode(texts)
            best[number] = min(best[number], time.perf_counter() - start)
    return [len(texts) / seconds for seconds in best]


def _size(student: Student, stored: int, speed: float) -> Size:
    table: Any = student.word_embeddings
    return Size(
        layers=student.shape.layers,
        vocabulary=int(table.num_embeddings) if table is not None else len(student.tokenizer),
        parameters=sum(parameter.numel() for parameter in student.parameters()),
        bytes=stored,
        texts_per_second=round(speed, 1),
    )


def _model_bytes(parts: Iterable[Path]) -> int:
    """Size of the files of a model that are needed to load it."""
    suffixes = {".json", ".txt", ".model", ".spm"}
    parts = [part for part in parts if part.is_dir()]  # a module without files may have no folder
    found = {path for part in parts for path in part.iterdir() if path.suffix in suffixes and path.name != RECORD}
    found |= {path for part in parts for path in weight_files(part)}
    return sum(path.stat().st_size for path in found)


def _keep_usage(usage: dict[str, Any], folder: Path) -> None:
    """Keep the named prompts of the larger model."""
    if not usage.get("prompts"):
        return
    path = folder / "config_sentence_transformers.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record |= {key: usage[key] for key in ("prompts", "default_prompt_name") if key in usage}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
