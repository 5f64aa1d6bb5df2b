"""`distill plan` against arithmetic, torch's own counts and the paper's figures."""

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from distill.config import RunConfig
from distill.errors import ConfigError, NeedsNotMet, StudentError
from distill.objectives import OBJECTIVES
from distill.objectives.base import TeacherShape
from distill.plan.allocator import CachingAllocator
from distill.plan.devices import GPUS, Device, parse_bytes
from distill.plan.estimate import plan
from distill.plan.kernels import kernels
from distill.plan.lengths import corpus_lengths
from distill.plan.models import student_model, teacher_model
from distill.plan.step import Trace, trace
from distill.plan.tracker import Operation, Tracker
from distill.student.shapes import SHAPES, has_shape, shape_config, shape_names
from distill.training.trainer import Distillation
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers.linear import ONEDNN_LINEAR
from tests.distill.tiny_runs import parts as parts_of
from tests.distill.tiny_runs import tiny_config

MIB = 2**20
TEACHER = TeacherShape(24, normalized=True)


@lru_cache
def traced(
    *overrides: str,
    device: str = "cuda",
    precision: str = "fp32",
    attention: str | None = None,
    texts: int = 4,
    length: int = 16,
    layers: int = 2,
) -> Trace:
    """A traced step of a small student on texts of one length."""
    config = RunConfig.load(None, ["student.model=shape:minilm-l3-h384", "objective.name=talas", *overrides])
    student = student_model(config.student).with_attention(attention)
    student.config.num_hidden_layers = layers
    return trace(config, student, TEACHER, [length] * texts, device=device, precision=precision)


@lru_cache
def published(*overrides: str, attention: str | None = "eager") -> Trace:
    """BERT-base, 32 texts of 64 tokens in two views, half precision, a teacher 2,560 wide."""
    config = RunConfig.load(None, ["student.model=shape:bert-base", "objective.name=talas", *overrides])
    student = student_model(config.student).with_attention(attention)
    return trace(config, student, TeacherShape(2560, True), [64] * 32, device="cuda", precision="fp16")


# -- tracker -------------------------------------------------------------------------------------------------


def test_bytes_are_counted_once_until_the_last_view_is_freed() -> None:
    tracker = Tracker()
    with tracker.fake, tracker:
        first = torch.empty(100)
        view = first.view(10, 10)[2:]
        second = torch.empty(50, dtype=torch.float16)
        assert tracker.live["activations"] == 400 + 100
        del first, second
        assert tracker.live["activations"] == 400
        del view
    assert tracker.live["activations"] == 0
    assert tracker.peak == 500


def test_bytes_belong_to_the_phase_that_allocated_them_unless_labeled() -> None:
    tracker = Tracker()
    with tracker.fake, tracker:
        with tracker.allocating("optimizer"):
            state = torch.empty(10)
        other = torch.empty(5)
        tracker.label([other], "gradients")
        assert (tracker.live["optimizer"], tracker.live["gradients"]) == (40, 20)
        assert tracker.live["activations"] == 0
        del state, other


def test_a_matrix_product_counts_its_flops_and_bytes() -> None:
    tracker = Tracker()
    with tracker.fake, tracker:
        _ = torch.empty(3, 4) @ torch.empty(4, 5)
    (product,) = [operation for operation in tracker.operations if operation.flops]
    assert product.flops == 2 * 3 * 4 * 5
    assert product.bytes == 4 * (3 * 4 + 4 * 5 + 3 * 5)


def test_integers_are_computed_and_fake_values_read_as_one() -> None:
    tracker = Tracker()
    with tracker.fake, tracker:
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        assert mask.sum(1).tolist() == [2, 1]
        assert not bool(mask.all())
        assert bool(torch.isfinite(torch.empty(3).sum()))


def test_a_large_integer_tensor_is_not_computed() -> None:
    tracker = Tracker()
    with tracker.fake, tracker:
        mask = torch.ones(2048, 2048, dtype=torch.bool)
        assert tracker.live["activations"] == 2048 * 2048
        del mask


# -- allocator ------------------------------------------------------------------------------------------------


def test_small_blocks_share_a_segment_and_large_ones_are_rounded() -> None:
    allocator = CachingAllocator()
    allocator.allocate(100)
    allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 2 * MIB + 20 * MIB
    allocator.allocate(17 * MIB + 1)  # does not fit into the 20
    assert allocator.reserved == 2 * MIB + 20 * MIB + 18 * MIB


def test_adjacent_free_blocks_are_merged_and_reused() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in blocks[:2]:
        allocator.release(block, 5 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.release(blocks[3], 5 * MIB)
    allocator.allocate(6 * MIB)  # 5 free at the end: a new segment
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_grow_at_their_end_if_no_free_block_fits() -> None:
    fixed, growing = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (fixed, growing):
        first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
        allocator.release(first, 30 * MIB)
        allocator.release(second, 30 * MIB)
        allocator.allocate(70 * MIB)
    assert fixed.reserved == (30 + 30 + 70) * MIB
    assert growing.reserved == 80 * MIB  # 60 and a page of 20
    growing.allocate(10 * MIB)
    assert growing.reserved == 80 * MIB
    growing.allocate(100)
    assert growing.reserved == (80 + 2) * MIB  # small blocks have their own segment


# -- a whole step ---------------------------------------------------------------------------------------------


def test_weights_heads_and_optimizer_states_have_the_bytes_of_their_sizes() -> None:
    found = traced(device="cpu", precision="fp32")
    config = shape_config("shape:minilm-l3-h384")
    heads = 2 * config.hidden_size * TEACHER.dim * 4
    parameters = 4 * found.parameters
    assert found.breakdown["heads"] == heads
    assert 0 <= found.breakdown["weights"] - parameters < 64 * 400  # rounding, and tables of positions
    states = 2 * (parameters + heads)
    assert 0 <= found.breakdown["optimizer"] - states < 3 * 64 * 400


def test_asam_keeps_one_copy_of_the_weights_and_norm_only_almost_none() -> None:
    full, small, plain = (
        traced(f"sharpness.name={name}", precision="fp16", texts=64, length=64)
        for name in ("asam", "norm-only", "none")
    )
    heads = 2 * 384 * TEACHER.dim
    assert full.breakdown["perturbation"] == pytest.approx(4 * (full.parameters + heads), rel=0.001)
    assert small.breakdown["perturbation"] < 0.001 * full.breakdown["perturbation"]
    assert "perturbation" not in plain.breakdown
    assert full.allocated - plain.allocated == pytest.approx(full.breakdown["perturbation"], rel=0.001)
    assert full.flops == pytest.approx(2 * plain.flops, rel=0.001)
    assert plain.flops < small.flops < full.flops


def test_an_average_of_the_weights_is_one_more_copy_of_them() -> None:
    found = traced("training.ema_decay=0.99")
    heads = found.breakdown["heads"] // 4
    assert found.breakdown["average"] == pytest.approx(4 * (found.parameters + heads), rel=0.001)


def test_with_few_texts_the_ascent_is_the_peak() -> None:
    found = traced("sharpness.name=asam", device="cpu")
    assert found.breakdown["perturbation"] > 2 * 4 * found.parameters


def test_an_ascent_at_every_third_step_costs_a_third() -> None:
    always, sometimes, plain = (
        traced(*overrides) for overrides in (["sharpness.name=sam"], ["sharpness.name=sam", "sharpness.every=3"], [])
    )
    assert [share for share, _ in sometimes.steps] == [1 / 3, 1 - 1 / 3]
    assert sometimes.flops == pytest.approx(always.flops / 3 + plain.flops * 2 / 3, rel=1e-6)
    assert sometimes.peak == pytest.approx(always.peak, rel=0.01)


def linear_flops(states: tuple[int, ...], weight: tuple[int, ...], *others: Any, out_shape: Any = None) -> int:
    return 2 * math.prod(states) * weight[0]


def test_flops_equal_those_that_torch_counts_in_a_real_step(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path)
    parts = parts_of(config)
    batch = parts.collator(parts.dataset.__getitems__(list(range(9))))
    model = Distillation(parts.student, parts.objective).train()
    # oneDNN's linear layers are not in torch's registry.
    known = {} if ONEDNN_LINEAR is None else {ONEDNN_LINEAR: linear_flops}
    with FlopCounterMode(display=False, custom_mapping=known) as counted:
        model(**batch)["loss"].backward()
    lengths = batch["attention_mask"][:9].sum(1).tolist()
    teacher = TeacherShape(batch["vectors"].shape[1], normalized=True)
    found = trace(config, student_model(config.student), teacher, lengths, device="cpu", precision="fp32")
    assert found.flops == counted.get_total_flops()


def test_accumulation_repeats_the_batch_but_not_the_update() -> None:
    once, four = traced(), traced("training.gradient_accumulation_steps=4")
    assert four.flops == pytest.approx(4 * once.flops)
    assert four.peak >= once.peak
    updates = [[one.bytes for one in found.steps[0][1] if one.phase == "optimizer"] for found in (once, four)]
    assert updates[0] == updates[1]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_can_be_traced(objective: str) -> None:
    config = RunConfig.load(
        None, ["student.model=shape:minilm-l3-h384", f"objective.name={objective}", "sharpness.name=none"]
    )
    student, teacher = student_model(config.student), teacher_model("shape:mpnet-base").teacher_shape
    student.config.num_hidden_layers = 2
    found = trace(config, student, teacher, [9, 7, 4], device="cuda", precision="fp16")
    assert found.peak > 16 * found.parameters
    assert found.flops > 0


def test_an_online_teacher_counts_in_memory_and_flops() -> None:
    config = RunConfig.load(None, ["student.model=shape:minilm-l3-h384", "sharpness.name=none"])
    student, teacher = student_model(config.student), teacher_model("multilingual-e5-small")
    arguments: dict[str, Any] = {"device": "cuda", "precision": "fp16"}
    student.config.num_hidden_layers = teacher.config.num_hidden_layers = 2
    cached = trace(config, student, teacher.teacher_shape, [16] * 4, **arguments)
    with_teacher = trace(config, student, teacher.teacher_shape, [16] * 4, online=teacher, **arguments)
    weights = sum(parameter.numel() for parameter in _meta(teacher).parameters())
    assert with_teacher.breakdown["teacher"] == pytest.approx(2 * weights, rel=0.02)
    assert with_teacher.peak > cached.peak
    assert with_teacher.flops > cached.flops


def _meta(model: Any) -> torch.nn.Module:
    with torch.device("meta"):
        built: torch.nn.Module = model.build()
    return built


# -- devices' kernels -----------------------------------------------------------------------------------------


def test_dropout_keeps_a_byte_per_number_on_a_gpu_and_a_float_on_a_cpu() -> None:
    kept = {}
    for device in ("cuda", "cpu"):
        tracker = Tracker()
        with tracker.fake, tracker, kernels(device):
            weights = torch.empty(1000, requires_grad=True)
            before = tracker.live.get("activations", 0)
            dropped = functional.dropout(weights, 0.1)
            kept[device] = tracker.live["activations"] - before - dropped.numel() * 4
    assert kept == {"cuda": 1000, "cpu": 4000}


def test_the_functions_of_torch_are_restored_afterwards() -> None:
    before = functional.scaled_dot_product_attention, functional.dropout, functional.layer_norm
    with pytest.raises(ZeroDivisionError), kernels("cuda"):
        raise ZeroDivisionError
    assert (functional.scaled_dot_product_attention, functional.dropout, functional.layer_norm) == before


def test_fused_attention_memory_is_linear_in_the_length_and_eager_quadratic() -> None:
    def activations(length: int, attention: str | None) -> int:
        return traced(attention=attention, precision="fp16", length=length).breakdown["activations"]

    fused = activations(256, None) / activations(128, None)
    eager = activations(256, "eager") / activations(128, "eager")
    assert fused < 2.1
    assert eager > 2.3


# -- the paper's setting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharpness", "gigabytes"), [("none", 3.98), pytest.param("asam", 4.5, marks=pytest.mark.slow)]
)
def test_the_estimate_is_within_5_percent_of_the_published_memory(sharpness: str, gigabytes: float) -> None:
    assert published(f"sharpness.name={sharpness}").peak / 1e9 == pytest.approx(gigabytes, rel=0.05)


@pytest.mark.slow
def test_low_memory_with_sharpness_halves_the_memory_and_8_bit_states_leave_a_third() -> None:
    exact = published("training.memory=low", "sharpness.name=norm-only", attention=None)
    assert exact.allocated <= 1.9e9
    eight = "training.memory=low", "sharpness.name=norm-one-view", "training.optim=adamw_bnb_8bit"
    small = published(*eight, attention=None)
    assert small.allocated <= 1.35e9
    # When Python frees reference cycles shifts the allocator's pages of 20 MiB.
    assert exact.peak <= 2.1e9 + 4 * 20 * MIB
    assert small.peak <= 1.5e9 + 4 * 20 * MIB


def test_with_low_memory_activations_hardly_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 512)

    def grown(memory: str) -> int:
        small, large = (traced(f"training.memory={memory}", texts=texts, length=64) for texts in (4, 8))
        return large.breakdown["activations"] - small.breakdown["activations"]

    assert grown("low") < grown("default") / 4


def test_8_bit_states_and_frozen_embeddings_have_the_bytes_of_their_sizes() -> None:
    exact = traced(device="cpu").breakdown["optimizer"]
    eight = traced("training.optim=adamw_bnb_8bit", device="cpu").breakdown["optimizer"]
    frozen = traced("training.freeze_embeddings=true", device="cpu").breakdown["optimizer"]
    config = shape_config("shape:minilm-l3-h384")
    width = config.hidden_size
    words = config.vocab_size * width
    tables = words + (config.max_position_embeddings + config.type_vocab_size) * width
    total = traced(device="cpu").parameters + 2 * width * TEACHER.dim
    assert exact - frozen == pytest.approx(2 * 4 * words, rel=0.001)
    assert eight == pytest.approx(2 * 4 * tables + 2 * (1 + 4 / 256) * (total - tables), rel=0.01)


# -- time -----------------------------------------------------------------------------------------------------


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory_traffic() -> None:
    device = Device("test", 1, {"fp32": 100.0}, 10.0, compute_share=0.5, bandwidth_share=1.0, launch=0.0)
    products = Operation(1000, 10, torch.float32, "activations"), Operation(50, 100, torch.float32, "activations")
    assert device.seconds(products) == pytest.approx(1000 / 50 + 100 / 10)
    assert replace(device, launch=100.0).seconds(products) == 200.0


def test_byte_sizes_are_parsed_with_their_units() -> None:
    sizes = {"15GB": 15 * 10**9, "14.5 GiB": int(14.5 * 2**30), "800mb": 8 * 10**8, "123": 123}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "15 apples", "nan", "infGB"):
        with pytest.raises(ConfigError, match="expected a size"):
            parse_bytes(text)


# -- the whole plan -------------------------------------------------------------------------------------------


def tiny(*overrides: str, **arguments: Any) -> Any:
    config = RunConfig.load(None, ["student.model=shape:minilm-l3-h384", "sharpness.name=none", *overrides])
    return plan(config, **{"length": 16, "teacher_dim": 24, **arguments})


def test_a_plan_covers_every_device_and_whether_it_fits() -> None:
    found = tiny("training.precision=bf16", device_memory=10**10, records=3200)
    assert set(found.devices) == {*(gpu.name for gpu in GPUS), "this CPU"}
    assert found.peak_bytes == sum(found.breakdown.values()) > found.allocated_bytes
    assert found.fits
    assert found.suggestions == ()
    assert found.steps == 5 * 100
    assert found.devices["T4"].step_ms is None  # has no bf16
    assert found.devices["L4"].step_ms > 0


@pytest.mark.slow
def test_a_plan_that_does_not_fit_has_suggestions_that_lower_the_peak() -> None:
    found = tiny(device_memory=3 * 10**8)
    assert not found.fits
    assert found.suggestions
    assert all(one.peak_bytes < found.peak_bytes for one in found.suggestions)
    assert [one.fits for one in found.suggestions] == sorted((one.fits for one in found.suggestions), reverse=True)
    for one in found.suggestions:
        if one.settings == ("training.optim=adamw_bnb_8bit",):
            same = traced("objective.name=cosine", *one.settings, precision="fp16", texts=32, layers=3)
            assert same.peak == one.peak_bytes


def test_lengths_come_from_the_corpus(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "training.seed=1")
    student = student_model(config.student)
    with TeacherCache.open(toy_cache) as cache:
        manifest = cache.corpus("few")
        texts = cache.texts(manifest.distinct_rows(cache.rows))
        found = corpus_lengths(cache, manifest, student, "", 9, by_length=False, seed=1)
        longest = corpus_lengths(cache, manifest, student, "", 9, by_length=True, seed=1)
    words = sorted(len(text.split()) + 2 for text in texts)
    assert len(found.typical) == len(found.largest) == 9
    assert found.quantiles["1"] == words[-1] == max(found.largest)
    assert np.mean(found.typical) == pytest.approx(np.mean(words), rel=0.1)
    assert sorted(longest.largest) == words[-9:]
    assert sum(found.largest) <= sum(longest.largest)
    traces: list[list[int]] = []

    def trace_of(config: RunConfig, student: Any, teacher: Any, lengths: Any, **options: Any) -> Trace:
        traces.append(sorted(lengths))
        return traced()

    monkeypatch.setattr("distill.plan.estimate.trace", trace_of)
    planned = plan(config)
    # The largest and the typical batch, for a GPU and for this processor.
    assert traces == [sorted(found.largest), sorted(found.typical)] * 2
    assert planned.steps == 12
    assert planned.lengths["texts"] == 60


def test_sampled_lengths_are_named_as_an_assumption(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "sharpness.name=none")
    monkeypatch.setattr("distill.plan.lengths.SAMPLED_TEXTS", 20)
    monkeypatch.setattr("distill.plan.estimate.trace", lambda *step, **options: traced())
    found = plan(config, suggest=False)
    assert any("20 sampled texts; the others may be longer" in line for line in found.assumptions)


@pytest.mark.slow
def test_a_change_that_a_run_would_refuse_is_not_suggested() -> None:
    found = tiny("sharpness.name=msam", device_memory=10**8)
    assert found.suggestions
    assert not any("8bit" in setting for one in found.suggestions for setting in one.settings)


@pytest.mark.parametrize(
    ("overrides", "arguments", "message"),
    [
        ([], {"teacher_dim": None}, "`teacher_dim`"),
        ([], {"length": None}, "`length`"),
        ([], {"length": 513}, "positions for 512"),
        ([], {"length": 1}, "at least 2"),
        ([], {"attention": "flash"}, "fused or eager"),
        (["student.model="], {}, "no student given"),
        (["student.model=shape:bert-bose"], {}, "did you mean shape:bert-base"),
        (["objective.name=dskd"], {}, "give `teacher`"),
        (["training.per_device_train_batch_size=1"], {}, "at least 2"),
    ],
)
def test_settings_without_an_estimate_are_an_error(
    overrides: list[str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, NeedsNotMet, StudentError), match=message):
        tiny(*overrides, **arguments)


# -- shapes ---------------------------------------------------------------------------------------------------


def test_a_shape_is_found_by_its_name_model_name_and_hub_id() -> None:
    assert has_shape("shape:qwen3-embedding-4b")
    assert has_shape("Qwen3-Embedding-4B")
    assert has_shape("Qwen/Qwen3-Embedding-4B")
    assert not has_shape("qwen4")


@pytest.mark.parametrize(
    ("name", "millions"),
    [("bert-base", 109.5), ("minilm-l6-h384", 22.7), ("bge-m3", 567.8), ("qwen3-embedding-0.6b", 595.8)],
)
def test_a_shape_has_as_many_parameters_as_the_published_model(name: str, millions: float) -> None:
    model = _meta(teacher_model(f"shape:{name}"))
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert count == pytest.approx(millions, rel=0.006)  # bert-base is counted with its pooler


def test_every_shape_can_be_configured() -> None:
    assert [shape_config(name).model_type for name in shape_names()] == [
        SHAPES[name].model_type for name in shape_names()
    ]
