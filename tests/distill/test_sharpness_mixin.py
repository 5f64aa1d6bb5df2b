"""`SharpnessMixin` in Trainer and in sentence-transformers' trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments, default_data_collator

from distill.errors import ConfigError
from distill.sharpness import build_sharpness
from distill.sharpness.mixin import SharpnessMixin


class Regression(nn.Module):
    """`mean (x w - y)^2`; divided by the number of items if Trainer gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((x @ self.weight - y) ** 2).mean()}


class SelfScaling(Regression):
    """Like language models: the sum over all items of the step, divided by their number."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        errors = ((x @ self.weight - labels) ** 2).sum()
        return {"loss": errors / (len(x) if num_items_in_batch is None else num_items_in_batch)}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class SharpTrainer(SharpnessMixin, InOrder):
    pass


def data(target: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(16, 3, generator=generator)
    ys = torch.randn(16, generator=generator)
    return [{"x": x, target: y} for x, y in zip(xs, ys, strict=True)]


def arguments(folder: Path, **options: Any) -> Any:
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }


def train(kind: Callable[..., Any], model: nn.Module, rows: list[dict[str, Tensor]], options: dict[str, Any]) -> Any:
    trainer = kind(model=model, args=TrainingArguments(**options), train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("model", "target"), [(Regression, "y"), (SelfScaling, "labels")])
def test_trainer_steps_with_the_gradient_at_the_perturbed_weights(
    tmp_path: Path, model: type[Regression], target: str, accumulate: int
) -> None:
    made = model()
    options = arguments(tmp_path, gradient_accumulation_steps=accumulate)
    trainer = train(SharpTrainer, made, data(target), options)
    trainer.sharpness = build_sharpness("sam", made.named_parameters(), rho=0.3)
    batches = [default_data_collator(data(target)[start : start + 4]) for start in range(0, 16, 4)]
    trainer.train()

    weight = torch.tensor([1.0, -2.0, 0.5])
    micro = 0
    for line in trainer.state.log_history[:3]:
        gradients, losses = [], []
        for _ in range(accumulate):
            batch = batches[micro % 4]
            micro += 1
            x, y = batch["x"], batch[target]
            slope = 2 / len(x) * x.T @ (x @ weight - y)
            there = weight + 0.3 * slope / slope.norm()
            gradients.append(2 / len(x) * x.T @ (x @ there - y))
            losses.append(((x @ weight - y) ** 2).mean().item())
        assert line["loss"] == pytest.approx(sum(losses) / accumulate, rel=1e-5)
        weight = weight - 0.1 * torch.stack(gradients).mean(0)
    assert torch.allclose(made.weight.detach(), weight, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_in_between_are_plain_and_all_micro_batches_of_a_step_equal(tmp_path: Path, accumulate: int) -> None:
    made = Regression()
    options = arguments(tmp_path, gradient_accumulation_steps=accumulate, max_steps=5)
    trainer = train(SharpTrainer, made, data("y"), options)
    trainer.sharpness = build_sharpness("sam", made.named_parameters(), rho=0.3, every=3)
    batches = [default_data_collator(data("y")[start : start + 4]) for start in range(0, 16, 4)]
    trainer.train()

    weight = torch.tensor([1.0, -2.0, 0.5])
    for step in range(5):
        gradients = []
        for micro in range(step * accumulate, (step + 1) * accumulate):
            x, y = batches[micro % 4]["x"], batches[micro % 4]["y"]
            slope = 2 / len(x) * x.T @ (x @ weight - y)
            there = weight + (0.3 * slope / slope.norm() if step in (0, 3) else 0)
            gradients.append(2 / len(x) * x.T @ (x @ there - y))
        weight = weight - 0.1 * torch.stack(gradients).mean(0)
    assert torch.allclose(made.weight.detach(), weight, atol=1e-6)
    assert trainer.ascent_step == 3


@pytest.mark.parametrize("name", ["sam", "looksam", "msam"])
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    options = arguments(tmp_path, optim="adamw_torch", max_steps=9, save_strategy="steps", save_steps=4)

    def made() -> Any:
        model = Regression()
        trainer = train(SharpTrainer, model, data("y"), options)
        trainer.sharpness = build_sharpness(name, model, rho=0.2, every=None if name == "msam" else 3)
        return trainer

    whole, resumed = made(), made()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert not torch.equal(whole.model.weight, Regression().weight)


def test_looksam_corrects_the_steps_of_trainer(tmp_path: Path) -> None:
    made = Regression()
    trainer = train(SharpTrainer, made, data("y"), arguments(tmp_path, max_steps=5))
    trainer.sharpness = build_sharpness("looksam", made.named_parameters(), rho=0.3, every=3, alpha=0.5)
    batches = [default_data_collator(data("y")[start : start + 4]) for start in range(0, 16, 4)]
    trainer.train()

    weight, kept = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    for step in range(5):
        x, y = batches[step % 4]["x"], batches[step % 4]["y"]
        slope = 2 / len(x) * x.T @ (x @ weight - y)
        if step in (0, 3):
            unit = slope / slope.norm()
            taken = 2 / len(x) * x.T @ (x @ (weight + 0.3 * unit) - y)
            kept = taken - (taken @ unit) * unit
        else:
            taken = slope + 0.5 * slope.norm() / kept.norm() * kept
        weight = weight - 0.1 * taken
    assert torch.allclose(made.weight.detach(), weight, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("disam", {}), ("asam", {"ascent_terms": ("tamd",)})])
def test_methods_that_need_terms_are_refused_by_a_trainer_without_terms(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    made = Regression()
    trainer = train(SharpTrainer, made, data("y"), arguments(tmp_path))
    trainer.sharpness = build_sharpness(name, made.named_parameters(), **options)
    with pytest.raises(ConfigError, match="override `ascent_loss` of SharpTrainer"):
        trainer.train()


def test_without_sharpness_the_mixin_changes_nothing(tmp_path: Path) -> None:
    plain, mixed = Regression(), Regression()
    for kind, model in ((InOrder, plain), (SharpTrainer, mixed)):
        train(kind, model, data("y"), arguments(tmp_path)).train()
    assert torch.equal(plain.weight, mixed.weight)


def test_a_sentence_transformer_trainer_trains_with_it(tmp_path: Path, tiny_student: Path) -> None:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    class SharpSentenceTrainer(SharpnessMixin, SentenceTransformerTrainer):
        def training_step(self, model: nn.Module, *rest: Any) -> Tensor:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            loss: Tensor = super().training_step(model, *rest)
            restored.append(all(map(torch.equal, before, (p.detach() for p in model.parameters()))))
            return loss

    restored: list[bool] = []
    modules = [Transformer(str(tiny_student)), Pooling(16, "mean")]
    model = SentenceTransformer(modules=modules, device="cpu")
    options = arguments(tmp_path, optim="adamw_torch", learning_rate=1e-3)
    rows = {"anchor": ["the cat", "dogs ran", "old sea", "a river"] * 2, "positive": ["cat sat"] * 8}
    trainer = SharpSentenceTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**options),
        train_dataset=Dataset.from_dict(rows),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.sharpness = build_sharpness("asam", model.named_parameters())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    assert restored == [True] * 3
    assert any(not torch.equal(a, b.detach()) for a, b in zip(start, model.parameters(), strict=True))
    ascent, rise = trainer.last_ascent
    assert ascent.finite
    assert float(ascent.norm) > 0
    assert bool(rise.isfinite())
