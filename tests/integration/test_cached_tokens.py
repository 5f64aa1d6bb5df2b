"""Token columns replace the teacher in training: equal losses, complete runs, clear errors for missing columns."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.config import DataConfig, RunConfig, TeacherConfig
from distill.errors import DistillError, NeedsNotMet
from distill.objectives import OBJECTIVES, load_objective
from distill.objectives.base import StudentShape, TeacherShape
from distill.runs.run import run
from distill.training.trainer import Distillation
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import SpaceMismatch
from teacher_cache.teachers import TeacherOptions
from teacher_cache.tokens.request import TokenRequest
from tests.conftest import varied_texts
from tests.distill.tiny_runs import metrics, parts, tiny_config
from tests.teacher_cache import tiny_teachers

TEXTS = varied_texts(40, seed=9)
STEPS = 3
BATCH = 9
BOTH_LAYERS = TokenRequest(attention=(1, 2))
SIZES = StudentShape(16, 2, "mean", 2), TeacherShape(16, True, 16, 2, 2, False)


def by_token() -> list[str]:
    """Names of the objectives that compare tokens with their default options."""
    return [name for name in OBJECTIVES if load_objective(name)(*SIZES).needs.tokens]


METHODS = by_token()
LEAF_LOSSES = ["minilm_weight", "tinybert_weight", "distilbert_weight"]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "bert" has the student's tokenizer; "qwen3" is causal, left-padded, with grouped-query attention."""
    root = tmp_path_factory.mktemp("models")
    return {
        "bert": tiny_teachers.write_bert(root / "tiny-teacher", seed=3),
        "mpnet": tiny_teachers.write_mpnet(root / "tiny-mpnet"),
        "st": tiny_teachers.write_sentence_transformer(root / "tiny"),
        "qwen3": tiny_teachers.write_qwen3(root / "tiny-qwen3"),
    }


class Caches:
    """Caches of the texts, built on first use."""

    def __init__(self, folder: Path, teachers: dict[str, Path]) -> None:
        self.folder = folder
        self.teachers = teachers

    def __call__(self, teacher: str, storage: str | None = None, tokens: TokenRequest | None = BOTH_LAYERS) -> Path:
        layers = "none" if tokens is None else "-".join(map(str, tokens.attention or ()))
        cache = self.folder / f"{teacher}-{storage}-{layers}"
        if not cache.exists():
            texts = self.folder / "few.txt"
            texts.write_text("".join(f"{text}\n" for text in TEXTS))
            options = TeacherOptions(model=str(self.teachers[teacher]), dtype="float32", device="cpu")
            report = build(Corpus.open(texts), options, cache, tokens=tokens, token_storage=storage)
            assert (report.distinct, report.quarantined) == (len(TEXTS), 0)
        return cache


@pytest.fixture(scope="module")
def caches(teachers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return Caches(tmp_path_factory.mktemp("caches"), teachers)


def config(cache: Path, student: Path, folder: Path, method: str, *overrides: str) -> RunConfig:
    return tiny_config(cache, student, folder, f"objective.name={method}", "training.max_steps=2", *overrides)


def with_online_teacher(of: RunConfig, teacher: Path) -> RunConfig:
    """The same run with the teacher in the loop."""
    return replace(of, teacher=TeacherConfig("online", str(teacher), "cpu"))


def batches(of: RunConfig) -> tuple[Distillation, Iterator[dict[str, Any]]]:
    """The model of a run, and its first batches in corpus order."""
    made = parts(of)
    made.student.train()
    starts = range(0, STEPS * BATCH, BATCH)
    records = (made.dataset.__getitems__(list(range(start, start + BATCH))) for start in starts)
    return Distillation(made.student, made.objective), (made.collator(batch) for batch in records)


def terms(model: Distillation, batch: dict[str, Any], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # equal dropout masks
    outputs = model(**batch)
    return {"loss": outputs["loss"], **outputs["terms"]}


# Largest relative difference of a term. float16 changes a number by at most 2^-11 of its value, and a term by less,
# because errors cancel.
BOUNDS = {"float16": 2.0**-11, "float16-raw": 2.0**-11, "int8": 2e-3}


# Each encoding, and each teacher with one of them: decoding does not depend on the teacher.
@pytest.mark.parametrize(
    ("teacher", "storage"), [*(("mpnet", storage) for storage in BOUNDS), ("st", "float16"), ("qwen3", "int8")]
)
@pytest.mark.parametrize("method", METHODS)
def test_losses_from_token_columns_equal_those_with_the_teacher(
    caches: Caches,
    teachers: dict[str, Path],
    tiny_student: Path,
    tmp_path: Path,
    method: str,
    teacher: str,
    storage: str,
) -> None:
    cached = config(caches(teacher, storage), tiny_student, tmp_path, method)
    model, of_cache = batches(cached)
    _, of_teacher = batches(with_online_teacher(cached, teachers[teacher]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (stored, online) in enumerate(zip(of_cache, of_teacher, strict=True)):
        assert torch.equal(stored["input_ids"], online["input_ids"])
        found, expected = terms(model, stored, step), terms(model, online, step)
        torch.testing.assert_close(found, expected, rtol=BOUNDS[storage], atol=1e-6)
        torch.autograd.backward(found["loss"])
        optimizer.step()
        optimizer.zero_grad()


def test_stored_tokens_equal_the_teacher_output_in_the_precision_of_the_encoding(
    caches: Caches, teachers: dict[str, Path], tiny_student: Path, tmp_path: Path
) -> None:
    cached = config(caches("mpnet", "float16-raw"), tiny_student, tmp_path, "emo")
    _, of_cache = batches(cached)
    _, of_teacher = batches(with_online_teacher(cached, teachers["mpnet"]))
    stored, online = next(of_cache), next(of_teacher)
    for name, tensor in online["teacher_tokens"].items():
        read = stored["teacher_tokens"][name]
        if tensor.dtype is torch.bool:
            assert torch.equal(read, tensor)
        else:
            assert torch.equal(read, read.half().float())
            torch.testing.assert_close(read, tensor, rtol=2.0**-11, atol=2e-6)
    for name in ("input_ids", "attention_mask", "text_ids", "special", "alignment"):
        assert torch.equal(stored[name], online[name]), name


@pytest.mark.parametrize("mode", ["cached", "online"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_trains_and_exports_with_every_token_objective(
    caches: Caches, teachers: dict[str, Path], tiny_student: Path, tmp_path: Path, method: str, mode: str
) -> None:
    of = config(caches("st"), tiny_student, tmp_path / "run", method, "data.window=64")
    result = run(with_online_teacher(of, teachers["st"]) if mode == "online" else of)
    assert result.steps == 2
    assert (Path(result.final) / "modules.json").exists()
    logged = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert len(logged) == 2
    assert all(np.isfinite(line["loss"]) for line in logged)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_from_token_columns_equals_one_with_the_teacher(
    caches: Caches, teachers: dict[str, Path], tiny_student: Path, tmp_path: Path, method: str
) -> None:
    cached = config(caches("mpnet"), tiny_student, tmp_path / "cached", method)
    run(cached)
    run(replace(with_online_teacher(cached, teachers["mpnet"]), output_dir=str(tmp_path / "online")))
    first, second = metrics(tmp_path / "cached"), metrics(tmp_path / "online")
    for mine, theirs in zip(first, second, strict=True):
        if "loss" in mine:
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=BOUNDS["float16"])


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_without_token_columns_is_refused_with_the_command_that_adds_them(
    caches: Caches, tiny_student: Path, tmp_path: Path, method: str
) -> None:
    # Sentence vectors do not record the number of layers of the teacher.
    columns = (
        r"vectors,tokens,attention --attention-layers 6,12` for a teacher of 12 layers"
        if method == "emo"
        else "vectors,tokens`$"
    )
    with pytest.raises(DistillError, match=f"tcache build --columns {columns}"):
        run(config(caches("mpnet", tokens=None), tiny_student, tmp_path / "run", method))


@pytest.mark.parametrize("kept", [TokenRequest(), TokenRequest(attention=(1,))], ids=["none", "the first"])
def test_attention_of_other_layers_is_refused_with_the_required_ones(
    caches: Caches, tiny_student: Path, tmp_path: Path, kept: TokenRequest
) -> None:
    found = r"those of \[1\]" if kept.attention else "none"
    with pytest.raises(NeedsNotMet, match=rf"layers \[1, 2\], but .* has {found}; .*--attention-layers 1,2`"):
        run(config(caches("mpnet", tokens=kept), tiny_student, tmp_path / "run", "emo"))


def test_one_stored_attention_layer_is_enough(caches: Caches, tiny_student: Path, tmp_path: Path) -> None:
    of = config(
        caches("mpnet", tokens=TokenRequest(attention=(2,))),
        tiny_student,
        tmp_path,
        "emo",
        "objective.options.attention_layers=1",
    )
    model, of_cache = batches(of)
    wide, of_both = batches(replace(of, cache=str(caches("mpnet"))))
    for step, (one, both) in enumerate(zip(of_cache, of_both, strict=True)):
        torch.testing.assert_close(terms(model, one, step), terms(wide, both, step))


@pytest.mark.parametrize("method", METHODS)
def test_another_online_teacher_is_refused_with_the_field_that_differs(
    caches: Caches, tiny_student: Path, tmp_path: Path, method: str
) -> None:
    other = tiny_teachers.write_mpnet(tmp_path / "other", seed=8)
    of = with_online_teacher(config(caches("mpnet"), tiny_student, tmp_path / "run", method), other)
    with pytest.raises(SpaceMismatch, match=r"does not match the cached space .*weights is '.*', cached '"):
        run(of)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("losses", [[name] for name in LEAF_LOSSES] + [LEAF_LOSSES], ids=lambda names: "+".join(names))
def test_additional_leaf_losses_train_with_an_online_teacher(
    caches: Caches, teachers: dict[str, Path], tiny_student: Path, tmp_path: Path, losses: list[str]
) -> None:
    weights = [f"objective.options.{name}=1.0" for name in losses]
    of = with_online_teacher(config(caches("bert"), tiny_student, tmp_path / "run", "leaf", *weights), teachers["bert"])
    assert run(of).steps == 2
    logged = [line for line in metrics(tmp_path / "run") if "loss" in line]
    for name in losses:
        assert all(line[name.removesuffix("_weight")] > 0 for line in logged)


def test_distilbert_losses_from_token_columns_equal_those_with_the_teacher(
    caches: Caches, teachers: dict[str, Path], tiny_student: Path, tmp_path: Path
) -> None:
    cached = config(caches("bert"), tiny_student, tmp_path, "leaf", "objective.options.distilbert_weight=1.0")
    model, of_cache = batches(cached)
    _, of_teacher = batches(with_online_teacher(cached, teachers["bert"]))
    for step, (stored, online) in enumerate(zip(of_cache, of_teacher, strict=True)):
        torch.testing.assert_close(
            terms(model, stored, step), terms(model, online, step), rtol=BOUNDS["float16"], atol=1e-6
        )


@pytest.mark.parametrize("name", ["minilm_weight", "tinybert_weight"])
def test_layer_losses_require_an_online_teacher(caches: Caches, tiny_student: Path, tmp_path: Path, name: str) -> None:
    of = config(caches("bert"), tiny_student, tmp_path / "run", "leaf", f"objective.options.{name}=1.0")
    with pytest.raises(NeedsNotMet, match=r"which a cache does not hold; use `distill run` with teacher\.mode=online"):
        run(of)


@pytest.mark.parametrize("mode", ["cached", "online"])
def test_token_losses_refuse_a_teacher_with_another_tokenizer(
    caches: Caches, teachers: dict[str, Path], tiny_student: Path, tmp_path: Path, mode: str
) -> None:
    of = config(caches("qwen3"), tiny_student, tmp_path / "run", "leaf", "objective.options.distilbert_weight=1.0")
    with pytest.raises(NeedsNotMet, match="tokens that are not the same; it needs one tokenizer"):
        run(with_online_teacher(of, teachers["qwen3"]) if mode == "online" else of)


def test_an_online_run_has_the_order_of_a_cached_one(
    tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.config.TOKEN_WINDOW", 18)  # several windows with tokens, one without
    (tmp_path / "few.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    build(Corpus.open(tmp_path / "few.txt"), TeacherOptions(model="toy"), tmp_path / "cache", tokens=TokenRequest())
    of = replace(config(tmp_path / "cache", tiny_student, tmp_path, "cdm"), data=DataConfig())
    online = replace(of, teacher=TeacherConfig("online", "toy"))
    mine, theirs = (parts(one).trainer().get_train_dataloader() for one in (of, online))
    assert [batch["text_ids"].tolist() for batch in mine] == [batch["text_ids"].tolist() for batch in theirs]


@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_several_spaces_are_refused(
    teachers: dict[str, Path], tiny_student: Path, tmp_path: Path, method: str
) -> None:
    (tmp_path / "few.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    for name in ("bert", "mpnet"):
        options = TeacherOptions(model=str(teachers[name]), dtype="float32", device="cpu")
        build(Corpus.open(tmp_path / "few.txt"), options, tmp_path / "cache", tokens=BOTH_LAYERS)
    of = config(tmp_path / "cache", tiny_student, tmp_path / "run", method)
    with pytest.raises(NeedsNotMet, match="differ between several spaces; name one space"):
        run(replace(of, space=(teachers["bert"].name, teachers["mpnet"].name)))
