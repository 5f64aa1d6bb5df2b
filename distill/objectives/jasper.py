"""Jasper and Stella (arXiv 2412.19048): the teacher's vectors, their similarities, and the order of these.

    loss = cosine_weight * COS + similarity_weight * SIM + triplet_weight * TRI

With s = e W the `(B, d_T)` head of the student's last pooled state e, t the teacher's vectors, S and T the
`(B, B)` cosines within the batch, p and q two of the P = B (B - 1) / 2 pairs of texts:

    COS = mean_i (1 - cos(s_i, t_i))
    SIM = (1 / B^2) ||S - T||_F^2
    TRI = mean over {p, q} of relu(margin - sign(T_p - T_q) (S_p - S_q))

SIM and TRI are means over the full width and the shorter `prefixes` of s, each scaled to length 1 again, against
the teacher at full width (Matryoshka). In the first `stage_one_epochs` epochs, counted by `advance`, only the head is
trained.

Several teachers are several spaces of the same rows: their unit vectors are concatenated, over the root of their
number, as in the authors' training.

Differences between the authors' code (preset "paper"), its port by the TALAS authors (preset "talas-port") and this
implementation:
- The head has a bias in both. An exported projection is a linear map, so here there is none unless `bias=True`, and a
  head with a bias is not exported. Little is lost: states after a LayerNorm, and means of them, have a constant
  component, which a linear map can use as a bias.
- The stages of the paper freeze different parts, the authors' code has no stages; the port has these two.
- Two pairs that the teacher finds equally similar have no order and add nothing; in the codes their order is that of
  their positions in the batch.
- TRI has P^2 entries, 66 million for 128 texts. Its relu is linear in S once it is known which pairs are too
  close, so value and gradient come from counts, taken a few rows at a time: exact, without the P^2 floats.
- The port has a head for every width, compared with the student's full head instead of the teacher
  (`matryoshka="heads"`), and sums their terms. Its weights are 0.5, 2, 0.5; stage one trains the full head, stage two
  all of it at 0.5 plus InfoNCE of the pooled states at 0.5. Its full head is 1,024 wide; here it is d_T, and shorter
  heads are narrower than that.
- The port begins stage two with a new optimizer and schedule; here one schedule spans both.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.options import check, check_choice, check_count, check_weight, check_weights
from distill.objectives.simcse import SimCSETerm

MATRYOSHKA = ("prefixes", "heads")
# Differences of pairs that `order_loss` computes at a time: 4 MiB per float32 tensor.
BLOCK = 1 << 20


def order_loss(scores: Tensor, guide: Tensor, margin: float) -> Tensor:
    """`mean over {p, q} of relu(margin - sign(guide_p - guide_q) (scores_p - scores_q))`, ties of the guide are 0.

    Args:
        scores, guide: `(P,)` float32; the guide gets no gradient. Fewer than 2 give 0.
        margin: least difference of two scores in the guide's direction.
    """
    count = len(scores)
    with torch.no_grad():
        slopes = torch.zeros_like(scores)  # gradient of the sum over pairs
        close = scores.new_zeros(())  # pairs closer than the margin, each counted from both ends
        for start in range(0, count, max(1, BLOCK // max(1, count))):
            rows = slice(start, start + max(1, BLOCK // count))
            above = torch.sign(guide[rows, None] - guide)
            above *= above * (scores[rows, None] - scores) < margin
            slopes[rows] = -above.sum(1)
            close += above.abs_().sum()
        center = scores.mean() if count else 0  # the slopes sum to 0; subtracting the mean reduces rounding
    return ((slopes * (scores - center)).sum() + margin * close / 2) / max(1, count * (count - 1) // 2)


class Jasper(Objective):
    """Vectors, similarities and their order match those of one or more teachers (Jasper and Stella, arXiv 2412.19048).

    The terms are "cosine", "similarity", "triplet" and "simcse"; a term of weight 0 is neither computed nor returned.
    """

    needs = Needs()
    terms = ("cosine", "similarity", "triplet", "simcse")
    second_view_terms = frozenset({"simcse"})
    head_only_epochs = 2.0
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {"bias": True},
        "talas-port": {
            "bias": True,
            "matryoshka": "heads",
            "cosine_weight": 0.5,
            "similarity_weight": 2.0,
            "triplet_weight": 0.5,
            "simcse_weight": 0.5,
            "mask_duplicates": False,
        },
    }

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        cosine_weight: float = 10.0,
        similarity_weight: float = 200.0,
        triplet_weight: float = 20.0,
        simcse_weight: float = 0.0,
        margin: float = 0.015,
        prefixes: Sequence[int] = (512, 256, 128),
        matryoshka: str = "prefixes",
        bias: bool = False,
        stage_one_epochs: float = 2,
        temperature: float = 0.1,
        mask_duplicates: bool = True,
    ) -> None:
        """Create the heads, with torch's default initial values.

        Args:
            simcse_weight: share, below 1, of InfoNCE between two views of the pooled state in stage two; the sum of the
                other terms has the rest.
            margin: of the triplet term, in cosines.
            prefixes: shorter widths to train; those of d_T or more are ignored.
            matryoshka: "prefixes" truncates the vector; "heads" learns a head per width, whose target is the
                student's full head.
            bias: add a bias to the heads; `projection` is None then.
            stage_one_epochs: first epochs that train only the heads.
            temperature: of InfoNCE.
            mask_duplicates: other rows of the same text are not negatives in InfoNCE.
        """
        super().__init__()
        weights = {
            "cosine_weight": cosine_weight,
            "similarity_weight": similarity_weight,
            "triplet_weight": triplet_weight,
        }
        check_weights(weights)
        check_weight("simcse_weight", simcse_weight)
        check_weight("stage_one_epochs", stage_one_epochs)
        check("simcse_weight", simcse_weight, "a number below 1", simcse_weight < 1)
        check_weight("margin", margin)
        check(
            "prefixes", prefixes, "a list of widths", isinstance(prefixes, Sequence) and not isinstance(prefixes, str)
        )
        for width in prefixes:
            check_count("prefixes", width, 1, None)
        check_choice("matryoshka", matryoshka, MATRYOSHKA)

        self.weights = weights
        self.simcse = SimCSETerm(simcse_weight, temperature, mask_duplicates)
        self.margin = margin
        self.needs = Needs(views=self.simcse.views)
        self.head_only_epochs, self.in_stage_one = float(stage_one_epochs), False
        self.prefixes = sorted({width for width in prefixes if width < teacher.dim}, reverse=True)
        self.last_layer = student.layers
        self.head = nn.Linear(student.dim, teacher.dim, bias=bias)
        related = matryoshka == "heads" and (similarity_weight or triplet_weight)
        self.short_heads = nn.ModuleList(
            nn.Linear(student.dim, width, bias=bias) for width in (self.prefixes if related else ())
        )

    def advance(self, epoch: float) -> None:
        """Start stage two after `stage_one_epochs`; without a call there is no stage one."""
        self.in_stage_one = epoch < self.head_only_epochs

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        pooled = student.view(0)[-1]
        if self.in_stage_one:
            pooled = pooled.detach()
        with torch.autocast(pooled.device.type, enabled=False):
            terms = self._terms(pooled.float(), unit(teacher.vectors.detach()))
        if self.in_stage_one or not self.simcse.weight:
            return terms
        terms = {name: (1 - self.simcse.weight) * value for name, value in terms.items()}
        return terms | self.simcse(student, teacher)

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight of the head; None if it has a bias, without which vectors would differ."""
        return self.head.weight if self.head.bias is None else None

    def linear_heads(self) -> dict[int, nn.Linear]:
        return {self.last_layer: self.head}

    def _terms(self, pooled: Tensor, target: Tensor) -> dict[str, Tensor]:
        projected = unit(self.head(pooled))
        terms = {}
        if self.weights["cosine_weight"]:
            terms["cosine"] = self.weights["cosine_weight"] * (1 - (projected * target).sum(-1)).mean()
        compared = self._compared(pooled, projected, target)
        if self.weights["similarity_weight"]:
            gaps = torch.stack([(mine @ mine.T - theirs @ theirs.T).square().mean() for mine, theirs in compared])
            terms["similarity"] = self.weights["similarity_weight"] * self._over_widths(gaps)
        if self.weights["triplet_weight"]:
            first, second = torch.triu_indices(len(pooled), len(pooled), 1, device=pooled.device)
            orders = torch.stack(
                [
                    order_loss((mine @ mine.T)[first, second], (theirs @ theirs.T)[first, second], self.margin)
                    for mine, theirs in compared
                ]
            )
            terms["triplet"] = self.weights["triplet_weight"] * self._over_widths(orders)
        return terms

    def _compared(self, pooled: Tensor, projected: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of unit vectors and targets, one per width."""
        if self.short_heads and self.in_stage_one:
            return [(projected, target)]
        if self.short_heads:
            return [(projected, target), *((unit(head(pooled)), projected) for head in self.short_heads)]
        return [(projected, target), *((unit(projected[:, :width]), target) for width in self.prefixes)]

    def _over_widths(self, losses: Tensor) -> Tensor:
        return losses.sum() if self.short_heads else losses.mean()
