from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from distill.config import ObjectiveConfig, RunConfig, SharpnessConfig, TrainingConfig
from distill.config.recipes import SECTIONS, read_recipe, recipes
from distill.errors import ConfigError
from distill.objectives import OBJECTIVES
from distill.runs.run import check_run
from distill.runs.sweep import SweepConfig


def keys(values: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted keys; the options of an objective are one."""
    found: set[str] = set()
    for key, value in values.items():
        inside = isinstance(value, dict) and key != "options"
        found |= keys(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}"}
    return found


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig.load(None, overrides)
    return str(error.value)


def test_recommended_is_the_defaults() -> None:
    assert RunConfig.load(None, ["recipe=recommended"]) == RunConfig()


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_is_complete_so_that_new_defaults_do_not_change_it(name: str) -> None:
    assert keys(read_recipe("recommended")) - keys(read_recipe(name)) == set()


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_loads_and_has_a_description(name: str) -> None:
    config = RunConfig.load(None, [f"recipe={name}"])
    assert config.objective.name in OBJECTIVES
    assert 40 < len(recipes()[name]) <= 117
    assert recipes()[name].endswith(".")


def test_the_recipe_of_the_talas_paper_is_what_the_paper_says() -> None:
    config = RunConfig.load(None, ["recipe=talas-paper"])
    assert config.objective == ObjectiveConfig("talas", "paper")
    assert config.sharpness == SharpnessConfig("asam", rho=0.05)
    changed = {f.name: getattr(config.training, f.name) for f in fields(TrainingConfig)}
    assert changed == asdict(TrainingConfig()) | {
        "num_train_epochs": 5,
        "per_device_train_batch_size": 32,
        "learning_rate": 2e-5,
        "head_learning_rate": 1e-4,
        "weight_decay": 0.01,
        "warmup_ratio": 0.06,
        "lr_scheduler_type": "cosine_with_min_lr",
        "min_lr_rate": 0.1,
    }


def test_settings_of_a_file_and_flags_override_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("recipe: talas-paper\ntraining: {learning_rate: 1e-4, num_train_epochs: 2}\n")
    config = RunConfig.load(tmp_path / "run.yaml", ["training.num_train_epochs=3", "objective.options.depth=1"])
    training = config.training
    assert (training.learning_rate, training.head_learning_rate, training.num_train_epochs) == (1e-4, 1e-4, 3)
    assert config.objective == ObjectiveConfig("talas", "paper", {"depth": 1})


def test_another_objective_takes_none_of_the_recipe_s_options() -> None:
    config = RunConfig.load(None, ["recipe=talas-paper", "objective.name=leaf", "sharpness.name=none"])
    assert config.objective == ObjectiveConfig("leaf")
    assert config.sharpness == SharpnessConfig("none")
    assert config.training.learning_rate == 2e-5


def test_a_recipe_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("description: Mine.\ntraining: {learning_rate: 3e-4}\n")
    assert RunConfig.load(None, [f"recipe={path}"]).training.learning_rate == 3e-4
    path.write_text("cache: somewhere\n")
    assert f"recipe {str(path)!r} sets cache; a recipe sets only {', '.join(SECTIONS)}" in refused(f"recipe={path}")


def test_a_misspelled_recipe_suggests_the_nearest() -> None:
    assert "recipe: none is called 'recomended'; did you mean 'recommended'?" in refused("recipe=recomended")
    assert "expected one name" in refused("recipe=[a, b]")


def test_the_resolved_configuration_loads_without_its_recipe(tmp_path: Path) -> None:
    config = RunConfig.load(None, ["recipe=leaf-paper", "cache=c"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert RunConfig.load(tmp_path / "config.yaml") == config


def test_runs_of_a_sweep_name_recipes(tmp_path: Path, toy_cache: Path, tiny_student: Path) -> None:
    base = {"cache": str(toy_cache), "corpus": "few", "student": {"model": str(tiny_student)}}
    sweep = SweepConfig(output_dir=str(tmp_path), base=base, grid={"recipe": ["recommended", "talas-paper"]})
    planned = {one.name: one.config for one in sweep.plan()}
    assert {name: config.objective.name for name, config in planned.items()} == {
        "recipe=recommended": "cosine",
        "recipe=talas-paper": "talas",
    }


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_run_can_use_a_recipe_as_it_is(name: str, toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    given = [
        f"cache={toy_cache}",
        "corpus=sentences",
        f"student.model={tiny_student}",
        f"output_dir={tmp_path / 'run'}",
    ]
    check_run(RunConfig.load(None, [f"recipe={name}", *given]))
