"""DistillCSE (Xu et al., Findings of EMNLP 2023): SimCSE, and the teacher's ranking of the batch for every text.

    loss = simcse_weight * SimCSE + distill_weight * distill

With z_i the head's output for view 1 of text i, S_ij = cos(z_i, z_j) and T_ij the cosines of the teacher's vectors:

    SimCSE  = `distill.objectives.simcse.info_nce` of the head's outputs, view 1 to view 2
    distill = mean_i -sum_{j != i} softmax_j(T_ij / teacher_temperature) log softmax_j(S_ij / student_temperature)

Of several teachers, cached as spaces of the same rows, T is the mean of their cosines.

Group-p shuffling. The teacher's order of texts with nearly equal similarity is mostly noise. In training, row i of T
is sorted from the most similar text down and cut where the cumulative sum of softmax_j(T_ij), without temperature,
passes p, 2p, ...; within each group the student's entries are permuted at random, so that their order is not learned.
In evaluation mode nothing is shuffled.

Differences from the published code, which follows the paper:
- It skips the diagonal as NaN in a sum over all; here it is excluded from both softmaxes and the mean.
- It keeps other rows of the same text, whose cosine of 1 takes nearly the whole softmax at a temperature of 0.0125.
  Here they are masked in both terms. Preset "official" keeps them.
- It shuffles with loops over rows and groups; here with one sort.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.objectives.base import (
    Needs,
    Objective,
    StudentOutput,
    StudentShape,
    TeacherShape,
    TeacherTargets,
    different_texts,
    unit,
)
from distill.objectives.options import check, check_choice, check_positive, check_weight, check_weights
from distill.objectives.simcse import info_nce

HEADS = ("mlp", "none")
# Replaces a masked cosine; finite, so that a batch of one text has no NaN.
MASKED = -1e9


class DistillCSE(Objective):
    """Contrast of two views, and the teacher's ranking of the batch (DistillCSE, arXiv 2310.13499).

    The terms are "simcse" and "distill"; a term of weight 0 is neither computed nor returned. The head is used only in
    training: the pooled state before it is evaluated and exported.
    """

    needs = Needs(views=2)
    terms = ("simcse", "distill")
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {"paper": {}, "official": {"mask_duplicates": False}}

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        simcse_weight: float = 1.0,
        distill_weight: float = 1.0,
        temperature: float = 0.05,
        student_temperature: float = 0.025,
        teacher_temperature: float = 0.0125,
        group_shuffle_p: float = 0.1,
        head: str = "mlp",
        mask_duplicates: bool = True,
    ) -> None:
        """Create the head; `teacher` is unused.

        Args:
            temperature: of SimCSE.
            student_temperature, teacher_temperature: of the softmaxes of "distill".
            group_shuffle_p: the teacher's probability in one group, 0 to 1; 0 disables shuffling.
            head: "mlp" is a linear layer of the student's width, initialized as in BERT, and tanh; "none" trains the
                pooled state itself.
            mask_duplicates: exclude other rows of the same text.
        """
        super().__init__()
        check_weights({"simcse_weight": simcse_weight, "distill_weight": distill_weight})
        check_positive("temperature", temperature)
        check_positive("student_temperature", student_temperature)
        check_positive("teacher_temperature", teacher_temperature)
        check_weight("group_shuffle_p", group_shuffle_p)
        check("group_shuffle_p", group_shuffle_p, "a number from 0 to 1", group_shuffle_p <= 1)
        check_choice("head", head, HEADS)

        self.simcse_weight, self.distill_weight = simcse_weight, distill_weight
        self.temperature = temperature
        self.student_temperature, self.teacher_temperature = student_temperature, teacher_temperature
        self.group_shuffle_p, self.mask_duplicates = group_shuffle_p, mask_duplicates
        self.needs = Needs(views=2 if simcse_weight else 1)
        self.head: nn.Module = nn.Identity()
        if head == "mlp":
            dense = nn.Linear(student.dim, student.dim)
            nn.init.normal_(dense.weight, std=0.02)
            nn.init.zeros_(dense.bias)
            self.head = nn.Sequential(dense, nn.Tanh())

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        terms: dict[str, Tensor] = {}
        states = student.view(0)[-1]
        with torch.autocast(states.device.type, enabled=False):
            first = self.head(states.float())
            if self.simcse_weight and student.views > 1:
                second = self.head(student.view(1)[-1].float())
                text_ids = teacher.text_ids if self.mask_duplicates else None
                terms["simcse"] = self.simcse_weight * info_nce(first, second, self.temperature, text_ids)
            if self.distill_weight:
                terms["distill"] = self.distill_weight * self._ranking(first, teacher)
        return terms

    def _ranking(self, states: Tensor, teacher: TeacherTargets) -> Tensor:
        vectors = unit(states)
        targets = unit(teacher.vectors.detach())
        mine, theirs = vectors @ vectors.T, targets @ targets.T
        compared = different_texts(teacher.text_ids, mask_duplicates=self.mask_duplicates)
        if self.training and self.group_shuffle_p:
            mine = mine.gather(1, group_shuffle(theirs, compared, self.group_shuffle_p))
        target = (theirs / self.teacher_temperature).masked_fill(~compared, MASKED).softmax(1) * compared
        predicted = (mine / self.student_temperature).masked_fill(~compared, MASKED).log_softmax(1)
        return -(target * predicted).sum(1).mean()


@torch.no_grad()
def group_shuffle(cosines: Tensor, compared: Tensor, p: float) -> Tensor:
    """`(B, B)` int64: [i, j] is the column of the student's row i that replaces column j.

    Args:
        cosines: `(B, B)`, the teacher's.
        compared: `(B, B)` bool, the columns that count in each row; the others are permuted separately.
        p: > 0, the share of softmax(cosines) in one group.
    """
    ordered, order = cosines.masked_fill(~compared, MASKED).sort(1, descending=True)
    group = (ordered.softmax(1).cumsum(1) / p).floor().clamp(max=math.ceil(1 / p) - 1)
    group = group.masked_fill(~compared.gather(1, order), math.inf)
    # A stable sort by group keeps the random order within each group.
    shuffled = torch.rand_like(ordered).argsort(1)
    shuffled = shuffled.gather(1, group.gather(1, shuffled).argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, order.gather(1, shuffled))
