"""Unsupervised SimCSE (Gao et al., EMNLP 2021): two dropout views of a text attract, other texts repel."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.options import check_positive


def info_nce(first: Tensor, second: Tensor, temperature: float, text_ids: Tensor | None = None) -> Tensor:
    """`mean_i -log softmax_j(cos(first_i, second_j) / temperature)[i]`: first to second, within the batch.

    Args:
        first, second: `(B, d)`, row i of both from the same text; computed in float32, outside autocast.
        temperature: > 0.
        text_ids: `(B,)`; where given, another row of the same text is no negative and leaves the sum. None
            keeps every other row as a negative, as the published codes do.
    """
    with torch.autocast(first.device.type, enabled=False):
        logits = unit(first) @ unit(second).T / temperature
        if text_ids is not None:
            same_text = text_ids[:, None] == text_ids[None, :]
            logits = logits.masked_fill(same_text.fill_diagonal_(False), -math.inf)
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def contrast_views(student: StudentOutput, teacher: TeacherTargets, temperature: float, *, mask: bool) -> Tensor:
    """`info_nce` from the first to the second view of the last layer; `mask` takes equal texts for no negatives."""
    text_ids = teacher.text_ids if mask else None
    return info_nce(student.view(0)[-1], student.view(1)[-1], temperature, text_ids)


class SimCSE(Objective):
    """`info_nce` between two views of the last layer; the teacher's vectors are not looked at.

    It is the control without a teacher. The paper trains through an extra tanh layer on [CLS] and drops it
    afterwards; here the pooled state itself is trained, so that what is trained is what is exported.
    """

    needs = Needs(views=2)
    terms = ("simcse",)
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {},
        "official": {"mask_duplicates": False},
    }

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        temperature: float = 0.05,
        mask_duplicates: bool = True,
    ) -> None:
        """See `info_nce`; `student` and `teacher` are part of every objective's signature and unused.

        Raises:
            ConfigError: `temperature` is not a positive number.
        """
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature
        self.mask_duplicates = mask_duplicates

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The one term, "simcse"; none where there is no second view."""
        if student.views < 2:
            return {}
        return {"simcse": contrast_views(student, teacher, self.temperature, mask=self.mask_duplicates)}
