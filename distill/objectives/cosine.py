"""Cosine: the projected vector of the student points where the teacher's does.

    loss = mean_i (1 - cos(e_i W, t_i))

e is the last layer's `(B, d_s)` pooled state, t the teacher's vector, W a bias-free `(d_s, d_T)` head, `projection()`;
with `head="identity"` the student's own vectors are trained. It is the anchor (TAMD) of TALAS (arXiv 2606.21851) for
one layer and without its other terms, and half of the squared distance of LEAF (arXiv 2509.12539): a text is encoded
once, and no term compares texts, so batches may be split without changing the loss.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.heads import linear_heads, make_heads


class Cosine(Objective):
    """The projected vector of the student points where the teacher's does (TALAS's anchor alone).

    The term is "cosine".
    """

    terms = ("cosine",)
    presets: ClassVar[dict[str, dict[str, object]]] = {}

    def __init__(
        self, student: StudentShape, teacher: TeacherShape, *, head: str = "learned", head_init_std: float = 1e-3
    ) -> None:
        """Create the head.

        Args:
            head: "learned" projects the student's vector into the teacher's space; "identity" trains the vector
                itself (equal widths only); "auto" is "identity" for equal widths, else "learned".
            head_init_std: standard deviation of the head's initial values.
        """
        super().__init__()
        self.head = make_heads(1, student, teacher, head, head_init_std)[0]
        self.in_teacher_space = self.projection() is None
        self.last_layer = student.layers

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The term, a float32 scalar, with or without autocast."""
        states = student.view(0)[-1]
        with torch.autocast(states.device.type, enabled=False):
            cosines = (unit(self.head(states.float())) * unit(teacher.vectors.detach())).sum(-1)
        return {"cosine": (1 - cosines).mean()}

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight of the head; None if none is learned."""
        return next(self.head.parameters(), None)

    def linear_heads(self) -> dict[int, nn.Linear]:
        return linear_heads([self.head], self.last_layer)
