import csv
import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill.analyses.trained_run import TrainedRun
from distill.config import EvaluationConfig, RunConfig
from distill.errors import ConfigError, EvaluationError, RunFolderError
from distill.evaluation.base import Task
from distill.evaluation.sts import spearman
from distill.runs.run import check_run, run
from distill.training.validation import Validation, best, points
from tests.conftest import varied_texts
from tests.distill.tiny_runs import Stopped, metrics, parts, stop_at, tiny_config

# "package.module:Class" of the tasks below.
HERE = __name__


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validation files of two tasks and a probe's training file; test files that cannot be read."""
    folder = tmp_path_factory.mktemp("data")
    texts = varied_texts(120, seed=3)
    for name, column, values in (("stsb", "score", 6), ("mrpc", "label", 2)):
        write(
            folder / f"{name}_validation.csv",
            ["sentence1", "sentence2", column],
            [(texts[place], texts[place + 30], place % values) for place in range(30)],
        )
    for part, start in (("train", 60), ("validation", 90)):
        write(
            folder / f"emotion_{part}.csv",
            ["text", "label"],
            [(texts[place], place % 3) for place in range(start, start + 30)],
        )
    for name in ("stsb", "mrpc", "emotion"):
        (folder / f"{name}_test.csv").write_text("not,what,is,expected\n")
    return folder


def write(path: Path, header: list[str], rows: list[tuple[Any, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def validated(cache: Path, student: Path, folder: Path, data: Path, *overrides: str) -> RunConfig:
    """12 steps, 7 an epoch, with dropout; scored every 3 steps on two tasks."""
    return tiny_config(
        cache,
        student,
        folder,
        f"evaluation.data={data}",
        "evaluation.tasks=[stsb, mrpc]",
        "evaluation.steps=3",
        *overrides,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def scored_as(monkeypatch: pytest.MonkeyPatch, averages: dict[int, float]) -> None:
    """Make the evaluations after steps 3, 6, 9 and 12 return these averages."""
    found = iter(averages.values())
    monkeypatch.setattr(Validation, "__call__", lambda self, student: {"average": next(found), "seconds": 0.5})


class Draws(Task):
    """Scores with random numbers of every kind, and sets their seeds."""

    metric: ClassVar[str] = "luck"

    def texts(self) -> list[str]:
        return ["the cat"]

    def files(self) -> list[Path]:
        return []

    def score(self, vectors: Any) -> dict[str, float]:
        vectors(["the cat"])
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        return {"luck": 100 * random.random()}


@pytest.mark.parametrize(
    "overrides",
    [
        ("sharpness.name=asam", "training.gradient_accumulation_steps=2"),
        ("training.precision=bf16",),
        (f"evaluation.tasks=[stsb, {HERE}:Draws]",),
    ],
    ids=["asam", "bf16", "a task that draws numbers"],
)
def test_validation_does_not_change_a_bit_of_the_weights(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "with", data, *overrides)
    parts(config).trainer(validation=Validation.from_config(config.evaluation)).train()
    plain = [key for key in overrides if not key.startswith("evaluation.")]
    parts(tiny_config(toy_cache, tiny_student, tmp_path / "without", *plain)).trainer().train()
    assert same(weights(tmp_path / "with" / "checkpoint-12"), weights(tmp_path / "without" / "checkpoint-12"))
    losses = [
        [(line["step"], line["loss"]) for line in metrics(tmp_path / name) if "loss" in line]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]


def test_an_evaluation_keeps_random_states_and_training_mode(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path, data, f"evaluation.tasks=[stsb, {HERE}:Draws]")
    trainer = parts(config).trainer(validation=Validation.from_config(config.evaluation))
    trainer.model.train()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    undisturbed = (random.random(), np.random.random(), torch.rand(1).item())
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    trainer.evaluate()
    assert (random.random(), np.random.random(), torch.rand(1).item()) == undisturbed
    assert all(module.training for module in trainer.model.modules())


def test_each_evaluation_is_a_line_of_the_curve_and_a_point_of_the_record(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path
) -> None:
    announced: list[str] = []
    result = run(validated(toy_cache, tiny_student, tmp_path / "run", data), announce=announced.append)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    lines = [line for line in metrics(tmp_path / "run") if "validation" in line]
    assert record["validation"]["points"] == lines
    assert result.validation == record["validation"]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    for line in lines:
        assert line["validation"]["average"] == pytest.approx(
            (line["validation"]["stsb"] + line["validation"]["mrpc"]) / 2
        )
        assert line["epoch"] == pytest.approx(line["step"] / 7)
    assert record["validation"]["seconds"] == pytest.approx(sum(line["seconds"] for line in lines), abs=1e-3)
    assert record["validation"]["files"].keys() == {"stsb_validation.csv", "mrpc_validation.csv"}
    scored = [line for line in announced if "validation" in line]
    assert len(scored) == 5
    assert f"step {record['validation']['best_step']}" in scored[-1]


def test_the_scores_are_those_of_the_checkpoints_student(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path
) -> None:
    config = validated(
        toy_cache, tiny_student, tmp_path / "run", data, "evaluation.tasks=[stsb]", "evaluation.steps=12"
    )
    run(config)
    (line,) = [line for line in metrics(tmp_path / "run") if "validation" in line]
    made = parts(config)
    trainer = made.trainer(validation=Validation.from_config(config.evaluation))
    trainer.load_step(12)
    with (data / "stsb_validation.csv").open() as file:
        rows = list(csv.DictReader(file))
    first, second = (made.student.encode([row[column] for row in rows]) for column in ("sentence1", "sentence2"))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    expected = spearman(cosines, np.array([float(row["score"]) for row in rows]))
    assert expected is not None
    assert line["validation"] == pytest.approx({"average": 100 * expected, "stsb": 100 * expected})


def test_without_steps_every_epoch_and_the_last_step_are_scored(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path
) -> None:
    result = run(validated(toy_cache, tiny_student, tmp_path / "run", data, "evaluation.steps=null"))
    assert result.validation is not None
    assert [point["step"] for point in result.validation["points"]] == [7, 12]


def test_the_best_checkpoint_outlives_the_limit_and_is_exported(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(
        toy_cache, tiny_student, tmp_path / "run", data, "training.save_steps=1", "training.save_total_limit=1"
    )
    scored_as(monkeypatch, {3: 10.0, 6: 40.0, 9: 40.0, 12: 30.0})
    result = run(config)
    assert result.validation is not None
    assert result.validation["best_step"] == 6  # the earlier of two equal ones
    assert steps_of(tmp_path / "run") == [6, 12]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["exported"]["step"] == 6
    assert (record["steps"], result.steps) == (12, 12)
    trained = weights(tmp_path / "run" / "checkpoint-6")
    exported = weights(tmp_path / "run" / "final")
    assert all(torch.equal(exported[name], trained[f"student.encoder.{name}"]) for name in exported)
    assert "step 6, average 40.00" in (tmp_path / "run" / "final" / "README.md").read_text()
    with TrainedRun.open(tmp_path / "run") as opened:
        looked_into = opened.load().state_dict()
    assert all(torch.equal(looked_into[name], trained[name]) for name in trained)


def test_a_new_best_is_saved_in_addition_to_save_steps(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "run", data, "training.save_total_limit=9")
    scored_as(monkeypatch, {3: 10.0, 6: 5.0, 9: 20.0, 12: 0.0})
    run(config)
    assert steps_of(tmp_path / "run") == [3, 9, 12]


def test_keep_last_exports_the_last_step_and_saves_nothing_more(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "run", data, "evaluation.keep=last")
    scored_as(monkeypatch, {3: 50.0, 6: 40.0, 9: 30.0, 12: 20.0})
    result = run(config)
    assert result.validation is not None
    assert (result.validation["best_step"], result.validation["keep"]) == (3, "last")
    assert steps_of(tmp_path / "run") == [12]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exported"]["step"] == 12


SAVED = ("training.save_steps=4", "training.logging_steps=5")


@pytest.fixture(scope="module")
def whole(toy_cache: Path, tiny_student: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(validated(toy_cache, tiny_student, folder, data, *SAVED))
    return folder


@pytest.mark.parametrize("stop", [2, 4, 11])
def test_a_killed_run_resumes_to_the_same_best_lines_and_weights(
    whole: Path, toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, stop: int
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "killed", data, *SAVED)
    with pytest.raises(Stopped):
        run(config, report=stop_at(stop))
    result = run(config)
    expected = json.loads((whole / "run.json").read_text())["validation"]
    assert result.validation is not None
    assert (result.resumed_from > 0) == (stop > 3)
    assert timeless(result.validation["points"]) == timeless(expected["points"])
    assert result.validation["best_step"] == expected["best_step"]
    assert timeless(metrics(tmp_path / "killed")) == timeless(metrics(whole))
    assert same(weights(tmp_path / "killed" / "final"), weights(whole / "final"))
    assert steps_of(tmp_path / "killed") == steps_of(whole)


def test_a_best_step_from_before_a_kill_stays_the_best(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(
        toy_cache, tiny_student, tmp_path / "run", data, "training.save_steps=2", "training.save_total_limit=2"
    )
    scored_as(monkeypatch, {3: 90.0, 6: 40.0, 9: 1.0})
    with pytest.raises(Stopped):
        run(config, report=stop_at(11))
    scored_as(monkeypatch, {12: 50.0})
    result = run(config)
    assert result.resumed_from == 10
    assert result.validation is not None
    assert (result.validation["best_step"], steps_of(tmp_path / "run")) == (3, [3, 12])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exported"]["step"] == 3


def test_a_moved_run_folder_keeps_its_best(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_as(monkeypatch, {3: 90.0, 6: 40.0})
    saving = ("training.save_steps=1", "training.save_total_limit=2")
    with pytest.raises(Stopped):
        run(validated(toy_cache, tiny_student, tmp_path / "there", data, *saving), report=stop_at(8))
    shutil.move(tmp_path / "there", tmp_path / "here")
    scored_as(monkeypatch, {9: 1.0, 12: 2.0})
    run(validated(toy_cache, tiny_student, tmp_path / "here", data, *saving))
    assert steps_of(tmp_path / "here") == [3, 12]


def test_a_run_killed_before_its_export_does_not_train_or_score_again(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "run", data)
    scored_as(monkeypatch, {3: 10.0, 6: 40.0, 9: 20.0, 12: 30.0})
    run(config)
    kept = weights(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "final")
    scored_as(monkeypatch, {})
    result = run(config)
    assert same(weights(tmp_path / "run" / "final"), kept)
    assert result.validation is not None
    assert result.validation["best_step"] == 6


def test_a_missing_best_checkpoint_is_an_error(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "run", data)
    scored_as(monkeypatch, {3: 10.0, 6: 40.0, 9: 20.0, 12: 30.0})
    run(config)
    for name in ("final", "checkpoint-6"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(RunFolderError, match=r"step 6 was the best by validation, but .*checkpoint-6 is missing"):
        run(config)


def test_the_exported_projection_is_scored(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def score(self: Validation, student: Any) -> dict[str, float]:
        widths.append(student.encode(["the cat"]).shape[1])
        return {"average": 1.0, "seconds": 0.0}

    monkeypatch.setattr(Validation, "__call__", score)
    run(validated(toy_cache, tiny_student, tmp_path / "own", data, "evaluation.steps=12"))
    run(validated(toy_cache, tiny_student, tmp_path / "into", data, "evaluation.steps=12", "export.projection=true"))
    own, projected = widths
    record = json.loads((tmp_path / "into" / "run.json").read_text())
    assert (own, projected) == (record["student"]["dim"], record["space"]["dims"])
    assert own != projected


def test_the_time_of_an_evaluation_is_not_timed(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = {"now": 0.0}
    monkeypatch.setattr("distill.training.measurement.time.perf_counter", lambda: hours["now"])

    def score(self: Validation, student: Any) -> dict[str, float]:
        hours["now"] += 3600
        return {"average": 1.0, "seconds": 3600.0}

    monkeypatch.setattr(Validation, "__call__", score)
    config = validated(toy_cache, tiny_student, tmp_path, data, "evaluation.steps=1")
    trainer = parts(config).trainer(validation=Validation.from_config(config.evaluation))
    trainer.train()
    assert max(step.seconds for step in trainer.clock.timer.steps) == 0


# Files


@contextmanager
def opened() -> Iterator[list[str]]:
    """Names of the files opened in the block."""
    names: list[str] = []
    listening = [True]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if listening[0] and event == "open":
            names.append(str(arguments[0]))

    sys.addaudithook(hear)
    try:
        yield names
    finally:
        listening[0] = False


def test_test_files_are_never_opened(toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path) -> None:
    tasks = "evaluation.tasks=[stsb, mrpc, emotion]"
    with opened() as names:
        run(validated(toy_cache, tiny_student, tmp_path / "run", data, tasks))
    from_data = {Path(name).name for name in names if name.startswith(str(data))}
    assert from_data == {
        "stsb_validation.csv",
        "mrpc_validation.csv",
        "emotion_train.csv",
        "emotion_validation.csv",
    }


def test_the_default_tasks_have_a_usable_validation_file(data: Path, tmp_path: Path) -> None:
    for name in ("stsb", "sick", "mrpc", "scitail", "wic", "emotion"):
        (tmp_path / f"{name}_validation.csv").touch()
    (tmp_path / "emotion_train.csv").touch()
    validation = Validation.from_config(EvaluationConfig(data=str(tmp_path)))
    assert validation is not None
    assert {task.name for task in validation.tasks} == {"stsb", "sick", "mrpc", "scitail", "wic", "emotion"}
    assert {task.split for task in validation.tasks} == {"validation"}
    assert Validation.from_config(EvaluationConfig()) is None


@pytest.mark.parametrize("name", ["banking77", "tweet", "sts12"])
def test_a_task_without_a_usable_validation_file_is_refused(data: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.tasks names {name}, but its validation file is"):
        Validation.from_config(EvaluationConfig(data=str(data), tasks=("stsb", name)))


def test_missing_and_malformed_files_are_refused_before_training(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path
) -> None:
    missing = validated(toy_cache, tiny_student, tmp_path / "run", data, "evaluation.tasks=[stsb, sick]")
    for check in (run, check_run):
        with pytest.raises(EvaluationError, match=r"missing sick_validation\.csv"):
            check(missing)
    write(tmp_path / "stsb_validation.csv", ["sentence1", "sentence2", "score"], [("a", "b", "much")])
    with pytest.raises(EvaluationError, match=r"stsb_validation\.csv:2"):
        run(validated(toy_cache, tiny_student, tmp_path / "run", tmp_path, "evaluation.tasks=[stsb]"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.keep=first", "evaluation.keep is 'first'; expected best or last"),
        ("evaluation.steps=0", "evaluation.steps is 0; expected at least 1"),
        ("evaluation.data=", "need evaluation.data"),
        ("training.arguments.save_strategy=epoch", "cannot be used with evaluation.data"),
        ("training.arguments.load_best_model_at_end=true", "set evaluation.data, evaluation.steps and evaluation.keep"),
    ],
)
def test_settings_without_an_evaluation_are_refused(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(toy_cache, tiny_student, tmp_path / "run", data, override)


def test_a_finished_folder_is_refused_with_other_validation_files_and_accepted_with_the_same_elsewhere(
    toy_cache: Path, tiny_student: Path, data: Path, tmp_path: Path
) -> None:
    config = validated(toy_cache, tiny_student, tmp_path / "run", data, "training.max_steps=3")
    run(config)
    shutil.copytree(data, tmp_path / "moved")
    moved = validated(toy_cache, tiny_student, tmp_path / "run", tmp_path / "moved", "training.max_steps=3")
    assert run(moved).finished_before
    write(
        tmp_path / "moved" / "stsb_validation.csv", ["sentence1", "sentence2", "score"], [("a", "b", 1), ("b", "c", 2)]
    )
    with pytest.raises(RunFolderError, match="was trained with the validation files"):
        run(moved)
    with pytest.raises(RunFolderError, match=r"other settings .*evaluation\.steps"):
        run(validated(toy_cache, tiny_student, tmp_path / "run", data, "training.max_steps=3", "evaluation.steps=2"))
    with pytest.raises(RunFolderError, match="evaluation"):
        run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "training.max_steps=3"))


def test_points_of_a_log_are_its_evaluations() -> None:
    log = [
        {"step": 1, "epoch": 0.1, "loss": 3.0},
        {"step": 2, "epoch": 0.2, "eval_average": 40.0, "eval_stsb": 40.0, "eval_seconds": 1.5},
        {"step": 4, "epoch": 0.4, "eval_average": 40.0, "eval_stsb": 40.0, "eval_seconds": 2.5},
    ]
    found = points(log)
    assert found[0] == {"step": 2, "epoch": 0.2, "validation": {"average": 40.0, "stsb": 40.0}, "seconds": 1.5}
    assert best(found)["step"] == 2
