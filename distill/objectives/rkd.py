"""Relational knowledge distillation (Park et al., CVPR 2019): distances and angles between texts, not vectors.

    loss = distance_weight * distance + angle_weight * angle

With D_ij = ||e_i - e_j|| over its mean, and V_i the unit vectors from text i to every text of the batch:

    distance = mean over the B^2 pairs of         huber(D^student_ij - D^teacher_ij)
    angle    = mean over the B^3 triplets of      huber(<V_ij, V_ik>^student - <V_ij, V_ik>^teacher)

huber is the smooth L1 with beta 1. Only the pooled state of the last layer is used; widths need not agree.

- Both relations are invariant to translation, a cosine is not: `normalize=True` uses the student's unit vectors, so
  that what is trained is what is compared later. The paper trains the raw vectors.
- Two rows of one text have the same teacher vector, so there is no direction between them: the student's direction
  would be dropout noise, whose gradient grows as the noise shrinks. Such pairs are left out of both terms. Preset
  "official" keeps them, as the published code does.

Memory: `(B, B, d)` differences and `(B, B, B)` angles, of student and of teacher. With widths of 384 and 768 a step
takes 31 MB at B = 32, 0.25 GB at 128 and 0.85 GB at 256; without the angles 17 MB, 0.13 GB and 0.49 GB.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from distill.objectives.base import (
    Objective,
    StudentOutput,
    StudentShape,
    TeacherShape,
    TeacherTargets,
    different_texts,
    unit,
)
from distill.objectives.options import check_weights

EPS = 1e-12


class RKD(Objective):
    """Distances and angles between texts match those of the teacher (RKD, arXiv 1904.05068).

    The terms are "distance" and "angle"; a term of weight 0 is neither computed nor returned.
    """

    terms = ("distance", "angle")
    presets: ClassVar[dict[str, dict[str, object]]] = {"paper": {}, "official": {"mask_duplicates": False}}

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
        """See the module; `student` and `teacher` are unused."""
        super().__init__()
        check_weights({"distance_weight": distance_weight, "angle_weight": angle_weight})
        self.distance_weight, self.angle_weight = distance_weight, angle_weight
        self.normalize, self.mask_duplicates = normalize, mask_duplicates

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast; 0 for a batch of one text."""
        states = student.view(0)[-1]
        terms: dict[str, Tensor] = {}
        with torch.autocast(states.device.type, enabled=False):
            mine = differences(unit(states) if self.normalize else states.float())
            theirs = differences(teacher.vectors.detach().float())
            different = different_texts(teacher.text_ids, mask_duplicates=self.mask_duplicates)
            if self.distance_weight:
                distance = smooth_l1_loss(distances(mine, different), distances(theirs, different))
                terms["distance"] = self.distance_weight * distance
            if self.angle_weight:
                terms["angle"] = self.angle_weight * smooth_l1_loss(angles(mine, different), angles(theirs, different))
        return terms


def differences(vectors: Tensor) -> Tensor:
    """`(B, B, d)` of `(B, d)`: [i, j] is vector j minus vector i."""
    return vectors[None, :, :] - vectors[:, None, :]


def distances(differences: Tensor, different: Tensor) -> Tensor:
    """`(B, B)` lengths over their mean, both of pairs that are `different`; 0 elsewhere."""
    # Clamped before the root and zeroed after it: its infinite slope at 0 would give NaN gradients.
    lengths = differences.square().sum(-1).clamp(min=EPS).sqrt() * different
    return lengths / (lengths.sum() / different.sum().clamp(min=1)).clamp(min=EPS)


def angles(differences: Tensor, different: Tensor) -> Tensor:
    """`(B, B, B)`: [i, j, k] is the cosine of the angle at i between j and k; 0 unless i is `different` from both."""
    directions = unit(differences) * different[..., None]
    return directions @ directions.mT
