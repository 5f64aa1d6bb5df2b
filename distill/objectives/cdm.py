"""CDM (Chen et al., Findings of ACL 2025), adapted to encoders: tokens of two tokenizers aligned, then compared.

    loss = simcse_weight * InfoNCE + token_weight * TOK + sentence_weight * SENT

With s, t the sentence vectors and S_i, T_j the last token states of one text, n(x) = x / ||x||, W the projection
into the teacher's space, and a_ij the alignment that averages teacher tokens onto student token i:

    TOK  = mean over aligned i of (1 / d) |n(S_i W) - n(sum_j a_ij T_j)|^2
    SENT = mean over texts of     (1 / d) |n(s W) - n(t)|^2

An alignment depends only on the text: it is computed once and stored. W is bias-free with torch's default initial
values, and shared by token states and sentence vectors if their widths are equal. Special tokens do not count.

The paper maps vocabularies of language models; the TALAS authors adapted it to encoders. Differences between their
text ("paper") and code ("official"), and an addition:
- In the text, dynamic time warping over edit distances aligns tokens, and teacher states are averaged onto every
  student token ("dtw_mean"). The code keeps only pairs of one token each with the same characters ("dtw_strict"), so
  tokens that the two tokenizers split differently are not trained.
- Repeated texts of a batch are negatives of each other in the code.
- A mean over the width d makes SENT (2 - 2 cos) / d, which is negligible next to InfoNCE; the weight of TOK, 0.5, has
  a factor of 100 to make up for it. Preset "fair" is 2 - 2 cos for both, TOK at 0.5.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.options import check_choice, check_weights
from distill.objectives.simcse import SimCSETerm
from distill.objectives.tokens import REDUCTIONS, direction_loss, token_states, token_width

ALIGNMENTS = ("dtw_mean", "dtw_strict")


class CDM(Objective):
    """Token states compared across two tokenizers by an alignment (CDM, arXiv 2502.11104).

    The terms are "simcse", "token" and "sentence"; a term of weight 0 is not computed and has no parameters.
    """

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
        """Create W.

        Args:
            alignment: "dtw_mean" or "dtw_strict", see `teacher_cache.tokens.alignment`.
            reduction: "mean" over the width as above, or "sum_dim", 2 - 2 cos.
            temperature: of InfoNCE.
            mask_duplicates: other rows of the same text are not negatives.
        """
        super().__init__()
        weights = {"simcse_weight": simcse_weight, "token_weight": token_weight, "sentence_weight": sentence_weight}
        check_weights(weights, required=("token_weight", "sentence_weight"))
        check_choice("alignment", alignment, ALIGNMENTS)
        check_choice("reduction", reduction, REDUCTIONS)

        self.simcse = SimCSETerm(simcse_weight, temperature, mask_duplicates)
        self.token_weight, self.sentence_weight, self.reduction = token_weight, sentence_weight, reduction
        self.needs = Needs(
            views=self.simcse.views,
            tokens=bool(token_weight),
            alignment=alignment if token_weight else None,
        )
        self.last_layer = student.layers
        self.head = nn.Linear(student.dim, teacher.dim, bias=False) if sentence_weight else None
        # None if it is shared: safetensors stores a weight with two names only once.
        self.token_head: nn.Linear | None = None
        if token_weight:
            width = token_width(teacher, "cdm")
            if self.head is None or width != teacher.dim:
                self.token_head = nn.Linear(student.dim, width, bias=False)

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        terms: dict[str, Tensor] = {}
        pooled = student.view(0)[-1]
        with torch.autocast(pooled.device.type, enabled=False):
            token_head = self.token_head or self.head
            if self.token_weight and token_head is not None:
                terms["token"] = self.token_weight * self._tokens(token_head, student, teacher)
            if self.head is not None:
                projected = self.head(pooled.float())
                distance = direction_loss(projected, teacher.vectors.detach(), self.reduction)
                terms["sentence"] = self.sentence_weight * distance
            terms |= self.simcse(student, teacher)
        return terms

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight W; None without the sentence term."""
        return None if self.head is None else self.head.weight

    def linear_heads(self) -> dict[int, nn.Linear]:
        return {} if self.head is None else {self.last_layer: self.head}

    def _tokens(self, head: nn.Linear, student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        mine, theirs = token_states(student, teacher, "cdm")
        if teacher.alignment is None:
            raise ConfigError("objective cdm was given no alignment of teacher tokens to student tokens")
        alignment = teacher.alignment.detach().float()
        target = alignment @ theirs.states.detach().float()
        aligned = mine.mask & ~mine.special & (alignment.sum(-1) > 0)
        return direction_loss(head(mine.states.float()), target, self.reduction, aligned)
