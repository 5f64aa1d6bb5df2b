"""Averages of the weights: the arithmetic, and that they are scored, exported, saved and resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distill.analyses.trained_run import TrainedRun
from distill.config import RunConfig, TrainingConfig
from distill.errors import ConfigError, RunFolderError
from distill.runs.run import run
from distill.training.averaging import COUNT, WeightAverage, soup_steps
from distill.training.validation import Validation
from tests.distill.tiny_runs import Stopped, parts, stop_at, tiny_config

EMA, SOUP = "training.ema_decay=0.9", "training.soup=3"


class One(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))
        self.frozen = nn.Parameter(torch.tensor([7.0]), requires_grad=False)

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.weight.fill_(value)


def test_three_steps_of_a_moving_average_by_hand() -> None:
    model = One(1.0)
    average = WeightAverage(model, ema_decay=0.2)
    average.begin()
    average.begin()  # of a training that was loaded: nothing
    expected = 1.0
    # The warm-up's decays are 2/11, then min(0.2, 3/12) and min(0.2, 4/13).
    for step, (value, decay) in enumerate([(2.0, 2 / 11), (5.0, 0.2), (-1.0, 0.2)], 1):
        model.become(value)
        average.update(step)
        expected = decay * expected + (1 - decay) * value
        with average.applied():
            assert model.weight.item() == pytest.approx(expected, rel=1e-6)
        assert model.weight.item() == value
    average.apply()
    assert model.weight.item() == pytest.approx(expected, rel=1e-6)
    assert model.frozen.item() == 7.0


def test_a_soup_is_the_plain_mean_over_its_steps() -> None:
    model = One(1.0)
    average = WeightAverage(model, steps=(2, 4, 5))
    average.begin()
    for step, value in enumerate([10.0, 1.0, 20.0, 4.0, 7.0], 1):
        if step == 2:
            with average.applied():
                assert model.weight.item() == 10.0  # nothing averaged yet
        model.become(value)
        average.update(step)
    with average.applied():
        assert model.weight.item() == pytest.approx((1 + 4 + 7) / 3)


def test_an_exception_in_the_block_restores_the_weights() -> None:
    model = One(1.0)
    average = WeightAverage(model, ema_decay=0.9)
    average.begin()
    model.become(2.0)
    with pytest.raises(Stopped), average.applied():
        raise Stopped
    assert model.weight.item() == 2.0


@pytest.mark.parametrize(
    ("save", "total", "soup", "expected"), [(5, 12, 3, [5, 10, 12]), (5, 10, 2, [5, 10]), (4, 12, 2, [8, 12])]
)
def test_a_soup_is_of_the_last_checkpoints(save: int, total: int, soup: int, expected: list[int]) -> None:
    assert soup_steps(TrainingConfig(save_steps=save, soup=soup), total) == expected


def test_a_run_with_too_few_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this run of 12 steps has 2; set training.save_steps to at most 5"):
        soup_steps(TrainingConfig(save_steps=10, soup=3), 12)
    assert len(soup_steps(TrainingConfig(save_steps=5, soup=3), 12)) == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.ema_decay=1"], "training.ema_decay is 1.0"),
        (["training.ema_decay=-0.1"], "training.ema_decay is -0.1"),
        (["training.soup=0"], "training.soup is 0"),
        ([EMA, SOUP], "two averages"),
        ([SOUP, "training.arguments.save_strategy=epoch"], "remove save_strategy"),
    ],
)
def test_settings_that_make_no_average_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.load(None, overrides)
    assert expected in str(error.value)


def averaged(folder: Path, step: int = 12) -> dict[str, Tensor]:
    tensors = load_file(folder / f"checkpoint-{step}" / "average.safetensors")
    tensors.pop(COUNT)
    return tensors


def trained(folder: Path, step: int = 12) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / f"checkpoint-{step}" / "model.safetensors")
    return found


def saving(cache: Path, student: Path, folder: Path, *overrides: str) -> RunConfig:
    steps = ("training.save_steps=3", "training.save_total_limit=2")
    return tiny_config(cache, student, folder, *steps, *overrides)


@pytest.mark.parametrize("option", [EMA, pytest.param(SOUP, marks=pytest.mark.slow)])
def test_the_weights_are_trained_as_without_it_and_their_average_is_exported(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, option: str
) -> None:
    run(saving(toy_cache, tiny_student, tmp_path / "plain"))
    run(saving(toy_cache, tiny_student, tmp_path / "averaged", option))
    plain, found = trained(tmp_path / "plain"), trained(tmp_path / "averaged")
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain.items())
    assert not (tmp_path / "plain" / "checkpoint-12" / "average.safetensors").exists()
    average = averaged(tmp_path / "averaged")
    assert set(average) == set(plain)  # heads too
    key = "encoder.embeddings.word_embeddings.weight"
    final = load_file(tmp_path / "averaged" / "final" / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert torch.equal(final, average[f"student.{key}"])
    assert not torch.equal(final, plain[f"student.{key}"])
    with TrainedRun.open(tmp_path / "averaged") as opened:
        assert torch.equal(opened.load().student.get_parameter(key), final)


@pytest.mark.parametrize(
    ("option", "stop", "sharpness"),
    [
        (EMA, 5, "asam"),
        pytest.param(SOUP, 8, "none", marks=pytest.mark.slow),
        pytest.param(EMA, 2, "none", marks=pytest.mark.slow),
        pytest.param(SOUP, 11, "asam", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_with_the_same_average(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, option: str, stop: int, sharpness: str
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    options = (option, f"sharpness.name={sharpness}")
    parts(saving(toy_cache, tiny_student, tmp_path / "whole", *options)).trainer().train()
    config = saving(toy_cache, tiny_student, tmp_path / "cut", *options)
    with pytest.raises(Stopped):
        parts(config).trainer(report=stop_at(stop)).train()
    last = tmp_path / "cut" / f"checkpoint-{stop // 3 * 3}"
    parts(config).trainer().train(resume_from_checkpoint=str(last) if stop > 2 else None)
    whole, cut = averaged(tmp_path / "whole"), averaged(tmp_path / "cut")
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def test_a_soup_is_the_mean_of_the_checkpoints_on_disk(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(
        toy_cache, tiny_student, tmp_path, "training.save_steps=5", SOUP, "training.save_total_limit=9"
    )
    trainer = parts(config).trainer()
    trainer.train()
    soup, each = averaged(tmp_path), [trained(tmp_path, step) for step in (5, 10, 12)]
    for name, tensor in soup.items():
        torch.testing.assert_close(tensor, torch.stack([one[name] for one in each]).mean(0), rtol=1e-5, atol=1e-7)


def test_validation_scores_the_average_and_keeps_the_best_one(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    rows = "".join(f"the cat sat,a river ran {number},{number}\n" for number in range(5))
    (tmp_path / "data" / "stsb_validation.csv").write_text(f"sentence1,sentence2,score\n{rows}")
    seen: list[Any] = []
    scores = iter([1.0, 3.0, 2.0, 1.0])

    def score(self: Validation, student: Any) -> dict[str, float]:
        seen.append(student.encode(["the cat sat on the mat"]))
        return {"average": next(scores), "seconds": 0.5}

    monkeypatch.setattr(Validation, "__call__", score)
    data = (f"evaluation.data={tmp_path / 'data'}", "evaluation.tasks=[stsb]", "evaluation.steps=3")
    run(saving(toy_cache, tiny_student, tmp_path / "run", EMA, *data, "training.save_steps=1000"))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["exported"]["step"] == 6
    with TrainedRun.open(tmp_path / "run") as opened:
        exported = opened.load().student.encode(["the cat sat on the mat"])
    np.testing.assert_allclose(exported, seen[1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(seen[1], seen[2], rtol=1e-5, atol=1e-6)
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")["embeddings.word_embeddings.weight"]
    expected = averaged(tmp_path / "run", 6)["student.encoder.embeddings.word_embeddings.weight"]
    assert torch.equal(final, expected)


def test_a_finished_training_that_was_not_exported_exports_the_same_average(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = saving(toy_cache, tiny_student, tmp_path, EMA)
    made = parts(config)
    made.trainer().train()
    again = parts(config)
    trainer = again.trainer()
    assert trainer.restore(tmp_path / "checkpoint-12")
    trainer.load_step(12)
    average = averaged(tmp_path)
    found = again.student.state_dict(prefix="student.")
    assert all(torch.equal(tensor, average[name]) for name, tensor in found.items() if name in average)
    (tmp_path / "checkpoint-12" / "average.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"has no average.safetensors"):
        parts(config).trainer().restore(tmp_path / "checkpoint-12")
