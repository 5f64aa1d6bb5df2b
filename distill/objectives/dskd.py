"""DSKD (Zhang et al., EMNLP 2024), ported to encoders: student and teacher compared in both of their spaces.

    loss = simcse_weight * InfoNCE + sentence_weight * SENT + token_weight * TOK

With s, t the sentence vectors and S_i, T_j the last token states of one text, n(x) = x / ||x||, W and W' the
projections into the teacher's and the student's space:

    SENT = mean |n(s W) - n(t)|^2 + mean |n(s) - n(t W')|^2
    TOK  = mean_i |n(S_i) - n(A_i)|^2 + mean_j |n(T_j) - n(C_j)|^2
    A_i  = sum_j softmax_j(S_i Q . T_j K / sqrt(d_att)) T_j V      cross-attention of student token i to the teacher
    C_j  = the same with the roles exchanged and three more projections

over the tokens of the texts; the keys exclude only padding. All projections are bias-free with Xavier-uniform
initial values; d_att is the smaller width.

The paper distills logits of language models and learns both projections. The published code for encoders is the
TALAS authors' port. Differences, and the presets:
- The port stops the gradient after W', so W' stays the random initial matrix, and the student's vectors are trained
  towards a random image of the teacher's. "paper" learns W'; "fair" and "parity" keep it fixed, as a buffer.
- The squared distance of the port is a mean over the width: (2 - 2 cos) / d, at most 0.004 for d = 1,024, next to an
  InfoNCE of 0.1 to 1, so that almost nothing is distilled. `reduction="mean"` is this ("parity"); "sum_dim" is
  2 - 2 cos ("paper", "fair").
- Repeated texts of a batch are negatives of each other in the port ("parity").

Both sides of a token distance are learned, and no term ties V to the teacher: the projections can lower TOK without
the student. The port has this too.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.options import check_choice, check_weights
from distill.objectives.simcse import SimCSETerm
from distill.objectives.tokens import REDUCTIONS, direction_loss, token_states, token_width


class CrossAttention(nn.Module):
    """Single-head cross-attention, with values in the width of the queries."""

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        width = min(query_dim, key_dim)
        self.query = linear(query_dim, width)
        self.key = linear(key_dim, width)
        self.value = linear(key_dim, query_dim)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """`(B, n_q, d_q)` from queries `(B, n_q, d_q)`, keys `(B, n_k, d_k)` and the mask of the keys `(B, n_k)`."""
        scores = self.query(queries) @ self.key(keys).mT / math.sqrt(self.query.out_features)
        # Not -inf, which would be NaN for a text without tokens.
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        attended: Tensor = scores.softmax(-1) @ self.value(keys)
        return attended


def linear(width_in: int, width_out: int) -> nn.Linear:
    """A bias-free projection with Xavier-uniform initial values."""
    layer = nn.Linear(width_in, width_out, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer


class DSKD(Objective):
    """Sentence vectors and token states compared in the spaces of both models (DSKD, arXiv 2406.17328).

    The terms are "simcse", "sentence" and "token"; a term of weight 0 is not computed and has no parameters.
    Sentence vectors and token states have separate projections, so their widths may differ.
    """

    needs = Needs(views=2, tokens=True)
    terms = ("simcse", "sentence", "token")
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {},
        "fair": {"learn_to_student": False},
        "parity": {"learn_to_student": False, "reduction": "mean", "mask_duplicates": False},
    }
    to_student: Tensor | None

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        simcse_weight: float = 1.0,
        sentence_weight: float = 1.0,
        token_weight: float = 1.0,
        reduction: str = "sum_dim",
        learn_to_student: bool = True,
        temperature: float = 0.07,
        mask_duplicates: bool = True,
    ) -> None:
        """Create the projections.

        Args:
            reduction: see `direction_loss`.
            learn_to_student: learn W', from the teacher's space into the student's; otherwise it stays random.
            temperature: of InfoNCE.
            mask_duplicates: other rows of the same text are not negatives.
        """
        super().__init__()
        weights = {"simcse_weight": simcse_weight, "sentence_weight": sentence_weight, "token_weight": token_weight}
        check_weights(weights, required=("sentence_weight", "token_weight"))
        check_choice("reduction", reduction, REDUCTIONS)

        self.simcse = SimCSETerm(simcse_weight, temperature, mask_duplicates)
        self.token_weight, self.sentence_weight, self.reduction = token_weight, sentence_weight, reduction
        self.needs = Needs(views=self.simcse.views, tokens=bool(token_weight))
        self.last_layer = student.layers
        self.to_teacher = linear(student.dim, teacher.dim) if sentence_weight else None
        if not sentence_weight:
            self.register_buffer("to_student", None)
        elif learn_to_student:
            self.to_student = linear(teacher.dim, student.dim).weight
        else:
            self.register_buffer("to_student", linear(teacher.dim, student.dim).weight.detach())
        self.of_teacher = self.of_student = None
        if token_weight:
            width = token_width(teacher, "dskd")
            self.of_teacher = CrossAttention(student.dim, width)
            self.of_student = CrossAttention(width, student.dim)

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        terms: dict[str, Tensor] = {}
        pooled = student.view(0)[-1]
        with torch.autocast(pooled.device.type, enabled=False):
            if self.to_teacher is not None and self.to_student is not None:
                vectors, target = pooled.float(), teacher.vectors.detach().float()
                in_teacher_space = direction_loss(self.to_teacher(vectors), target, self.reduction)
                projected = nn.functional.linear(target, self.to_student)
                in_student_space = direction_loss(vectors, projected, self.reduction)
                terms["sentence"] = self.sentence_weight * (in_teacher_space + in_student_space)
            if self.of_teacher is not None and self.of_student is not None:
                mine, theirs = token_states(student, teacher, "dskd")
                states, target = mine.states.float(), theirs.states.detach().float()
                of_teacher = self.of_teacher(states, target, theirs.mask)
                of_student = self.of_student(target, states, mine.mask)
                in_student_space = direction_loss(states, of_teacher, self.reduction, mine.mask & ~mine.special)
                in_teacher_space = direction_loss(target, of_student, self.reduction, theirs.mask & ~theirs.special)
                terms["token"] = self.token_weight * (in_student_space + in_teacher_space)
            terms |= self.simcse(student, teacher)
        return terms

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight W; None without the sentence term."""
        return None if self.to_teacher is None else self.to_teacher.weight

    def linear_heads(self) -> dict[int, nn.Linear]:
        return {} if self.to_teacher is None else {self.last_layer: self.to_teacher}
