"""Searches by successive halving; runs are invented records, or real ones in threads."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.distill import main
from distill.config import RunConfig
from distill.config.reading import build_config
from distill.errors import ConfigError, RunFolderError, SearchError
from distill.runs import sweep as sweep_module
from distill.runs.halving import search
from distill.runs.launch import Job, Launcher
from distill.runs.sweep import SearchConfig, SweepConfig, sweep
from tests.distill.tiny_sweeps import write_sweep
from tests.distill.tiny_tasks import TASKS, write_tasks

# Learning rate -> name of its candidate.
NAMES = {rate: f"learning_rate={rate:g}" for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}


@dataclass
class Invented:
    """Runs that are only records; `score` gives validation average and agreement, or the error of a failed run."""

    score: Callable[[RunConfig], tuple[float, float] | str]
    trained: list[str] = field(default_factory=list)
    stop_after: int | None = None

    def start(self, job: Job) -> str | None:
        if len(self.trained) == self.stop_after:
            raise OSError(28, "No space left on device")
        config: RunConfig = build_config(RunConfig, job.content["config"], "")
        folder, steps = Path(config.output_dir), config.training.max_steps
        self.trained.append("/".join(folder.parts[-2:]))
        scored = self.score(config)
        if isinstance(scored, str):
            return scored
        shutil.copytree(config.student.model, folder / "final")
        (folder / "config.yaml").write_text(config.to_yaml())
        average, agreement = scored
        points = [{"step": steps, "validation": {"average": average}}, {"step": 1, "validation": {"average": 99.0}}]
        record = {
            "status": "finished",
            "steps": steps,
            "seconds": 2.0 * steps,
            "validation": {"points": points[: 1 if steps == 1 else 2]},
            "exported": {"step": steps},
            "agreement": {"after": {"spearman": agreement}},
        }
        (folder / "run.json").write_text(json.dumps(record))
        return None


@pytest.fixture
def invent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Invented]:
    def invented(score: Callable[[RunConfig], tuple[float, float] | str], **options: Any) -> Invented:
        runs = Invented(score, **options)

        class Records(Launcher):
            def _start(self, job: Job) -> str | None:
                return runs.start(job)

            def _stop(self) -> None:
                pass

        @contextmanager
        def launcher(*_: object) -> Iterator[Launcher]:
            yield Records(1)

        monkeypatch.setattr(sweep_module, "launcher", launcher)
        monkeypatch.setattr("distill.runs.run.run", lambda config: None)  # would compare digests of real files
        return runs

    return invented


@pytest.fixture
def searched(base: dict[str, Any], tmp_path: Path) -> Callable[..., SweepConfig]:
    """A sweep of learning rates with 30 steps and a search."""
    base["training"]["max_steps"] = 30
    data = write_tasks(tmp_path / "data")
    for name in TASKS:
        shutil.copy(data / f"{name}_test.csv", data / f"{name}_validation.csv")
    base["evaluation"] = {"data": str(data), "tasks": TASKS}

    def config(rates: Any = tuple(NAMES), more: dict[str, Any] | None = None, **settings: Any) -> SweepConfig:
        grid = {"training.learning_rate": list(rates)}
        section = {"stages": [0.1, 0.5, 1], "keep": 0.34} | settings
        return SweepConfig.load(write_sweep(tmp_path, base, **{"grid": grid, "search": section} | (more or {})))

    return config


def later_is_better(config: RunConfig) -> tuple[float, float]:
    """0.2 and 0.3 lead after 3 steps, 0.3 after 15 and 30."""
    rate, steps = config.training.learning_rate, config.training.max_steps
    return {0.2: 60.0, 0.3: 59.0 + steps / 10}.get(rate, 10 * rate) + config.training.seed / 100, 0.5


def stages(record: Any) -> list[tuple[list[str], list[str]]]:
    return [([one["name"] for one in stage["ranking"]], stage["kept"]) for stage in record["stages"]]


# The search


def test_each_stage_trains_the_best_of_the_last_for_more_steps(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path
) -> None:
    runs = invent(later_is_better)
    result = search(searched(seeds=[7, 42]))
    second, third = NAMES[0.2], NAMES[0.3]
    # 0.34 * 6 = 2.04 and 0.34 * 2 < 1
    assert runs.trained == [
        *(f"stage-1/{name}" for name in NAMES.values()),
        f"stage-2/{second}",
        f"stage-2/{third}",
        f"stage-3/{third}",
        f"finalists/{third}-seed=7",  # seed 42 is the run of the last stage
    ]
    found = json.loads((tmp_path / "sweep" / "search.json").read_text())
    assert found == result.record
    others = [NAMES[rate] for rate in (0.6, 0.5, 0.4, 0.1)]
    assert stages(found) == [
        ([second, third, *others], [second, third]),
        ([third, second], [third]),
        ([third], [third]),
    ]
    steps = [[one["steps"] for one in stage["ranking"]] for stage in found["stages"]]
    assert steps == [[3] * 6, [15] * 2, [30]]
    assert [one["validation"] for one in found["finalists"][third]] == [62.07, 62.42]
    # Two values lie half their distance from the mean: s^2 = 2 (0.35 / 2)^2.
    assert found["choice"]["name"] == third
    assert found["choice"]["validation"] == pytest.approx({"mean": 62.245, "deviation": 0.35 / 2**0.5, "n": 2})


def test_a_share_of_epochs_is_a_number_of_epochs(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], base: dict[str, Any], tmp_path: Path
) -> None:
    epochs: list[tuple[float, int]] = []

    def score(config: RunConfig) -> tuple[float, float]:
        epochs.append((config.training.num_train_epochs, config.training.max_steps))
        return 1.0, 0.5

    invent(score)
    base["training"] |= {"max_steps": -1, "num_train_epochs": 4}
    search(searched([0.1, 0.2], stages=[0.25, 1]))
    assert epochs == [(1.0, -1), (1.0, -1), (4, -1)]


def test_equal_scores_are_ranked_by_agreement_and_then_as_in_the_file(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig]
) -> None:
    invent(lambda config: (50.0, {0.3: 0.9}.get(config.training.learning_rate, 0.8)))
    result = search(searched([0.1, 0.2, 0.3]))
    assert stages(result.record)[0][0] == [NAMES[0.3], NAMES[0.1], NAMES[0.2]]


def test_the_choice_has_the_highest_mean_over_the_seeds(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig]
) -> None:
    def score(config: RunConfig) -> tuple[float, float]:
        # With the seed of the stages, 42, the first is better; with 1 and 2 the second is.
        first = config.training.learning_rate == 0.1
        return (60.0 if first == (config.training.seed == 42) else 50.0), 0.5

    invent(score)
    result = search(searched([0.1, 0.2, 0.3], stages=[1], keep=0.7, seeds=[42, 1, 2]))
    assert list(result.record["finalists"]) == [NAMES[0.1], NAMES[0.2]]
    assert result.record["choice"]["name"] == NAMES[0.2]
    # 50, 60 and 60
    assert result.record["choice"]["validation"] == pytest.approx({"mean": 170 / 3, "deviation": 10 / 3**0.5, "n": 3})


def test_failed_candidates_drop_out_with_a_message(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig]
) -> None:
    def score(config: RunConfig) -> tuple[float, float] | str:
        rate, steps = config.training.learning_rate, config.training.max_steps
        failed = rate == 0.6 or (rate == 0.5 and steps == 15) or (rate == 0.4 and steps == 30)
        return "the loss is nan" if failed else (100 * rate, 0.5)

    invent(score)
    lines: list[str] = []
    result = search(searched(keep=0.7), announce=lines.append)
    first, second, third = result.record["stages"]
    # The share is of all candidates of the stage: 4 of 6, 2 of 4, 1 of 2.
    assert (first["failed"], first["kept"]) == (
        {NAMES[0.6]: "the loss is nan"},
        [NAMES[r] for r in (0.5, 0.4, 0.3, 0.2)],
    )
    assert (second["failed"], second["kept"]) == ({NAMES[0.5]: "the loss is nan"}, [NAMES[0.4], NAMES[0.3]])
    assert third["kept"] == [NAMES[0.3]]
    assert f"{NAMES[0.6]} failed: the loss is nan" in lines


def test_a_finalist_with_a_failed_seed_drops_out(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path
) -> None:
    broken = {0.3}

    def score(config: RunConfig) -> tuple[float, float] | str:
        rate = config.training.learning_rate
        return "the loss is nan" if rate in broken and config.training.seed == 1 else (100 * rate, 0.5)

    invent(score)
    config = searched([0.1, 0.2, 0.3], stages=[1], keep=0.7, seeds=[42, 1])
    result = search(config)
    assert result.record["failed"] == {f"{NAMES[0.3]}-seed=1": "the loss is nan"}
    assert result.record["finalists"].keys() == {NAMES[0.2]}
    assert result.record["choice"]["name"] == NAMES[0.2]
    shutil.rmtree(tmp_path / "sweep")
    broken.add(0.2)
    with pytest.raises(SearchError, match=r"every finalist has a failed run, .*seed=1 with: the loss is nan"):
        search(config)


def test_without_a_candidate_left_there_is_no_choice(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path
) -> None:
    invent(lambda config: "the loss is nan")
    with pytest.raises(SearchError, match=r"every candidate failed, learning_rate=0.1 with: the loss is nan"):
        search(searched())
    assert not (tmp_path / "sweep" / "search.json").exists()  # the next call tries them again


@pytest.mark.parametrize("stop_after", [4, 7, 9])
def test_a_stopped_search_resumes_with_its_recorded_stages(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path, stop_after: int
) -> None:
    config = searched(seeds=[42, 7])
    whole = invent(later_is_better)
    expected = search(config).record
    shutil.rmtree(tmp_path / "sweep")
    first = invent(later_is_better, stop_after=stop_after)
    with pytest.raises(OSError, match="No space left"):
        search(config)
    rest = invent(later_is_better)
    assert search(config).record == expected
    assert [*first.trained, *rest.trained] == whole.trained
    assert search(config).record == expected
    assert len(rest.trained) == len(whole.trained) - stop_after


def test_a_recorded_stage_stands_even_if_its_runs_are_gone(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path
) -> None:
    invent(later_is_better, stop_after=6)
    with pytest.raises(OSError, match="No space left"):
        search(searched())
    shutil.rmtree(tmp_path / "sweep" / "stage-1")
    runs = invent(later_is_better)
    assert search(searched()).record["choice"]["name"] == NAMES[0.3]
    assert not [name for name in runs.trained if name.startswith("stage-1")]


def test_a_changed_search_is_refused_in_one_line(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], base: dict[str, Any], tmp_path: Path
) -> None:
    invent(later_is_better)
    search(searched())
    runs = invent(later_is_better)
    for change, expected in (
        ({"keep": 0.5}, "search.keep: 0.34 there, 0.5 now"),
        ({"stages": [0.5, 1]}, r"search.stages: \[0.1, 0.5, 1.0\] there, \[0.5, 1.0\] now"),
        ({"seeds": [1, 2]}, r"search.seeds: \[\] there, \[1, 2\] now"),
        ({"rates": [0.1, 0.2]}, "candidate learning_rate=0.3 there only and 3 more"),
    ):
        with pytest.raises(RunFolderError, match=f"search.json has another search .{expected}.*`output_dir`"):
            search(searched(**change))
    base["training"]["weight_decay"] = 0.5
    with pytest.raises(
        RunFolderError, match=r"learning_rate=0.1, training.weight_decay: 0.01 there, 0.5 now and 5 more"
    ):
        search(searched())
    assert runs.trained == []


def test_a_setting_that_a_later_version_added_is_no_change(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path
) -> None:
    invent(later_is_better)
    search(searched())
    path = tmp_path / "sweep" / "search.json"
    record = json.loads(path.read_text())
    for settings in record["candidates"].values():
        del settings["training"]["soup"]
    path.write_text(json.dumps(record))
    assert search(searched()).record == record


# The plan


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"stages": [0.5, 0.1, 1]}, r"search.stages is \[0.5, 0.1, 1.0\]; expected increasing shares"),
        ({"stages": [0.1, 0.5]}, "the last one 1"),
        ({"stages": [0, 1]}, "shares above 0"),
        ({"stages": []}, "search.stages"),
        ({"stages": ["a"]}, r"search.stages\[0\] is 'a'; expected float"),
        ({"stages": 3}, "search.stages is 3; expected a list of numbers"),
        ({"keep": 1}, "search.keep is 1; expected more than 0 and less than 1"),
        ({"keep": 0}, "search.keep is 0"),
        ({"seeds": [1, 1]}, "search.seeds is .*different numbers"),
        ({"seeds": [-1]}, "search.seeds"),
        ({"seeds": [0.5]}, r"search.seeds\[0\] is 0.5; expected int"),
        ({"samples": 0}, "search.samples is 0"),
        ({"kepe": 0.5}, "no setting 'search.kepe'; did you mean search.keep?"),
        ({"more": {"grid": {"training.seed": [1, 2]}}}, "differ in training.seed, .* set search.seeds"),
        ({"more": {"grid": {"evaluation.keep": ["best", "last"]}}}, "differ in evaluation; .* in base only"),
    ],
)
def test_an_invalid_search_is_an_error_before_the_first_run(
    searched: Callable[..., SweepConfig], tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        search(searched(**settings))
    assert not (tmp_path / "sweep").exists()


def test_validation_files_are_required(base: dict[str, Any], tmp_path: Path) -> None:
    config = SweepConfig.load(write_sweep(tmp_path, base, grid={"training.learning_rate": [0.1, 0.2]}, search={}))
    assert config.search == SearchConfig()
    with pytest.raises(ConfigError, match=r"on validation files: set evaluation.data in base"):
        search(config)


def test_a_sweep_does_not_ignore_its_search(searched: Callable[..., SweepConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"call distill.runs.halving.search"):
        sweep(searched())
    with pytest.raises(ConfigError, match=r"call distill.runs.sweep.sweep"):
        search(replace(searched(), search=None))


def test_a_sample_is_the_same_for_the_same_seed(searched: Callable[..., SweepConfig]) -> None:
    def names(**settings: Any) -> list[str]:
        return [one.name for one in searched(**settings).plan()]

    drawn = names(samples=3)
    assert len(drawn) == 3
    assert drawn == names(samples=3) == [name for name in NAMES.values() if name in drawn]
    assert {tuple(names(samples=3, sample_seed=seed)) for seed in range(8)} > {tuple(drawn)}
    assert names(samples=6) == names(samples=100) == list(NAMES.values())


# Validation and test files


class Opened:
    """Names of files as they are opened."""

    listener: Callable[[str], None] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if Opened.listener is not None and event == "open" and isinstance(arguments[0], str):
        Opened.listener(arguments[0])


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    sys.addaudithook(_audit)  # stays, but is silent without a listener
    return lambda listener: monkeypatch.setattr(Opened, "listener", staticmethod(listener))


@pytest.mark.usefixtures("in_threads")
def test_test_files_are_opened_after_the_choice_and_score_the_finalists_only(
    searched: Callable[..., SweepConfig], tmp_path: Path, listen: Callable[[Callable[[str], None]], None]
) -> None:
    data = write_tasks(tmp_path / "test", seed=5)
    record = tmp_path / "sweep" / "search.json"
    opened: list[tuple[str, str | None]] = []

    def listener(name: str) -> None:
        if name.endswith(".csv"):
            choice = json.loads(record.read_text())["choice"] if record.exists() else None
            opened.append((Path(name).name, choice and choice["name"]))

    listen(listener)
    more = {"data": str(data), "tasks": TASKS, "dtype": "fp32"}
    config = searched([1e-3, 1e-2, 1e-1], more=more, stages=[0.1, 1], seeds=[42, 7])
    config = replace(config, base=config.base | {"training": config.base["training"] | {"max_steps": 10}})
    result = search(config)
    chosen = result.record["choice"]["name"]
    test = {(name, choice) for name, choice in opened if name.endswith("_test.csv")}
    assert test == {("stsb_test.csv", chosen), ("mrpc_test.csv", chosen)}
    assert {name for name, choice in opened if choice is None} == {"stsb_validation.csv", "mrpc_validation.csv"}
    folders = [f"stage-2/{chosen}", f"finalists/{chosen}-seed=7"]
    assert sorted(path.parent for path in (tmp_path / "sweep").rglob("eval.json")) == sorted(
        tmp_path / "sweep" / folder for folder in folders
    )
    # Ranked by what the runs recorded.
    (stage, _) = result.record["stages"]
    for one in stage["ranking"]:
        run = json.loads((tmp_path / "sweep" / one["run"] / "run.json").read_text())
        (point,) = run["validation"]["points"]
        assert (run["steps"], point["validation"]["average"]) == (1, one["validation"])
    assert [one["validation"] for one in stage["ranking"]] == sorted(
        (one["validation"] for one in stage["ranking"]), reverse=True
    )
    (group,) = result.comparison.groups
    assert group.figures["average.all"].n == 2
    # Again, nothing is trained or scored.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*")}
    assert search(config).comparison == result.comparison
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*")} == before


# The command


def test_a_dry_run_prints_candidates_and_stages(searched: Callable[..., SweepConfig], tmp_path: Path) -> None:
    searched(seeds=[1, 2, 3])
    result = CliRunner().invoke(main, ["sweep", str(tmp_path / "sweep.yaml"), "--dry-run"])
    assert result.stdout.splitlines() == [
        *NAMES.values(),
        "10% of the steps: 6 candidates; 2 to keep",
        "50% of the steps: 2 candidates; 1 to keep",
        "100% of the steps: 1 candidate; 1 to keep",
        f"then 1 finalist with 3 seeds, in {tmp_path / 'sweep'}",
    ]
    assert not (tmp_path / "sweep").exists()


def test_the_table_has_scores_of_all_stages_and_the_cost(
    invent: Callable[..., Invented], searched: Callable[..., SweepConfig], tmp_path: Path
) -> None:
    def score(config: RunConfig) -> tuple[float, float] | str:
        return "the loss is nan" if config.training.learning_rate == 0.6 else later_is_better(config)

    invent(score)
    searched(seeds=[42, 7])
    table = tmp_path / "table.md"
    result = CliRunner().invoke(main, ["sweep", str(tmp_path / "sweep.yaml"), "-o", str(table)])
    assert result.exit_code == 0, result.output
    lines = [re.sub(" +", " ", line) for line in table.read_text().splitlines()]
    header = "| candidate | learning_rate | validation 10% | validation 50% | validation 100% | validation, seeds |"
    assert lines[0] == f"{header} result | steps | seconds |"
    assert lines[2:8] == [
        f"| {NAMES[0.3]} | 0.3 | 59.72 | 60.92 | 62.42 | 62.25 ± 0.25 | chosen | 78 | 156 |",
        f"| {NAMES[0.2]} | 0.2 | 60.42 | 60.42 | - | - | dropped at 50% | 18 | 36 |",
        f"| {NAMES[0.5]} | 0.5 | 5.42 | - | - | - | dropped at 10% | 3 | 6 |",
        f"| {NAMES[0.4]} | 0.4 | 4.42 | - | - | - | dropped at 10% | 3 | 6 |",
        f"| {NAMES[0.1]} | 0.1 | 1.42 | - | - | - | dropped at 10% | 3 | 6 |",
        f"| {NAMES[0.6]} | 0.6 | - | - | - | - | failed at 10% | 0 | 0 |",
    ]
    assert f"- {NAMES[0.6]} at 10% failed and dropped out: the loss is nan" in lines
    assert f"- chosen: {NAMES[0.3]}, validation average 62.25 ± 0.25, before any test file was opened" in lines
    assert "- 105 steps were trained in 210 s; all candidates in full, with one seed, are about 180" in lines
    again = CliRunner().invoke(main, ["sweep", str(tmp_path / "sweep.yaml"), "--json"])
    assert json.loads(again.stdout)["choice"]["name"] == NAMES[0.3]
