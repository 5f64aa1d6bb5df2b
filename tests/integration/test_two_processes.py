"""Data-parallel training in two processes, as torchrun starts them, on CPUs."""

import json
import multiprocessing
import os
import socket
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model

from distill.config import RunConfig
from tests.conftest import varied_texts
from tests.distill.tiny_runs import metrics, tiny_config

pytestmark = pytest.mark.slow


def run_as(rank: int, port: int, config: RunConfig, output: Path) -> None:
    """One rank's process; writes its weights and result to `output`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from distill.runs.run import run
    from distill.training.trainer import DistillTrainer

    class SavingTrainer(DistillTrainer):
        def train(self, *args: object, **kwargs: object) -> object:
            outcome = super().train(*args, **kwargs)
            assert isinstance(self.model_wrapped, torch.nn.parallel.DistributedDataParallel)
            save_model(self.model, str(output / f"rank{rank}.safetensors"))
            return outcome

    run.__globals__["DistillTrainer"] = SavingTrainer
    result = run(config)
    (output / f"rank{rank}.json").write_text(json.dumps(result.to_json()))
    torch.distributed.destroy_process_group()


def start_both(config: RunConfig, output: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_as, args=(rank, port, config, output)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]


def six_steps(cache: Path, student: Path, folder: Path, *overrides: str) -> RunConfig:
    sizes = ("training.per_device_train_batch_size=20", "training.max_steps=6")
    return tiny_config(cache, student, folder, "corpus=sentences", *sizes, *overrides)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_train_one_model_with_asam_and_export_one_student(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, accumulate: int
) -> None:
    config = six_steps(
        toy_cache,
        tiny_student,
        tmp_path / "run",
        "training.save_steps=3",
        "sharpness.name=asam",
        f"training.gradient_accumulation_steps={accumulate}",
    )
    start_both(config, tmp_path)
    first, second = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2))
    start = load_file(tiny_student / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = "embeddings.word_embeddings.weight"
    assert not torch.equal(first[f"student.encoder.{name}"], start[name])
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(tensor, first[f"student.encoder.{name}"]) for name, tensor in final.items())
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:  # both are means over the ranks
        assert line["loss"] == pytest.approx(line["tamd"] + line["lasd"] + line["simcse"], rel=1e-4)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert results[0]["steps"] == results[1]["steps"] == 6
    assert results[0]["agreement"] == results[1]["agreement"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2


def test_two_processes_choose_the_same_step_by_validation(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = "".join(f"{text},{other},{place % 4}\n" for place, (text, other) in enumerate(pairwise(varied_texts(40))))
    (data / "stsb_validation.csv").write_text(f"sentence1,sentence2,score\n{rows}")
    config = six_steps(
        toy_cache,
        tiny_student,
        tmp_path / "run",
        f"evaluation.data={data}",
        "evaluation.tasks=[stsb]",
        "evaluation.steps=2",
    )
    start_both(config, tmp_path)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text())["validation"] for rank in range(2)]
    assert results[0] == results[1]
    assert [point["step"] for point in results[0]["points"]] == [2, 4, 6]
    assert [line["step"] for line in metrics(tmp_path / "run") if "validation" in line] == [2, 4, 6]
    chosen = load_file(tmp_path / "run" / f"checkpoint-{results[0]['best_step']}" / "model.safetensors")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(tensor, chosen[f"student.encoder.{name}"]) for name, tensor in final.items())
