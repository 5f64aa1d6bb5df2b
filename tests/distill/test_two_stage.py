"""Two objectives after each other, with shared heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError
from distill.objectives.base import StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.cosine import Cosine
from distill.objectives.simcse import SimCSE
from distill.objectives.two_stage import TwoStage
from distill.runs.run import check_run, run
from tests.distill.tiny_runs import Stopped, metrics, parts, stop_at, tiny_config

STUDENT, TEACHER = StudentShape(4, 3, "mean"), TeacherShape(6, normalized=True)


def batch(views: int = 2) -> tuple[StudentOutput, TeacherTargets]:
    generator = torch.Generator().manual_seed(0)
    layers = torch.randn(4, views * 5, 4, generator=generator)
    return StudentOutput(layers, views), TeacherTargets(torch.randn(5, 6, generator=generator), torch.arange(5))


def test_each_stage_has_the_terms_of_its_objective() -> None:
    objective = TwoStage(STUDENT, TEACHER, second="simcse", stage_one_epochs=1.5)
    output, targets = batch()
    objective.advance(1.49)
    alone = Cosine(STUDENT, TEACHER)
    alone.load_state_dict(objective.first.state_dict())
    assert objective(output, targets) == alone(output, targets)
    assert (objective.terms, objective.present_views, objective.needs.views) == (("cosine",), 1, 2)
    objective.advance(1.5)
    assert objective(output, targets) == SimCSE(STUDENT, TEACHER)(output, targets)
    assert (objective.terms, objective.present_views) == (("simcse",), 2)
    assert objective.second_view_terms == {"simcse"}


def test_the_second_objective_counts_epochs_from_its_start() -> None:
    objective = TwoStage(STUDENT, TEACHER, second="jasper", second_options={"stage_one_epochs": 1}, stage_one_epochs=2)
    objective.advance(2.9)
    assert objective.second.in_stage_one
    objective.advance(3.0)
    assert not objective.second.in_stage_one


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [("cosine", "talas", [3]), ("talas", "leaf", [3]), ("leaf", "jasper", [3]), ("cosine", "distillcse", [])],
)
def test_heads_of_the_same_layer_are_one(first: str, second: str, shared: list[int]) -> None:
    objective = TwoStage(STUDENT, TEACHER, first=first, second=second)
    one, two = objective.first.linear_heads(), objective.second.linear_heads()
    assert [layer for layer in one if two.get(layer) is one[layer]] == shared
    assert sorted(objective.linear_heads()) == sorted({*one, *two})
    assert all(objective.linear_heads()[layer] is head for layer, head in one.items())
    if shared:
        assert objective.projection() is one[3].weight


def test_a_head_with_a_bias_is_not_one_without() -> None:
    objective = TwoStage(STUDENT, TEACHER, second="jasper", second_options={"preset": "paper", "margin": 0.1})
    assert objective.second.margin == 0.1
    assert objective.second.head.bias is not None
    assert objective.projection() is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"first": "cosin"}, "did you mean 'cosine'"),
        ({"second": "two-stage"}, "another objective"),
        ({"first_options": {"heads": 1}}, "objective cosine has no option 'heads'"),
        ({"second_options": {"preset": "none"}}, "one of paper, official"),
        ({"stage_one_epochs": 0}, "stage_one_epochs: expected a number above 0"),
        ({"first": "talas", "second": "simcse", "first_options": {"views": "pair"}}, "need different batches"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        TwoStage(STUDENT, TEACHER, **options)
    assert expected in str(error.value)


def test_two_objectives_that_compare_tokens_are_refused() -> None:
    teacher = TeacherShape(6, token_dim=5, layers=6, heads=2)
    with pytest.raises(ConfigError, match="only one of its two objectives may compare tokens"):
        TwoStage(STUDENT, teacher, first="dskd", second="cdm")
    assert TwoStage(STUDENT, teacher, second="cdm").needs.alignment == "dtw_mean"


def staged(cache: Path, student: Path, folder: Path, *overrides: str) -> Any:
    """7 steps an epoch, 12 steps: the second stage begins after step 7."""
    options = "objective.options={second: talas, second_options: {anchored_layers: 2}, stage_one_epochs: 1}"
    return tiny_config(
        cache, student, folder, "objective.name=two-stage", options, "training.save_total_limit=9", *overrides
    )


@pytest.mark.parametrize("stop", [pytest.param(6, marks=pytest.mark.slow), 11])
def test_a_resumed_run_ends_with_the_same_bits_in_either_stage(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, stop: int
) -> None:
    options = ("training.save_steps=5", "training.ema_decay=0.5")
    run(staged(toy_cache, tiny_student, tmp_path / "whole", *options))
    whole = load_file(tmp_path / "whole" / "checkpoint-12" / "model.safetensors")
    lines = metrics(tmp_path / "whole")
    assert [sorted({"cosine", "tamd", "lasd"} & line.keys()) for line in lines] == [["cosine"]] * 7 + [
        ["lasd", "tamd"]
    ] * 5
    assert sum("head" in name for name in whole) == 2  # layers 1 and 2; the shared one has one name
    folder = tmp_path / "cut"
    with pytest.raises(Stopped):
        run(staged(toy_cache, tiny_student, folder, *options), report=stop_at(stop))
    run(staged(toy_cache, tiny_student, folder, *options))
    for name in ("model", "average"):
        found = load_file(folder / "checkpoint-12" / f"{name}.safetensors")
        expected = load_file(tmp_path / "whole" / "checkpoint-12" / f"{name}.safetensors")
        assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
    assert metrics(folder) == lines
    with TrainedRun.open(tmp_path / "whole") as opened:
        head = opened.load().objective.projection()
    average = load_file(tmp_path / "whole" / "checkpoint-12" / "average.safetensors")
    assert head is not None
    assert any(torch.equal(head, tensor) for key, tensor in average.items() if "head" in key)


def test_the_first_stage_encodes_one_view_and_equals_a_run_of_its_objective(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    steps = "training.lr_scheduler_type=constant"
    made = parts(staged(toy_cache, tiny_student, tmp_path / "a", steps, "training.save_steps=7"))
    made.trainer().train()
    alone = parts(tiny_config(toy_cache, tiny_student, tmp_path / "b", "objective.name=cosine", steps))
    alone.objective.load_state_dict(parts(made.config).objective.first.state_dict())
    torch.manual_seed(0)
    trainer = alone.trainer()
    trainer.args.max_steps = 7
    trainer.train()
    found = load_file(tmp_path / "a" / "checkpoint-7" / "model.safetensors")
    expected = alone.student.state_dict(prefix="student.")
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items() if name in expected)


@pytest.mark.parametrize("sharpness", ["norm-one-view", pytest.param("asam", marks=pytest.mark.slow)])
def test_sharpness_goes_through_both_stages(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, sharpness: str
) -> None:
    options = "objective.options={second: simcse, stage_one_epochs: 1}"
    config = staged(toy_cache, tiny_student, tmp_path, options, f"sharpness.name={sharpness}")
    parts(config).trainer().train()
    assert len(metrics(tmp_path)) == 12


def test_what_does_not_fit_two_stages_is_refused_before_training(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    for overrides, expected in (
        (("training.max_steps=7",), "begins after 1 epochs"),
        (("sharpness.name=sam", "sharpness.ascent_terms=[cosine]"), "has no term 'cosine' in one of its stages"),
        (("export.projection=true", "objective.options={second: simcse}"), "learned no projection"),
    ):
        with pytest.raises(ConfigError) as error:
            check_run(staged(toy_cache, tiny_student, tmp_path, *overrides))
        assert expected in str(error.value)
