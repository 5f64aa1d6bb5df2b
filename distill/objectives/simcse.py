"""Unsupervised SimCSE (Gao et al., EMNLP 2021): contrast of two dropout views of a text with the rest of the batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.options import check_positive


def info_nce(first: Tensor, second: Tensor, temperature: float, text_ids: Tensor | None = None) -> Tensor:
    """`mean_i -log softmax_j(cos(first_i, second_j) / temperature)[i]`: InfoNCE with in-batch negatives.

    Args:
        first, second: `(B, d)`, row i of both from the same text; computed in float32, without autocast.
        temperature: > 0.
        text_ids: `(B,)`; other rows of the same text are not negatives. None makes every other row a negative, as
            the published codes do.
    """
    with torch.autocast(first.device.type, enabled=False):
        logits = unit(first) @ unit(second).T / temperature
        if text_ids is not None:
            same_text = text_ids[:, None] == text_ids[None, :]
            logits = logits.masked_fill(same_text.fill_diagonal_(False), -math.inf)
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


@dataclass(frozen=True)
class SimCSETerm:
    """The term "simcse" of an objective: `weight * info_nce` of the last layer, view 1 to view 2.

    Attributes:
        mask_duplicates: other rows of the same text are not negatives.
    """

    weight: float
    temperature: float
    mask_duplicates: bool

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    @property
    def views(self) -> int:
        """Views that the term needs."""
        return 2 if self.weight else 1

    def __call__(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The term; empty if the weight is 0 or there is only one view."""
        if not self.weight or student.views < 2:
            return {}
        text_ids = teacher.text_ids if self.mask_duplicates else None
        return {"simcse": self.weight * info_nce(student.view(0)[-1], student.view(1)[-1], self.temperature, text_ids)}


class SimCSE(Objective):
    """Contrast of two dropout views of a text, without a teacher (SimCSE, arXiv 2104.08821).

    The paper trains through an extra tanh layer on [CLS] and drops it afterwards; here the pooled state itself is
    trained, so that what is trained is what is exported.
    """

    needs = Needs(views=2)
    terms = ("simcse",)
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {"paper": {}, "official": {"mask_duplicates": False}}

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        temperature: float = 0.05,
        mask_duplicates: bool = True,
    ) -> None:
        """See `info_nce`; `student` and `teacher` are unused."""
        super().__init__()
        self.simcse = SimCSETerm(1.0, temperature, mask_duplicates)

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The term "simcse"; empty without a second view."""
        return self.simcse(student, teacher)
