"""CDM (Chen et al., 2025), as adapted to encoders: tokens of two tokenizers aligned, then compared one by one.

    loss = simcse_weight * InfoNCE + token_weight * TOK + sentence_weight * SENT

With s, t the sentence vectors and S_i, T_j the last token states of one text, n(x) = x / ||x||, W the projection
into the teacher's space, and a_ij the alignment that averages teacher tokens onto student token i:

    TOK  = mean over aligned i of (1 / d) |n(S_i W) - n(sum_j a_ij T_j)|^2
    SENT = mean over texts of     (1 / d) |n(s W) - n(t)|^2

An alignment depends on the text alone: it is computed once and kept. W has no bias and torch's default initial
values; where token states and sentence vectors are of one width they share it. Special tokens do not count.

The paper maps vocabularies of language models; the adaptation to encoders is the TALAS authors'. Where theirs in
words ("paper") and in code ("official") differ, and what we add:
- In words, dynamic time warping over edit distances aligns the texts and teacher states are averaged onto every
  student token ("dtw_mean"). The code keeps the pairs in which one token meets one token of the same characters
  ("dtw_strict"), so tokens that two tokenizers cut differently teach nothing.
- Repeated texts of a batch are each other's negatives in the code.
- A mean over the width d makes SENT (2 - 2 cos) / d, next to nothing beside InfoNCE; TOK has a factor of 100 on
  its weight of 0.5 to make up for it. Preset "fair" is 2 - 2 cos of both, TOK at 0.5.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.dskd import REDUCTIONS, direction_loss, token_states, token_width
from distill.objectives.options import check, check_choice, check_positive, check_weight
from distill.objectives.simcse import contrast_views

ALIGNMENTS = ("dtw_mean", "dtw_strict")


class CDM(Objective):
    """The terms are "simcse", "token" and "sentence"; one of weight 0 is not computed and owns nothing."""

    needs = Needs(views=2, tokens=True, alignment="dtw_mean")
    terms = ("simcse", "token", "sentence")
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {},
        "official": {"alignment": "dtw_strict", "mask_duplicates": False},
        "fair": {"reduction": "sum_dim", "token_weight": 0.5},
    }

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        simcse_weight: float = 0.5,
        token_weight: float = 50.0,
        sentence_weight: float = 1.0,
        alignment: str = "dtw_mean",
        reduction: str = "mean",
        temperature: float = 0.07,
        mask_duplicates: bool = True,
    ) -> None:
        """Allocate W.

        Args:
            alignment: "dtw_mean" or "dtw_strict", see `teacher_cache.tokens.alignment`.
            reduction: "mean" over the width as above, or "sum_dim", 2 - 2 cos.
            temperature: of InfoNCE.
            mask_duplicates: texts equal to row i's are no negatives of row i.

        Raises:
            ConfigError: an option out of its range, or a teacher without token states.
        """
        super().__init__()
        weights = {"simcse_weight": simcse_weight, "token_weight": token_weight, "sentence_weight": sentence_weight}
        for name, weight in weights.items():
            check_weight(name, weight)
        check("*_weight", weights, "token or sentence above 0", bool(token_weight or sentence_weight))
        check_choice("alignment", alignment, ALIGNMENTS)
        check_choice("reduction", reduction, REDUCTIONS)
        check_positive("temperature", temperature)

        self.simcse_weight, self.token_weight, self.sentence_weight = simcse_weight, token_weight, sentence_weight
        self.reduction, self.temperature, self.mask_duplicates = reduction, temperature, mask_duplicates
        self.needs = Needs(
            views=2 if simcse_weight else 1,
            tokens=bool(token_weight),
            alignment=alignment if token_weight else None,
        )
        self.head = nn.Linear(student.dim, teacher.dim, bias=False) if sentence_weight else None
        # None where the sentence's is shared: a weight of two names would be missing from a checkpoint under one.
        self.token_head: nn.Linear | None = None
        if token_weight:
            width = token_width(teacher, "cdm")
            if self.head is None or width != teacher.dim:
                self.token_head = nn.Linear(student.dim, width, bias=False)

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, whatever the autocast state around.

        Raises:
            ConfigError: no alignment was given, or no token states.
        """
        terms: dict[str, Tensor] = {}
        pooled = student.view(0)[-1]
        with torch.autocast(pooled.device.type, enabled=False):
            token_head = self.token_head or self.head
            if self.token_weight and token_head is not None:
                terms["token"] = self.token_weight * self._tokens(token_head, student, teacher)
            if self.head is not None:
                said = self.head(pooled.float())
                terms["sentence"] = self.sentence_weight * direction_loss(
                    said, teacher.vectors.detach(), self.reduction
                )
            if self.simcse_weight and student.views > 1:
                contrast = contrast_views(student, teacher, self.temperature, mask=self.mask_duplicates)
                terms["simcse"] = self.simcse_weight * contrast
        return terms

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight W; None without the sentence term."""
        return None if self.head is None else self.head.weight

    def _tokens(self, head: nn.Linear, student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        mine, theirs = token_states(student, teacher, "cdm")
        if teacher.alignment is None:
            raise ConfigError("objective cdm was given no alignment of the teacher's tokens with the student's")
        alignment = teacher.alignment.detach().float()
        target = alignment @ theirs.states.detach().float()
        aligned = mine.mask & ~mine.special & (alignment.sum(-1) > 0)
        return direction_loss(head(mine.states.float()), target, self.reduction, aligned)
