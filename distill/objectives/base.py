"""What every objective sees and returns."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Needs:
    """What an objective asks of the student and the teacher; checked before the first step.

    Attributes:
        views: encodings of each text in one step: 2 asks for a second one (another dropout mask, or the
            second text of a pair).
        tokens: the last hidden state of every token, the student's and the teacher's.
        alignment: how teacher tokens are mapped onto student tokens, a name of
            `teacher_cache.tokens.alignment.METHODS`; None for objectives that compare no tokens one by one.
        attention: pairs (student layer, teacher layer), both counted from 1, whose attention maps are compared.
        importance: how much attention each teacher token receives in the teacher's last layer.
        same_tokens: both models must cut every text into the same tokens.
        internals: what no cache keeps: every layer's states, heads one by one. Only an online teacher gives it.
    """

    views: int = 1
    tokens: bool = False
    alignment: str | None = None
    attention: tuple[tuple[int, int], ...] = ()
    importance: bool = False
    same_tokens: bool = False
    internals: bool = False


@dataclass(frozen=True)
class StudentShape:
    """The sizes that projections depend on.

    Attributes:
        dim: width d_s of a pooled state, and of a token's.
        layers: number L of transformer blocks; there are L + 1 pooled states, 0 being the embedding layer.
        pooling: "mean", "cls" or "last_token".
        heads: of one attention layer.
    """

    dim: int
    layers: int
    pooling: str
    heads: int = 1


@dataclass(frozen=True)
class TeacherShape:
    """The sizes of a teacher that projections depend on.

    Attributes:
        dim: width d_T of a sentence vector; the sum of the widths where several spaces are asked for.
        normalized: sentence vectors have unit length; None where it is not known.
        token_dim: width d_H of a token's last hidden state. It, `layers`, `heads` and `causal` are None where
            only sentence vectors are known.
        layers: number L_T of transformer blocks.
        heads: of one attention layer.
        causal: a token attends to those before it alone.
    """

    dim: int
    normalized: bool | None = None
    token_dim: int | None = None
    layers: int | None = None
    heads: int | None = None
    causal: bool | None = None


@dataclass(frozen=True)
class Internals:
    """What one model computed on the way, view 1 of B texts padded to n tokens.

    Attributes:
        hidden: `(L + 1, B, n, d)` states of the embedding layer and of every block.
        attention: `(L, B, heads, n, n)`: softmax(QK^T / sqrt(d_head)) of every block, rows sum to 1.
        values: `(B, heads, n, d_head)`: V of the last block.
    """

    hidden: Tensor
    attention: Tensor
    values: Tensor

    def take(self, places: Tensor) -> Self:
        return type(self)(self.hidden[:, places], self.attention[:, places], self.values[places])


@dataclass(frozen=True)
class TokenStates:
    """The tokens of B texts of one model, padded to n tokens on whichever side.

    Attributes:
        states: `(B, n, d)` last hidden states, float; padding is 0.
        mask: `(B, n)` bool, True for tokens, False for padding.
        special: `(B, n)` bool, True for tokens that are no part of the text: [CLS], </s>, a prompt's.
        attention: `(z, B, n, n)` mean over the heads of the attention maps of `Needs.attention`, in its order:
            [.., i, j] is what token i takes from token j; padding is 0. None unless asked for.
        importance: `(B, n)` attention that each token receives in the last layer, mean over heads and summed over
            the rows of tokens; padding is 0. The teacher's, where asked for.
        internals: where asked for.
    """

    states: Tensor
    mask: Tensor
    special: Tensor
    attention: Tensor | None = None
    importance: Tensor | None = None
    internals: Internals | None = None

    def take(self, places: Tensor) -> Self:
        """The same of some of the texts."""
        return type(self)(
            self.states[places],
            self.mask[places],
            self.special[places],
            None if self.attention is None else self.attention[:, places],
            None if self.importance is None else self.importance[places],
            None if self.internals is None else self.internals.take(places),
        )


@dataclass(frozen=True)
class StudentOutput:
    """What the student said of a batch of B texts in V views.

    Attributes:
        layers: `(L + 1, V * B, d_s)` pooled states, float32, view by view: rows `[0, B)` are view 1.
            `layers[0]` is the embedding layer, `layers[L]` the last block.
        views: V. It may be smaller than the objective asked for: then the terms that need the missing view are
            left out (a cheaper first pass of sharpness-aware steps).
        tokens: of view 1, where the objective asked for them.
    """

    layers: Tensor
    views: int = 1
    tokens: TokenStates | None = None

    def view(self, number: int) -> Tensor:
        """`(L + 1, B, d_s)`: the pooled states of one view, counted from 0."""
        batch = self.layers.shape[1] // self.views
        return self.layers[:, number * batch : (number + 1) * batch]

    def take(self, places: Tensor) -> Self:
        """The same of some of the texts, by their number in the batch."""
        batch = self.layers.shape[1] // self.views
        rows = torch.cat([view * batch + places for view in range(self.views)])
        tokens = None if self.tokens is None else self.tokens.take(places)
        return type(self)(self.layers[:, rows], self.views, tokens)


@dataclass(frozen=True)
class TeacherTargets:
    """What the teacher said of the same B texts.

    Attributes:
        vectors: `(B, d_T)` float32, constants: no gradient flows into them. Of several spaces the unit vectors
            stand side by side, over the root of their number, so that a cosine is the mean of the spaces'.
        text_ids: `(B,)` int64, equal where two texts of the batch are the same text.
        domains: `(B,)` int64, which part of the corpus a text is from; None where it was not asked for.
        tokens: where the objective asked for them.
        alignment: `(B, n_s, n_T)` float32: row s says how the teacher's tokens are averaged onto student token s;
            it sums to 1, or to 0 where the token has no counterpart. Where the objective named a method.
    """

    vectors: Tensor
    text_ids: Tensor
    domains: Tensor | None = None
    tokens: TokenStates | None = None
    alignment: Tensor | None = None

    def take(self, places: Tensor) -> Self:
        """The same of some of the texts, by their number in the batch."""
        return type(self)(
            self.vectors[places],
            self.text_ids[places],
            None if self.domains is None else self.domains[places],
            None if self.tokens is None else self.tokens.take(places),
            None if self.alignment is None else self.alignment[places],
        )


class Objective(nn.Module):
    """A loss over pooled vectors, and token states where it asks for them. It owns its projections, never the student.

    A method is one file in this folder: a subclass, and one line in `distill.objectives.OBJECTIVES`. The
    constructor takes `(student: StudentShape, teacher: TeacherShape, **options)`; unknown options are refused by
    Python itself.
    """

    # What it needs with its default options; an instance whose options need less (or more) sets its own.
    needs: Needs = Needs()
    # Named bundles of options: the paper's values, and where its published code differs, "official".
    presets: ClassVar[dict[str, dict[str, object]]] = {}
    # Where view 2 comes from: "dropout" encodes the same text again, "pair" the second text of a record.
    views: str = "dropout"
    # Names of all terms that it may have; empty where nobody has listed them.
    terms: tuple[str, ...] = ()
    # Terms that compare two views; the others are the same without the second one.
    second_view_terms: frozenset[str] = frozenset()
    # Whether the student's own vectors are trained to be the teacher's, without a projection in between.
    in_teacher_space: bool = False
    # Epochs in which the objective's own projections learn alone, before the student does.
    head_only_epochs: float = 0.0
    # Whether it leaves some of the student's parameters without a gradient, always.
    has_unused_parameters: bool = False

    @abstractmethod
    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """Named scalar terms, already weighted; the trainer minimises their sum."""

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight that carries the student's vector into the teacher's space, if learned."""
        return None

    def advance(self, epoch: float) -> None:
        """Told before every step how many epochs are done, for methods that train in stages."""


def unit(vectors: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows scaled to length 1 in float32; a zero row stays zero."""
    return torch.nn.functional.normalize(vectors.float(), dim=-1, eps=eps)
