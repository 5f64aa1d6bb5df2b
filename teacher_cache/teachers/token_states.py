"""The token-level output of each text, recorded from one forward pass over a padded batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from teacher_cache.tokens.request import TextTokens, TokenRequest

if TYPE_CHECKING:
    from torch import Tensor


class TokenPass:
    """The requested token-level output of b texts padded to t tokens, on the device until `fetch`.

    `record_attention` and `record_output` are callbacks of `attention.record_forward`.
    """

    def __init__(self, request: TokenRequest, layers: int, mask: "Tensor") -> None:
        self._wanted = request.attention
        self._last = layers
        self._mask = mask
        self._maps: list[Tensor] = []
        self._importance: Tensor | None = None
        self._states: Tensor | None = None

    def record_attention(self, layer: int, maps: "Tensor", values: "Tensor") -> None:
        """Keep the mean over heads of a requested layer, and the column sums of the last layer."""
        wanted = self._wanted is not None and layer in self._wanted
        if not wanted and layer != self._last:
            return
        mean = maps.float().mean(dim=1)
        if wanted:
            self._maps.append(mean)
        if layer == self._last:
            self._importance = mean.masked_fill(self._mask.unsqueeze(2) == 0, 0.0).sum(dim=1)

    def record_output(self, output: Any) -> None:
        """Keep the last hidden states without padding: `(tokens of all texts, width)`."""
        self._states = output[0][self._mask.bool()].float()

    def fetch(self, pieces: Sequence[npt.NDArray[np.int32]]) -> list[TextTokens]:
        """The token-level output of each text of the batch, given its word pieces."""
        if self._states is None:
            raise RuntimeError("fetch was called before a forward pass was recorded")
        states = self._states.cpu().numpy()
        importance = None if self._importance is None else self._importance.cpu().numpy()
        maps = [layer.cpu().numpy() for layer in self._maps]
        starts = self._mask.int().argmax(dim=1).cpu().tolist()
        texts, done = [], 0
        for row, (start, text_pieces) in enumerate(zip(starts, pieces, strict=True)):
            count = len(text_pieces)
            at = slice(start, start + count)
            attention = None
            if self._wanted is not None:
                # Copied, so that the padded maps of the batch are freed.
                attention = np.zeros((len(maps), count, count), dtype=np.float32)
                for number, layer in enumerate(maps):
                    attention[number] = layer[row, at, at]
            texts.append(
                TextTokens(
                    states=states[done : done + count],
                    pieces=text_pieces,
                    importance=None if importance is None else importance[row, at].copy(),
                    attention=attention,
                )
            )
            done += count
        return texts
