"""What objectives on token states share."""

from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import StudentOutput, TeacherShape, TeacherTargets, TokenStates, unit

REDUCTIONS = ("sum_dim", "mean")


def direction_loss(first: Tensor, second: Tensor, reduction: str, keep: Tensor | None = None) -> Tensor:
    """`mean |n(first) - n(second)|^2` over rows, float32; n scales to length 1, a zero row stays zero.

    Args:
        first, second: `(..., d)`.
        reduction: "sum_dim" is 2 - 2 cos of a row; "mean" divides that by d, as a mean squared error does.
        keep: `(...)` bool, the rows that count; the loss is 0 if none does.
    """
    distance = (unit(first) - unit(second)).square()
    rows = distance.sum(-1) if reduction == "sum_dim" else distance.mean(-1)
    if keep is None:
        return rows.mean()
    return (rows * keep).sum() / keep.sum().clamp(min=1)


def token_width(teacher: TeacherShape, method: str) -> int:
    """Width of the teacher's token states."""
    if teacher.token_dim is None:
        raise ConfigError(
            f"objective {method} compares tokens, but the cache holds only sentence vectors of the teacher; add token "
            "states: `tcache build --columns vectors,tokens`"
        )
    return teacher.token_dim


def token_states(student: StudentOutput, teacher: TeacherTargets, method: str) -> tuple[TokenStates, TokenStates]:
    """Token states of student and teacher."""
    if student.tokens is None or teacher.tokens is None:
        raise ConfigError(f"objective {method} was given no token states, of the student or of the teacher")
    return student.tokens, teacher.tokens
