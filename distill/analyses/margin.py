"""Robustness margin: how large the approximation error of a student may be at the score of its teacher.

Of every checkpoint c, with y(x) the teacher's and p(x) the student's unit vectors in the teacher's space of n held-out
texts x:

    error(c) = mean over x of ||y(x) - p(x)||          = mean of sqrt(2 - 2 cos), in [0, 2]
    score(c) = nDCG@10 with the teacher's documents and the student's queries, or Spearman over STS tasks
    margin   = (score of the teacher - intercept) / slope       of the least-squares line score ~ error

the error at which the line reaches the teacher's score (LEAF, section "Robustness"). If it is above 0, vectors need not
equal the teacher's to be as good for the task. As published, checkpoints of the first epoch of each cycle of the
learning rate are excluded from the fit; `skipped_epochs` excludes fewer if an epoch is most of a run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.analyses.base import Analysis, float_option
from distill.analyses.trained_run import TrainedRun
from distill.errors import EvaluationError, NeedsNotMet
from distill.evaluation.base import QUERY, TEACHER_DOCUMENT, TEXT, Encoder, Report, Task, unit_rows
from distill.evaluation.evaluator import NINE, Evaluator, nine_tasks
from distill.evaluation.retrieval import retrieval_tasks
from distill.training.arguments import LINEAR_CYCLES
from distill.training.checkpoints import STATE, checkpoint_step
from distill.training.trainer import Distillation, ProjectedStudent
from teacher_cache.errors import optional_import

# Fewest checkpoints that a line is fitted to.
FEWEST_POINTS = 3


class Margin(Analysis):
    """Fits score against approximation error over the checkpoints of a run that kept many."""

    name: ClassVar[str] = "margin"
    needs_tasks: ClassVar[bool] = True

    def __init__(self, *, skipped_epochs: float = 1.0, **options: Any) -> None:
        """
        Args:
            skipped_epochs: epochs at the beginning of each cycle whose checkpoints are excluded.
        """
        super().__init__(**options)
        self.skipped_epochs = float_option("margin.skipped_epochs", skipped_epochs, least=0)

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """`points`, `fit`, `teacher_score`, `margin` and, if there is no margin, the `reason`."""
        rows = run.without_quarantined(run.held_out_rows())
        if not len(rows):
            raise EvaluationError(
                f"{run.folder} has no held-out texts to measure the error on; train with data.held_out above 0 on a "
                "corpus of at least 256 distinct texts"
            )
        texts, teacher = run.cache.texts(rows), run.space.gather(rows)
        checkpoints = run.checkpoints()
        in_teacher_space(run.load(checkpoints[0]))  # raises before the teacher encodes anything
        scores = _Scores(self, run)
        teacher_score = scores.teacher()
        points = []
        for number, checkpoint in enumerate(checkpoints):
            self.progress("scoring checkpoints", number, len(checkpoints), checkpoint.name)
            student = in_teacher_space(run.load(checkpoint))
            epoch, skipped = self._place(checkpoint, run)
            point = {
                "step": checkpoint_step(checkpoint),
                "epoch": round(epoch, 4),
                "error": approximation_error(student.encode(texts), teacher),
                "score": scores.student(student),
                "fitted": not skipped,
            }
            self.announce(f"step {point['step']:,}: error {point['error']:.4f}, {scores.metric} {point['score']:.2f}")
            points.append(point)
        exported = (run.record.get("exported") or {}).get("step")
        final = next((point for point in points if point["step"] == exported), points[-1])
        return {
            "metric": scores.metric,
            "task": scores.task,
            "texts": len(rows),
            "teacher_prompt": scores.teacher_prompt,
            "skipped_epochs": self.skipped_epochs,
            **fit_margin(points, teacher_score),
            **{f"student_{key}": final[key] for key in ("step", "error", "score")},
        }

    def _place(self, checkpoint: Path, run: TrainedRun) -> tuple[float, bool]:
        """Epochs done at a checkpoint, and whether it is excluded from the fit."""
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        step, steps, epoch = state["global_step"], state["max_steps"], state["epoch"]
        training = run.config.training
        cycles = training.cycles if training.lr_scheduler_type == LINEAR_CYCLES else 1
        warmup = int(training.warmup_ratio * steps)
        return epoch, in_skipped_epochs(step, steps, step / epoch, cycles, warmup, self.skipped_epochs)

    @staticmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        what = f"{result['metric']} on {result['task']}"
        student = (
            f"the student of step {result['student_step']:,} has an error of {result['student_error']:.3f} and "
            f"{result['student_score']:.2f} {what}"
        )
        if result["margin"] is None:
            return f"No margin: {result['reason']}; {student}, the teacher {result['teacher_score']:.2f}."
        fit, fitted = result["fit"], sum(point["fitted"] for point in result["points"])
        reached = (
            f"the line reaches the teacher's {result['teacher_score']:.2f} at an error of {result['margin']:.3f}"
            if result["margin"] > 0
            else f"even at no error the line stays below the teacher's {result['teacher_score']:.2f}: no margin"
        )
        return (
            f"Over {fitted} checkpoints each 0.01 of error costs {-fit['slope'] / 100:.2f} {what} "
            f"(r2 {fit['r2']:.2f}); {reached}; {student}."
        )


def in_teacher_space(model: Distillation) -> ProjectedStudent:
    """The student with vectors in its teacher's space, projected if necessary."""
    projection = model.objective.projection()
    if projection is None and not model.objective.in_teacher_space:
        raise NeedsNotMet(
            f"the margin needs a student in its teacher's space, and objective {type(model.objective).__name__} "
            "neither learns a projection into it nor trains the student there; use one that does, such as leaf"
        )
    return ProjectedStudent(model.student, projection)


def approximation_error(student: npt.NDArray[Any], teacher: npt.NDArray[Any]) -> float:
    """Mean distance, in [0, 2], of `(n, d)` vectors of the same texts, each scaled to length 1."""
    return float(np.linalg.norm(unit_rows(student) - unit_rows(teacher), axis=1).mean())


def fit_margin(points: Sequence[Mapping[str, Any]], teacher_score: float) -> dict[str, Any]:
    """The line through the points that are `fitted`, and where it reaches the teacher's score.

    Returns:
        `points`, `fit` (`slope`, `intercept`, `r2`, None if there is no line), `teacher_score`, `margin`, and with a
        `margin` of None the `reason`.
    """
    with optional_import("fitting the margin"):
        from scipy.stats import linregress
    found: dict[str, Any] = {"points": list(points), "fit": None, "teacher_score": teacher_score, "margin": None}
    fitted = [(point["error"], point["score"]) for point in points if point["fitted"]]
    if len(fitted) < FEWEST_POINTS:
        return found | {
            "reason": f"{len(fitted)} of {len(points)} checkpoints are after the skipped epochs, and a line needs "
            f"{FEWEST_POINTS}: keep more with training.save_steps and .save_total_limit, or skip less with "
            "margin.skipped_epochs"
        }
    errors, scores = zip(*fitted, strict=True)
    if len(set(errors)) < 2:
        return found | {"reason": f"all {len(fitted)} checkpoints have the same error, {errors[0]:.4f}"}
    line = linregress(errors, scores)
    # The correlation of equal scores is undefined.
    r2 = float(line.rvalue**2) if len(set(scores)) > 1 else 0.0
    found["fit"] = {"slope": float(line.slope), "intercept": float(line.intercept), "r2": r2}
    if line.slope >= 0:
        return found | {"reason": "the score does not fall with a growing error"}
    return found | {"margin": float((teacher_score - line.intercept) / line.slope)}


class _Scores:
    """Scores of the teacher, and of students with the teacher's documents, on the task of a margin."""

    def __init__(self, analysis: Margin, run: TrainedRun) -> None:
        # Queries too are encoded as in training: those of a student without error are equal.
        self._teacher = analysis.teacher_encoder(run)
        self.teacher_prompt = self._teacher.space.prompt
        if analysis.retrieval is not None:
            self._student_tasks, self._teacher_tasks = (
                [task] for task in retrieval_tasks(analysis.retrieval, ["asymmetric", "teacher"])
            )
        else:
            self._student_tasks = self._teacher_tasks = _sts_tasks(analysis.data)
        self.metric = self._student_tasks[0].metric
        self.task = ", ".join(task.name for task in self._student_tasks)

    def teacher(self) -> float:
        return _mean(Evaluator(self._teacher_tasks)(self._teacher))

    def student(self, student: ProjectedStudent) -> float:
        encoders: dict[str, Encoder] = {TEXT: student, QUERY: student, TEACHER_DOCUMENT: self._teacher}
        return _mean(Evaluator(self._student_tasks)(encoders))


def _sts_tasks(data: Path | None) -> list[Task]:
    names = [name for name, (kind, _) in NINE.items() if kind == "sts"]
    present = [name for name in names if data is not None and (data / f"{name}_test.csv").is_file()]
    if data is None or not present:
        raise EvaluationError(f"{data}: no {', '.join(f'{name}_test.csv' for name in names)}; at least one is needed")
    return nine_tasks(data, present)


def _mean(report: Report) -> float:
    return fmean(task.score for task in report.tasks.values())


def in_skipped_epochs(
    step: int, steps: int, steps_an_epoch: float, cycles: int = 1, warmup: int = 0, skipped_epochs: float = 1.0
) -> bool:
    """Whether the step, from 1, is in the first epochs of a cycle; the first cycle starts with the warm-up."""
    length = (steps - warmup) / cycles
    # A step that ends a cycle belongs to it.
    done = max(0, int(np.ceil((step - warmup) / length)) - 1) if length > 0 else 0
    begun = warmup + done * length if done else 0
    return step - begun <= skipped_epochs * steps_an_epoch + 1e-6
