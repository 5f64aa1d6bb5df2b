"""`benchmarks/step.py`: the paper's loop equals a run, the figures are right, and it runs."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import step, step_contenders
from benchmarks.paper_loop import PaperLoop
from benchmarks.step_contenders import BATCH, Contender, Taken, Task
from distill.config import StudentConfig
from distill.objectives.base import StudentOutput, TeacherShape, TeacherTargets
from distill.objectives.talas import Talas
from distill.sharpness import build_sharpness
from distill.student.student import Student
from distill.training.measurement import StepTime
from distill.training.trainer import Distillation
from tests.conftest import varied_texts
from tests.distill.tiny_runs import parts
from tests.teacher_cache.tiny_teachers import edit_json

WIDTH = 12
STEPS = 4


@pytest.fixture(scope="module")
def still_student(tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny student without dropout."""
    folder = shutil.copytree(tiny_student, tmp_path_factory.mktemp("models") / "still")
    edit_json(folder / "config.json", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with (folder / "corpus.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in varied_texts(5 * BATCH))])
    step_contenders.prepare(folder / "corpus.csv", "text", folder)
    return folder


def batch(student: Student) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = student.tokenizer(varied_texts(8), padding=True, return_tensors="pt")
    vectors = torch.nn.functional.normalize(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)))
    return tokens["input_ids"], tokens["attention_mask"], vectors


def both(student_folder: Path) -> tuple[PaperLoop, Distillation]:
    """With equal weights and heads."""
    student = Student.load(StudentConfig(str(student_folder)))
    model = Distillation(student, Talas(student.shape, TeacherShape(WIDTH, normalized=True)))
    loop = PaperLoop(student_folder, WIDTH, STEPS, ascends=True)
    loop.heads.load_state_dict(model.objective.heads.state_dict())
    return loop, model


def loss_of(model: Distillation, ids: torch.Tensor, mask: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    output = StudentOutput(model.student(ids.repeat(2, 1), mask.repeat(2, 1)), views=2)
    terms = model.objective(output, TeacherTargets(vectors, torch.arange(len(vectors))))
    return torch.stack(list(terms.values())).sum()


def test_the_loss_of_the_papers_loop_equals_the_objective(still_student: Path) -> None:
    loop, model = both(still_student)
    given = batch(model.student)
    assert loop.loss(*given).item() == pytest.approx(loss_of(model, *given).item(), rel=1e-5)


def test_the_papers_loop_encodes_two_views_with_different_dropout_masks(tiny_student: Path) -> None:
    loop, model = both(tiny_student)
    ids, mask, _ = batch(model.student)
    first, second = loop.pooled(ids, mask), loop.pooled(ids, mask)
    assert not torch.allclose(first[-1], second[-1])


def test_the_perturbed_gradient_of_the_papers_loop_equals_asam(still_student: Path) -> None:
    loop, model = both(still_student)
    given = batch(model.student)
    before = [weight.detach().clone() for weight in loop.parameters()]
    torch.autograd.backward(loop.loss(*given))
    plain = [head.weight.grad.clone() for head in loop.heads]
    with loop.perturbed():
        torch.autograd.backward(loop.loss(*given))
    assert all(torch.equal(weight, kept) for weight, kept in zip(loop.parameters(), before, strict=True))

    sharpness = build_sharpness("asam", model)
    assert sharpness is not None
    with sharpness.ascended(loss_of(model, *given)):
        torch.autograd.backward(loss_of(model, *given))
    theirs = dict(model.student.encoder.named_parameters())
    for name, weight in loop.encoder.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-3, atol=1e-5)
    for head, other, unperturbed in zip(loop.heads, model.objective.heads, plain, strict=True):
        torch.testing.assert_close(head.weight.grad, other.weight.grad, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(head.weight.grad, unperturbed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["talas", "talas+asam"])
def test_the_papers_loop_ends_with_the_weights_of_a_run(
    method: str, still_student: Path, prepared: Path, tmp_path: Path
) -> None:
    task = Task(Contender(method, "fp32"), still_student, prepared, 64, steps=STEPS - 1, warm_up=1, seed=3)
    made = parts(replace(task.config(), output_dir=str(tmp_path)))
    before = [weight.detach().clone() for weight in made.student.encoder.parameters()]
    loop = PaperLoop(still_student, step_contenders.WIDTH, STEPS, ascends=method == "talas+asam")
    loop.heads.load_state_dict(made.objective.heads.state_dict())
    made.trainer().train()

    texts, vectors = varied_texts(5 * BATCH), torch.from_numpy(np.load(prepared / "vectors.npy"))
    numbers = task.numbers(len(texts))
    assert len(set(numbers)) == len(numbers) == STEPS * BATCH
    for start in range(0, len(numbers), BATCH):
        chosen = numbers[start : start + BATCH]
        tokens = made.student.tokenizer([texts[number] for number in chosen], padding=True, return_tensors="pt")
        loop.step(tokens["input_ids"], tokens["attention_mask"], vectors[chosen])
    ours = torch.cat([(w - b).flatten() for w, b in zip(made.student.encoder.parameters(), before, strict=True)])
    its = torch.cat([(w - b).flatten() for w, b in zip(loop.encoder.parameters(), before, strict=False)])
    assert (ours - its[: len(ours)]).norm() < 0.02 * ours.norm()


def test_a_figure_is_the_median_of_cycle_means() -> None:
    walls = (1.0, 3.0, 20.0, 40.0, 3.0, 5.0)
    found = Taken(tuple(StepTime(wall, 2 * wall, {}) for wall in walls), peak=0).figures()
    assert found == {"seconds": 4.0, "processor": 8.0}


def rounds() -> list[step.Round]:
    first = {
        "talas fp32": 1.0,
        "talas bf16": 0.6,
        "talas+asam fp32": 1.8,
        "talas+asam bf16": 1.2,
        "talas+cheap fp32": 1.3,
        "mse fp32": 1.25,
        "mse bf16": 1.5,
        "paper+asam fp32": 4.0,
    }

    def at(slower: float, seconds: dict[str, float]) -> step.Round:
        return {name: {"seconds": slower * one, "processor": 2 * one} for name, one in seconds.items()}

    # The machine is ten times slower in the second round: of each contender alone, the medians say little.
    return [at(1, first), at(10, first), at(1, first | {"talas fp32": 1.5})]


def test_ratios_are_taken_within_rounds_and_compared_with_their_bars() -> None:
    found = {(one["mine"], one["theirs"]): one for one in step.step_ratios(rounds())}
    talas = found["talas fp32", "mse fp32"]
    assert (talas["ratio"], talas["least"], talas["most"]) == pytest.approx((0.8, 0.8, 1.2))
    assert talas["processor"] == pytest.approx(0.8)
    assert talas["met"]
    assert found["talas+asam fp32", "paper+asam fp32"]["ratio"] == pytest.approx(0.45)
    assert not found["talas+asam fp32", "paper+asam fp32"]["met"]


def test_contenders_run_in_float32_and_in_their_fastest_precision() -> None:
    compared = [(one["mine"], one["theirs"]) for one in step.step_ratios(rounds())]
    assert compared == [
        ("talas fp32", "mse fp32"),
        ("talas bf16", "mse fp32"),
        ("talas+asam fp32", "paper+asam fp32"),
        ("talas+asam bf16", "paper+asam fp32"),
        # Prices are within one precision, and who had no turn is not asked for.
        ("talas+asam fp32", "talas fp32"),
        ("talas+asam bf16", "talas bf16"),
        ("talas+cheap fp32", "talas fp32"),
    ]


def test_memory_is_a_ratio_of_peaks() -> None:
    peaks = dict.fromkeys(rounds()[0], 100) | {"talas fp32": 90, "talas bf16": 110}
    found = {
        (one["mine"], one["theirs"]): (one["ratio"], one["met"])
        for one in step.memory_ratios(peaks, step.summary(rounds()))
    }
    assert found["talas fp32", "mse fp32"] == (0.9, True)
    assert found["talas bf16", "mse fp32"] == (1.1, False)


@pytest.mark.parametrize("wrong", [["--only", "talas,sgd"], ["--steps", "3"]])
def test_invalid_arguments_are_an_error(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        step.main(["--model", str(tmp_path), "--corpus", str(tmp_path), *wrong])
    assert stopped.value.code == 2


@pytest.mark.slow
def test_it_runs_and_all_contenders_train_on_the_same_batches(
    tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer

    with (tmp_path / "corpus.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["said"], *([text] for text in varied_texts(5 * BATCH))])
    seen: dict[str, list[Any]] = {"mse": [], "paper": []}
    preprocess, learn = SentenceTransformer.preprocess, PaperLoop.step

    def preprocessed(self: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        found = preprocess(self, inputs, *arguments, **options)
        if len(inputs) == BATCH:  # it looks at some texts beforehand, for the model's card
            seen["mse"].append(found["input_ids"])
        return found

    def learned(self: PaperLoop, ids: torch.Tensor, *rest: torch.Tensor) -> None:
        seen["paper"].append(ids)
        learn(self, ids, *rest)

    monkeypatch.setattr(SentenceTransformer, "preprocess", preprocessed)
    monkeypatch.setattr(PaperLoop, "step", learned)
    arguments = ["--model", str(tiny_student), "--corpus", str(tmp_path / "corpus.csv"), "--text-key", "said"]
    step.main([*arguments, "--quick", "--json", str(tmp_path / "f")])
    found = json.loads((tmp_path / "f").read_text())
    assert {name.split()[0] for name in found["contenders"]} == set(step_contenders.METHODS)
    assert all(min(figures.values()) > 0 for figures in found["contenders"].values())
    assert {one["theirs"].split()[0] for one in found["step"]} == {"talas", "mse", "paper", "paper+asam"}
    assert len(found["memory"]) >= 3
    for mine, theirs in zip(seen["mse"][:4], seen["paper"][:4], strict=True):
        assert torch.equal(mine, theirs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("peak memory, TALAS with ASAM to the paper's loop: ")
