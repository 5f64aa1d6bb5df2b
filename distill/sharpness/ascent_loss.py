"""What the first pass climbs where it is not the whole loss: some of its terms, one view's, less DISAM's variance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.sharpness.disam import domain_variance


@dataclass(frozen=True)
class AscentLoss:
    """`L - variance_weight * V`: L the sum of the named terms, V their `domain_variance`.

    Attributes:
        terms: names of the objective's terms; None is all of them.
        variance_weight: lambda of DISAM, 0 for other methods.
        first_view: leave out the terms that compare two views, of an objective that has others.
    """

    terms: tuple[str, ...] | None = None
    variance_weight: float = 0.0
    first_view: bool = False

    def is_one_view(self, objective: Objective) -> bool:
        """Whether it can be had without the second encoding of the texts."""
        if self.first_view:
            return objective.needs.views > 1 and not objective.second_view_terms.issuperset(objective.terms)
        return self.terms is not None and objective.second_view_terms.isdisjoint(self.terms)

    def whole(self, objective: Objective) -> bool:
        """Whether the objective's whole loss is known beside it."""
        return self.terms is None and not self.is_one_view(objective)

    def inputs(self, objective: Objective, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch, without its second view where that is not needed: the first pass then encodes half as much.

        Args:
            inputs: `input_ids` and `attention_mask` view by view, the rest by text.
        """
        if not self.is_one_view(objective):
            return dict(inputs)
        texts = len(inputs["vectors"])
        return {**inputs, **{name: inputs[name][:texts] for name in ("input_ids", "attention_mask")}}

    def __call__(
        self, objective: Objective, student: StudentOutput, teacher: TeacherTargets, found: Mapping[str, Tensor]
    ) -> Tensor:
        """The scalar to climb.

        Args:
            found: the objective's terms of this batch.

        Raises:
            ConfigError: a name that no term has, no term at all, or DISAM without the texts' domains.
        """
        if not found:
            raise ConfigError(
                "sharpness: with these options all terms of the objective compare two views, none is left for a first "
                "pass over one; use norm-only"
            )
        unknown = [name for name in self.terms or () if name not in found]
        if unknown:
            left_out = objective.second_view_terms if student.views < objective.needs.views else ()
            raise ConfigError(
                f"sharpness ascent_terms: the objective has no term {unknown[0]!r} in this step; known here: "
                f"{', '.join(sorted({*found, *left_out}))}"
            )
        loss = self._sum(found)
        if not self.variance_weight:
            return loss
        if teacher.domains is None:
            raise ConfigError(
                "sharpness disam compares the losses of a batch's domains, but the corpus has none: build the corpus "
                "with --domain-key"
            )

        def loss_of(places: Tensor) -> Tensor:
            return self._sum(objective(student.take(places), teacher.take(places)))

        return loss - self.variance_weight * domain_variance(loss_of, teacher.domains)

    def _sum(self, found: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([found[name] for name in self.terms or found]).sum()
