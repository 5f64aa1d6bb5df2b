"""Relational knowledge distillation (Park et al., CVPR 2019): distances and angles between texts, not vectors.

    loss = distance_weight * distance + angle_weight * angle

With D_ij = ||e_i - e_j|| over its mean, and V_i the unit vectors from text i to every text of the batch:

    distance = mean over the B^2 pairs of         huber(D^student_ij - D^teacher_ij)
    angle    = mean over the B^3 triplets of      huber(<V_ij, V_ik>^student - <V_ij, V_ik>^teacher)

huber is the smooth L1 of beta 1. Only the last layer's pooled state is read; widths need not agree.

- Both relations ignore where the origin lies, a cosine does not: `normalize=True` takes the student's unit vectors,
  so that what is matched is what is compared later. The paper trains the raw vectors.
- Two rows of one text are the same point of the teacher's space, where no direction leads from one to the other:
  the student's direction would be dropout noise, and its gradient grows as the noise shrinks. Such pairs are left out
  of both terms. Preset "official" keeps them, as the published code does.

Memory: `(B, B, d)` differences and `(B, B, B)` angles, for student and teacher each. With widths of 384 and 768 a step
holds 31 MB at B = 32, 0.25 GB at 128 and 0.85 GB at 256; without the angles 17 MB, 0.13 GB and 0.49 GB.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.options import check, check_weight

EPS = 1e-12


class RKD(Objective):
    """The terms are "distance" and "angle"; one of weight 0 is neither computed nor returned."""

    terms = ("distance", "angle")
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {},
        "official": {"mask_duplicates": False},
    }

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        distance_weight: float = 25.0,
        angle_weight: float = 50.0,
        normalize: bool = False,
        mask_duplicates: bool = True,
    ) -> None:
        """See the module; `student` and `teacher` are part of every objective's signature and unused.

        Raises:
            ConfigError: a weight below 0, or both 0.
        """
        super().__init__()
        weights = {"distance_weight": distance_weight, "angle_weight": angle_weight}
        for name, weight in weights.items():
            check_weight(name, weight)
        check("*_weight", weights, "at least one above 0", any(weights.values()))
        self.distance_weight, self.angle_weight = distance_weight, angle_weight
        self.normalize, self.mask_duplicates = normalize, mask_duplicates

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, whatever the autocast state around; 0 for a batch of one text."""
        states = student.view(0)[-1]
        terms: dict[str, Tensor] = {}
        with torch.autocast(states.device.type, enabled=False):
            mine = differences(unit(states) if self.normalize else states.float())
            theirs = differences(teacher.vectors.detach().float())
            apart = self._apart(teacher.text_ids)
            if self.distance_weight:
                distance = smooth_l1_loss(distances(mine, apart), distances(theirs, apart))
                terms["distance"] = self.distance_weight * distance
            if self.angle_weight:
                terms["angle"] = self.angle_weight * smooth_l1_loss(angles(mine, apart), angles(theirs, apart))
        return terms

    def _apart(self, text_ids: Tensor) -> Tensor:
        """`(B, B)` bool: pairs of two texts."""
        if self.mask_duplicates:
            return text_ids[:, None] != text_ids[None, :]
        return ~torch.eye(len(text_ids), dtype=torch.bool, device=text_ids.device)


def differences(vectors: Tensor) -> Tensor:
    """`(B, B, d)` of `(B, d)`: [i, j] leads from vector i to vector j."""
    return vectors[None, :, :] - vectors[:, None, :]


def distances(differences: Tensor, apart: Tensor) -> Tensor:
    """`(B, B)` lengths over the mean of those that are `apart`; 0 elsewhere."""
    # Clamped first and zeroed afterwards: the root has an infinite slope at 0, which the product rule makes NaN.
    lengths = differences.square().sum(-1).clamp(min=EPS).sqrt() * apart
    return lengths / (lengths.sum() / apart.sum().clamp(min=1)).clamp(min=EPS)


def angles(differences: Tensor, apart: Tensor) -> Tensor:
    """`(B, B, B)`: [i, j, k] is the cosine of the angle at i between j and k; 0 where i is not `apart` from both."""
    directions = unit(differences) * apart[..., None]
    return directions @ directions.mT
