"""`distill bench`: rows time the trainer's real steps, on texts of the given length."""

from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from distill.bench import measure
from distill.bench.measure import Progress, Row, bench
from distill.bench.settings import DEFAULT_METHODS, BenchSettings, Method
from distill.bench.synthetic import BACKEND, SyntheticTeacher, model_config, write_student, write_teacher
from distill.bench.timed_run import (
    FIRST_PASS,
    FORWARD,
    PARTS,
    TEACHER,
    Measurement,
    TimedTrainer,
    measure_run,
)
from distill.bench.workloads import synthetic_texts, workloads
from distill.config import ObjectiveConfig, RunConfig, SharpnessConfig, StudentConfig
from distill.errors import ConfigError
from distill.training.measurement import (
    CLEAR_PEAK,
    DATA,
    StepTime,
    cycle_means,
    memory_in_use,
    peak_memory,
    reset_peak_memory,
)
from distill.training.trainer import DistillTrainer
from teacher_cache.errors import TeacherError
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve
from teacher_cache.teachers.transformer import TransformerTeacher
from tests.distill.tiny_runs import parts, tiny_config
from tests.teacher_cache.tiny_teachers import write_bert, write_qwen3

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("teachers") / "tiny-qwen3")


def settings(student: Path, **given: Any) -> BenchSettings:
    chosen = {"batch_size": 6, "steps": 2, "warm_up": 1, "rounds": 2, "precision": "fp32", "own_process": False}
    return BenchSettings(student=str(student), **{**chosen, **given})


def rows_of(result: measure.BenchResult, place: int = 0) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in result.tables[place]["rows"]}


# -- methods ---------------------------------------------------------------------------------------------


def test_a_method_has_an_objective_a_preset_a_sharpness_and_a_teacher() -> None:
    method = Method.parse("talas/official+asam-kwon@online")
    assert (method.objective, method.preset, method.sharpness, method.teacher) == (
        "talas",
        "official",
        "asam-kwon",
        "online",
    )
    assert Method.parse("leaf") == Method("leaf", "leaf", None, "none", "cached")
    config = method.configure(RunConfig())
    assert (config.objective.name, config.objective.preset, config.sharpness.name) == ("talas", "official", "asam-kwon")


@pytest.mark.parametrize("name", ["talos", "talas+sharp", "talas/none", "talas@here"])
def test_an_unknown_name_in_a_method_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name.partition("+")[0].partition("/")[0][:5]):
        Method.parse(name)


def test_jasper_is_measured_in_the_stage_that_trains_the_student() -> None:
    assert Method.parse("jasper").configure(RunConfig()).objective.options == {"stage_one_epochs": 0}
    given = RunConfig.load(None, ["objective.name=jasper", "objective.options.stage_one_epochs=2"])
    assert Method.parse("jasper").configure(given).objective.options == {"stage_one_epochs": 2}


def test_every_default_method_can_be_parsed() -> None:
    assert len({Method.parse(name) for name in DEFAULT_METHODS}) == len(DEFAULT_METHODS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "`cache`"),
        ({"random_weights": "bge-m3", "lengths": ("corpus",)}, "`lengths` corpus needs `cache`"),
        ({"cache": "c", "teacher": "t", "random_weights": "bge-m3"}, "keep one"),
        ({"cache": "c", "methods": ("talas", "talas")}, "`methods` names talas twice"),
        ({"cache": "c", "lengths": (16, 16)}, "`lengths` names 16 twice"),
        ({"cache": "c", "precision": "fp17"}, "fp17"),
        ({"cache": "c", "lengths": (2,)}, "from 4 on"),
        ({"cache": "c", "rounds": 0}, "`rounds` is 0"),
        ({"cache": "c", "minutes": 0.0}, "`minutes`"),
        ({"cache": "c", "methods": ()}, "at least one"),
        ({"cache": "c", "sets": ("training.precision=bf16",)}, "sets it from `precision`"),
        ({"cache": "c", "sets": ("training.per-device-train-batch-size=8",)}, "sets it from `batch_size`"),
        ({"cache": "c", "sets": ("teacher.mode=online",)}, "@online"),
    ],
)
def test_invalid_settings_are_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchSettings(**given).check()


# -- texts and models ------------------------------------------------------------------------------------


@given(length=st.integers(6, 60))
def test_synthetic_texts_are_distinct_and_have_exactly_the_given_length(tiny_student: Path, length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_student)
    texts = synthetic_texts(tokenizer, length, 16)
    assert len(set(texts)) == 16
    assert {len(ids) for ids in tokenizer(texts)["input_ids"]} == {length}


def test_too_few_texts_of_a_length_are_an_error_with_their_number(tiny_student: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"only 14 distinct texts of 3 tokens can be made of the student's words, 20 are needed"
    ):
        synthetic_texts(AutoTokenizer.from_pretrained(tiny_student), 3, 20)


def test_a_student_of_a_known_shape_has_its_sizes_and_vocabulary(tmp_path: Path) -> None:
    config = write_student("shape:minilm-l3-h384", tmp_path / "student")
    model = AutoModel.from_pretrained(tmp_path / "student")
    assert (model.config.hidden_size, model.config.num_hidden_layers, config.pooling) == (384, 3, "mean")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token_id == model.config.pad_token_id
    assert tokenizer("w7 w9")["input_ids"] == [2, 4 + 7, 4 + 9, 3]


def test_a_synthetic_teacher_has_the_sizes_of_its_folder_and_needs_no_weights(
    tiny_teacher: Path, tiny_student: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_student)
    config = model_config(str(tiny_teacher))
    config.vocab_size = 3  # smaller than the tokenizer, whose ids would be out of its table
    folder = write_teacher(config, tokenizer, tmp_path / "teacher")
    spec = resolve(TeacherOptions(model=str(folder), backend=BACKEND, dtype="float32"))
    teacher = load_teacher(spec)
    assert isinstance(teacher, SyntheticTeacher)
    vectors = teacher.encode(["the cat sat", "dogs"])
    assert vectors.shape == (2, config.hidden_size)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", [write_bert, write_qwen3])
def test_a_synthetic_teacher_has_the_parameter_dtypes_of_a_real_one(
    tiny_student: Path, tmp_path: Path, kind: Callable[[Path], Path]
) -> None:
    real = kind(tmp_path / "real")
    folder = write_teacher(model_config(str(real)), AutoTokenizer.from_pretrained(real), tmp_path / "synthetic")
    networks: list[Any] = []
    for model, backend in ((real, "transformer"), (folder, BACKEND)):
        options = TeacherOptions(model=str(model), backend=backend, dtype="bfloat16", device="cpu")
        teacher: Any = load_teacher(resolve(options))
        assert isinstance(teacher, TransformerTeacher)
        networks.append(teacher.network)
    real_parameters, parameters = ({name: (p.shape, p.dtype) for name, p in one.named_parameters()} for one in networks)
    assert parameters == real_parameters
    assert {dtype for _, dtype in parameters.values()} == {torch.bfloat16, torch.float32}
    assert [type(module) for module in networks[0].modules()] == [type(module) for module in networks[1].modules()]


def test_workloads_have_texts_of_each_length_and_the_token_data_of_the_methods(
    tiny_student: Path, tiny_teacher: Path
) -> None:
    chosen = settings(tiny_student, random_weights=str(tiny_teacher), lengths=(8, 12), methods=("talas", "emo"))
    with workloads(chosen) as created:
        for workload, length in zip(created, (8, 12), strict=True):
            with TeacherCache.open(workload.cache) as cache:
                space, rows = cache.space(), np.arange(cache.rows)
                assert space.present(rows).all()
                assert space.tokens is not None
                stored = space.tokens.gather_stored(rows[:3], attention=True)
                tokens = [space.tokens.restore(one) for one in stored]
                assert {one.states.shape for one in tokens} == {(length, space.tokens.record.shape.width)}
                assert all(
                    np.allclose(one.attention.sum(-1), 1, atol=0.02) for one in tokens if one.attention is not None
                )
        kept = Path(created[0].cache)
        assert kept.exists()
    assert not kept.exists()


def test_methods_that_compare_vectors_only_need_no_token_columns(tiny_student: Path, tiny_teacher: Path) -> None:
    chosen = settings(tiny_student, random_weights=str(tiny_teacher), lengths=(8,), methods=("talas", "leaf"))
    with workloads(chosen) as created, TeacherCache.open(created[0].cache) as cache:
        assert cache.space().tokens is None


# -- steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", ["none", "asam", "msam"])
def test_a_timed_step_is_the_step_of_a_run(toy_cache: Path, tiny_student: Path, tmp_path: Path, sharpness: str) -> None:
    states = []
    for kind in (DistillTrainer, TimedTrainer):
        config = tiny_config(
            toy_cache, tiny_student, tmp_path / kind.__name__, f"sharpness.name={sharpness}", "training.max_steps=3"
        )
        trainer = parts(config).trainer(kind)
        trainer.train()
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("method", "first_pass", "teacher"),
    [("talas", False, False), ("talas+asam", True, False), ("talas+msam", False, False), ("talas@online", False, True)],
)
def test_a_step_has_the_parts_of_its_method(
    toy_cache: Path, tiny_student: Path, method: str, first_pass: bool, teacher: bool
) -> None:
    chosen = settings(tiny_student, cache=str(toy_cache), corpus="sentences", teacher="toy", methods=(method,))
    with workloads(chosen) as created:
        row = Method.parse(method)
        measured = measure_run(
            created[0].configure(row.configure(chosen.run_config()), row.teacher == "online"), warm_up=1
        )
    assert len(measured.steps) == 2
    for step in measured.steps:
        assert (step.parts[FIRST_PASS] > 0, step.parts[TEACHER] > 0) == (first_pass, teacher)
        assert step.parts[FORWARD] > 0
        assert 0 < sum(step.parts.values()) <= step.seconds
        assert 0 < step.tokens < step.positions


def test_all_methods_train_on_the_same_batches(toy_cache: Path, tiny_student: Path) -> None:
    chosen = settings(tiny_student, cache=str(toy_cache), corpus="sentences", methods=("talas", "leaf+asam"))
    with workloads(chosen) as created:
        measured = [
            measure_run(created[0].configure(method.configure(chosen.run_config()), False), warm_up=0)
            for method in chosen.rows()
        ]
    counted = [[(step.tokens, step.positions) for step in one.steps] for one in measured]
    assert counted[0] == counted[1]
    assert len(set(counted[0])) > 1


@pytest.mark.skipif(not CLEAR_PEAK.exists(), reason="the peak can be forgotten on Linux alone")
def test_the_peak_counts_what_was_let_go_of_and_can_be_forgotten() -> None:
    before = memory_in_use(CPU)
    reset_peak_memory(CPU)
    torch.ones(20_000_000).sum()
    assert peak_memory(CPU) - before > 60_000_000
    reset_peak_memory(CPU)
    assert peak_memory(CPU) - before < 60_000_000


# -- figures ---------------------------------------------------------------------------------------------


def test_every_method_is_measured_with_the_teacher_cached_and_online(tiny_student: Path, tiny_teacher: Path) -> None:
    seen: list[Progress] = []
    names = ("talas", "talas+norm-one-view", "emo", "dskd", "emo@online", "cdm@online")
    chosen = settings(tiny_student, random_weights=str(tiny_teacher), lengths=(8,), methods=names, rounds=1)
    result = bench(chosen, report=seen.append)
    rows = rows_of(result)
    assert all(row["failed"] is None for row in rows.values())
    assert [(one.done, one.total) for one in seen] == [(number, 6) for number in range(6)]
    assert result.tables[0]["tokens"] == 6 * 8
    assert result.baseline == "talas"
    assert rows["talas"]["ratio"]["step"] == rows["talas"]["ratio"]["with_data"] == 1
    assert {row["steps"] for row in rows.values()} == {2}
    # A vector of 16 numbers in float16, and the frame of its codec; tokens are 8 states of 16 numbers more.
    assert 32 <= rows["talas"]["cache_bytes_a_sample"] < rows["emo"]["cache_bytes_a_sample"] - 8 * 32
    # Two maps of 8 x 8 in float16, which dskd does not read.
    assert rows["dskd"]["cache_bytes_a_sample"] < rows["emo"]["cache_bytes_a_sample"] - 64
    assert rows["emo@online"]["cache_bytes_a_sample"] is None
    config = model_config(str(tiny_teacher))
    size = sum(4 * parameter.numel() for parameter in AutoModel.from_config(config).parameters())
    assert size <= rows["emo@online"]["teacher_bytes"] <= size + 4 * 64 * config.hidden_size
    for row in rows.values():
        assert row["peak_bytes"] is None  # measured in a new process only
    student = sum(
        4 * one.numel() for one in AutoModel.from_pretrained(tiny_student, add_pooling_layer=False).parameters()
    )
    assert rows["talas"]["weights_bytes"] == student + 2 * 4 * 16 * 16  # and its two heads
    for row in rows.values():
        assert row["tokens_per_second"] > 0


def test_a_cache_is_measured_on_its_texts_and_on_uniform_lengths(toy_cache: Path, tiny_student: Path) -> None:
    names = ("talas", "simcse@online", "emo")
    chosen = settings(
        tiny_student, cache=str(toy_cache), corpus="sentences", lengths=("corpus", 8), methods=names, rounds=1
    )
    result = bench(chosen)
    corpus, uniform = rows_of(result, 0), rows_of(result, 1)
    assert result.tables[0]["tokens"] < result.tables[0]["positions"]
    assert result.tables[1]["tokens"] == result.tables[1]["positions"] == 6 * 8
    assert "`teacher`" in corpus["simcse@online"]["failed"]
    assert "token" in corpus["emo"]["failed"]  # the toy cache has vectors only
    assert corpus["talas"]["failed"] is uniform["talas"]["failed"] is uniform["emo"]["failed"] is None
    with_teacher = replace(chosen, teacher="toy", methods=("talas", "talas@online"))
    again = [rows_of(bench(with_teacher), place)["talas@online"] for place in (0, 1)]
    assert [row["failed"] for row in again] == [None, None]
    assert all(row["parts_ms"]["teacher"] > 0 for row in again)


def test_a_synthetic_teacher_can_encode_the_texts_of_a_cache(
    toy_cache: Path, tiny_student: Path, tiny_teacher: Path
) -> None:
    chosen = settings(
        tiny_student,
        cache=str(toy_cache),
        corpus="sentences",
        random_weights=str(tiny_teacher),
        methods=("talas", "dskd@online"),
        rounds=1,
    )
    result = bench(chosen)
    assert all(row["failed"] is None for row in rows_of(result).values())
    assert result.tables[0]["tokens"] < result.tables[0]["positions"]


def test_a_method_that_runs_out_of_memory_is_a_failed_row(
    toy_cache: Path, tiny_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(config: RunConfig, warm_up: int) -> Measurement:
        if config.objective.name == "leaf":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if config.objective.name == "rkd":
            raise TeacherError("the teacher does not fit on the device") from torch.OutOfMemoryError("CUDA")
        return measure_run(config, warm_up)

    monkeypatch.setattr(measure, "measure_run", full)
    chosen = settings(tiny_student, cache=str(toy_cache), corpus="few", methods=("talas", "leaf", "rkd"), rounds=1)
    rows = rows_of(bench(chosen))
    assert rows["leaf"]["failed"] == rows["rkd"]["failed"] == "out of memory"
    assert rows["talas"]["failed"] is None
    with pytest.raises(ConfigError, match=r"no method could be measured; the first, leaf: out of memory"):
        bench(replace(chosen, methods=("leaf", "rkd")))


def test_a_method_whose_process_was_killed_is_a_failed_row(
    toy_cache: Path, tiny_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(config: RunConfig, warm_up: int) -> Measurement:
        if config.objective.name == "leaf":
            raise BrokenProcessPool("a process was terminated abruptly")
        return measure_run(config, warm_up)

    monkeypatch.setattr(measure, "_measure_in_new_process", killed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = ("talas", "leaf")
    rows = rows_of(
        bench(settings(tiny_student, cache=str(toy_cache), corpus="few", methods=names, rounds=1, own_process=True))
    )
    assert rows["leaf"]["failed"] == "its process was killed: out of memory?"
    assert rows["talas"]["failed"] is None


def test_a_memory_cap_without_a_gpu_is_an_error(
    toy_cache: Path, tiny_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="`memory_cap`"):
        bench(settings(tiny_student, cache=str(toy_cache), corpus="few", memory_cap=10**9))


def step(seconds: float, wait: float = 0.0) -> StepTime:
    return StepTime(seconds + wait, 2 * seconds, {**dict.fromkeys(PARTS, 0.0), DATA: wait}, 10, 20)


def test_ratios_are_taken_within_a_round() -> None:
    method = Method.parse("leaf")
    base = Row(method, RunConfig(), [Measurement((step(1.0),) * 2, 0, 0), Measurement((step(10.0),) * 2, 0, 0)])
    mine = Row(
        method, RunConfig(), [Measurement((step(2.0, 3.0),) * 2, 0, 0), Measurement((step(21.0, 9.0),) * 2, 0, 0)]
    )
    ratios = measure._ratios(mine, base)
    assert ratios is not None
    assert (ratios["step"], ratios["step_least"], ratios["step_most"]) == pytest.approx((2.05, 2.0, 2.1))
    assert ratios["with_data"] == pytest.approx((5.0 + 3.0) / 2)
    assert ratios["processor"] == pytest.approx(2.05)
    assert "memory" not in ratios


def cycles(expensive: float, cheap: float, count: int = 3) -> Measurement:
    """Steps that begin with a cheap one, as after an odd number of warm-up steps."""
    return Measurement((step(cheap), step(expensive)) * count, 0, 0)


def test_figures_of_alternating_steps_are_means_over_a_cycle() -> None:
    method = Method.parse("talas+norm-one-view")
    steps = (step(1.0, 1.0), step(2.0), step(1.0), step(4.0), step(1.0, 3.0), step(9.0))
    row = Row(method, RunConfig(), [Measurement(steps, 0, 0)], cycle=2)
    base = Row(Method.parse("talas"), RunConfig(), [Measurement((step(1.0),) * 6, 0, 0)], cycle=2)
    summary = measure._summary(row, base)
    # Three cycles: 1.5, 2.5 and 5 seconds a step, and 2, 2.5 and 6.5 with the wait for data.
    assert summary["step_ms_p50"] == pytest.approx(2500)
    assert summary["step_ms_p90"] == pytest.approx(2500 + 0.8 * 2500)
    assert summary["with_data_ms_p50"] == pytest.approx(2500)
    assert summary["with_data_ms_p90"] == pytest.approx(2500 + 0.8 * 4000)
    assert summary["processor_ms_p50"] == pytest.approx(5000)
    assert summary["parts_ms"][DATA] == pytest.approx(500)  # of 0.5, 0 and 1.5
    assert summary["steps"] == 6
    assert summary["tokens_per_second"] == pytest.approx(60 / 22)
    assert summary["ratio"]["step"] == pytest.approx(2.5)


def test_the_ratio_of_alternating_steps_does_not_depend_on_where_a_cycle_begins() -> None:
    method = Method.parse("talas")
    base = Row(method, RunConfig(), [Measurement((step(1.0),) * 6, 0, 0)] * 2, cycle=2)
    for measurements in ([cycles(1.6, 1.0)] * 2, [cycles(1.0, 1.6)] * 2):
        ratios = measure._ratios(Row(method, RunConfig(), measurements, cycle=2), base)
        assert ratios is not None
        assert ratios["step"] == pytest.approx(1.3)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 20))
def test_any_range_of_whole_cycles_has_the_same_means(every: int, cycle_count: int, warm_up: int) -> None:
    taken = [2.0 if number % every == 0 else 1.0 for number in range(warm_up + every * cycle_count)]
    assert cycle_means(taken[warm_up:], every) == pytest.approx([1 + 1 / every] * cycle_count)


def test_a_partial_cycle_is_an_error() -> None:
    with pytest.raises(ValueError, match="reshape"):
        cycle_means([1.0, 2.0, 1.0], 2)


@pytest.mark.parametrize(
    ("methods", "sets", "cycle"),
    [
        (("talas", "talas+asam", "talas+msam", "leaf"), (), 1),
        (("talas", "talas+norm-one-view"), (), 2),
        (("talas+norm-one-view", "leaf+looksam"), (), 10),
        (("talas", "talas+norm-one-view"), ("sharpness.name=norm-one-view", "sharpness.every=3"), 3),
        (("talas+asam", "talas+looksam"), ("sharpness.name=asam", "sharpness.every=4"), 20),
    ],
)
def test_a_cycle_is_the_least_common_multiple_of_the_methods(
    methods: tuple[str, ...], sets: tuple[str, ...], cycle: int
) -> None:
    assert BenchSettings(cache="c", methods=methods, sets=sets).cycle() == cycle


def test_options_of_an_objective_apply_to_its_rows_only() -> None:
    config = RunConfig.load(None, ["objective.name=talas", "objective.preset=official", "objective.options.depth=2"])
    assert Method.parse("talas").configure(config).objective == config.objective
    assert Method.parse("talas/paper").configure(config).objective == replace(config.objective, preset="paper")
    assert Method.parse("leaf").configure(config).objective == ObjectiveConfig("leaf")


def test_options_of_a_sharpness_apply_to_its_rows_only() -> None:
    config = RunConfig.load(None, ["sharpness.name=asam", "sharpness.rho=0.3"])
    assert Method.parse("talas+asam").configure(config).sharpness == config.sharpness
    assert Method.parse("talas+sam").configure(config).sharpness == SharpnessConfig("sam")
    assert Method.parse("talas").configure(config).sharpness == SharpnessConfig("none")


def test_timed_steps_are_rounded_up_to_whole_cycles(toy_cache: Path, tiny_student: Path) -> None:
    names = ("talas", "talas+norm-one-view", "leaf+looksam")
    result = bench(settings(tiny_student, cache=str(toy_cache), corpus="few", methods=names, rounds=1, steps=1))
    rows = rows_of(result)
    assert result.to_json()["cycle"] == 10
    assert {name: row["steps"] for name, row in rows.items()} == dict.fromkeys(names, 10)
    assert rows["talas"]["parts_ms"][FIRST_PASS] == 0 < rows["talas+norm-one-view"]["parts_ms"][FIRST_PASS]


def test_a_step_counts_the_tokens_of_all_its_micro_batches(toy_cache: Path, tiny_student: Path) -> None:
    measured = []
    for batch, accumulated in ((6, 1), (3, 2)):
        sets = (f"training.gradient_accumulation_steps={accumulated}",)
        chosen = settings(
            tiny_student, cache=str(toy_cache), corpus="sentences", methods=("talas",), batch_size=batch, sets=sets
        )
        with workloads(chosen) as created:
            measured.append(
                measure_run(created[0].configure(chosen.rows()[0].configure(chosen.run_config()), False), 0)
            )
    whole, halves = measured
    assert len(whole.steps) == len(halves.steps) == 3
    assert [step.tokens for step in whole.steps] == [step.tokens for step in halves.steps]
    assert all(step.positions > 0 for step in halves.steps)


def test_memory_is_that_of_the_new_process() -> None:
    base = Row(
        Method.parse("talas"),
        RunConfig(),
        [Measurement((step(1.0),), 5, 1)],
        own_process=Measurement((step(1.0),), 100, 40),
    )
    mine = Row(
        Method.parse("leaf"),
        RunConfig(),
        [Measurement((step(1.0),), 7, 1)],
        own_process=Measurement((step(1.0),), 250, 40),
    )
    ratios = measure._ratios(mine, base)
    assert ratios is not None
    assert ratios["memory"] == 2.5


def test_each_round_has_every_row_and_starts_with_another() -> None:
    rows = [Row(Method.parse(name), None) for name in ("talas", "leaf", "rkd")]
    order = [(number, row.method.name) for number, row in measure._schedule(rows, 3, own_process=True)]
    assert order[:3] == [(None, "talas"), (None, "leaf"), (None, "rkd")]
    by_round = [[name for round_, name in order if round_ == number] for number in range(3)]
    assert [names[0] for names in by_round] == ["talas", "leaf", "rkd"]
    assert all(sorted(names) == ["leaf", "rkd", "talas"] for names in by_round)


def test_the_time_limit_does_not_cut_the_first_round(toy_cache: Path, tiny_student: Path) -> None:
    chosen = settings(
        tiny_student, cache=str(toy_cache), corpus="few", methods=("talas", "leaf"), rounds=50, minutes=1e-6
    )
    assert {row["rounds"] for row in rows_of(bench(chosen)).values()} == {1}


@pytest.mark.slow
def test_memory_on_a_cpu_is_measured_in_a_new_process(toy_cache: Path, tiny_student: Path) -> None:
    here = torch.ones(30_000_000)  # not in the new process
    chosen = settings(
        tiny_student, cache=str(toy_cache), corpus="few", methods=("talas", "talas+asam"), rounds=1, own_process=True
    )
    rows = rows_of(bench(chosen))
    for row in rows.values():
        assert 0 < row["loaded_bytes"] <= row["peak_bytes"] < here.nbytes
    assert rows["talas"]["ratio"]["memory"] == 1


@pytest.mark.gpu
def test_memory_and_parts_are_measured_on_a_gpu(toy_cache: Path, tiny_student: Path) -> None:
    chosen = settings(tiny_student, cache=str(toy_cache), corpus="few", methods=("talas", "talas+asam"))
    rows = rows_of(bench(chosen))
    assert rows["talas"]["peak_bytes"] >= rows["talas"]["loaded_bytes"] > 0
    assert rows["talas+asam"]["parts_ms"]["first_pass"] > 0


def test_overrides_apply_to_every_row(tiny_student: Path) -> None:
    chosen = settings(tiny_student, cache="c", memory="low", sets=("training.optim=adamw_torch", "student.prompt=q: "))
    config = chosen.run_config()
    assert (config.training.memory, config.training.optim, config.student.prompt) == ("low", "adamw_torch", "q: ")
    assert config.student == StudentConfig(prompt="q: ")
