"""What every objective sees and returns."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Needs:
    """What an objective asks of the student and the cache; checked before the first step.

    Attributes:
        views: encodings of each text in one step: 2 asks for a second one (another dropout mask, or the
            second text of a pair).
        token_states: the student's and the teacher's states of every token.
    """

    views: int = 1
    token_states: bool = False


@dataclass(frozen=True)
class StudentShape:
    """The sizes that projections depend on.

    Attributes:
        dim: width d_s of a pooled state.
        layers: number L of transformer blocks; there are L + 1 pooled states, 0 being the embedding layer.
        pooling: "mean", "cls" or "last_token".
    """

    dim: int
    layers: int
    pooling: str


@dataclass(frozen=True)
class StudentOutput:
    """What the student said of a batch of B texts in V views.

    Attributes:
        layers: `(L + 1, V * B, d_s)` pooled states, float32, view by view: rows `[0, B)` are view 1.
            `layers[0]` is the embedding layer, `layers[L]` the last block.
        views: V.
    """

    layers: Tensor
    views: int = 1

    def view(self, number: int) -> Tensor:
        """`(L + 1, B, d_s)`: the pooled states of one view, counted from 0."""
        batch = self.layers.shape[1] // self.views
        return self.layers[:, number * batch : (number + 1) * batch]


@dataclass(frozen=True)
class TeacherTargets:
    """What the teacher said of the same B texts.

    Attributes:
        vectors: `(B, d_T)` float32, constants: no gradient flows into them.
        text_ids: `(B,)` int64, equal where two texts of the batch are the same text.
    """

    vectors: Tensor
    text_ids: Tensor


class Objective(nn.Module):
    """A loss over pooled vectors. It owns its projections, never the student.

    A method is one file in this folder: a subclass, and one line in `distill.objectives.OBJECTIVES`. The
    constructor takes `(shape: StudentShape, teacher_dim: int, **options)`; unknown options are refused by
    Python itself.
    """

    # What it needs with its default options; an instance whose options need less (or more) sets its own.
    needs: Needs = Needs()
    # Named bundles of options: the paper's values, and where its published code differs, "official".
    presets: ClassVar[dict[str, dict[str, object]]] = {}
    # Where view 2 comes from: "dropout" encodes the same text again, "pair" the second text of a record.
    views: str = "dropout"
    # Whether the student's own vectors are trained to be the teacher's, without a projection in between.
    in_teacher_space: bool = False

    @abstractmethod
    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """Named scalar terms, already weighted; the trainer minimises their sum."""

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight that carries the student's vector into the teacher's space, if learned."""
        return None


def unit(vectors: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows scaled to length 1 in float32; a zero row stays zero."""
    return torch.nn.functional.normalize(vectors.float(), dim=-1, eps=eps)
