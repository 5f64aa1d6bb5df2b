"""Those whose steps `benchmarks/step.py` compares: what each has to train, and how it does."""

import csv
import gc
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PrinterCallback, set_seed

from benchmarks.encode import distinct
from benchmarks.paper_loop import PaperLoop
from distill.bench.settings import BenchSettings
from distill.bench.timed_run import TimedRunClock, measure_run
from distill.config import RunConfig, SharpnessConfig, StudentConfig
from distill.student.student import student_shape
from distill.training.measurement import StepTime, cycle_means, memory_in_use, peak_memory, reset_peak_memory
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.transfer.importer import import_vectors

BATCH, WIDTH, SEED = 32, 1024, 42
# Steps whose mean is one figure: cheap sharpness repeats after so many.
CYCLE = 2
PROCESSOR = torch.device("cpu")
NO_SHARPNESS = SharpnessConfig("none")
OURS = {
    "talas": NO_SHARPNESS,
    "talas+asam": SharpnessConfig("asam"),
    "talas+cheap": SharpnessConfig("norm-one-view", every=CYCLE),
}
PEER, PAPERS = "mse", {"paper": False, "paper+asam": True}
METHODS = (*OURS, PEER, *PAPERS)


@dataclass(frozen=True)
class Contender:
    method: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.precision}"


@dataclass(frozen=True)
class Task:
    """What a contender has to train.

    Attributes:
        folder: as `prepare` fills it.
        length: tokens, at which a run cuts texts of this student.
    """

    contender: Contender
    model: Path
    folder: Path
    length: int
    steps: int
    warm_up: int
    seed: int = SEED
    batch: int = BATCH

    def config(self) -> RunConfig:
        """As a run of it; the others take from it what is theirs too."""
        settings = BenchSettings(
            batch_size=self.batch,
            precision=self.contender.precision,
            steps=self.steps,
            warm_up=self.warm_up,
            sets=("recipe=talas-paper", f"training.seed={self.seed}"),
        )
        return replace(
            settings.run_config(),
            cache=str(self.folder / "cache"),
            student=StudentConfig(str(self.model)),
            sharpness=OURS.get(self.contender.method, NO_SHARPNESS),
        )

    def numbers(self, texts: int) -> list[int]:
        """Of the texts of all batches, in the order in which a run takes them."""
        order = WindowedShuffle(texts, self.batch, window=self.config().window(tokens=False), seed=self.seed)
        windows = range(order.windows)
        found = np.concatenate([order.records_of(0, one)[order.permutation(0, one)] for one in windows])
        return [int(number) for number in found[: (self.warm_up + self.steps) * self.batch]]


@dataclass(frozen=True)
class Taken:
    """The timed steps, and the peak memory beyond what was in use before, in bytes."""

    steps: tuple[StepTime, ...]
    peak: int

    def figures(self) -> dict[str, float]:
        """Median seconds and processor seconds of a step, each the mean over a cycle."""
        return {
            "seconds": median(cycle_means([step.seconds for step in self.steps], CYCLE)),
            "processor": median(cycle_means([step.processor_seconds for step in self.steps], CYCLE)),
        }


def take(task: Task) -> Taken:
    """Step times and peak memory of one training."""
    if task.contender.method in OURS:
        measured = measure_run(task.config(), task.warm_up)
        return Taken(measured.steps, measured.peak)
    gc.collect()
    before, clock = memory_in_use(PROCESSOR), TimedRunClock(PROCESSOR)
    set_seed(task.seed)
    (by_sentence_transformers if task.contender.method == PEER else by_the_paper)(task, clock)
    return Taken(tuple(clock.timer.steps[task.warm_up :]), max(0, peak_memory(PROCESSOR) - before))


def by_sentence_transformers(task: Task, clock: TimedRunClock) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer.losses import MSELoss
    from sentence_transformers.sentence_transformer.modules import Dense

    def in_order(dataset: Any, *, batch_size: int, drop_last: bool, **_: Any) -> Any:
        return DefaultBatchSampler(range(len(dataset)), batch_size=batch_size, drop_last=drop_last)

    training = task.config().training
    student = SentenceTransformer(str(task.model), device="cpu")
    dense = Dense(student_shape(StudentConfig(str(task.model))).dim, WIDTH, activation_function=None)
    model = SentenceTransformer(modules=[student[0], student[1], dense], device="cpu")
    model.max_seq_length = task.length
    dataset = Dataset.load_from_disk(str(task.folder / "dataset"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=scratch,
            max_steps=training.max_steps,
            per_device_train_batch_size=task.batch,
            batch_sampler=in_order,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            lr_scheduler_type=training.lr_scheduler_type,
            lr_scheduler_kwargs={"min_lr_rate": training.min_lr_rate},
            warmup_steps=int(training.warmup_ratio * training.max_steps),
            max_grad_norm=training.max_grad_norm,
            optim=training.optim,
            bf16=task.contender.precision == "bf16",
            use_cpu=True,
            seed=task.seed,
            save_strategy="no",
            logging_steps=training.logging_steps,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset.select(task.numbers(len(dataset))),
            loss=MSELoss(model),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def by_the_paper(task: Task, clock: TimedRunClock) -> None:
    folder = ModelFolder(task.model).encoder
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loop = PaperLoop(folder, WIDTH, task.warm_up + task.steps, ascends=PAPERS[task.contender.method])
    texts = distinct(task.folder / "texts.csv", "text")
    vectors = torch.from_numpy(np.load(task.folder / "vectors.npy"))
    numbers = task.numbers(len(texts))
    reset_peak_memory(PROCESSOR)
    clock.timer.start()
    for start in range(0, len(numbers), task.batch):
        batch = numbers[start : start + task.batch]
        tokens = tokenizer(
            [texts[number] for number in batch],
            padding=True,
            truncation=True,
            max_length=task.length,
            return_tensors="pt",
        )
        loop.step(tokens["input_ids"], tokens["attention_mask"], vectors[batch])
        clock.timer.stop()


def prepare(corpus: Path, column: str, folder: Path) -> int:
    """The same texts and targets for all: as a cache, as a data set, as plain files. Returns how many."""
    import datasets

    datasets.disable_progress_bars()
    texts = distinct(corpus, column)
    with (folder / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    vectors = np.random.default_rng(SEED).normal(size=(len(texts), WIDTH)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.save(folder / "vectors.npy", vectors)
    given = Corpus.open(folder / "texts.csv", text_key="text")
    import_vectors(folder / "vectors.npy", folder / "cache", corpus=given, teacher="random")
    datasets.Dataset.from_dict({"sentence": texts, "label": vectors}).save_to_disk(str(folder / "dataset"))
    return len(texts)
