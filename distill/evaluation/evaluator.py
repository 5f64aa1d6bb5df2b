"""Runs tasks on one encoder, encoding every distinct text once, and names the nine tasks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation import load_task
from distill.evaluation.base import QUERY, ROLES, TEACHER, TEACHER_DOCUMENT, TEXT, Encoder, Report, Task, TaskScore
from distill.evaluation.encoders import CachedEncoder, encode_all
from distill.evaluation.retrieval import Retrieval
from distill.evaluation.roles import (
    AS_MODEL,
    SpaceEncoder,
    TeacherSource,
    model_encoders,
    require_one_space,
    require_teacher_space,
    run_record,
    teacher_encoders,
)

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
    """The nine tasks, or those named, over the files in `data`; "package.module:Class" names one's own.

    "validation" as `split` is for choosing among models. Those of banking77 and tweet are taken from their
    training files: they tell nothing.

    Raises:
        EvaluationError: an unknown name, or files that are missing; the message lists every one.
        MissingDependency: scikit-learn or SciPy is absent.
    """
    data = Path(data)
    tasks = []
    for name in NINE if names is None else names:
        if name not in NINE and ":" not in name:
            nearest = get_close_matches(name, NINE, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise EvaluationError(
                f"no task is called {name!r}: {hint}Known: {', '.join(NINE)}, or package.module:Class"
            )
        kind, domain = NINE.get(name, (name, "other"))
        own_name = name.rpartition(":")[2]
        tasks.append(load_task(kind)(own_name, data, domain=domain, split=split))
    missing = [path.name for task in tasks for path in task.files() if not path.is_file()]
    if missing and not data.is_dir():
        raise EvaluationError(f"{data}: there is no such folder; name the one that holds the tasks' files")
    if missing:
        raise EvaluationError(f"{data}: missing {', '.join(missing)}; put the files there, or name the tasks to run")
    return tasks


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
    announce: Callable[[str], None] = lambda line: None,
) -> Report:
    """Score a model on the nine tasks and any others, with its own pooling, prompts and maximum length.

    A model is asked exactly as a teacher is: a finished student can be either. Unless `options.normalize` says
    otherwise, its vectors are taken as its pooling gives them, before any normalisation: the published protocol
    trains its classifiers on those, and cosines do not change.

    Args:
        options: which model and how it is asked; of a run folder `final/` is scored.
        data: folder of the nine tasks' files; None runs none of the nine.
        names: of the nine; None is all.
        tasks: further ones, such as `retrieval_tasks` gives.
        cache: where the model's own vectors are kept, so that a second evaluation encodes nothing; None keeps none.
        query_prompt, document_prompt: None takes those that the model names itself.
        teacher: where the teacher's vectors come from, if a task asks for any; of a run's student, its own cache and
            space unless said otherwise.
        mteb: tasks of the MTEB library, as `run_mteb` takes them.
        announce: is told how each role is asked, before it is.

    Raises:
        EvaluationError, TeacherError, CacheError: a file, the model or a teacher's vector is missing, or the teacher is
            another than it has to be.
    """
    chosen = [*([] if data is None else nine_tasks(data, names)), *tasks]
    if not (chosen or mteb) or (data is None and names is not None):
        raise EvaluationError(
            "nothing to evaluate on: name the folder of the nine tasks' files (--data), one in BEIR's layout "
            "(--retrieval), a file of your own tasks (--tasks-file), texts (--texts), or a task of MTEB (--mteb)"
        )
    prompts = {"query_prompt": query_prompt, "document_prompt": document_prompt}
    report = Report(model=options.model, tasks={}, texts=0, seconds=0.0, encode_seconds=0.0)
    if chosen:
        report = _evaluated(options, chosen, cache, prompts, teacher or TeacherSource(), announce)
    if mteb:
        from distill.evaluation.mteb_tasks import run_mteb

        start = time.perf_counter()
        kept = None if cache is None else partial(CachedEncoder, cache, None, announce=announce)
        scores = run_mteb(options, mteb, **prompts, encoder_of=kept, announce=announce)
        seconds = report.seconds + time.perf_counter() - start
        report = replace(report, tasks={**report.tasks, **scores}, seconds=seconds)
    return report


def _evaluated(
    options: "TeacherOptions",
    chosen: Sequence[Task],
    cache: Path | None,
    prompts: Mapping[str, str | None],
    teacher: TeacherSource,
    announce: Callable[[str], None],
) -> Report:
    """The scores of one model on these tasks; see `evaluate_model`."""
    evaluator = Evaluator(chosen)
    asymmetric = any(isinstance(task, Retrieval) and task.mode == "asymmetric" for task in chosen)
    if asymmetric:
        require_teacher_space(options.model)
    needed = {role for task in chosen for _, role in task.inputs()}
    own = model_encoders(options, needed, cache=cache, **prompts, announce=announce)
    theirs: dict[str, SpaceEncoder] = {}
    if needed & AS_MODEL.keys():
        record = run_record(options.model)
        theirs = teacher_encoders(teacher if record is None else teacher.of_run(record), needed, announce)
    if asymmetric:
        require_one_space(options.model, own[QUERY].space, theirs[TEACHER_DOCUMENT].space)
    if TEACHER in needed and TEXT in needed:
        from distill.evaluation.label_free import without_approximation

        try:
            require_teacher_space(options.model)
            require_one_space(options.model, own[TEXT].space, theirs[TEACHER].space)
        except EvaluationError as error:
            evaluator = Evaluator(without_approximation(chosen, str(error), announce))
    return evaluator({**theirs, **own}, options.model)  # a missing vector is noticed before anything is encoded


class Evaluator:
    """Scores encoders on a fixed list of tasks.

    Raises:
        EvaluationError: no task, or two of one name.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        names = [task.name for task in tasks]
        if not names:
            raise EvaluationError("nothing to evaluate: the list of tasks is empty")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise EvaluationError(f"tasks are told apart by name, and two are called {', '.join(twice)}")
        self.tasks = list(tasks)

    def __call__(self, encoders: Encoder | Mapping[str, Encoder], model: str = "") -> Report:
        """Encode every distinct text once by each encoder, in one float32 matrix, then score each task on its rows.

        Args:
            encoders: one for every role, or by role; roles that share an encoder share its vectors.
            model: what the report calls the encoder.

        Raises:
            EvaluationError: a file is missing or malformed, a role has no encoder, or an encoder gives NaN,
                infinity or a wrong shape.
        """
        start = time.perf_counter()
        by_role = encoders if isinstance(encoders, Mapping) else dict.fromkeys(ROLES, encoders)
        # Encoder by identity -> row of each of its texts.
        rows: dict[int, dict[str, int]] = {id(encoder): {} for encoder in by_role.values()}
        for task in self.tasks:
            for text, role in task.inputs():
                if role not in by_role:
                    raise EvaluationError(
                        f"task {task.name!r} needs vectors of role {role!r}, and no encoder gives them"
                    )
                own = rows[id(by_role[role])]
                own.setdefault(text, len(own))
        encoding = time.perf_counter()
        kept = {id(encoder): encoder for encoder in by_role.values()}
        matrices = {key: encode_all(kept[key], list(own)) for key, own in rows.items() if own}
        encode_seconds = time.perf_counter() - encoding
        self._refuse_non_finite(by_role, matrices, rows)
        lookups = {role: (matrices[key], rows[key]) for role, e in by_role.items() if (key := id(e)) in matrices}
        scores = {task.name: _scored(task, _Lookup(task.name, lookups)) for task in self.tasks}
        return Report(
            model=model,
            tasks=scores,
            texts=len(set().union(*rows.values())),
            seconds=time.perf_counter() - start,
            encode_seconds=encode_seconds,
        )

    def _refuse_non_finite(
        self,
        by_role: Mapping[str, Encoder],
        matrices: Mapping[int, npt.NDArray[np.float32]],
        rows: Mapping[int, Mapping[str, int]],
    ) -> None:
        bad = {key: set(np.flatnonzero(~np.isfinite(m).all(axis=1)).tolist()) for key, m in matrices.items()}
        if any(bad.values()):
            listed = []
            for task in self.tasks:
                asked = {(id(by_role[role]), text) for text, role in task.inputs()}
                count = sum(rows[key][text] in bad[key] for key, text in asked)
                listed += [f"{task.name} {count}"] if count else []
            raise EvaluationError(
                f"{sum(map(len, bad.values()))} of {sum(map(len, rows.values()))} texts got vectors with NaN or "
                f"infinity (by task: {', '.join(listed)}); encode in float32, or check the model's weights"
            )


@dataclass(frozen=True)
class _Lookup:
    """The vectors of a task's inputs, out of the matrices of all."""

    task: str
    by_role: Mapping[str, tuple[npt.NDArray[np.float32], Mapping[str, int]]]

    def __call__(self, texts: Sequence[str], role: str = TEXT, /) -> npt.NDArray[np.float32]:
        try:
            matrix, rows = self.by_role[role]
            return matrix[[rows[text] for text in texts]]
        except KeyError as error:
            raise EvaluationError(
                f"task {self.task!r} asks for the vector of a {role} that its inputs() do not list: {error}"
            ) from error


def _scored(task: Task, vectors: _Lookup) -> TaskScore:
    start = time.perf_counter()
    figures = dict(task.score(vectors))
    score = figures.pop(task.metric, math.nan)
    if not math.isfinite(score):
        raise EvaluationError(f"task {task.name!r} gave no finite {task.metric}: {score}")
    return TaskScore(
        metric=task.metric,
        score=score,
        domain=task.domain,
        extra=figures,
        examples=task.examples(vectors),
        seconds=time.perf_counter() - start,
    )
