"""The loss of the first pass if it is not the whole loss: some terms, one view, or minus the variance of DISAM."""

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
        first_view: skip the terms that compare two views, if the objective has others.
    """

    terms: tuple[str, ...] | None = None
    variance_weight: float = 0.0
    first_view: bool = False

    def is_one_view(self, objective: Objective) -> bool:
        """Whether it does not need the second encoding of the texts."""
        if self.first_view:
            return objective.needs.views > 1 and not objective.second_view_terms.issuperset(objective.terms)
        return self.terms is not None and objective.second_view_terms.isdisjoint(self.terms)

    def includes_whole_loss(self, objective: Objective) -> bool:
        """Whether the whole loss of the objective is computed with it."""
        return self.terms is None and not self.is_one_view(objective)

    def select_inputs(self, objective: Objective, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch, without the second view if it is not needed, which halves the cost of the first pass.

        Args:
            inputs: `input_ids` and `attention_mask` view by view, the others by text.
        """
        if not self.is_one_view(objective):
            return dict(inputs)
        texts = len(inputs["vectors"])
        return {**inputs, **{name: inputs[name][:texts] for name in ("input_ids", "attention_mask")}}

    def __call__(
        self, objective: Objective, student: StudentOutput, teacher: TeacherTargets, terms: Mapping[str, Tensor]
    ) -> Tensor:
        """The scalar to ascend.

        Args:
            terms: the objective's terms of this batch.
        """
        if not terms:
            raise ConfigError(
                "sharpness: with these options all terms of the objective compare two views, so that the first pass "
                "cannot use one; use sharpness.name=norm-only"
            )
        unknown = [name for name in self.terms or () if name not in terms]
        if unknown:
            left_out = objective.second_view_terms if student.views < objective.needs.views else ()
            raise ConfigError(
                f"sharpness ascent_terms: the objective has no term {unknown[0]!r} in this step; known here: "
                f"{', '.join(sorted({*terms, *left_out}))}"
            )
        loss = self._sum(terms)
        if not self.variance_weight:
            return loss
        if teacher.domains is None:
            raise ConfigError(
                "sharpness disam compares the losses of a batch's domains, but the corpus has none; build it again: "
                "`tcache build CORPUS --domain-key COLUMN`"
            )

        def loss_of(indices: Tensor) -> Tensor:
            return self._sum(objective(student.take(indices), teacher.take(indices)))

        return loss - self.variance_weight * domain_variance(loss_of, teacher.domains)

    def _sum(self, terms: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([terms[name] for name in self.terms or terms]).sum()
