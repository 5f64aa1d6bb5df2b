"""Analyses: names, options, and results in the run folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from cli.distill import main
from distill.analyses import ANALYSES
from distill.analyses.base import Analysis, analyze, choice_option, float_option, int_option, names_option
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError, NeedsNotMet, RunFolderError
from distill.registry import load_class
from distill.runs.run import run
from tests.distill.tiny_runs import tiny_config

MINE = f"{__name__}:Steps"


class Steps(Analysis):
    """The number of steps of a run, plus `more`."""

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


class Refused(Steps):
    name: ClassVar[str] = "refused"

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        raise NeedsNotMet("the run has no such thing")


def kept(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "analyses").glob("*.json")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    folder = tmp_path_factory.mktemp("analysed") / "run"
    run(tiny_config(toy_cache, tiny_student, folder, "training.max_steps=2"))
    return folder


@pytest.mark.parametrize("name", ANALYSES)
def test_every_name_in_the_table_is_that_of_its_analysis(name: str) -> None:
    kind = load_class(name, ANALYSES, "analysis", Analysis)  # type: ignore[type-abstract]
    assert kind.name == name


def test_the_result_of_a_custom_analysis_is_saved(finished: Path) -> None:
    records = analyze(finished, [MINE], options={MINE: {"more": 3}})
    assert records[MINE]["result"] == {"steps": 5}
    assert records[MINE]["conclusion"] == "It took 5 steps."
    assert records[MINE]["step"] == 2
    assert kept(finished) == {"steps": records[MINE]}
    analyze(finished, [MINE])
    assert kept(finished)["steps"]["result"] == {"steps": 2}  # the newer result replaced the older


def test_an_unknown_option_is_an_error_with_the_nearest_name(finished: Path) -> None:
    with pytest.raises(ConfigError, match="has no option 'mre'; did you mean more"):
        analyze(finished, [MINE], options={MINE: {"mre": 3}})


def test_options_of_an_analysis_that_is_not_run_are_an_error(finished: Path) -> None:
    with pytest.raises(ConfigError, match="'curvature', which is not one of the analyses"):
        analyze(finished, [MINE], options={"curvature": {"texts": 3}})
    with pytest.raises(ConfigError, match="names no option of the analysis"):
        analyze(finished, [MINE], options={MINE: 3})  # type: ignore[dict-item]


def test_an_analysis_on_tasks_needs_their_folder(finished: Path) -> None:
    with pytest.raises(ConfigError, match="`data` or `retrieval`"):
        analyze(finished, [f"{__name__}:Scored"])


def test_a_result_that_is_not_finite_is_not_saved(finished: Path) -> None:
    before = kept(finished)
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        analyze(finished, [f"{__name__}:Endless"])
    assert kept(finished) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("curvatur", "did you mean 'curvature'"),
        ("zzz", "known: compression, curvature"),
        ("no_such_module:Class", "found no module 'no_such_module'"),
        (f"{__name__}:Path", "must name a subclass"),
    ],
)
def test_an_unknown_name_is_an_error(finished: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analyze(finished, [name])


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        analyze(tmp_path, [MINE])


def test_the_command_prints_conclusions_or_json(finished: Path) -> None:
    said = CliRunner().invoke(main, ["analyze", str(finished), "--analyses", MINE])
    assert said.exit_code == 0
    assert f"{finished}: {MINE}: It took 2 steps." in said.stdout
    as_json = CliRunner().invoke(main, ["analyze", str(finished), "--analyses", MINE, "--json"])
    assert json.loads(as_json.stdout)[str(finished)][MINE]["result"] == {"steps": 2}


REFUSED = f"{__name__}:Refused"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with an analysis that does not apply to the run before one that does."""
    monkeypatch.setattr("distill.analyses.base.ANALYSES", {"refused": REFUSED, "steps": MINE})


def test_analyses_that_do_not_apply_are_skipped_with_the_reason_unless_named(finished: Path, table: None) -> None:
    said: list[str] = []
    records = analyze(finished, announce=said.append)
    assert list(records) == ["steps"]
    assert any("refused of" in line and "is skipped: the run has no such thing" in line for line in said)


def test_a_named_analysis_that_does_not_apply_is_an_error(finished: Path, table: None) -> None:
    with pytest.raises(NeedsNotMet, match="no such thing"):
        analyze(finished, ["refused", "steps"])


def test_it_is_an_error_if_no_analysis_applies(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.analyses.base.ANALYSES", {"refused": REFUSED})
    with pytest.raises(NeedsNotMet, match="no such thing"):
        analyze(finished)


def test_a_result_that_is_not_finite_is_an_error_without_names_too(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.analyses.base.ANALYSES", {"steps": MINE, "endless": f"{__name__}:Endless"})
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        analyze(finished)


@pytest.mark.parametrize("flag", ["data", "retrieval"])
def test_missing_folders_are_an_error_without_names_too(finished: Path, flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"`{flag}` is .*does not exist"):
        analyze(finished, **{flag: tmp_path / "nowhere"})


def test_the_command_prints_the_results_before_an_analysis_that_failed(finished: Path) -> None:
    asked = ["analyze", str(finished), "--analyses", f"{MINE},{REFUSED}"]
    said = CliRunner().invoke(main, asked)
    assert said.exit_code == 1
    assert f"{finished}: {MINE}: It took 2 steps." in said.stdout
    assert "error: the run has no such thing" in said.stderr
    as_json = CliRunner().invoke(main, [*asked, "--json"])
    assert as_json.exit_code == 1
    assert list(json.loads(as_json.stdout)[str(finished)]) == [MINE]


def test_the_command_prints_the_runs_before_the_one_that_failed(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "broken")
    (tmp_path / "broken" / "run.json").unlink()
    said = CliRunner().invoke(main, ["analyze", str(finished), str(tmp_path / "broken"), "--analyses", MINE])
    assert said.exit_code == 1
    assert f"{finished}: {MINE}: It took 2 steps." in said.stdout
    assert "is not a run folder" in said.stderr


def test_the_command_prints_an_error_of_all_runs_once(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    asked = ["analyze", str(tmp_path / "copy"), str(finished), "--analyses", MINE, "--set", f"{MINE}.mre=1"]
    said = CliRunner().invoke(main, asked)
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.count("has no option 'mre'") == 1


@pytest.mark.parametrize("value", ["many", -3, 2.0, True, None, 9])
def test_an_int_option_is_a_whole_number_in_its_range(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"map\.texts is .*; expected a whole number from 1 to 8"):
        int_option("map.texts", value, 1, 8)
    assert int_option("map.texts", 8, 1, 8) == 8


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), True, None, 0, [1]])
def test_a_float_option_is_a_finite_number_in_its_range(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"curvature\.rho is .*; expected a number above 0"):
        float_option("curvature.rho", value, above=0)
    assert float_option("curvature.rho", "1e-4", above=0) == 1e-4  # as YAML reads it


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_choice_option_is_one_of_its_values(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected one of true, false"):
        choice_option("curvature.heads", value, (True, False))


def test_a_names_option_may_be_a_comma_list() -> None:
    assert names_option("compression.tasks", "stsb") == ["stsb"]
    assert names_option("compression.tasks", "stsb, mrpc") == ["stsb", "mrpc"]
    assert names_option("compression.tasks", None) is None
    for value in (3, [], [1], ""):
        with pytest.raises(ConfigError, match=r"compression\.tasks is .*; expected a list of names"):
            names_option("compression.tasks", value)
