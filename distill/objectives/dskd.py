"""DSKD (Zhang et al., EMNLP 2024), as ported to encoders: student and teacher compared in both of their spaces.

    loss = simcse_weight * InfoNCE + sentence_weight * SENT + token_weight * TOK

With s, t the sentence vectors and S_i, T_j the last token states of one text, n(x) = x / ||x||, W and W' the
projections into the teacher's and the student's space:

    SENT = mean |n(s W) - n(t)|^2 + mean |n(s) - n(t W')|^2
    TOK  = mean_i |n(S_i) - n(A_i)|^2 + mean_j |n(T_j) - n(C_j)|^2
    A_i  = sum_j softmax_j(S_i Q . T_j K / sqrt(d_att)) T_j V      what student token i takes of the teacher
    C_j  = the same with the roles exchanged and three projections more

over tokens that are part of their texts; the keys leave out padding alone. All projections are free of bias, with
Xavier-uniform initial values; d_att is the smaller width.

The paper distils logits of language models, where both projections are learned. The published code for encoders
is the TALAS authors' port. Where it differs, and the presets:
- The port stops the gradient behind W', which so stays the random matrix that it began as, and the student's
  own vectors are pulled to a random image of the teacher's. "paper" learns W' too; "fair" and "parity" keep the
  port's, as a buffer.
- The port's squared distance is a mean over the width: (2 - 2 cos) / d, at most 0.004 for d = 1,024, beside an
  InfoNCE of 0.1 to 1, so that next to nothing is distilled. `reduction="mean"` is this ("parity");
  "sum_dim" is 2 - 2 cos ("paper", "fair").
- Repeated texts of a batch are each other's negatives in the port ("parity").

Both sides of a token's distance are learned, and no term holds V to the teacher: part of TOK can be met by the
projections alone. That is so in the port, and left.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.base import (
    Needs,
    Objective,
    StudentOutput,
    StudentShape,
    TeacherShape,
    TeacherTargets,
    TokenStates,
    unit,
)
from distill.objectives.options import check, check_choice, check_positive, check_weight
from distill.objectives.simcse import contrast_views

REDUCTIONS = ("sum_dim", "mean")


def direction_loss(first: Tensor, second: Tensor, reduction: str, keep: Tensor | None = None) -> Tensor:
    """`mean |n(first) - n(second)|^2` over rows, float32; with "mean" divided by the width.

    Args:
        first, second: `(..., d)`; n of a zero row is zero.
        reduction: "sum_dim": 2 - 2 cos of a row; "mean": that over d, as a mean squared error has it.
        keep: `(...)` bool, the rows that count; without any the loss is 0.
    """
    distance = (unit(first) - unit(second)).square()
    rows = distance.sum(-1) if reduction == "sum_dim" else distance.mean(-1)
    if keep is None:
        return rows.mean()
    return (rows * keep).sum() / keep.sum().clamp(min=1)


def token_width(teacher: TeacherShape, method: str) -> int:
    """Width of the teacher's token states.

    Raises:
        ConfigError: it has none.
    """
    if teacher.token_dim is None:
        raise ConfigError(
            f"objective {method} compares tokens, and the cache holds the teacher's sentence vectors alone; build it "
            "with token states: tcache build --columns vectors,tokens"
        )
    return teacher.token_dim


def token_states(student: StudentOutput, teacher: TeacherTargets, method: str) -> tuple[TokenStates, TokenStates]:
    """Of both models.

    Raises:
        ConfigError: either is absent.
    """
    if student.tokens is None or teacher.tokens is None:
        raise ConfigError(f"objective {method} was given no token states, of the student or of the teacher")
    return student.tokens, teacher.tokens


class CrossAttention(nn.Module):
    """One head: every query takes a weighted mean of the keys' values, in the queries' width."""

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        width = min(query_dim, key_dim)
        self.query = linear(query_dim, width)
        self.key = linear(key_dim, width)
        self.value = linear(key_dim, query_dim)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """`(B, n_q, d_q)` of queries `(B, n_q, d_q)`, keys `(B, n_k, d_k)` and which keys are tokens `(B, n_k)`."""
        scores = self.query(queries) @ self.key(keys).mT / math.sqrt(self.query.out_features)
        # Not -inf: a text without a token would be NaN, here it is the mean of its zero padding.
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        attended: Tensor = scores.softmax(-1) @ self.value(keys)
        return attended


def linear(width_in: int, width_out: int) -> nn.Linear:
    layer = nn.Linear(width_in, width_out, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer


class DSKD(Objective):
    """The terms are "simcse", "sentence" and "token"; one of weight 0 is not computed and owns nothing.

    The sentence vectors may have another width than the token states: they meet in different projections.
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
        """Allocate the projections.

        Args:
            reduction: see `direction_loss`.
            learn_to_student: whether W', from the teacher's space into the student's, is learned or stays random.
            temperature: of InfoNCE.
            mask_duplicates: texts equal to row i's are no negatives of row i.

        Raises:
            ConfigError: an option out of its range, or a teacher without token states.
        """
        super().__init__()
        weights = {"simcse_weight": simcse_weight, "sentence_weight": sentence_weight, "token_weight": token_weight}
        for name, weight in weights.items():
            check_weight(name, weight)
        check("*_weight", weights, "sentence or token above 0", bool(sentence_weight or token_weight))
        check_choice("reduction", reduction, REDUCTIONS)
        check_positive("temperature", temperature)

        self.simcse_weight, self.sentence_weight, self.token_weight = simcse_weight, sentence_weight, token_weight
        self.reduction, self.temperature, self.mask_duplicates = reduction, temperature, mask_duplicates
        self.needs = Needs(views=2 if simcse_weight else 1, tokens=bool(token_weight))
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
        """The weighted terms, float32 scalars, whatever the autocast state around."""
        terms: dict[str, Tensor] = {}
        pooled = student.view(0)[-1]
        with torch.autocast(pooled.device.type, enabled=False):
            if self.to_teacher is not None and self.to_student is not None:
                said, target = pooled.float(), teacher.vectors.detach().float()
                there = direction_loss(self.to_teacher(said), target, self.reduction)
                here = direction_loss(said, nn.functional.linear(target, self.to_student), self.reduction)
                terms["sentence"] = self.sentence_weight * (there + here)
            if self.of_teacher is not None and self.of_student is not None:
                mine, theirs = token_states(student, teacher, "dskd")
                said, target = mine.states.float(), theirs.states.detach().float()
                of_teacher = self.of_teacher(said, target, theirs.mask)
                of_student = self.of_student(target, said, mine.mask)
                here = direction_loss(said, of_teacher, self.reduction, mine.mask & ~mine.special)
                there = direction_loss(target, of_student, self.reduction, theirs.mask & ~theirs.special)
                terms["token"] = self.token_weight * (here + there)
            if self.simcse_weight and student.views > 1:
                contrast = contrast_views(student, teacher, self.temperature, mask=self.mask_duplicates)
                terms["simcse"] = self.simcse_weight * contrast
        return terms

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight W; None without the sentence term."""
        return None if self.to_teacher is None else self.to_teacher.weight
