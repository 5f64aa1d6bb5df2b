"""Methods in `DistillTrainer`: against a plain loop, resumed, with a loss scale, and in two processes."""

import json
import multiprocessing
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor

from distill.config import RunConfig, SharpnessConfig
from distill.data.dataset import ShuffledDataset
from distill.data.sampler import StreamingSampler
from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.training.trainer import DistillTrainer
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.teachers.base import TeacherOptions
from tests.conftest import varied_texts
from tests.distill.tiny_runs import Parts, Stopped, metrics, parts, stop_at, tiny_config
from tests.reference_loop import train as reference

VARIANTS = {
    "every": ("sharpness.name=asam", "sharpness.every=3"),
    "norm-only": ("sharpness.name=norm-only", "sharpness.every=2"),
    "student": ("sharpness.name=sam", "sharpness.parameters=student"),
    "disam": ("sharpness.name=disam", "sharpness.variance_weight=5.0"),
    "terms": ("sharpness.name=asam", "sharpness.ascent_terms=[tamd, lasd]"),
    "looksam": ("sharpness.name=looksam", "sharpness.every=3"),
    "msam": ("sharpness.name=msam", "sharpness.rho=0.3"),
}


def among(*quick: str) -> list[Any]:
    """All variants; redundant ones are marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


@pytest.fixture(scope="module")
def parted_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of the toy teacher with 60 texts of three domains."""
    folder = tmp_path_factory.mktemp("parted")
    records = [{"text": text, "part": f"part {place % 3}"} for place, text in enumerate(varied_texts(60))]
    (folder / "few.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    corpus = Corpus.open(folder / "few.jsonl", domain_key="part")
    build(corpus, TeacherOptions(model="toy"), folder / "cache", name="few")
    return folder / "cache"


def weights(made: Parts) -> dict[str, Tensor]:
    return {**made.student.state_dict(prefix="student."), **made.objective.state_dict(prefix="objective.")}


def loop_options(objective: Objective, name: str) -> dict[str, Any]:
    """Arguments of the plain loop for a variant."""

    def disam(student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        assert teacher.domains is not None
        losses = [
            torch.stack(list(objective(student.take(places), teacher.take(places)).values())).sum()
            for places in ((teacher.domains == domain).nonzero()[:, 0] for domain in range(3))
            if len(places) > 1
        ]
        loss = torch.stack(list(objective(student, teacher).values())).sum()
        mean = sum(losses) / max(len(losses), 1)
        return loss - 5.0 * sum((one - mean) ** 2 for one in losses) / max(len(losses), 1)

    def terms(student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        found = objective(student, teacher)
        return found["tamd"] + found["lasd"]

    return {
        "every": {"every": 3},
        "disam": {"adaptive": False, "ascent_loss": disam},
        "terms": {"ascent_loss": terms, "ascent_views": 1},
    }[name]


# 7 batches an epoch, the last one smaller: with 2 micro-batches a step the last step of an epoch has one.
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["every", "disam", "terms"])
def test_training_equals_the_plain_loop(
    parted_cache: Path, tiny_student: Path, tmp_path: Path, name: str, accumulate: int
) -> None:
    overrides = (
        "objective.options.simcse_weight=0.5",
        "training.max_steps=5",
        f"training.gradient_accumulation_steps={accumulate}",
    )
    config = tiny_config(parted_cache, tiny_student, tmp_path, *VARIANTS[name], *overrides)
    made, expected = parts(config), parts(config)
    made.trainer().train()
    training = config.training
    torch.manual_seed(training.seed)
    order = WindowedShuffle(
        len(expected.dataset),
        training.per_device_train_batch_size,
        window=config.data.window or 64,
        seed=training.seed,
    )
    log = reference(
        expected.student,
        expected.objective,
        ShuffledDataset(expected.dataset, order).__getitems__,
        expected.collator,
        StreamingSampler(order),
        steps=training.max_steps,
        accumulate=accumulate,
        warmup=int(training.warmup_ratio * training.max_steps),
        learning_rate=training.learning_rate,
        head_learning_rate=training.head_learning_rate,
        weight_decay=training.weight_decay,
        floor=training.min_lr_rate,
        rho=0.05,
        **loop_options(expected.objective, name),
    )
    wanted = weights(expected)
    for key, tensor in weights(made).items():
        # Softmax does not depend on a key bias: its gradient is rounding noise, which Adam amplifies.
        if not key.endswith("key.bias"):
            assert torch.allclose(tensor, wanted[key], rtol=0, atol=2e-6), key
    lines = metrics(tmp_path)
    assert len(lines) == len(log) == 5
    for line, terms in zip(lines, log, strict=True):
        for term, value in terms.items():
            assert line[term] == pytest.approx(value, rel=1e-4, abs=1e-6)
        assert line["loss"] == pytest.approx(sum(line[term] for term in terms), rel=1e-5)


@pytest.mark.parametrize("name", among("looksam", "msam"))
def test_a_resumed_training_ends_with_the_same_bits_and_lines(
    parted_cache: Path, tiny_student: Path, tmp_path: Path, name: str
) -> None:
    def config(folder: str) -> RunConfig:
        return tiny_config(
            parted_cache,
            tiny_student,
            tmp_path / folder,
            *VARIANTS[name],
            "training.gradient_accumulation_steps=2",
            "training.max_steps=6",
            "training.save_steps=4",  # not a multiple of 3: the direction is restored
            "training.logging_steps=2",
            "training.save_total_limit=5",
        )

    whole = parts(config("whole"))
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    whole.trainer().train()
    with pytest.raises(Stopped):
        parts(config("cut")).trainer(report=stop_at(5)).train()
    made = parts(config("cut"))
    torch.manual_seed(999)
    made.trainer().train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(made).items())
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_a_checkpoint_holds_unperturbed_weights_and_a_direction_only_for_looksam(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    for name in ("msam", "looksam"):
        config = tiny_config(
            parted_cache,
            tiny_student,
            tmp_path / name,
            *VARIANTS[name],
            "training.save_steps=4",
            "training.max_steps=4",
        )
        made = parts(config)
        (tmp_path / name).mkdir()
        made.trainer().train()
        saved = load_file(tmp_path / name / "checkpoint-4" / "model.safetensors")
        assert all(torch.equal(tensor, saved[key]) for key, tensor in weights(made).items() if key in saved)
    assert not (tmp_path / "msam" / "checkpoint-4" / "sharpness.safetensors").exists()
    kept = load_file(tmp_path / "looksam" / "checkpoint-4" / "sharpness.safetensors")
    assert kept.keys() <= weights(made).keys()
    assert sum(float(tensor.double().square().sum()) for tensor in kept.values()) == pytest.approx(1, rel=1e-5)


class ScaledTrainer(DistillTrainer):
    """With a loss scale, as float16 on a GPU has one; it overflows in the steps named."""

    overflows: tuple[int, ...] = ()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10**6)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        scaler = self.accelerator.scaler
        scaler.scale(torch.zeros(()))  # creates the scale
        scaler.update(new_scale=2.0**127 if self.state.global_step in self.overflows else 2.0**16)
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("name", among("looksam", "disam"))
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(
    parted_cache: Path, tiny_student: Path, tmp_path: Path, name: str
) -> None:
    config = tiny_config(parted_cache, tiny_student, tmp_path, *VARIANTS[name], "training.max_steps=4")
    plain, scaled = parts(config), parts(config)
    plain.trainer().train()
    scaled.trainer(ScaledTrainer).train()
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(scaled).items())


@pytest.mark.parametrize("name", among("looksam", "disam"))
def test_an_overflow_skips_the_step_bit_for_bit_and_training_continues(
    parted_cache: Path, tiny_student: Path, tmp_path: Path, name: str
) -> None:
    class Overflowing(ScaledTrainer):
        overflows = (3, 4)  # with every=3: one with an ascent and one without

    config = tiny_config(parted_cache, tiny_student, tmp_path, *VARIANTS[name], "training.max_steps=7")
    made = parts(config)
    seen: list[dict[str, Tensor]] = []
    scales: list[float] = []

    def report(progress: Any) -> None:
        seen.append({key: tensor.clone() for key, tensor in weights(made).items()})
        scales.append(trainer.accelerator.scaler.get_scale())

    trainer = made.trainer(Overflowing, report=report)
    trainer.train()
    for step in (3, 4):
        assert all(torch.equal(tensor, seen[step][key]) for key, tensor in seen[2].items())
    assert [scale == 2.0**126 for scale in scales] == [False, False, False, True, True, False, False]
    assert any(not torch.equal(tensor, seen[6][key]) for key, tensor in seen[4].items())
    assert all(bool(tensor.isfinite().all()) for tensor in seen[6].values())


def test_lines_after_an_ascent_log_it(parted_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    parts(
        tiny_config(parted_cache, tiny_student, tmp_path, *VARIANTS["every"], "training.max_steps=5")
    ).trainer().train()
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "perturbation_norm" in line] == [1, 4]
    for line in lines:
        shares = {key: value for key, value in line.items() if key.startswith("share of ")}
        assert bool(shares) == ("perturbation_norm" in line) == ("perturbation_rise" in line)
        if shares:
            assert sum(shares.values()) == pytest.approx(1)
            assert shares["share of norm gains"] > 0.3


def test_norm_only_shares_are_those_of_norms(parted_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(parted_cache, tiny_student, tmp_path, "sharpness.name=norm-only", "training.max_steps=2")
    parts(config).trainer().train()
    for line in metrics(tmp_path):
        assert {key for key in line if key.startswith("share of ")} == {"share of norm gains", "share of norm biases"}


def test_methods_without_the_loss_at_the_weights_log_no_rise(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    for name in ("msam", "terms"):
        config = tiny_config(parted_cache, tiny_student, tmp_path / name, *VARIANTS[name], "training.max_steps=2")
        parts(config).trainer().train()
        last = metrics(tmp_path / name)[-1]
        assert last["perturbation_norm"] > 0
        assert "perturbation_rise" not in last
        assert last["loss"] == pytest.approx(last["tamd"] + last["lasd"] + last["simcse"], rel=1e-5)


def test_the_first_pass_without_view_terms_encodes_one_view(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    made = parts(tiny_config(parted_cache, tiny_student, tmp_path, *VARIANTS["terms"], "training.max_steps=2"))
    rows: list[int] = []
    made.student.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    made.trainer().train()
    assert rows == [9, 18, 9, 18]


def test_norm_one_view_is_norm_only_without_the_terms_that_compare_views(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    ways = (("norm-one-view",), ("norm-only", "sharpness.every=2", "sharpness.ascent_terms=[tamd, lasd]"))
    found = []
    for number, (name, *more) in enumerate(ways):
        config = tiny_config(
            parted_cache,
            tiny_student,
            tmp_path / str(number),
            f"sharpness.name={name}",
            "training.max_steps=3",
            *more,
        )
        made = parts(config)
        made.trainer().train()
        found.append(weights(made))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_norm_one_view_is_an_ascent_of_one_view_at_every_second_step(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(parted_cache, tiny_student, tmp_path, "sharpness.name=norm-one-view", "training.max_steps=3")
    made = parts(config)
    rows: list[int] = []
    made.student.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    trainer = made.trainer()
    trainer.train()
    assert rows == [9, 18, 18, 9, 18]
    assert trainer.sharpness is not None
    assert set(trainer.sharpness.perturbation_shares()) == {"norm gains", "norm biases"}


def test_a_loss_that_only_compares_views_is_ascended_as_a_whole(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    found = []
    for name in ("norm-one-view", "norm-only"):
        config = tiny_config(
            parted_cache,
            tiny_student,
            tmp_path / name,
            "objective.name=simcse",
            f"sharpness.name={name}",
            "sharpness.every=2",
            "training.max_steps=3",
        )
        made = parts(config)
        made.trainer().train()
        found.append(weights(made))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_unknown_terms_stop_the_first_step(parted_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(parted_cache, tiny_student, tmp_path, "sharpness.name=asam", "sharpness.ascent_terms=[otis]")
    made = parts(replace(config, sharpness=SharpnessConfig("none")))
    made.config = config  # not checked
    with pytest.raises(ConfigError, match="no term 'otis' in this step; known here: lasd, simcse, tamd"):
        made.trainer().train()


@pytest.mark.parametrize("name", ["disam", "looksam", "terms", "norm-only"])
def test_weights_are_restored_if_the_second_pass_raises(
    parted_cache: Path, tiny_student: Path, tmp_path: Path, name: str
) -> None:
    made = parts(tiny_config(parted_cache, tiny_student, tmp_path, *VARIANTS[name]))
    before = {key: tensor.clone() for key, tensor in weights(made).items()}

    class Failing(DistillTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.in_second_pass:
                assert any(not torch.equal(tensor, before[key]) for key, tensor in weights(made).items())
                raise KeyError
            return super().compute_loss(*args, **kwargs)

    trainer = made.trainer(Failing)
    with pytest.raises(KeyError):
        trainer.train()
    assert not trainer.in_second_pass
    assert trainer.logs_loss
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(made).items())


# norm-only and student differ from asam and sam in what one process does with its own gradient.
SHARED = ("every", "disam", "terms", "looksam", "msam")


def train_as(rank: int, port: int, configs: dict[str, RunConfig], left: Path) -> None:
    """Train all methods in one process of two, and store the weights of each in `left`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, config in configs.items():
        trainer = parts(config).trainer()
        trainer.train()
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        assert trainer.sharpness is not None
        save_model(trainer.model, str(left / f"{name}-{rank}.safetensors"))
        ascent = trainer.last_ascent
        assert ascent is not None
        kept = trainer.sharpness.state_dict() | {"gradient_norm": ascent[0].gradient_norm}
        save_file(kept, str(left / f"{name}-{rank}-kept.safetensors"))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_equal_weights_with_every_method(
    parted_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    configs = {
        name: tiny_config(
            parted_cache,
            tiny_student,
            tmp_path / name,
            *VARIANTS[name],
            "training.per_device_train_batch_size=6",
            "training.gradient_accumulation_steps=2",
            "training.max_steps=5",
        )
        for name in SHARED
    }
    for name in SHARED:
        (tmp_path / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train_as, args=(rank, port, configs, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    start = load_file(tiny_student / "model.safetensors")["embeddings.word_embeddings.weight"]
    ends = {}
    for name in SHARED:
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first), name
        ends[name] = first["student.encoder.embeddings.word_embeddings.weight"]
        assert not torch.equal(ends[name], start)
        kept = [load_file(tmp_path / f"{name}-{rank}-kept.safetensors") for rank in range(2)]
        norms = [state.pop("gradient_norm") for state in kept]
        # Of separate losses, except for the momentum, which is common.
        assert torch.equal(*norms) == (name == "msam")
        assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0] | kept[1])
        assert bool(kept[0]) == (name == "looksam")
    assert not any(torch.equal(ends["every"], ends[name]) for name in SHARED if name != "every")
