"""Every objective trains in transformers' Trainer and in that of sentence-transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from distill.config import StudentConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset
from distill.errors import ConfigError, NeedsNotMet, StudentError
from distill.objectives import OBJECTIVES, load_objective
from distill.objectives.base import Objective, StudentShape
from distill.sharpness import build_sharpness
from distill.sharpness.mixin import SharpnessMixin
from distill.student.student import Student
from distill.training.loss import CachedLoss, student_shape
from distill.training.targets import teacher_shape
from distill.training.trainer import Distillation
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import MissingRows
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from teacher_cache.tokens.request import TokenRequest
from tests.conftest import varied_texts

TEXTS = varied_texts(12, seed=5)
STEPS = 2


@pytest.fixture(scope="module")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the toy teacher with token states and the attention of all layers."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "few.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    request = TokenRequest(attention=(1, 2, 3))
    build(Corpus.open(folder / "few.txt"), TeacherOptions(model="toy"), folder / "cache", tokens=request)
    return folder / "cache"


@pytest.fixture
def cache(token_cache: Path) -> Iterator[TeacherCache]:
    with TeacherCache.open(token_cache) as opened:
        yield opened


def made(name: str, student: StudentShape, cache: TeacherCache, **options: Any) -> Objective:
    set_seed(0)
    kind: Any = load_objective(name)
    objective: Objective = kind(student, teacher_shape(cache.space()), **options)
    if objective.needs.internals or objective.needs.same_tokens:
        pytest.skip("compares a teacher with a student of its own kind")
    return objective


def sentence_model(folder: Path, *more: nn.Module, pooling: Any = "mean") -> SentenceTransformer:
    set_seed(1)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16, pooling), *more], device="cpu")


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **options,
    }


class Gradients(TrainerCallback):
    """Records before each step whether all gradients are finite."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts = parts
        self.finite: list[bool] = []

    def on_pre_optimizer_step(self, *arguments: Any, **options: Any) -> None:
        gradients = [p.grad for part in self.parts for p in part.parameters() if p.grad is not None]
        self.finite.append(bool(gradients) and all(bool(gradient.isfinite().all()) for gradient in gradients))


def trained(trainer: Trainer, *parts: nn.Module) -> None:
    """Train, and check that gradients are finite and changed every part that has parameters."""
    trainer.remove_callback(PrinterCallback)
    gradients = Gradients(*parts)
    trainer.add_callback(gradients)
    before = [[parameter.detach().clone() for parameter in part.parameters()] for part in parts]
    trainer.train()
    assert gradients.finite == [True] * STEPS
    for part, old in zip(parts, before, strict=True):
        new = [parameter.detach() for parameter in part.parameters()]
        assert all(bool(parameter.isfinite().all()) for parameter in new)
        assert not old or any(not torch.equal(one, other) for one, other in zip(old, new, strict=True))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_transformers_trainer_trains_a_student_with(
    name: str, tmp_path: Path, tiny_student: Path, cache: TeacherCache
) -> None:
    student = Student.load(StudentConfig(model=str(tiny_student)))
    objective = made(name, student.shape, cache)
    needs, space = objective.needs, cache.space()
    tokens = space.tokens if needs.tokens else None
    dataset = CachedDataset(cache, space, cache.corpus(), tokens="attention" if needs.tokens else None)
    collator = Collator(
        student.tokenizer,
        student.max_length,
        repeat=needs.views,
        needs=needs,
        restore=None if tokens is None else tokens.restore,
        attention_layers=() if tokens is None else tokens.record.attention or (),
    )
    trainer = Trainer(
        model=Distillation(student, objective),
        args=TrainingArguments(**arguments(tmp_path, remove_unused_columns=False)),
        train_dataset=dataset,
        data_collator=collator,
    )
    trained(trainer, student, objective)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_sentence_transformers_trainer_trains_a_student_with(
    name: str, tmp_path: Path, tiny_student: Path, cache: TeacherCache
) -> None:
    model = sentence_model(tiny_student, Normalize())
    objective = made(name, student_shape(model), cache)
    loss = CachedLoss(model, objective, cache.space(), cache)
    trained(sentence_trainer(model, loss, cache, tmp_path), model, objective)


def sentence_trainer(
    model: SentenceTransformer,
    loss: nn.Module,
    cache: TeacherCache,
    folder: Path,
    kind: Callable[..., Any] = SentenceTransformerTrainer,
    **columns: Any,
) -> Any:
    rows = columns or {"text": TEXTS, "label": cache.lookup(TEXTS).tolist()}
    return kind(
        model=model,
        args=SentenceTransformerTrainingArguments(**arguments(folder)),
        train_dataset=Dataset.from_dict(rows),
        loss=loss,
    )


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_loss_in_sentence_transformers_equals_that_of_a_run(
    name: str, pooling: str, tiny_student: Path, cache: TeacherCache
) -> None:
    model = sentence_model(tiny_student, pooling=pooling).eval()
    objective = made(name, student_shape(model), cache)
    loss = CachedLoss(model, objective, cache.space(), cache)
    how: Any = "last_token" if pooling == "lasttoken" else pooling
    student = Student.load(StudentConfig(model=str(tiny_student), pooling=how)).eval()
    assert student.shape == student_shape(model)
    needs, space = objective.needs, cache.space()
    tokens = space.tokens
    assert tokens is not None
    dataset = CachedDataset(cache, space, cache.corpus(), tokens="attention" if needs.tokens else None)
    collator = Collator(
        student.tokenizer,
        student.max_length,
        repeat=needs.views,
        needs=needs,
        restore=tokens.restore if needs.tokens else None,
        attention_layers=tokens.record.attention or (),
    )
    records = dataset.__getitems__([3, 0, 7, 11])
    with torch.no_grad():
        expected = Distillation(student, objective)(**collator(records))["terms"]
        features = dict(model.preprocess(records.texts))
        before = dict(features)
        terms = loss([features], torch.from_numpy(records.rows))
    assert terms.keys() == expected.keys()
    for term, value in terms.items():
        assert value.item() == pytest.approx(expected[term].item(), rel=1e-4, abs=1e-7), term
    assert features.keys() == before.keys()
    assert "forward" not in vars(model[0].auto_model)


def test_terms_are_logged_by_name(tmp_path: Path, tiny_student: Path, cache: TeacherCache) -> None:
    model = sentence_model(tiny_student)
    loss = CachedLoss(model, made("talas", student_shape(model), cache), cache.space())
    trainer = sentence_trainer(model, loss, cache, tmp_path)
    trained(trainer, model, loss.objective)
    line = trainer.state.log_history[0]
    assert line["tamd"] + line["lasd"] + line["simcse"] == pytest.approx(line["loss"], abs=2e-4)  # terms are rounded


def test_the_second_column_is_the_second_view(tmp_path: Path, tiny_student: Path, cache: TeacherCache) -> None:
    model = sentence_model(tiny_student).eval()
    paired = CachedLoss(model, made("talas", student_shape(model), cache, views="pair"), cache.space())
    rows = torch.from_numpy(cache.lookup(TEXTS[:3]))
    first, second = (dict(model.preprocess(texts)) for texts in (TEXTS[:3], TEXTS[3:6]))
    with torch.no_grad():
        same, other = paired([first, first], rows), paired([first, second], rows)
    assert torch.equal(same["tamd"], other["tamd"])
    assert not torch.equal(same["simcse"], other["simcse"])
    columns = {"anchor": TEXTS, "positive": TEXTS[::-1], "label": cache.lookup(TEXTS).tolist()}
    model.train()
    trained(sentence_trainer(model, paired, cache, tmp_path, **columns), model, paired.objective)
    for wrong in ([first], [first, first, second]):
        with pytest.raises(StudentError, match=f"{len(wrong)} text columns; the objective needs 2"):
            paired(wrong, rows)


def test_it_works_with_sharpness_aware_steps(tmp_path: Path, tiny_student: Path, cache: TeacherCache) -> None:
    class SharpTrainer(SharpnessMixin, SentenceTransformerTrainer):
        pass

    model = sentence_model(tiny_student)
    loss = CachedLoss(model, made("talas", student_shape(model), cache), cache.space())
    trainer = sentence_trainer(model, loss, cache, tmp_path, SharpTrainer)
    trainer.sharpness = build_sharpness("asam", loss.named_parameters())
    trained(trainer, model, loss.objective)
    ascent, _ = trainer.last_ascent
    assert float(ascent.norm) > 0


@pytest.mark.parametrize(("pooling", "more"), [("max", None), (("mean", "cls"), None), ("mean", Dense(16, 8))])
def test_an_unsupported_model_is_refused(tiny_student: Path, pooling: Any, more: nn.Module | None) -> None:
    model = sentence_model(tiny_student, *([] if more is None else [more]), pooling=pooling)
    with pytest.raises(StudentError, match="expected"):
        student_shape(model)


def test_a_space_without_token_columns_is_refused(tiny_student: Path, cache: TeacherCache, toy_cache: Path) -> None:
    model = sentence_model(tiny_student)
    objective = made("emo", student_shape(model), cache)
    with TeacherCache.open(toy_cache) as plain, pytest.raises(NeedsNotMet, match="build --columns vectors,tokens"):
        CachedLoss(model, objective, plain.space(), plain)
    with pytest.raises(NeedsNotMet, match="CachedLoss needs `cache`"):
        CachedLoss(model, objective, cache.space())


def test_a_text_missing_from_the_cache_stops_the_training(tiny_student: Path, cache: TeacherCache) -> None:
    model = sentence_model(tiny_student)
    loss = CachedLoss(model, made("simcse", student_shape(model), cache), cache.space())
    unknown = ["dogs dogs dogs", TEXTS[0]]
    with pytest.raises(MissingRows):
        loss([model.preprocess(unknown)], torch.from_numpy(cache.lookup(unknown)))


def test_tokens_of_other_texts_than_the_rows_are_refused(tiny_student: Path, cache: TeacherCache) -> None:
    model = sentence_model(tiny_student)
    loss = CachedLoss(model, made("dskd", student_shape(model), cache), cache.space(), cache)
    rows = torch.from_numpy(cache.lookup(TEXTS[:3]))
    for features in (model.preprocess(TEXTS[1:4]), model.preprocess(TEXTS[:3], prompt="the ")):
        with pytest.raises(StudentError, match="not those of the texts of the label rows"):
            loss([features], rows)


def test_projections_in_several_processes_are_refused(
    tiny_student: Path, cache: TeacherCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sentence_model(tiny_student)
    rows = torch.from_numpy(cache.lookup(TEXTS[:3]))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    without = CachedLoss(model, made("simcse", student_shape(model), cache), cache.space())
    assert without([model.preprocess(TEXTS[:3])], rows)
    with_projections = CachedLoss(model, made("talas", student_shape(model), cache), cache.space())
    with pytest.raises(ConfigError, match="does not synchronize the parameters of a loss"):
        with_projections([model.preprocess(TEXTS[:3])], rows)
