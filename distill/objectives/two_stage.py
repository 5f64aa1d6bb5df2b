"""Two objectives after each other: first align the student with the teacher, then contrast texts.

    loss = first    in the first `stage_one_epochs` epochs, counted by `advance`
           second   afterwards

Recipes of embedding models align in a first stage and contrast texts in a second one: Jasper and Stella (arXiv
2412.19048); SimCSE and DistillCSE start from a trained encoder (arXiv 2104.08821, 2310.13499). One schedule, and one
optimizer with its states, spans both stages.

A head from the same layer into the teacher's space that both objectives have is one head, trained in both stages. Other
parameters of an objective change only in its stage. The exported projection is that of the second one, if it has any.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives import load_objective
from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.options import check, check_positive
from distill.registry import construct


class TwoStage(Objective):
    """One objective in the first epochs and another one afterwards, for the same student and shared heads.

    The terms are those of the present stage.
    """

    presets: ClassVar[dict[str, dict[str, object]]] = {}

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        first: str = "cosine",
        second: str = "distillcse",
        first_options: Mapping[str, Any] | None = None,
        second_options: Mapping[str, Any] | None = None,
        stage_one_epochs: float = 1,
    ) -> None:
        """Create both objectives.

        Args:
            first, second: their names, of `distill.objectives.OBJECTIVES` or "package.module:Class".
            first_options, second_options: their options; a key "preset" selects a preset, which the others override.
            stage_one_epochs: epochs of the first stage; the run must be longer.
        """
        super().__init__()
        check_positive("stage_one_epochs", stage_one_epochs)
        self.stage_one_epochs = float(stage_one_epochs)
        self.first = _objective("first", first, first_options, student, teacher)
        self.second = _objective("second", second, second_options, student, teacher)
        self.needs, self.views = _combined(self.first, self.second)
        heads = self.first.linear_heads()
        for layer, own in self.second.linear_heads().items():
            head = heads.get(layer)
            if head is not None and (head.weight.shape, head.bias is None) == (own.weight.shape, own.bias is None):
                name = next(name for name, module in self.second.named_modules() if module is own)
                self.second.set_submodule(name, head)
        self.head_only_epochs = min(self.first.head_only_epochs, self.stage_one_epochs)
        self.in_teacher_space = self.second.in_teacher_space
        self.compares_lengths = self.first.compares_lengths
        # Parameters of the other stage have no gradient.
        self.has_unused_parameters = True
        self._enter(self.second)

    def _enter(self, stage: Objective) -> None:
        self.in_stage_one = stage is self.first
        self.terms, self.second_view_terms = stage.terms, stage.second_view_terms

    @property
    def present(self) -> Objective:
        """The objective of the present stage."""
        return self.first if self.in_stage_one else self.second

    @property
    def present_views(self) -> int:
        return self.present.present_views

    def stages(self) -> tuple[Objective, ...]:
        return (*self.first.stages(), *self.second.stages())

    def advance(self, epoch: float) -> None:
        """Start the second stage after `stage_one_epochs`; without a call there is no first one."""
        self._enter(self.first if epoch < self.stage_one_epochs else self.second)
        self.first.advance(epoch)
        self.second.advance(max(0.0, epoch - self.stage_one_epochs))

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The terms of the present objective."""
        terms: dict[str, Tensor] = self.present(student, teacher)
        return terms

    def projection(self) -> Tensor | None:
        """That of the second objective."""
        return self.second.projection()

    def linear_heads(self) -> dict[int, nn.Linear]:
        """The heads of both, the first objective's where they differ."""
        return {**self.second.linear_heads(), **self.first.linear_heads()}


def _objective(
    option: str, name: str, options: Mapping[str, Any] | None, student: StudentShape, teacher: TeacherShape
) -> Objective:
    """One of the two objectives."""
    check(option, name, "the name of an objective", isinstance(name, str))
    kind = load_objective(name)
    check(option, name, "another objective", not issubclass(kind, TwoStage))
    check(f"{option}_options", options, "keys and values", options is None or isinstance(options, Mapping))
    given = dict(options or {})
    preset = given.pop("preset", None)
    if preset is not None:
        check(f"{option}_options.preset", preset, f"one of {', '.join(kind.presets) or 'none'}", preset in kind.presets)
        given = {**kind.presets[preset], **given}
    return construct(kind, f"objective {name}", student, teacher, options=given)


def _combined(first: Objective, second: Objective) -> tuple[Needs, str]:
    """What both need together, and the source of view 2."""
    if first.needs.tokens and second.needs.tokens:
        raise ConfigError("objective two-stage: only one of its two objectives may compare tokens")
    sources = {one.views for one in (first, second) if one.needs.views > 1}
    if len(sources) > 1:
        raise ConfigError(
            "objective two-stage: views=pair of one objective and views=dropout of the other need different batches; "
            "set the option `views` of both alike"
        )
    needs = first.needs if first.needs.tokens else second.needs
    views = max(first.needs.views, second.needs.views)
    return replace(needs, views=views), sources.pop() if sources else "dropout"
