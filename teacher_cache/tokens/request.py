"""What a teacher says of a text token by token, as back ends give it and token columns keep it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Part a token plays: of the text itself; the special in front ([CLS], <s>); the one behind ([SEP], </s>); any
# other that is no part of the text, such as a prompt's.
TEXT_TOKEN, OPENING, CLOSING, OTHER = range(4)

# Columns of `TextTokens.pieces`.
ID, START, END, ROLE = range(4)


@dataclass(frozen=True)
class TokenShape:
    """The sizes of a model that speaks token by token.

    Attributes:
        width: of a last hidden state.
        layers: transformer blocks.
        heads: of one attention layer.
        causal: a token attends to those before it alone.
    """

    width: int
    layers: int
    heads: int
    causal: bool


@dataclass(frozen=True)
class TokenRequest:
    """What is asked of a teacher besides sentence vectors.

    Attributes:
        attention: layers, counted from 1 and ascending, whose attention maps are wanted too, and with them the
            attention that each token receives in the last layer; None for last hidden states alone.
    """

    attention: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TextTokens:
    """What a teacher said of one text of T tokens, specials and prompt included, without padding.

    Attributes:
        states: `(T, width)` float32, last hidden states as the model gives them.
        pieces: `(T, 4)` int32: id, first character and the one behind the last, role. Characters are counted in
            the text without the prompt; both are 0 for tokens that are no part of it.
        importance: `(T,)` float32, attention that each token receives in the last layer: mean over heads, summed
            over rows.
        attention: `(z, T, T)` float32, of each layer asked for the mean over heads; rows sum to 1.
    """

    states: npt.NDArray[np.float32]
    pieces: npt.NDArray[np.int32]
    importance: npt.NDArray[np.float32] | None = None
    attention: npt.NDArray[np.float32] | None = None
