"""Plans and runs of sweeps; runs are in threads here, in real processes in test_sweep_processes."""

import fcntl
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.distill import main
from distill.errors import ConfigError, RunFolderError
from distill.report.comparison import Figure
from distill.runs import launch
from distill.runs import sweep as sweep_module
from distill.runs.launch import Job, JobEvent, Launcher
from distill.runs.sweep import SweepConfig, SweepProgress, SweepResult, sweep
from tests.distill.tiny_sweeps import InThreads, write_sweep
from tests.distill.tiny_tasks import TASKS, write_tasks


def planned(folder: Path, base: dict[str, Any], **settings: Any) -> list[str]:
    return [one.name for one in SweepConfig.load(write_sweep(folder, base, **settings)).plan()]


# The plan


def test_a_grid_has_every_combination_named_after_its_values(base: dict[str, Any], tmp_path: Path) -> None:
    path = write_sweep(tmp_path, base, grid={"objective.name": ["talas", "simcse"], "training.seed": [1, 2]})
    plan = SweepConfig.load(path).plan()
    assert [one.name for one in plan] == ["talas-seed=1", "talas-seed=2", "simcse-seed=1", "simcse-seed=2"]
    assert [(one.config.objective.name, one.config.training.seed) for one in plan] == [
        ("talas", 1),
        ("talas", 2),
        ("simcse", 1),
        ("simcse", 2),
    ]
    assert plan[0].config.output_dir == str(tmp_path / "sweep" / "talas-seed=1")
    assert {one.config.training.max_steps for one in plan} == {3}


def test_the_grid_is_applied_to_each_run_of_the_list(base: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        {"name": "k1", "set": {"objective.options.anchored_layers": 1}},
        {"name": "plain", "set": {"objective.options": {"lasd_weight": 0.0}, "objective.options.depth": 1}},
    ]
    path = write_sweep(tmp_path, base, runs=runs, grid={"training.seed": [7, 8]})
    plan = SweepConfig.load(path).plan()
    assert [one.name for one in plan] == ["k1-seed=7", "k1-seed=8", "plain-seed=7", "plain-seed=8"]
    assert plan[1].config.objective.options == {"anchored_layers": 1}
    assert plan[2].config.objective.options == {"lasd_weight": 0.0, "depth": 1}


def test_a_run_without_a_name_is_named_after_its_settings(base: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        {"set": {"objective.name": "simcse", "sharpness.name": "asam", "training.learning_rate": 1e-4}},
        {"set": {"export.normalize": False, "corpus": None, "space": "toy"}},
    ]
    with pytest.raises(Exception, match="several corpora"):  # the cache is opened
        planned(tmp_path, base, runs=runs)
    runs[1]["set"] = {"export.normalize": False, "space": "toy"}
    assert planned(tmp_path, base, runs=runs) == ["simcse-asam-learning_rate=0.0001", "normalize=false-space=toy"]


def test_keys_with_the_same_ending_get_longer_labels(base: dict[str, Any], tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e-4], "training.head_learning_rate": [0.5], "objective.options.depth": [1]}
    assert planned(tmp_path, base, grid=grid) == ["learning_rate=0.0001-head_learning_rate=0.5-depth=1"]


def test_equal_names_get_a_stable_digest_each(base: dict[str, Any], tiny_student: Path, tmp_path: Path) -> None:
    grid = {"student.model": [str(tiny_student), f"{tiny_student.parent}/./{tiny_student.name}"]}
    first, second = planned(tmp_path, base, grid=grid)
    assert first != second
    assert first.startswith("tiny-bert-")
    assert planned(tmp_path, base, grid={"student.model": grid["student.model"][::-1]}) == [second, first]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "nothing to run: give a grid, a list of runs, or both"),
        ({"grid": {"training.sed": [1]}}, "run sed=1: no setting 'training.sed'; did you mean training.seed?"),
        ({"grid": {"training.seed": 1}}, r"grid.training.seed is 1; expected a list"),
        ({"grid": {"training.seed": []}}, r"grid.training.seed is \[\]; expected a list"),
        ({"grid": {"training.seed": [1, "x"]}}, "run seed=x: training.seed is 'x'; expected int"),
        ({"grid": {"training.seed": [1, 1]}}, "have equal settings"),
        ({"grid": {"output_dir": ["x"]}}, "the sweep sets output_dir"),
        ({"grid": {"objective.name": ["talas", "talass"]}}, "run talass: .*did you mean 'talas'"),
        ({"grid": {"objective.preset": ["offical"]}}, "no preset 'offical'; it has: paper, official"),
        ({"grid": {"objective.options.temprature": [1]}}, "has no option 'temprature'; did you mean temperature"),
        ({"grid": {"sharpness.name": ["azam"]}}, "did you mean 'asam'"),
        ({"grid": {"corpus": ["few", "wiki"]}}, "run corpus=wiki: .*'wiki'"),
        ({"grid": {"space": ["e5"]}}, "run space=e5: .*'e5'"),
        (
            {"grid": {"student.model": ["/nowhere/student"]}},
            "run student: student '/nowhere/student' cannot be used: no folder at '/nowhere/student'",
        ),
        ({"gird": {"training.seed": [1]}}, "no setting 'gird'; did you mean grid?"),
        ({"runs": {"a": 1}}, "expected a list of runs"),
        ({"runs": ["a"]}, r"runs\[0\]: expected keys and values, found 'a'"),
        ({"runs": [{"nmae": "a"}]}, r"no setting 'runs\[0\].nmae'; did you mean runs\[0\].name?"),
        ({"runs": [{"name": "a/b"}]}, "'a/b' is not a valid folder name"),
        ({"runs": [{"name": "a"}, {"name": "a", "set": {"training.seed": 1}}]}, "two runs are named 'a'"),
        ({"runs": [{"name": "a"}], "parallel": 0}, "parallel is 0"),
        ({"runs": [{"name": "a"}], "parallel": 2, "workers": "ray"}, "write workers: ray:2"),
        ({"runs": [{"name": "a"}], "gpus_per_run": 0.5}, "gpus_per_run is for workers: ray"),
        ({"runs": [{"name": "a"}], "gpus_per_run": 2.0, "workers": "ray"}, "gpus_per_run is 2"),
        ({"runs": [{"name": "a"}], "workers": "spark"}, "unknown workers 'spark'"),
        ({"runs": [{"name": "a"}], "tasks": ["stsb"]}, "no data to score on"),
        ({"runs": [{"name": "a"}], "data": "/nowhere", "tasks": ["stsb"]}, "/nowhere: no such folder"),
        ({"runs": [{"name": "a"}], "data": "/nowhere", "tasks": ["sstb"]}, "did you mean 'stsb'"),
        ({"runs": [{"name": "a"}], "data": "/nowhere", "dtype": "fp8"}, "dtype is 'fp8'; expected auto, fp32 or bf16"),
        ({"runs": [{"name": "a"}], "output_dir": None}, "output_dir is not set"),
    ],
)
def test_an_invalid_sweep_is_an_error_in_one_line_before_the_first_run(
    base: dict[str, Any], tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    path = write_sweep(tmp_path, base, **settings)
    result = CliRunner().invoke(main, ["sweep", str(path)])
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    with pytest.raises(Exception, match=expected):
        sweep(SweepConfig.load(path))
    assert not (tmp_path / "sweep").exists()


def test_an_unreadable_sweep_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("grid: [")
    with pytest.raises(ConfigError, match="not YAML"):
        SweepConfig.load(tmp_path / "sweep.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        SweepConfig.load(tmp_path / "absent.yaml")


def test_a_dry_run_prints_the_names_and_starts_no_run(base: dict[str, Any], tmp_path: Path) -> None:
    path = write_sweep(tmp_path, base, grid={"training.seed": [1, 2]})
    result = CliRunner().invoke(main, ["sweep", str(path), "--dry-run"])
    assert result.stdout.splitlines() == ["seed=1", "seed=2", f"2 runs in {tmp_path / 'sweep'}"]
    assert not (tmp_path / "sweep").exists()


# The runs


def mtimes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


GRID = {"objective.name": ["talas", "simcse"], "training.seed": [1, 2]}


@pytest.mark.usefixtures("in_threads")
def test_a_grid_has_means_and_standard_deviations_over_seeds(base: dict[str, Any], tmp_path: Path) -> None:
    data = write_tasks(tmp_path / "data")
    path = write_sweep(tmp_path, base, grid=GRID, data=str(data), tasks=TASKS, dtype="fp32")
    reported: list[SweepProgress] = []
    result = sweep(SweepConfig.load(path), report=reported.append)
    assert (result.finished_before, dict(result.failed)) == (0, {})
    assert reported[0] == SweepProgress(0, 4, ())
    assert reported[1] == SweepProgress(0, 4, ("talas-seed=1",))
    assert reported[-1] == SweepProgress(4, 4, ())
    assert [group.name for group in result.comparison.groups] == ["talas", "simcse"]
    assert result.comparison.differing == ("objective.name",)
    for group, method in zip(result.comparison.groups, ("talas", "simcse"), strict=True):
        folders = [tmp_path / "sweep" / f"{method}-seed={seed}" for seed in (1, 2)]
        scores = [json.loads((folder / "eval.json").read_text()) for folder in folders]
        records = [json.loads((folder / "run.json").read_text()) for folder in folders]
        for name, (one, other) in {
            "tasks.stsb": [score["tasks"]["stsb"]["score"] for score in scores],
            "average.all": [
                (score["tasks"]["stsb"]["score"] + score["tasks"]["mrpc"]["score"]) / 2 for score in scores
            ],
            "agreement.after.spearman": [record["agreement"]["after"]["spearman"] for record in records],
        }.items():
            # Two values lie half their distance from the mean: s^2 = 2 (d / 2)^2 / (2 - 1).
            expected = Figure((one + other) / 2, pytest.approx(abs(one - other) / math.sqrt(2)), 2)
            assert group.figures[name] == expected, name
        assert all(record["teacher"]["mode"] == "cached" for record in records if "teacher" in record)
        assert {score["dtype"] for score in scores} == {"float32"}


@pytest.mark.usefixtures("in_threads")
def test_a_finished_sweep_run_again_trains_nothing_and_gives_the_same_comparison(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_tasks(tmp_path / "data")
    path = write_sweep(tmp_path, base, grid={"training.seed": [1, 2]}, data=str(data), tasks=TASKS)
    first = sweep(SweepConfig.load(path))
    before = mtimes(tmp_path / "sweep")
    monkeypatch.setattr(sweep_module, "launcher", None)  # no run may start
    again = sweep(SweepConfig.load(path))
    assert again.finished_before == 2
    assert mtimes(tmp_path / "sweep") == before
    assert again.comparison == first.comparison


@pytest.mark.usefixtures("in_threads")
def test_finished_runs_are_scored_when_data_are_added_or_changed(base: dict[str, Any], tmp_path: Path) -> None:
    def swept(**settings: Any) -> SweepResult:
        return sweep(SweepConfig.load(write_sweep(tmp_path, base, grid={"training.seed": [1]}, **settings)))

    assert swept().comparison.rows[0].figures.keys().isdisjoint({"tasks.stsb", "average.all"})
    trained = (tmp_path / "sweep" / "seed=1" / "run.json").stat().st_mtime_ns
    data = write_tasks(tmp_path / "data")
    scored = swept(data=str(data), tasks=["stsb"])
    assert (scored.finished_before, swept(data=str(data), tasks=["stsb"]).finished_before) == (0, 1)
    assert scored.comparison.rows[0].figures["average.all"] == scored.comparison.rows[0].figures["tasks.stsb"]
    other = write_tasks(tmp_path / "other", seed=5)
    assert swept(data=str(other), tasks=["stsb"]).finished_before == 0
    assert (tmp_path / "sweep" / "seed=1" / "run.json").stat().st_mtime_ns == trained


@pytest.mark.usefixtures("in_threads")
def test_a_failed_run_does_not_stop_the_others_and_is_retried(base: dict[str, Any], tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e38, 1e-3], "training.seed": [1]}
    path = write_sweep(tmp_path, base, grid=grid)
    result = CliRunner().invoke(main, ["sweep", str(path), "--json", "-o", str(tmp_path / "table.md")])
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["failed"].keys() == {"learning_rate=1e+38-seed=1"}
    assert "the loss is" in record["failed"]["learning_rate=1e+38-seed=1"]
    assert [row["status"] for row in record["runs"]] == ["failed", "finished"]
    table = (tmp_path / "table.md").read_text()
    assert "| learning_rate=1e+38-seed=1 | failed | 1e+38 | - |" in table
    assert "- learning_rate=1e+38-seed=1 failed: " in table
    again = CliRunner().invoke(main, ["sweep", str(path)])
    assert again.exit_code == 1
    assert "1 of 2 runs are already finished" in again.stderr
    assert "learning_rate=1e+38-seed=1 failed" in again.stderr


@pytest.mark.usefixtures("in_threads")
def test_a_sweep_with_changed_settings_is_an_error_before_any_run(base: dict[str, Any], tmp_path: Path) -> None:
    sweep(SweepConfig.load(write_sweep(tmp_path, base, grid={"training.seed": [1]})))
    before = mtimes(tmp_path / "sweep")
    base["training"]["learning_rate"] = 0.5
    with pytest.raises(RunFolderError, match=r"training.learning_rate: 0.001 there, 0.5 now"):
        sweep(SweepConfig.load(write_sweep(tmp_path, base, grid={"training.seed": [0, 1]})))
    assert mtimes(tmp_path / "sweep") == before


class Endless(Launcher):
    """Its runs end when they are stopped."""

    def __init__(self) -> None:
        super().__init__(2)
        self.stopped = threading.Event()
        self.started: list[str] = []

    def _start(self, job: Job) -> str | None:
        self.started.append(job.name)
        self.stopped.wait(30)
        return "stopped"

    def _stop(self) -> None:
        self.stopped.set()


def test_closing_the_events_stops_running_jobs_and_starts_no_other(tmp_path: Path) -> None:
    launcher = Endless()
    events = launcher.run([Job(name, {}, tmp_path / f"{name}.log") for name in "abcd"])
    assert {next(events).name, next(events).name} == {"a", "b"}
    events.close()
    assert launcher.stopped.is_set()
    assert sorted(launcher.started) == ["a", "b"]


class Broken(InThreads):
    def _start(self, job: Job) -> str | None:
        raise OSError(28, "No space left on device", str(job.log))


def test_an_error_of_the_launcher_ends_the_sweep(tmp_path: Path) -> None:
    events = Broken(1).run([Job("a", {}, tmp_path / "a.log")])
    assert next(events) == JobEvent("a")
    with pytest.raises(OSError, match="No space left"):
        next(events)


# Where they run


def environments_of(
    launcher: Launcher, names: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[dict[str, str]]:
    """The environments of the launcher's processes."""
    seen: list[dict[str, str]] = []
    together = threading.Barrier(launcher.at_once)

    def run_job(job: Job, environment: dict[str, str], *more: Any) -> None:
        together.wait(10)
        seen.append(environment)

    monkeypatch.setattr(launch, "run_job", run_job)
    assert not [event.error for event in launcher.run([Job(name, {}, tmp_path) for name in names]) if event.error]
    return sorted(seen, key=str)


def test_parallel_runs_divide_the_cores_and_have_one_gpu_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(launch, "_cores", lambda: 13)
    environments = environments_of(launch.LocalLauncher(4), "abcdefgh", monkeypatch, tmp_path)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["5"] * 4 + ["7"] * 4
    assert {environment["OMP_NUM_THREADS"] for environment in environments} == {"3"}


def test_given_threads_and_a_single_gpu_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert environments_of(launch.LocalLauncher(2), "ab", monkeypatch, tmp_path) == [{}, {}]


class FakeRay:
    """Nodes, and the options of a task."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes
        self.task_options: dict[str, float] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def remote(self, function: Any) -> "FakeRay":
        return self

    def options(self, **options: float) -> "FakeRay":
        self.task_options = options
        return self


@pytest.mark.parametrize(
    ("wanted", "share", "at_once", "gpus"),
    [(None, 0.25, 8, 0.25), (None, None, 2, 1), (4, None, 4, 0.5), (3, 0.25, 3, 0.25), (None, 1.0, 2, 1.0)],
)
def test_runs_on_ray_share_gpus(wanted: int | None, share: float | None, at_once: int, gpus: float) -> None:
    ray = FakeRay({"CPU": 16, "GPU": 1}, {"CPU": 16, "GPU": 1})
    assert launch.RayLauncher(ray, wanted, share).at_once == at_once
    assert ray.task_options["num_gpus"] == gpus
    assert ray.task_options["num_cpus"] * at_once <= 32


def test_a_run_that_another_process_trains_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "SECONDS_TO_WAIT", 0.0)
    with (tmp_path / "a.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        (started, ended) = launch.LocalLauncher(1).run([Job("a", {}, tmp_path / "a.log")])
    assert started == JobEvent("a")
    assert "another process trains run a" in str(ended.error)


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("teacher: toy\nerror: no space left\n\n", 1, "no space left"),
        ("Traceback (most recent call last):\n  File x\nValueError: no\n", 1, "ValueError: no"),
        ("", 3, "ended with exit code 3 without output"),
        ("step 1\n", -9, "ended by SIGKILL, as when memory runs out"),
        ("step 1\n", -11, "ended by SIGSEGV; see"),
    ],
)
def test_a_failure_is_the_last_line_of_the_log_or_the_signal(
    tmp_path: Path, output: str, code: int, expected: str
) -> None:
    (tmp_path / "a.log").write_text("error: of an earlier try\n" + output)
    assert launch._failure(tmp_path / "a.log", len("error: of an earlier try\n"), code).startswith(expected)
