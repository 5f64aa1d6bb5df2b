"""The interface of objectives: what they need, see and return."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Needs:
    """Inputs that an objective needs; checked before the first step.

    Attributes:
        views: encodings of each text per step; the second is another dropout mask, or the second text of a pair.
        tokens: the last hidden state of every token, of student and teacher.
        alignment: how teacher tokens are mapped onto student tokens, a name of
            `teacher_cache.tokens.alignment.METHODS`; None if tokens are not compared one by one.
        attention: pairs (student layer, teacher layer), counted from 1, whose attention maps are compared.
        importance: attention that each teacher token receives in the teacher's last layer.
        same_tokens: both models must tokenize every text alike.
        internals: states of every layer and attention of every head, which only an online teacher has.
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
    """Sizes of a student.

    Attributes:
        dim: width d_s of a pooled or token state.
        layers: number L of transformer blocks; there are L + 1 pooled states, the first of the embedding layer.
        pooling: "mean", "cls" or "last_token".
        heads: attention heads of a layer.
    """

    dim: int
    layers: int
    pooling: str
    heads: int = 1


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of a teacher.

    Attributes:
        dim: width d_T of a sentence vector; of several spaces the sum of their widths.
        normalized: sentence vectors have unit length; None if unknown.
        token_dim: width d_H of a token's last hidden state. It, `layers`, `heads` and `causal` are None if only
            sentence vectors are available.
        layers: number L_T of transformer blocks.
        heads: attention heads of a layer.
        causal: tokens attend only to earlier ones.
    """

    dim: int
    normalized: bool | None = None
    token_dim: int | None = None
    layers: int | None = None
    heads: int | None = None
    causal: bool | None = None


@dataclass(frozen=True)
class Internals:
    """Intermediate results of one model for B texts padded to n tokens, view 1.

    Attributes:
        hidden: `(L + 1, B, n, d)` states of the embedding layer and every block.
        attention: `(L, B, heads, n, n)`: softmax(QK^T / sqrt(d_head)) of every block; rows sum to 1.
        values: `(B, heads, n, d_head)`: V of the last block.
    """

    hidden: Tensor
    attention: Tensor
    values: Tensor

    def take(self, indices: Tensor) -> Self:
        """The same for some of the texts."""
        return type(self)(self.hidden[:, indices], self.attention[:, indices], self.values[indices])


@dataclass(frozen=True)
class TokenStates:
    """Token states of one model for B texts, padded to n tokens on either side.

    Attributes:
        states: `(B, n, d)` last hidden states, float; padding is 0.
        mask: `(B, n)` bool, True for tokens, False for padding.
        special: `(B, n)` bool, True for tokens that are not part of the text: [CLS], </s>, those of a prompt.
        attention: `(z, B, n, n)` attention maps of `Needs.attention`, in its order, mean over heads: [.., i, j] is
            the attention of token i to token j; padding is 0. None if not needed.
        importance: `(B, n)` attention that each token receives in the last layer, mean over heads and summed over
            the rows of tokens; padding is 0. Only of the teacher, None if not needed.
        internals: None if not needed.
    """

    states: Tensor
    mask: Tensor
    special: Tensor
    attention: Tensor | None = None
    importance: Tensor | None = None
    internals: Internals | None = None

    def take(self, indices: Tensor) -> Self:
        """The same for some of the texts."""
        return type(self)(
            self.states[indices],
            self.mask[indices],
            self.special[indices],
            None if self.attention is None else self.attention[:, indices],
            None if self.importance is None else self.importance[indices],
            None if self.internals is None else self.internals.take(indices),
        )


@dataclass(frozen=True)
class StudentOutput:
    """Student output for a batch of B texts in V views.

    Attributes:
        layers: `(L + 1, V * B, d_s)` pooled states, float32, view by view: rows `[0, B)` are view 1.
            `layers[0]` is the embedding layer, `layers[L]` the last block.
        views: V. If it is smaller than `Needs.views`, the terms of the missing view are skipped (a cheaper first
            pass of sharpness-aware steps).
        tokens: of view 1; None if not needed.
    """

    layers: Tensor
    views: int = 1
    tokens: TokenStates | None = None

    def view(self, number: int) -> Tensor:
        """`(L + 1, B, d_s)` pooled states of one view, counted from 0."""
        batch = self.layers.shape[1] // self.views
        return self.layers[:, number * batch : (number + 1) * batch]

    def take(self, indices: Tensor) -> Self:
        """The same for some of the texts, by index in the batch."""
        batch = self.layers.shape[1] // self.views
        rows = torch.cat([view * batch + indices for view in range(self.views)])
        tokens = None if self.tokens is None else self.tokens.take(indices)
        return type(self)(self.layers[:, rows], self.views, tokens)


@dataclass(frozen=True)
class TeacherTargets:
    """Teacher output for the same B texts.

    Attributes:
        vectors: `(B, d_T)` float32 constants. Of several spaces the concatenated unit vectors over the root of their
            number, so that a cosine is the mean of the spaces' cosines.
        text_ids: `(B,)` int64, equal for equal texts.
        domains: `(B,)` int64, the part of the corpus a text is from; None if not needed.
        tokens: None if not needed.
        alignment: `(B, n_s, n_T)` float32: row s averages teacher tokens onto student token s; it sums to 1, or to 0
            for a token without a counterpart. None if not needed.
    """

    vectors: Tensor
    text_ids: Tensor
    domains: Tensor | None = None
    tokens: TokenStates | None = None
    alignment: Tensor | None = None

    def take(self, indices: Tensor) -> Self:
        """The same for some of the texts, by index in the batch."""
        return type(self)(
            self.vectors[indices],
            self.text_ids[indices],
            None if self.domains is None else self.domains[indices],
            None if self.tokens is None else self.tokens.take(indices),
            None if self.alignment is None else self.alignment[indices],
        )


class Objective(nn.Module):
    """A loss over pooled vectors and, if needed, token states; its parameters are projections, not the student.

    A method is one file in this folder: a subclass, and one line in `distill.objectives.OBJECTIVES`. The
    constructor takes `(student: StudentShape, teacher: TeacherShape, **options)`.
    """

    # Needs of the default options; an instance with other options may set its own.
    needs: Needs = Needs()
    # Named sets of options: values of the paper, and "official" for those of its code if they differ.
    presets: ClassVar[dict[str, dict[str, object]]] = {}
    # Source of view 2: "dropout" encodes the same text again, "pair" the second text of a record.
    views: str = "dropout"
    # Names of all possible terms; empty if unknown.
    terms: tuple[str, ...] = ()
    # Terms that compare two views; the others do not depend on the second one.
    second_view_terms: frozenset[str] = frozenset()
    # Whether the student's vectors are trained to equal the teacher's, without a projection.
    in_teacher_space: bool = False
    # First epochs in which only the objective's projections are trained.
    head_only_epochs: float = 0.0
    # Epochs before a second stage with another loss; 0 if there is none.
    stage_one_epochs: float = 0.0
    # Whether some student parameters never get a gradient.
    has_unused_parameters: bool = False
    # Whether the loss depends on the lengths of heads' outputs and targets, not only on their directions.
    compares_lengths: bool = False

    @abstractmethod
    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """Named scalar terms, already weighted; the trainer minimizes their sum."""

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight that maps student vectors into the teacher's space; None if none is learned."""
        return None

    def linear_heads(self) -> dict[int, nn.Linear]:
        """Linear maps from the pooled state of a student layer, by its number, to the teacher's vector."""
        return {}

    @property
    def present_views(self) -> int:
        """Views that the present stage needs, at most `needs.views`."""
        return self.needs.views

    def stages(self) -> "tuple[Objective, ...]":
        """The objectives of successive stages: itself, unless it is made of others."""
        return (self,)

    def advance(self, epoch: float) -> None:
        """Set the number of epochs done, before every step; for methods that train in stages."""


def different_texts(text_ids: Tensor, *, mask_duplicates: bool) -> Tensor:
    """`(B, B)` bool: pairs of two texts; without `mask_duplicates`, all pairs of two rows."""
    if mask_duplicates:
        return text_ids[:, None] != text_ids[None, :]
    return ~torch.eye(len(text_ids), dtype=torch.bool, device=text_ids.device)


def unit(vectors: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows scaled to length 1 in float32; a zero row stays zero."""
    return torch.nn.functional.normalize(vectors.float(), dim=-1, eps=eps)
