"""Heads that map the student's pooled states into the teacher's space."""

from collections.abc import Iterable

from torch import nn

from distill.errors import ConfigError
from distill.objectives.base import StudentShape, TeacherShape
from distill.objectives.options import check_choice, check_positive

HEADS = ("learned", "identity", "auto")


def make_heads(count: int, student: StudentShape, teacher: TeacherShape, head: str, init_std: float) -> nn.ModuleList:
    """`count` bias-free maps from `(.., d_s)` to `(.., d_T)`.

    Args:
        head: the option `head`: "learned"; "identity", which has no parameters; or "auto", identity if the widths are
            equal, else learned.
        init_std: the option `head_init_std`, the standard deviation of the initial values.

    Raises:
        ConfigError: an option is invalid, or the widths differ with "identity".
    """
    check_positive("head_init_std", init_std)
    check_choice("head", head, HEADS)
    equal = student.dim == teacher.dim
    if head == "identity" and not equal:
        raise ConfigError(
            f"objective option head: 'identity' needs equal widths; the student's is {student.dim} and the teacher's "
            f"{teacher.dim}"
        )
    learned = head == "learned" or (head == "auto" and not equal)
    heads = nn.ModuleList(
        nn.Linear(student.dim, teacher.dim, bias=False) if learned else nn.Identity() for _ in range(count)
    )
    for weight in heads.parameters():
        nn.init.normal_(weight, std=init_std)
    return heads


def linear_heads(heads: Iterable[nn.Module], first_layer: int) -> dict[int, nn.Linear]:
    """The learned ones of heads of successive layers, by layer."""
    return {layer: head for layer, head in enumerate(heads, first_layer) if isinstance(head, nn.Linear)}
