"""The teacher in the training loop: it encodes every batch, which a cache avoids.

It has the options of the cached space, so that a run differs from one on the cache only in its cost.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from distill.errors import NeedsNotMet
from distill.objectives.base import Internals
from distill.student.internals import capture_internals
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers import Encoded, TeacherOptions, TeacherSpec, load_teacher, resolve_for_space
from teacher_cache.teachers.batching import longest_first
from teacher_cache.teachers.loading import choose_device
from teacher_cache.tokens.request import TokenRequest

# A token budget above that of any batch: internals come from a single forward pass.
_UNLIMITED_TOKENS = 2**31


class OnlineTeacher:
    """A teacher that encodes while a student trains, without gradients and outside autocast.

    Args:
        spec: of the teacher; its own request is replaced.
        request: token-level output to compute.
        internals: whether `encode_with_internals` will be called.
    """

    def __init__(self, spec: TeacherSpec, request: TokenRequest | None = None, internals: bool = False) -> None:
        options = replace(spec.options, batch_tokens=_UNLIMITED_TOKENS) if internals else spec.options
        self._teacher = load_teacher(replace(spec, options=options, request=request))
        self._device_type = choose_device(options.device).type
        self._internals = internals
        if internals and self.network is None:
            raise NeedsNotMet(
                f"internals need a transformers model, but {spec.space.teacher} ({spec.space.backend}) is none; use "
                "another objective or teacher"
            )

    @property
    def space(self) -> EmbeddingSpace:
        return self._teacher.space

    @property
    def network(self) -> nn.Module | None:
        """The transformers model that computes the vectors; None for other teachers."""
        return self._teacher.network

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Vectors and requested token-level output of n texts."""
        with torch.autocast(self._device_type, enabled=False):
            return self._teacher.encode_counted(texts)

    def encode_with_internals(self, texts: Sequence[str], *, padding_side: str = "right") -> tuple[Encoded, Internals]:
        """The result of `encode`, and the internals of its single forward pass.

        Internals are constants on the teacher's device, in the order of the texts, padded with 0 to the longest text on
        `padding_side`, which may differ from the padding side of the teacher.

        Raises:
            NeedsNotMet: the batch took several passes, or the teacher was loaded without `internals`.
        """
        if self.network is None or not self._internals:
            raise NeedsNotMet("this online teacher was loaded without internals; load it with `internals`")
        with capture_internals(self.network) as passes:
            encoded = self.encode(texts)
        if len(passes) != 1:
            raise NeedsNotMet(
                f"a batch of {len(texts)} texts took {len(passes)} passes of {self.space.teacher}, but internals need "
                "one: lower training.per_device_train_batch_size, or use float32 if another dtype overflows"
            )
        with torch.no_grad():
            order = np.argsort(longest_first(encoded.tokens))
            rows = passes[0].take(torch.from_numpy(order).to(passes[0].hidden.device))
            return encoded, _repadded(rows, encoded.tokens.tolist(), self.space.padding_side, padding_side)


def load_online_teacher(
    model: str,
    space: EmbeddingSpace,
    device: str | None = None,
    request: TokenRequest | None = None,
    internals: bool = False,
    *,
    trust_remote_code: bool = False,
) -> OnlineTeacher:
    """The teacher of a cached space, loaded with the options of that space."""
    options = TeacherOptions(model=model, device=device, trust_remote_code=trust_remote_code)
    return OnlineTeacher(resolve_for_space(space, options), request, internals)


def _repadded(internals: Internals, lengths: Sequence[int], old_side: str, new_side: str) -> Internals:
    """Internals with the padding moved from one side to the other, and set to 0."""
    longest = internals.hidden.shape[2]
    device = internals.hidden.device
    counts = torch.tensor(lengths, device=device)[:, None]
    places = torch.arange(longest, device=device)[None]
    first = {"right": torch.zeros_like(counts), "left": longest - counts}  # place of the first token of a text
    is_token = (places >= first[new_side]) & (places < first[new_side] + counts)
    # (B, n): the old place of the token at each new place; at padding any valid place.
    source = (places - first[new_side] + first[old_side]).clamp(0, longest - 1)

    def moved(tensor: Tensor, *dims: int) -> Tensor:
        """`tensor`, with batch dimension 0, whose token dimensions `dims` are moved."""
        for dim in dims:
            shape = [len(source), *(longest if at == dim else 1 for at in range(1, tensor.dim()))]
            index, kept = source.reshape(shape), is_token.reshape(shape)
            tensor = tensor.gather(dim, index.expand_as(tensor)).masked_fill(~kept, 0.0)
        return tensor

    return Internals(
        moved(internals.hidden.transpose(0, 1), 2).transpose(0, 1),
        moved(internals.attention.transpose(0, 1), 3, 4).transpose(0, 1),
        moved(internals.values, 2),
    )
