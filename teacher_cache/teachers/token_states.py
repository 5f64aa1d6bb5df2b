"""From one forward pass over a padded batch to what was said of each text, token by token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from teacher_cache.tokens.request import TextTokens, TokenRequest

if TYPE_CHECKING:
    from torch import Tensor


class TokenPass:
    """What a request wants of b texts padded to t tokens, kept on the device until it is fetched.

    `visit` and `output` are for `attention.watching`.
    """

    def __init__(self, request: TokenRequest, layers: int, mask: "Tensor") -> None:
        self._wanted = request.attention
        self._last = layers
        self._mask = mask
        self._maps: list[Tensor] = []
        self._importance: Tensor | None = None
        self._states: Tensor | None = None

    def visit(self, layer: int, maps: "Tensor", values: "Tensor") -> None:
        """Keep the mean over the heads of a layer that is wanted, and the column sums of the last one."""
        wanted = self._wanted is not None and layer in self._wanted
        if not wanted and layer != self._last:
            return
        mean = maps.float().mean(dim=1)
        if wanted:
            self._maps.append(mean)
        if layer == self._last:
            self._importance = mean.masked_fill(self._mask.unsqueeze(2) == 0, 0.0).sum(dim=1)

    def output(self, said: Any) -> None:
        """Keep the last hidden states, those of padding left out: `(tokens of all texts, width)`."""
        self._states = said[0][self._mask.bool()].float()

    def fetch(self, pieces: Sequence[npt.NDArray[np.int32]]) -> list[TextTokens]:
        """What was said of each text, in the order of the batch."""
        if self._states is None:
            raise RuntimeError("fetched before the forward pass was watched")
        states = self._states.cpu().numpy()
        importance = None if self._importance is None else self._importance.cpu().numpy()
        maps = [one.cpu().numpy() for one in self._maps]
        starts = self._mask.int().argmax(dim=1).cpu().tolist()
        texts, done = [], 0
        for row, (start, of_text) in enumerate(zip(starts, pieces, strict=True)):
            count = len(of_text)
            at = slice(start, start + count)
            attention = None
            if self._wanted is not None:
                # Copied, so that the padded maps of the batch are freed.
                attention = np.zeros((len(maps), count, count), dtype=np.float32)
                for layer, one in enumerate(maps):
                    attention[layer] = one[row, at, at]
            texts.append(
                TextTokens(
                    states=states[done : done + count],
                    pieces=of_text,
                    importance=None if importance is None else importance[row, at].copy(),
                    attention=attention,
                )
            )
            done += count
        return texts
