"""The teacher in the training loop: what a cache saves is computed at every step. The honest baseline.

It is asked with the options that the cached space had, so that a run differs from one on the cache in nothing but
its cost.
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

# A budget that no batch reaches: internals come out of one forward pass.
_ONE_PASS = 2**31


class OnlineTeacher:
    """A teacher that is asked while a student trains; never under gradients, never under autocast.

    Args:
        spec: of the teacher; its own request is replaced.
        request: what is wanted token by token.
        internals: whether `encode_with_internals` will be called.

    Raises:
        TeacherError: it cannot be loaded or cannot say what is requested.
        NeedsNotMet: internals of a teacher that is no transformers model.
    """

    def __init__(self, spec: TeacherSpec, request: TokenRequest | None = None, internals: bool = False) -> None:
        options = replace(spec.options, batch_tokens=_ONE_PASS) if internals else spec.options
        self._teacher = load_teacher(replace(spec, options=options, request=request))
        self._device_type = choose_device(options.device).type
        self._network = self.network if internals else None
        if internals and self._network is None:
            raise NeedsNotMet(
                f"{spec.space.teacher} ({spec.space.backend}) is no transformers model: what it computes on the way "
                "cannot be had"
            )

    @property
    def space(self) -> EmbeddingSpace:
        return self._teacher.space

    @property
    def network(self) -> nn.Module | None:
        """The transformers model that it runs; None of another kind of teacher."""
        found: nn.Module | None = getattr(self._teacher, "network", None)
        return found

    def said(self, texts: Sequence[str]) -> Encoded:
        """Vectors of n texts, and what was requested token by token."""
        with torch.autocast(self._device_type, enabled=False):
            return self._teacher.encode_counted(texts)

    def encode_with_internals(self, texts: Sequence[str], *, padding_side: str = "right") -> tuple[Encoded, Internals]:
        """The same, and what was computed on the way, out of one forward pass.

        Internals are constants on the teacher's device, in the order of the texts, padded with 0 to the longest on
        `padding_side`, whichever side the teacher itself is padded on.

        Raises:
            NeedsNotMet: the batch took several passes, or internals were not announced.
        """
        if self._network is None:
            raise NeedsNotMet("internals were asked of an online teacher that was opened without")
        with capture_internals(self._network) as passes:
            encoded = self.said(texts)
        if len(passes) != 1:
            raise NeedsNotMet(
                f"a batch of {len(texts)} texts took {len(passes)} passes of {self.space.teacher}, but internals need "
                "one: lower training.per_device_train_batch_size, or use float32 where another precision overflows"
            )
        with torch.no_grad():
            order = np.argsort(longest_first(encoded.tokens))
            rows = passes[0].take(torch.from_numpy(order).to(passes[0].hidden.device))
            return encoded, _padded(rows, encoded.tokens.tolist(), self.space.padding_side, padding_side)


def load_online_teacher(
    model: str,
    space: EmbeddingSpace,
    device: str | None = None,
    request: TokenRequest | None = None,
    internals: bool = False,
    *,
    trust_remote_code: bool = False,
) -> OnlineTeacher:
    """Load the teacher that a cached space came from, asked in the very same way.

    Args:
        model: folder, hub id or short name.
        space: as the cache holds it.

    Raises:
        SpaceMismatch: `model` is another teacher, or cannot be asked in this way.
        TeacherError, NeedsNotMet: as `OnlineTeacher`.
    """
    options = TeacherOptions(model=model, device=device, trust_remote_code=trust_remote_code)
    return OnlineTeacher(resolve_for_space(space, options), request, internals)


def _padded(internals: Internals, lengths: Sequence[int], found: str, wanted: str) -> Internals:
    """Move each text's tokens from one side of the padding to the other, and null the padding."""
    longest = internals.hidden.shape[2]
    device = internals.hidden.device
    counts = torch.tensor(lengths, device=device)[:, None]
    places = torch.arange(longest, device=device)[None]
    none = torch.zeros_like(counts)
    before = {"right": none, "left": longest - counts}  # padding in front of a text
    own = (places >= before[wanted]) & (places < before[wanted] + counts)
    # (B, n): where the token at each place stood before; padding points anywhere within.
    source = (places - before[wanted] + before[found]).clamp(0, longest - 1)

    def moved(tensor: Tensor, *dims: int) -> Tensor:
        """`tensor`, whose dimension 0 is the batch, with these dimensions of tokens moved."""
        for dim in dims:
            shape = [len(source), *(longest if at == dim else 1 for at in range(1, tensor.dim()))]
            index, kept = source.reshape(shape), own.reshape(shape)
            tensor = tensor.gather(dim, index.expand_as(tensor)).masked_fill(~kept, 0.0)
        return tensor

    return Internals(
        moved(internals.hidden.transpose(0, 1), 2).transpose(0, 1),
        moved(internals.attention.transpose(0, 1), 3, 4).transpose(0, 1),
        moved(internals.values, 2),
    )
