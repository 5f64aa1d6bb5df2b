"""Token-level teacher outputs, as backends return them and token columns store them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Role of a token: of the text; the opening special token ([CLS], <s>); the closing one ([SEP], </s>); any other that
# is not of the text, such as a prompt's.
TEXT_TOKEN, OPENING, CLOSING, OTHER = range(4)

# Columns of `TextTokens.pieces`.
ID, START, END, ROLE = range(4)


@dataclass(frozen=True)
class TokenShape:
    """The sizes of a teacher with token-level outputs."""

    width: int  # of a last hidden state
    layers: int
    heads: int  # per layer
    causal: bool  # a token attends only to the tokens before it


@dataclass(frozen=True)
class TokenRequest:
    """Token-level outputs to compute besides sentence vectors: last hidden states, optionally attention.

    Attributes:
        attention: layers, counted from 1 and ascending, whose attention maps to return, together with the attention
            that each token receives in the last layer; None for no attention.
    """

    attention: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TextTokens:
    """Token-level teacher output of one text of T tokens, with special tokens and prompt, without padding.

    Attributes:
        states: `(T, width)` float32, last hidden states.
        pieces: `(T, 4)` int32: token id, first character, end character, role. Characters are counted in the text
            without the prompt; both are 0 for tokens outside the text.
        importance: `(T,)` float32, attention that each token receives in the last layer: mean over heads, summed
            over rows.
        attention: `(z, T, T)` float32, the mean over heads of each requested layer; rows sum to 1.
    """

    states: npt.NDArray[np.float32]
    pieces: npt.NDArray[np.int32]
    importance: npt.NDArray[np.float32] | None = None
    attention: npt.NDArray[np.float32] | None = None
