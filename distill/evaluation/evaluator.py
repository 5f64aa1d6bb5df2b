"""Scoring of an encoder or a model on tasks, and the nine tasks of the TALAS table."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distill.errors import EvaluationError
from distill.evaluation import load_task
from distill.evaluation.base import (
    DOCUMENT,
    QUERY,
    ROLES,
    TEACHER,
    TEACHER_DOCUMENT,
    TEXT,
    Announce,
    Encoder,
    Progress,
    Report,
    Task,
    TaskScore,
    Vectors,
    no_progress,
    require_known,
    silent,
)
from distill.evaluation.encoders import CachedEncoder
from distill.evaluation.retrieval import Retrieval
from distill.evaluation.roles import (
    MODEL_ROLES,
    SpaceEncoder,
    TeacherSource,
    model_encoders,
    require_comparable,
    require_teacher_space,
    run_record,
    teacher_encoders,
)
from distill.evaluation.vectors import TaskVectors

if TYPE_CHECKING:
    from teacher_cache.teachers import TeacherOptions


# The nine tasks of the TALAS table: name -> (kind of task, domain).
NINE: dict[str, tuple[str, str]] = {
    "banking77": ("classification", "out"),
    "emotion": ("classification", "in"),
    "tweet": ("classification", "out"),
    "mrpc": ("pairs", "out"),
    "scitail": ("pairs", "out"),
    "wic": ("pairs", "in"),
    "sick": ("sts", "out"),
    "sts12": ("sts", "out"),
    "stsb": ("sts", "in"),
}


def nine_tasks(data: Path, names: Sequence[str] | None = None, *, split: str = "test") -> list[Task]:
    """The nine tasks, or those named, over the files in `data`; "package.module:Class" names another task class.

    Choose models on `split` "validation". The validation files of banking77 and tweet are part of their training
    files: scores on them say nothing.
    """
    data = Path(data)
    tasks = []
    for name in NINE if names is None else names:
        if ":" not in name:
            require_known([name], (*NINE, "package.module:Class"), "unknown task")
        kind, domain = NINE.get(name, (name, "other"))
        tasks.append(load_task(kind)(name.rpartition(":")[2], data, domain=domain, split=split))
    missing = [path.name for task in tasks for path in task.files() if not path.is_file()]
    if missing and not data.is_dir():
        raise EvaluationError(f"{data}: no such folder; name the one with the tasks' files")
    if missing:
        raise EvaluationError(f"{data}: missing {', '.join(missing)}; put the files there, or name the tasks to run")
    return tasks


def evaluate(
    model: "str | Path | TeacherOptions | Encoder",
    tasks: Sequence[Task | str] | None = None,
    data: str | Path | None = None,
    *,
    split: str = "test",
    names: Sequence[str] | None = None,
) -> Report:
    """Score a model on tasks.

    Args:
        model: a run folder, model folder or hub id, which encodes in float32, without normalization; `TeacherOptions`;
            or an object whose `encode(texts)` returns `(n, d)` vectors, such as a `SentenceTransformer`.
        tasks: `Task` objects, and names of the nine tasks; None is all nine.
        data: folder of the nine tasks' files.
        split: "validation" or "test"; of the nine tasks.
        names: of the nine tasks, besides those in `tasks`.

    Raises:
        TypeError: `model` cannot encode, or `tasks` or `names` is not a list of these.
        EvaluationError, TeacherError: no task is given, or a file or the model is missing.
    """
    from teacher_cache.teachers.base import TeacherOptions

    if isinstance(tasks, str | Task) or isinstance(names, str):
        raise TypeError("`tasks` and `names` must be lists, such as ['stsb']")
    if isinstance(model, str | Path):
        model = TeacherOptions(model=str(model), dtype="float32")
    if not isinstance(model, TeacherOptions) and (isinstance(model, type) or not hasattr(model, "encode")):
        found = type(model).__name__
        raise TypeError(
            f"`model` is a {found}; expected a folder, a hub id, TeacherOptions, or an object with `encode`"
        )
    listed = [*(tasks or ()), *(names or ())]
    for task in listed:
        if not isinstance(task, str | Task):
            raise TypeError(f"`tasks` has a {type(task).__name__}; expected Task objects and names of the nine tasks")
    named = None if tasks is None and names is None else [task for task in listed if isinstance(task, str)]
    nine: list[Task] = []
    if named is None or named:
        if data is None:
            raise EvaluationError("`data` is missing: name the folder of the nine tasks' files, or give Task objects")
        nine = nine_tasks(Path(data), named, split=split)
    remaining = iter(nine)
    chosen = nine if named is None else [next(remaining) if isinstance(task, str) else task for task in listed]
    if isinstance(model, TeacherOptions):
        return evaluate_model(model, tasks=chosen)
    # Not the teacher's roles: a task that compares with a teacher is an error.
    return Evaluator(chosen)(dict.fromkeys((TEXT, QUERY, DOCUMENT), model), type(model).__name__)


def evaluate_model(
    options: "TeacherOptions",
    data: Path | None = None,
    *,
    names: Sequence[str] | None = None,
    tasks: Sequence[Task] = (),
    cache: Path | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    teacher: TeacherSource | None = None,
    mteb: Sequence[str] = (),
    announce: Announce = silent,
    progress: Progress = no_progress,
) -> Report:
    """Score a model on the nine tasks and any others, with its own pooling, prompts and maximum length.

    Unless `options.normalize` is set, vectors are taken before any normalization: the published protocol trains its
    classifiers on those, and cosines do not change.

    Args:
        tasks: further ones, such as those of `retrieval_tasks`.
        cache: where the model's own vectors are stored, so that a second evaluation encodes nothing; None stores none.
        teacher: source of the teacher's vectors, if a task needs them; by default, for a run's student, the run's
            cache and space.
        mteb: tasks of the MTEB library, as `run_mteb` takes them.
        announce: called with how each role is encoded, and with what is skipped.
        progress: called with every phase: "loading model", "encoding texts (...)", "scoring tasks".

    Raises:
        EvaluationError, TeacherError, CacheError: a file, the model or a teacher's vector is missing, or the teacher is
            not the student's.
    """
    chosen = [*([] if data is None else nine_tasks(data, names)), *tasks]
    if not (chosen or mteb) or (data is None and names is not None):
        raise EvaluationError(
            "nothing to evaluate on: name the folder of the nine tasks' files (`data`), one in BEIR's layout "
            "(`retrieval`), a file of your own tasks (`tasks_file`), texts (`texts`), or a task of MTEB (`mteb`)"
        )
    prompts = {"query_prompt": query_prompt, "document_prompt": document_prompt}
    report = Report(model=options.model, tasks={}, texts=0, seconds=0.0, encode_seconds=0.0)
    if chosen:
        report = _evaluate(options, chosen, cache, prompts, teacher or TeacherSource(), announce, progress)
    if mteb:
        from distill.evaluation.mteb_tasks import run_mteb

        start = time.perf_counter()
        encoder_of = None if cache is None else partial(CachedEncoder, cache, None, announce=announce)
        scores = run_mteb(options, mteb, **prompts, encoder_of=encoder_of, progress=progress)
        seconds = report.seconds + time.perf_counter() - start
        report = replace(report, tasks={**report.tasks, **scores}, seconds=seconds)
    return report


def _evaluate(
    options: "TeacherOptions",
    tasks: Sequence[Task],
    cache: Path | None,
    prompts: Mapping[str, str | None],
    teacher: TeacherSource,
    announce: Announce,
    progress: Progress,
) -> Report:
    evaluator = Evaluator(tasks)
    asymmetric = any(isinstance(task, Retrieval) and task.mode == "asymmetric" for task in tasks)
    if asymmetric:
        require_teacher_space(options.model)
    roles = {role for task in tasks for _, role in task.inputs()}
    own = model_encoders(options, roles, cache=cache, **prompts, announce=announce)
    teachers: dict[str, SpaceEncoder] = {}
    if roles & MODEL_ROLES.keys():
        record = run_record(options.model)
        teachers = teacher_encoders(teacher if record is None else teacher.for_run(record), roles, announce)
    if asymmetric:
        require_comparable(options.model, own[QUERY].space, teachers[TEACHER_DOCUMENT].space)
    if TEACHER in roles and TEXT in roles:
        from distill.evaluation.label_free import without_approximation

        try:
            require_teacher_space(options.model)
            require_comparable(options.model, own[TEXT].space, teachers[TEACHER].space)
        except EvaluationError as error:
            evaluator = Evaluator(without_approximation(tasks, str(error), announce))
    # The teacher first: its missing vectors raise before the model has encoded anything.
    return evaluator({**teachers, **own}, options.model, progress)


class Evaluator:
    """Scores encoders on a fixed list of tasks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        names = [task.name for task in tasks]
        if not names:
            raise EvaluationError("nothing to evaluate: the list of tasks is empty")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise EvaluationError(f"every task needs a name of its own; two are called {', '.join(twice)}")
        self.tasks = list(tasks)

    def __call__(
        self, encoders: Encoder | Mapping[str, Encoder], model: str = "", progress: Progress = no_progress
    ) -> Report:
        """Encode every distinct text once with each encoder, then score each task.

        Args:
            encoders: one for all roles, or by role; roles that share an encoder share its vectors.
        """
        start = time.perf_counter()
        by_role = encoders if isinstance(encoders, Mapping) else dict.fromkeys(ROLES, encoders)
        inputs = {task.name: task.inputs() for task in self.tasks}
        encoding = time.perf_counter()
        vectors = TaskVectors(by_role, inputs, progress)
        encode_seconds = time.perf_counter() - encoding
        scores = {}
        for number, task in enumerate(self.tasks):
            progress("scoring tasks", number, len(self.tasks), task.name)
            scores[task.name] = _score(task, vectors.of_task(task.name))
        progress("scoring tasks", len(self.tasks), len(self.tasks), "")
        return Report(
            model=model,
            tasks=scores,
            texts=vectors.texts,
            seconds=time.perf_counter() - start,
            encode_seconds=encode_seconds,
        )


def _score(task: Task, vectors: Vectors) -> TaskScore:
    start = time.perf_counter()
    figures = dict(task.score(vectors))
    score = figures.pop(task.metric, math.nan)
    if not math.isfinite(score):
        raise EvaluationError(f"task {task.name!r}: {task.metric} is not finite: {score}")
    return TaskScore(
        metric=task.metric,
        score=score,
        domain=task.domain,
        extra=figures,
        examples=task.examples(vectors),
        seconds=time.perf_counter() - start,
    )
