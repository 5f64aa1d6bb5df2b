"""What a training step will take, foretold without the device it will run on."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.config import RunConfig
    from distill.plan.forecast import Plan

__all__ = ["plan"]


def plan(
    config: "RunConfig",
    *,
    length: int | None = None,
    teacher_dim: int | None = None,
    teacher: str | None = None,
    attention: str = "fused",
    device_memory: int | None = None,
    records: int | None = None,
    suggest: bool = True,
    announce: Callable[[str], None] = lambda line: None,
) -> "Plan":
    """Foretell memory and time of a step of `config`; no weights are loaded, nothing is written.

    Args:
        length: tokens of every text, specials included; None takes the corpus's own lengths.
        teacher_dim: width of the teacher's vectors; None takes the space's, or the online teacher's.
        teacher: model folder or shape that is asked at every step on the same device; None is a cached teacher.
        attention: on GPUs: "fused", as torch's kernels compute it, or "eager", which keeps every attention map.
        device_memory: bytes that a step should fit into; None is the smallest GPU of the table.
        records: that an epoch has; None takes the corpus's.
        suggest: where it does not fit, look for what would make it.
        announce: is told what is being followed.

    Raises:
        KnownError: settings that no run can have, or a model, cache or length that is not there.
    """
    from distill.plan.forecast import forecast

    return forecast(
        config,
        length=length,
        teacher_dim=teacher_dim,
        teacher=teacher,
        attention=attention,
        device_memory=device_memory,
        records=records,
        suggest=suggest,
        announce=announce,
    )
