"""LEAF (arXiv 2509.12539): the projected vector of the student equals that of the teacher; unsquared distance.

    loss = LEAF + minilm_weight * MiniLM + tinybert_weight * TinyBERT + distilbert_weight * DistilBERT
    LEAF = mean_i ||y_i - t_i||_2,     y_i = Norm(e_i W_out)

e is the last layer's `(B, d_s)` pooled state, W_out a bias-free `(d_s, d_T)` projection with torch's initial values,
`projection()`. Norm is applied only if the teacher's vectors have unit length. The gradient of the distance is a unit
vector for any error; the root is of the sum plus 1e-12, for a finite slope at 0. The training code is not public:
`squared=True` follows a third party's summary.

The paper's appendix adds the losses of three older methods and finds them harmful; they do not train W_out. They
compare the k-th tokens of both models, so the tokenizers must agree; a text that only one of them truncates is
skipped. With C the width of a head, H the last states, means over the tokens of the batch:

    DistilBERT = mean over tokens of  1 - cos(H^S W_map, H^T)
    MiniLM     = mean over heads and query tokens of  KL(T || S)  of softmax(QK^T / sqrt(C)), and of
                 softmax(VV^T / sqrt(C)), in the last block; the sum of the two
    TinyBERT   = sum over blocks l of  MSE(h^S_l W_map, h^T_g(l)) + MSE(A^S_l, A^T_g(l)),   g(l) = floor(L_T / L_S) l

W_map is one bias-free linear map to the width of the teacher's states, or nothing if the widths are equal. A are the
attention maps; the original TinyBERT compares them before the softmax, and the embedding layers too. MiniLM and
TinyBERT need an online teacher, because a cache does not hold every layer and head. The paper gives no weights.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from distill.errors import ConfigError, NeedsNotMet
from distill.objectives.base import (
    Internals,
    Needs,
    Objective,
    StudentOutput,
    StudentShape,
    TeacherShape,
    TeacherTargets,
    TokenStates,
    unit,
)
from distill.objectives.options import check_weight

EPS = 1e-12
# Logit of padding; finite, so that a text without tokens has no NaN.
NO_TOKEN = -1e9


class Leaf(Objective):
    """The projected vector of the student equals that of the teacher (LEAF, arXiv 2509.12539).

    The terms are "leaf" and, if weighted, "minilm", "tinybert" and "distilbert".
    """

    terms = ("leaf", "minilm", "tinybert", "distilbert")
    presets: ClassVar[dict[str, dict[str, object]]] = {"paper": {}}

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        squared: bool = False,
        normalize: bool | None = None,
        minilm_weight: float = 0.0,
        tinybert_weight: float = 0.0,
        distilbert_weight: float = 0.0,
    ) -> None:
        """Create W_out, and W_map if an added loss compares states of different widths.

        Args:
            squared: use the mean of the squared distances.
            normalize: scale both vectors to unit length; None does unless the teacher is known not to.
        """
        super().__init__()
        weights = {"minilm": minilm_weight, "tinybert": tinybert_weight, "distilbert": distilbert_weight}
        for name, weight in weights.items():
            check_weight(f"{name}_weight", weight)
        added = [name for name, weight in weights.items() if weight]
        for name in added:
            _check_models(name, student, teacher)
        self.squared = squared
        self.normalize = teacher.normalized is not False if normalize is None else normalize
        self.weights = weights
        self.needs = Needs(
            tokens=bool(added), same_tokens=bool(added), internals=bool(minilm_weight or tinybert_weight)
        )
        self.compares_lengths = not self.normalize
        self.last_layer = student.layers
        self.out = nn.Linear(student.dim, teacher.dim, bias=False)
        self.token_map: nn.Module = nn.Identity()
        if (tinybert_weight or distilbert_weight) and teacher.token_dim not in (None, student.dim):
            self.token_map = nn.Linear(student.dim, teacher.token_dim, bias=False)
        # Teacher blocks per student block; used by TinyBERT only.
        self.stride = teacher.layers // student.layers if tinybert_weight and teacher.layers else 1

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        states = student.view(0)[-1]
        with torch.autocast(states.device.type, enabled=False):
            terms = {"leaf": self._distance(self.out(states.float()), teacher.vectors.detach().float())}
            if self.needs.tokens:
                terms |= self._added(student.tokens, teacher.tokens)
        return terms

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight of W_out."""
        return self.out.weight

    def linear_heads(self) -> dict[int, nn.Linear]:
        return {self.last_layer: self.out}

    def _distance(self, projected: Tensor, target: Tensor) -> Tensor:
        if self.normalize:
            projected, target = unit(projected), unit(target)
        squares = (projected - target).square().sum(-1)
        return (squares if self.squared else (squares + EPS).sqrt()).mean()

    def _added(self, student: TokenStates | None, teacher: TokenStates | None) -> dict[str, Tensor]:
        if student is None or teacher is None:
            raise NeedsNotMet("objective leaf: the added losses need token states of student and teacher")
        pairing = _Pairing(student.mask, teacher.mask)
        terms: dict[str, Tensor] = {}
        if self.weights["distilbert"]:
            mine, theirs = pairing.tokens(student.states, teacher.states)
            terms["distilbert"] = pairing.mean(1 - (unit(self.token_map(mine)) * unit(theirs)).sum(-1))
        if self.weights["minilm"]:
            terms["minilm"] = _minilm(pairing, *_internals(student, teacher))
        if self.weights["tinybert"]:
            terms["tinybert"] = self._tinybert(pairing, *_internals(student, teacher))
        return {name: self.weights[name] * term for name, term in terms.items()}

    def _tinybert(self, pairing: "_Pairing", student: Internals, teacher: Internals) -> Tensor:
        """Means over tokens, and over pairs of them, summed over the student's blocks."""
        blocks = len(student.attention)
        matched = slice(self.stride - 1, self.stride * blocks, self.stride)
        # Batch first: (B, L, n, d) and (B, L, heads, n, n).
        mine, theirs = pairing.tokens(student.hidden[1:].transpose(0, 1), teacher.hidden[1:][matched].transpose(0, 1))
        states = pairing.mean((self.token_map(mine) - theirs).square().mean(-1).sum(1))
        mine, theirs = pairing.pairs(student.attention.transpose(0, 1), teacher.attention[matched].transpose(0, 1))
        return states + pairing.mean_of_pairs((mine - theirs).square().mean(2).sum(1))


class _Pairing:
    """Pairs of the k-th tokens of each text in both models, padded on either side.

    Attributes:
        mask: `(B, m)` bool, the tokens of texts that have equally many tokens in both models.
    """

    def __init__(self, student: Tensor, teacher: Tensor) -> None:
        width = min(student.shape[1], teacher.shape[1])
        # Tokens first, in order, then padding.
        self._orders = [
            mask.int().argsort(dim=1, descending=True, stable=True)[:, :width] for mask in (student, teacher)
        ]
        counts = student.sum(1, keepdim=True), teacher.sum(1, keepdim=True)
        places = torch.arange(width, device=student.device)
        self.mask = (places < counts[0]) & (counts[0] == counts[1])

    def tokens(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """`(B, .., n, d)` of both as `(B, .., m, d)`, float32; padding is 0."""
        return self._picked(student, teacher, -2)

    def pairs(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """`(B, .., n, n)` of both as `(B, .., m, m)`, float32; padding is 0."""
        return self._picked(*self._picked(student, teacher, -2), -1)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of `(B, m)` over the tokens; 0 if there are none."""
        return values.where(self.mask, 0).sum() / self.mask.sum().clamp(min=1)

    def mean_of_pairs(self, values: Tensor) -> Tensor:
        """Mean of `(B, m, m)` over the pairs of tokens of one text."""
        pairs = self.mask[:, :, None] & self.mask[:, None, :]
        return values.where(pairs, 0).sum() / pairs.sum().clamp(min=1)

    def _picked(self, student: Tensor, teacher: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        shape = [len(self.mask)] + [1] * (student.ndim - 1)
        shape[dim] = -1
        # Padding may hold NaN, which would have a gradient even if masked later.
        padding = ~self.mask.reshape(shape)
        mine, theirs = (order.reshape(shape) for order in self._orders)
        return (
            torch.take_along_dim(student.float(), mine, dim).masked_fill(padding, 0),
            torch.take_along_dim(teacher.detach().float(), theirs, dim).masked_fill(padding, 0),
        )


def _minilm(pairing: _Pairing, student: Internals, teacher: Internals) -> Tensor:
    """KL(teacher || student) of the last block's attention and value relations."""
    mine, theirs = pairing.pairs(student.attention[-1], teacher.attention[-1])
    attention = (torch.xlogy(theirs, theirs) - theirs * mine.clamp(min=EPS).log()).sum(-1)
    mine, theirs = (_relation(values, pairing.mask) for values in pairing.tokens(student.values, teacher.values))
    values = kl_div(mine, theirs, log_target=True, reduction="none").sum(-1)
    return pairing.mean((attention + values).mean(1))


def _relation(values: Tensor, mask: Tensor) -> Tensor:
    """log softmax(VV^T / sqrt(C)) over the tokens, `(B, heads, m, m)`."""
    logits = values @ values.mT / math.sqrt(values.shape[-1])
    return logits.masked_fill(~mask[:, None, None, :], NO_TOKEN).log_softmax(-1)


def _internals(student: TokenStates, teacher: TokenStates) -> tuple[Internals, Internals]:
    if student.internals is None or teacher.internals is None:
        raise NeedsNotMet("objective leaf: minilm and tinybert need all layers and heads of student and teacher")
    return student.internals, teacher.internals


def _check_models(name: str, student: StudentShape, teacher: TeacherShape) -> None:
    """Raise `ConfigError` if an added loss does not fit the two models."""
    option = f"objective option {name}_weight"
    if teacher.token_dim is None:
        raise ConfigError(f"{option}: compares token states, but only sentence vectors of this teacher are available")
    if name == "distilbert":
        return
    if teacher.layers is None or teacher.heads is None:
        raise ConfigError(
            f"{option}: compares attention head by head, but the layers and heads of this teacher are unknown; use "
            "teacher.mode=online"
        )
    if teacher.heads != student.heads:
        raise ConfigError(
            f"{option}: compares attention head by head, but the student has {student.heads} heads and the teacher "
            f"{teacher.heads}; distilbert_weight works with any number of heads"
        )
    if name == "tinybert" and teacher.layers < student.layers:
        raise ConfigError(
            f"{option}: pairs each layer of the student with one of the teacher, but the student has {student.layers} "
            f"and the teacher {teacher.layers}"
        )
