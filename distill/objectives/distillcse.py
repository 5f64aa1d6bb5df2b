"""DistillCSE (Xu et al., Findings of EMNLP 2023): SimCSE, and the teacher's ranking of the batch for every text.

    loss = simcse_weight * SimCSE + distill_weight * distill

With z_i the head's output for view 1 of text i, S_ij = cos(z_i, z_j) and T_ij the cosines of the teacher's vectors:

    SimCSE  = `distill.objectives.simcse.info_nce` of the head's outputs, view 1 to view 2
    distill = mean_i -sum_{j != i} softmax_j(T_ij / teacher_temperature) log softmax_j(S_ij / student_temperature)

Of several teachers, cached as spaces of the same rows, T is the mean of their cosines.

Group-p shuffling. The teacher's order among texts that it finds nearly equally close is mostly noise. While training,
row i of T is sorted from the closest text down and cut where the running sum of softmax_j(T_ij), without temperature,
passes p, 2p, ...; inside each group the student's entries are permuted at random, so that nothing is learned from the
order within it. In evaluation mode nothing is shuffled.

Where we differ from the published code, which is the paper's:
- It skips the diagonal as NaN in a sum over all; here it is left out of both softmaxes and of the mean.
- It keeps other rows of the same text, whose cosine of 1 takes nearly the whole softmax at a temperature of 0.0125
  and leaves nothing to learn. Here they are no rivals in either term. Preset "official" keeps them.
- It shuffles with loops over rows and groups; here one sort does it.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.options import check, check_choice, check_positive, check_weight
from distill.objectives.simcse import info_nce

HEADS = ("mlp", "none")
# Stands for a cosine that is left out; finite, so that a batch of one text has no NaN.
NO_RIVAL = -1e9


class DistillCSE(Objective):
    """Contrast and ranking; the terms are "simcse" and "distill". One of weight 0 is neither computed nor returned.

    The head is used in training alone: what is evaluated and exported is the pooled state before it.
    """

    needs = Needs(views=2)
    terms = ("simcse", "distill")
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
        simcse_weight: float = 1.0,
        distill_weight: float = 1.0,
        temperature: float = 0.05,
        student_temperature: float = 0.025,
        teacher_temperature: float = 0.0125,
        group_shuffle_p: float = 0.1,
        head: str = "mlp",
        mask_duplicates: bool = True,
    ) -> None:
        """`teacher` is part of every objective's signature and unused.

        Args:
            temperature: of SimCSE.
            student_temperature, teacher_temperature: of the two softmaxes of "distill".
            group_shuffle_p: share of the teacher's probability in one group; 0 shuffles nothing, 1 everything.
            head: "mlp" is one layer and tanh, of the student's width, started as in BERT; "none" trains the
                pooled state itself.
            mask_duplicates: texts equal to row i's are no rivals of row i.

        Raises:
            ConfigError: an option out of its range.
        """
        super().__init__()
        weights = {"simcse_weight": simcse_weight, "distill_weight": distill_weight}
        for name, weight in weights.items():
            check_weight(name, weight)
        check("*_weight", weights, "at least one above 0", any(weights.values()))
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
        """The weighted terms, float32 scalars, whatever the autocast state around."""
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
        if self.mask_duplicates:
            rivals = teacher.text_ids[:, None] != teacher.text_ids[None, :]
        else:
            rivals = ~torch.eye(len(mine), dtype=torch.bool, device=mine.device)
        if self.training and self.group_shuffle_p:
            mine = mine.gather(1, group_shuffle(theirs, rivals, self.group_shuffle_p))
        wanted = (theirs / self.teacher_temperature).masked_fill(~rivals, NO_RIVAL).softmax(1) * rivals
        found = (mine / self.student_temperature).masked_fill(~rivals, NO_RIVAL).log_softmax(1)
        return -(wanted * found).sum(1).mean()


@torch.no_grad()
def group_shuffle(cosines: Tensor, rivals: Tensor, p: float) -> Tensor:
    """`(B, B)` int64: [i, j] is the column of the student's row i that takes the place of column j.

    Args:
        cosines: `(B, B)`, the teacher's.
        rivals: `(B, B)` bool, the columns that count in each row; the others are exchanged among themselves only.
        p: > 0, the share of softmax(cosines) in one group.
    """
    ordered, order = cosines.masked_fill(~rivals, NO_RIVAL).sort(1, descending=True)
    group = (ordered.softmax(1).cumsum(1) / p).floor().clamp(max=math.ceil(1 / p) - 1)
    group = group.masked_fill(~rivals.gather(1, order), math.inf)
    # Sorted by group, which keeps the order of equal groups, a random order is one inside each group.
    shuffled = torch.rand_like(ordered).argsort(1)
    shuffled = shuffled.gather(1, group.gather(1, shuffled).argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, order.gather(1, shuffled))
