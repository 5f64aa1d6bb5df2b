"""`distill static`: a static student from a model's vocabulary."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from distill.config import StudentConfig
from distill.errors import ConfigError, RunFolderError
from distill.export.card import static_card
from distill.export.sentence_transformer import export
from distill.student.static import (
    counted_probabilities,
    plain_tokenizer,
    principal_components,
    ranked_probabilities,
    sif_weights,
    static_student,
    token_counts,
    token_vectors,
)
from distill.student.student import Student
from teacher_cache.corpus.corpus import Corpus, CorpusSource, to_corpus
from teacher_cache.storage.files import atomic_write
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers.loading import choose_device
from teacher_cache.teachers.precision import PROBE_TEXTS

DIMS, MAX_LENGTH = 256, 512
# SIF's constant: model2vec's for token ids. For counts the one with the best scores on validation files, of two models:
# function words have a larger share of a corpus than Zipf's law gives their ids.
RANKED_SIF, COUNTED_SIF = 1e-4, 3e-3
# Texts whose vectors the exported folder must reproduce, and those whose encoding is timed.
CHECKED_TEXTS, TIMED_TEXTS, CHUNK = 50, 8192, 4096


@dataclass(frozen=True)
class StaticResult:
    """A static student.

    Attributes:
        output_dir: its folder.
        dims: width of its vectors.
        vocabulary: rows of its table.
        bytes: size of its files.
        explained_variance: share of the variance of the token vectors that PCA kept.
        weights: source of the token frequencies: "corpus", "token ids" or "none".
        sif: the constant of the weights.
        counted_tokens: tokens of the corpus; 0 without one.
        texts_per_second: of the corpus, on the CPU, tokenization included; None without one.
        smallest_cosine: between a vector of the exported folder and of the table.
    """

    output_dir: str
    dims: int
    vocabulary: int
    bytes: int
    explained_variance: float
    weights: str
    sif: float
    counted_tokens: int
    texts_per_second: float | None
    smallest_cosine: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build_static(
    model: str,
    output_dir: str | Path,
    *,
    dims: int | None = None,
    pooling: str = "mean",
    sif: float | None = None,
    words: "CorpusSource | None" = None,
    cache: str | Path | None = None,
    corpus: str | None = None,
    max_length: int = MAX_LENGTH,
    device: str | None = None,
    trust_remote_code: bool = False,
    report: Callable[[str, int, int, str], None] = lambda phase, done, total, detail: None,
) -> StaticResult:
    """Write a StaticEmbedding folder with a vector for every token of a model's vocabulary (as model2vec).

    The folder is a student for `run`, and a model for sentence-transformers and model2vec.

    Args:
        model: folder or hub id of a teacher or student.
        dims: width after PCA; None is 256, or that of the model if it is narrower.
        pooling: how the states of a token and the special tokens around it become one vector.
        sif: constant a of the weights a / (a + p), with p the frequency of a token; 0 for equal weights. None is 3e-3
            for counted frequencies, 1e-4 for those from token ids.
        words: a corpus in which tokens are counted, as `teacher_cache.build` takes it.
        cache: a cache whose `corpus` is used instead. Without either, frequencies follow from the token ids.
        max_length: tokens to which texts are truncated, by the exported tokenizer.
        device: torch device of the model; None picks CUDA, then MPS, then CPU.

    Raises:
        ConfigError: an option is out of range, or token ids are not in the order of frequency.
        StudentError: the model cannot be used.
        RunFolderError: `output_dir` is not empty.
        MissingDependency: scikit-learn is not installed.
    """
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is not empty; choose another `output_dir`")
    if words is not None and cache is not None:
        raise ConfigError("both `words` and `cache` were given: keep one to count tokens in")
    if (sif is not None and not 0 <= sif < 1) or max_length < 1:
        raise ConfigError(f"`sif` is {sif} and `max_length` {max_length}; expected 0 <= sif < 1, and at least 1 token")
    report("loading the model", 0, 0, "")
    source = Student.load(StudentConfig(model, pooling=pooling, trust_remote_code=trust_remote_code))
    if source.is_static:
        raise ConfigError(f"{model} is a static model already; expected a transformer")
    width, tokenizer = source.shape.dim, plain_tokenizer(source)
    dims = min(DIMS, width) if dims is None else dims
    if not 1 <= dims <= width:
        raise ConfigError(f"`dims` is {dims}, expected 1 to {width}, the width of {source.name}")
    size = 1 + max(tokenizer.get_vocab().values())

    counted, sample = 0, list(PROBE_TEXTS[:CHECKED_TEXTS])
    if words is None and cache is None:
        frequencies, a = "token ids", RANKED_SIF if sif is None else sif
        # Before the model runs, because token ids may be in no order.
        weights = sif_weights(ranked_probabilities(tokenizer, size), a) if a else np.ones(size, dtype=np.float32)
    else:
        report("counting tokens", 0, 0, "")
        kept: list[str] = []
        counts = token_counts(tokenizer, _remember(_chunks(words, cache, corpus), kept), size)
        counted, sample, frequencies, a = int(counts.sum()), kept, "corpus", COUNTED_SIF if sif is None else sif
        weights = sif_weights(counted_probabilities(counts), a) if a else np.ones(size, dtype=np.float32)

    source.to(choose_device(device))
    vectors = token_vectors(source, lambda done, total: report("encoding the vocabulary", done, total, ""))
    report("reducing the vectors", 0, 0, "")
    reduced, explained = principal_components(vectors, dims)
    student = static_student(reduced * weights[:, None], tokenizer, max_length=max_length, name=source.name)
    report("writing the student", 0, 0, "")
    cosine = export(student, None, True, folder, sample[:CHECKED_TEXTS])
    speed = None
    if counted:
        started = time.perf_counter()
        student.encode(sample)
        speed = round(len(sample) / (time.perf_counter() - started), 1)
    result = StaticResult(
        output_dir=str(folder),
        dims=dims,
        vocabulary=size,
        bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        explained_variance=explained,
        weights="none" if a == 0 else frequencies,
        sif=a,
        counted_tokens=counted,
        texts_per_second=speed,
        smallest_cosine=cosine,
    )
    with atomic_write(folder / "README.md") as file:
        file.write(static_card(source.name, pooling, max_length, result.to_json()).encode())
    return result


def _chunks(words: "CorpusSource | None", cache: str | Path | None, corpus: str | None) -> Iterator[list[str]]:
    """The texts of all records, some thousand at a time."""
    if words is not None:
        read: Corpus = to_corpus(words)
        for batch in read.batches(CHUNK):
            yield [text for record in batch for text in record]
        read.require_records()
    elif cache is not None:
        with TeacherCache.open(cache) as table:
            manifest = table.corpus(corpus)
            for start in range(0, len(manifest), CHUNK):
                records = np.arange(start, min(start + CHUNK, len(manifest)))
                yield table.texts(manifest.rows_of(records).ravel())


def _remember(chunks: Iterator[list[str]], kept: list[str]) -> Iterator[list[str]]:
    """The same chunks; the first texts of all are added to `kept`."""
    for chunk in chunks:
        kept.extend(islice(chunk, max(0, TIMED_TEXTS - len(kept))))
        yield chunk
