"""Analyses are found by name, take their options, and keep their answers in the run folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from cli.distill import main
from distill.analyses import ANALYSES
from distill.analyses.base import Analysis, analyze, kept_analyses
from distill.errors import ConfigError, EvaluationError, RunFolderError
from distill.registry import find
from distill.run import run
from distill.trained_run import TrainedRun
from tests.distill.tiny_runs import tiny_config

MINE = f"{__name__}:Steps"


class Steps(Analysis):
    """How many steps a run took, and as many more as wanted."""

    name: ClassVar[str] = "steps"

    def __init__(self, *, more: int = 0, **given: Any) -> None:
        super().__init__(**given)
        self.more = more

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        return {"steps": run.record["steps"] + self.more}

    @staticmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        return f"It took {result['steps']} steps."


class Scored(Steps):
    needs_tasks: ClassVar[bool] = True


class Endless(Steps):
    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        return {"steps": float("nan")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    folder = tmp_path_factory.mktemp("analysed") / "run"
    run(tiny_config(toy_cache, tiny_student, folder, "training.max_steps=2"))
    return folder


@pytest.mark.parametrize("name", ANALYSES)
def test_every_name_of_the_table_is_an_analysis_of_that_name(name: str) -> None:
    kind = find(name, ANALYSES, "analysis", Analysis)  # type: ignore[type-abstract]
    assert kind.name == name


def test_an_analysis_of_ones_own_is_kept_and_read_back(finished: Path) -> None:
    records = analyze(finished, [MINE], options={MINE: {"more": 3}})
    assert records[MINE]["result"] == {"steps": 5}
    assert records[MINE]["conclusion"] == "It took 5 steps."
    assert records[MINE]["step"] == 2
    assert kept_analyses(finished) == {"steps": records[MINE]}
    analyze(finished, [MINE])
    assert kept_analyses(finished)["steps"]["result"] == {"steps": 2}  # the newest answer, in place of the older


def test_an_unknown_option_names_the_nearest(finished: Path) -> None:
    with pytest.raises(ConfigError, match="has no option 'mre'; did you mean more"):
        analyze(finished, [MINE], options={MINE: {"mre": 3}})


def test_options_for_what_is_not_asked_are_refused(finished: Path) -> None:
    with pytest.raises(ConfigError, match="'curvature', which is not among the analyses"):
        analyze(finished, [MINE], options={"curvature": {"texts": 3}})
    with pytest.raises(ConfigError, match="names no option of it"):
        analyze(finished, [MINE], options={MINE: 3})  # type: ignore[dict-item]


def test_an_analysis_on_tasks_says_where_they_should_come_from(finished: Path) -> None:
    with pytest.raises(ConfigError, match="say with --data or --retrieval"):
        analyze(finished, [f"{__name__}:Scored"])


def test_an_answer_that_is_not_finite_is_not_kept(finished: Path) -> None:
    before = kept_analyses(finished)
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        analyze(finished, [f"{__name__}:Endless"])
    assert kept_analyses(finished) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("curvatur", "did you mean 'curvature'"),
        ("zzz", "known: compression, curvature"),
        ("no_such_module:Class", "found no module 'no_such_module'"),
        (f"{__name__}:Path", "must name a subclass"),
    ],
)
def test_a_name_that_is_none_is_told(finished: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analyze(finished, [name])


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        analyze(tmp_path, [MINE])


def test_the_command_prints_conclusions_or_json(finished: Path) -> None:
    said = CliRunner().invoke(main, ["analyze", str(finished), "--analyses", MINE])
    assert said.exit_code == 0
    assert f"{finished}: {MINE}: It took 2 steps." in said.stdout
    as_json = CliRunner().invoke(main, ["analyze", str(finished), "--analyses", MINE, "--json"])
    assert json.loads(as_json.stdout)[str(finished)][MINE]["result"] == {"steps": 2}
