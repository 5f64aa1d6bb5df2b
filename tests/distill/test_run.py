import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill.config import RunConfig, SharpnessConfig
from distill.errors import ConfigError, NeedsNotMet, RunFolderError, StudentError
from distill.objectives import OBJECTIVES
from distill.objectives.base import Needs, StudentShape, TeacherShape
from distill.objectives.talas import Talas
from distill.runs import run as run_module
from distill.runs.run import check_run, run
from distill.student.student import Student, student_shape
from distill.training.callbacks import TrainingProgress
from distill.training.checkpoints import last_checkpoint
from distill.training.method import build_objective, held_out_rows, learned_projection
from distill.training.targets import Targets
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusNotFound, DiskFull, KnownError, SpaceNotFound
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers.base import TeacherOptions
from tests.conftest import varied_texts
from tests.distill.tiny_runs import Stopped, metrics, stop_at, tiny_config


@pytest.fixture(scope="module")
def finished(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on "sentences", 6 steps; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run(six_steps(toy_cache, tiny_student, folder))
    return folder


def six_steps(cache: Path, student: Path, folder: Path, *overrides: str) -> RunConfig:
    """Six steps of 50 records on "sentences", a checkpoint every 2; an epoch has 8."""
    return tiny_config(
        cache,
        student,
        folder,
        "corpus=sentences",
        "training.per_device_train_batch_size=50",
        "training.max_steps=6",
        "training.save_steps=2",
        *overrides,
    )


def checkpoint(folder: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def forbid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("training was started")

    monkeypatch.setattr(run_module.DistillTrainer, "train", train)


def test_a_run_folder_has_settings_record_metrics_and_student(
    finished: Path, toy_cache: Path, tiny_student: Path
) -> None:
    config = RunConfig.load(finished / "config.yaml")
    assert config == six_steps(toy_cache, tiny_student, finished)
    record = json.loads((finished / "run.json").read_text())
    assert record["status"] == "finished"
    with TeacherCache.open(toy_cache) as cache:
        assert record["space"]["fingerprint"] == cache.space().space.fingerprint
        assert record["corpus"]["fingerprint"] == cache.corpus("sentences").record.fingerprint
    assert re.fullmatch("[0-9a-f]{32}", record["corpus"]["held_out_digest"])
    assert record["corpus"] | {"fingerprint": "", "held_out_digest": ""} == {
        "name": "sentences",
        "fingerprint": "",
        "records": 400,
        "distinct": 360,
        "held_out": 45,  # an eighth of 360
        "held_out_digest": "",
    }
    assert record["student"]["name"] == "tiny-bert"
    assert (record["student"]["dim"], record["student"]["layers"]) == (16, 2)
    assert (record["precision"], record["processes"]) == ("fp32", 1)
    assert (record["steps"], record["resumed_from"]) == (6, 0)
    assert record["export"] == {"format": "sentence_transformer", "projection": False, "normalize": True}
    assert record["exported"]["smallest_cosine"] > 0.9999
    assert record["exported"]["texts"] == 50
    assert record["agreement"]["after"]["texts"] == record["agreement"]["before"]["texts"] == 45
    assert {"python", "torch", "transformers", "teacher-cache"} <= record["versions"].keys()
    lines = metrics(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "epoch", "tamd", "lasd", "simcse"} <= lines[0].keys()
    assert record["loss"] == lines[-1]["loss"]
    assert "tiny-bert distilled from toy" in (finished / "final" / "README.md").read_text()
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.yaml", "run.json", "metrics.jsonl", "checkpoint-4", "checkpoint-6", "final"}


def test_the_exported_student_is_the_trained_one(finished: Path) -> None:
    trained = checkpoint(finished)
    exported = final_weights(finished)
    assert {f"student.encoder.{name}" for name in exported} == {n for n in trained if n.startswith("student.")}
    assert all(torch.equal(tensor, trained[f"student.encoder.{name}"]) for name, tensor in exported.items())


def test_a_finished_run_is_not_trained_again(
    finished: Path, toy_cache: Path, tiny_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_training(monkeypatch)
    result = run(six_steps(toy_cache, tiny_student, finished))
    assert result.finished_before
    assert (result.steps, result.loss) == (6, metrics(finished)[-1]["loss"])
    assert result.final == str(finished / "final")
    assert result.agreement is not None


def test_a_finished_run_of_another_corpus_is_an_error(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["corpus"]["fingerprint"] = "1" * 32
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunFolderError, match="was trained with the corpus of fingerprint 1111"):
        run(six_steps(toy_cache, tiny_student, tmp_path / "run"))


def test_a_run_without_checkpoints_and_logs_exports_a_student(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    quiet = ('training.arguments.save_strategy="no"', "training.logging_steps=50", "data.held_out=0")
    result = run(six_steps(toy_cache, tiny_student, tmp_path / "run", *quiet))
    assert (result.steps, result.loss) == (6, None)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_agreement_before_and_after_does_not_depend_on_the_exported_projection(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    projecting = run(six_steps(toy_cache, tiny_student, tmp_path / "a", "export.projection=true")).agreement
    plain = run(six_steps(toy_cache, tiny_student, tmp_path / "b")).agreement
    assert projecting is not None
    assert plain is not None
    assert (projecting["before"], projecting["after"]) == (plain["before"], plain["after"])
    assert plain["projected"] is None
    assert projecting["projected"] != projecting["after"]


def test_progress_is_reported_after_every_step(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    reported: list[TrainingProgress] = []
    run(six_steps(toy_cache, tiny_student, tmp_path / "run", "data.held_out=0"), report=reported.append)
    assert [progress.step for progress in reported] == [1, 2, 3, 4, 5, 6]
    assert {progress.steps for progress in reported} == {6}
    assert reported[-1].loss == pytest.approx(metrics(tmp_path / "run")[-2]["loss"])


def test_a_run_prints_nothing_by_itself(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = six_steps(toy_cache, tiny_student, tmp_path / "run", "training.save_steps=1")
    with pytest.raises(Stopped):
        run(config, report=stop_at(3))
    run(config)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("stop", [1, 5])
def test_a_resumed_run_has_the_same_weights_and_record(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path, stop: int
) -> None:
    config = six_steps(toy_cache, tiny_student, tmp_path / "run")
    with pytest.raises(Stopped):
        run(config, report=stop_at(stop))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"
    result = run(config)
    assert result.resumed_from == stop // 2 * 2
    assert not result.finished_before
    assert same(checkpoint(tmp_path / "run"), checkpoint(finished))
    assert same(final_weights(tmp_path / "run"), final_weights(finished))
    assert metrics(tmp_path / "run") == metrics(finished)
    mine = json.loads((tmp_path / "run" / "run.json").read_text())
    theirs = json.loads((finished / "run.json").read_text())
    differing = {"resumed_from"} if stop > 1 else set()
    # What was measured may come out equal by chance.
    assert {key for key in mine if mine[key] != theirs[key]} - {"seconds", "cost"} == differing


def test_a_run_killed_after_its_last_checkpoint_is_only_exported(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"status": "running"}))
    shutil.rmtree(folder / "final")
    (folder / "final.writing").mkdir()
    forbid_training(monkeypatch)
    result = run(six_steps(toy_cache, tiny_student, folder))
    assert (result.steps, result.resumed_from, result.loss) == (6, 6, record["loss"])
    assert same(final_weights(folder), final_weights(finished))
    assert not (folder / "final.writing").exists()


def test_a_deleted_final_folder_is_exported_again(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    forbid_training(monkeypatch)
    assert not run(six_steps(toy_cache, tiny_student, tmp_path / "run")).finished_before
    assert same(final_weights(tmp_path / "run"), final_weights(finished))


@pytest.mark.parametrize("left", [["config.yaml"], ["config.yaml", "run.json"], ["config.yaml.123.writing"]])
def test_a_run_killed_before_its_first_step_starts_from_the_beginning(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path, left: list[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml.123.writing").write_text("cache: x")
    for name in left[: 2 if left[0] == "config.yaml" else 0]:
        shutil.copy(finished / name, folder / name)
    if "run.json" in left:
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(record | {"status": "running"}))
    assert run(six_steps(toy_cache, tiny_student, folder)).resumed_from == 0
    assert same(checkpoint(folder), checkpoint(finished))


def damage_state_missing(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()


def damage_state_cut(folder: Path) -> None:
    path = folder / "trainer_state.json"
    path.write_text(path.read_text()[:40])


def damage_optimizer_missing(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def damage_weights_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_random_missing(folder: Path) -> None:
    (folder / "rng_state.pth").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        damage_state_missing,
        damage_state_cut,
        damage_optimizer_missing,
        damage_weights_missing,
        damage_random_missing,
    ],
)
def test_an_incomplete_checkpoint_is_removed_and_not_resumed(finished: Path, tmp_path: Path, damage: Any) -> None:
    shutil.copytree(finished, tmp_path / "run")
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-6"
    damage(tmp_path / "run" / "checkpoint-6")
    (tmp_path / "run" / "checkpoint-best").mkdir()  # not of a run
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-4"
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    assert (tmp_path / "run" / "checkpoint-best").is_dir()
    damage(tmp_path / "run" / "checkpoint-4")
    assert last_checkpoint(tmp_path / "run") is None


def test_checkpoints_are_ordered_by_number(finished: Path, tmp_path: Path) -> None:
    for step in (6, 10):
        shutil.copytree(finished / "checkpoint-6", tmp_path / f"checkpoint-{step}")
        path = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"global_step": step}))
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_resume_without_a_checkpoint_is_an_error(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="nothing to resume"):
        run(six_steps(toy_cache, tiny_student, tmp_path / "run"), resume=True)
    assert not (tmp_path / "run").exists()


def test_other_settings_are_an_error_with_keys_and_both_values(
    finished: Path, toy_cache: Path, tiny_student: Path
) -> None:
    config = six_steps(toy_cache, tiny_student, finished, "training.seed=7", "student.pooling=cls")
    with pytest.raises(RunFolderError) as error:
        run(config)
    message = str(error.value)
    assert "training.seed: 42 there, 7 now" in message
    assert "student.pooling: None there, 'cls' now" in message
    assert "choose another `output_dir`" in message


def test_a_run_is_not_resumed_with_another_sharpness(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asam = six_steps(toy_cache, tiny_student, folder, "sharpness.name=asam")
    with pytest.raises(Stopped):
        run(asam, report=stop_at(3))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=r"sharpness\.name: 'asam' there, 'none' now"):
        run(replace(asam, sharpness=SharpnessConfig()))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert run(asam).steps == 6


def changed(finished: Path, folder: Path, **change: Any) -> Path:
    shutil.copytree(finished, folder)
    record = json.loads((folder / "run.json").read_text()) | {"status": "running"}
    for section, value in change.items():
        record[section] = {**record[section], **value} if isinstance(value, dict) else value
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"space": {"fingerprint": "0" * 32}}, "was trained with the space of fingerprint " + "0" * 32),
        ({"corpus": {"fingerprint": "1" * 32}}, "was trained with the corpus of fingerprint " + "1" * 32),
        ({"student": {"weights": "2" * 32}}, "was trained with the student of weights " + "2" * 32),
        ({"student": {"tokenizer": "3" * 32}}, "was trained with the student of tokenizer " + "3" * 32),
        ({"precision": "bf16"}, "was trained in bf16"),
        ({"processes": 2}, "was trained by 2 processes"),
    ],
)
def test_a_checkpoint_is_not_continued_on_other_data_or_in_another_way(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    folder = changed(finished, tmp_path / "run", **change)
    with pytest.raises(RunFolderError, match=expected):
        run(six_steps(toy_cache, tiny_student, folder))
    assert (folder / "checkpoint-6").is_dir()


def test_a_record_that_is_damaged_is_named(finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"run\.json is not JSON"):
        run(six_steps(toy_cache, tiny_student, tmp_path / "run"))


def test_a_folder_that_holds_something_else_is_left_alone(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="not a run folder"):
        run(six_steps(toy_cache, tiny_student, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("override", "kind", "expected"),
    [
        ("cache=", ConfigError, "cache is not set"),
        ("output_dir=", ConfigError, "output_dir is not set"),
        ("objective.name=talass", ConfigError, "did you mean 'talas'"),
        ("objective.preset=offical", ConfigError, "no preset 'offical'; it has: paper, official"),
        ("objective.options.temprature=1", ConfigError, "temprature"),
        ("objective.options.anchored_layers=3", ConfigError, "student of 2 layers"),
        ("objective.options.views=pair", ConfigError, "needs two texts per record"),
        ("sharpness.name=azam", ConfigError, "did you mean 'asam'"),
        ("sharpness.rho=-1", ConfigError, "rho"),
        ("training.arguments.adam_bta=1", ConfigError, "training.arguments.adam_bta"),
        ("space=e5", SpaceNotFound, "'e5'"),
        ("corpus=wiki", CorpusNotFound, "'wiki'"),
        ("student.model=", StudentError, "no student given"),
    ],
)
def test_an_invalid_setting_is_an_error_before_anything_is_written(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, override: str, kind: type[Exception], expected: str
) -> None:
    sharp = ["sharpness.name=asam"] if override.startswith("sharpness.rho") else []
    config = six_steps(toy_cache, tiny_student, tmp_path / "run", *sharp, override)
    with pytest.raises(kind, match=expected) as error:
        run(config)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_export_of_a_projection_that_is_not_learned_is_an_error_before_training(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = six_steps(toy_cache, tiny_student, tmp_path / "run", "objective.name=simcse", "export.projection=true")
    with pytest.raises(ConfigError, match="learned no projection"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_nothing_is_projected_if_vectors_are_in_the_teacher_space_without_it(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = six_steps(toy_cache, tiny_student, tmp_path / "run", "export.projection=true")
    objective = Talas(StudentShape(16, 2, "mean"), TeacherShape(16), head="identity")
    assert learned_projection(config, objective) is None


def test_the_projection_is_exported_with_export_projection(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = six_steps(toy_cache, tiny_student, tmp_path / "run", "export.projection=true", "training.max_steps=2")
    run(config)
    dense = load_file(tmp_path / "run" / "final" / "2_Dense" / "model.safetensors")["linear.weight"]
    assert torch.equal(dense, checkpoint(tmp_path / "run", 2)["objective.heads.1.weight"])


class NeedsTokens(Talas):
    """Needs token states, which a cache of vectors lacks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.needs = Needs(views=2, tokens=True)


def test_an_objective_on_tokens_is_an_error_if_the_cache_has_none(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "needs-tokens", f"{__name__}:NeedsTokens")
    with pytest.raises(NeedsNotMet, match="token states"):
        run(six_steps(toy_cache, tiny_student, tmp_path / "run", "objective.name=needs-tokens"))


def test_single_options_override_the_preset(toy_cache: Path, tiny_student: Path) -> None:
    shape = student_shape(tiny_config(toy_cache, tiny_student, Path("x")).student)
    config = RunConfig.load(
        None, ["objective.name=talas", "objective.preset=official", "objective.options.temperature=0.2"]
    )
    with TeacherCache.open(toy_cache) as cache:
        objective: Any = build_objective(config, shape, Targets(config, cache))
    assert (objective.simcse.mask_duplicates, objective.simcse.temperature) == (False, 0.2)


def test_an_objective_with_pair_views_trains_on_pairs(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(
        toy_cache,
        tiny_student,
        tmp_path / "run",
        "corpus=pairs",
        "objective.options.views=pair",
        "training.max_steps=2",
    )
    assert run(config).steps == 2


def test_held_out_rows_depend_only_on_corpus_and_seed(toy_cache: Path) -> None:
    def rows(corpus: str, *overrides: str) -> np.ndarray:
        config = RunConfig.load(None, list(overrides))
        with TeacherCache.open(toy_cache) as cache:
            return held_out_rows(config, cache.corpus(corpus), cache.rows)

    first = rows("sentences")
    assert len(first) == 45
    assert np.all(np.diff(first) > 0)
    assert np.array_equal(rows("sentences", "training.learning_rate=1", "data.window=100"), first)
    assert not np.array_equal(rows("sentences", "training.seed=1"), first)
    assert len(rows("sentences", "data.held_out=10")) == 10
    assert len(rows("sentences", "data.held_out=0")) == 0
    assert len(rows("few")) == 0  # 60 distinct texts are too few


def test_without_held_out_texts_there_is_no_agreement(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    result = run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "training.max_steps=2"))
    assert result.agreement is None
    assert json.loads((tmp_path / "run" / "run.json").read_text())["agreement"] is None


def test_a_run_moved_with_its_cache_is_the_same_run(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    shutil.copytree(toy_cache, tmp_path / "cache")
    shutil.copytree(finished, tmp_path / "elsewhere")
    assert run(six_steps(tmp_path / "cache", tiny_student, tmp_path / "elsewhere")).finished_before


def test_a_full_disk_ends_the_run_before_a_checkpoint_is_written(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path / "run", "training.save_steps=5")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(DiskFull, match="checkpoint 5 takes"):
            run(config)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert run(config).steps == 12


@pytest.mark.parametrize("method", ["jasper", "distillcse", "talas"])
def test_two_teachers_of_the_same_texts_train_one_student(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, method: str
) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "few.txt").write_text("".join(f"{text}\n" for text in varied_texts(60)))
    for dims in (12, 20):
        build(Corpus.open(tmp_path / "few.txt"), TeacherOptions(model="toy", dims=dims), cache)
    with TeacherCache.open(cache) as opened:
        first, second = sorted(opened.space_records())
    overrides = [f"objective.name={method}", f"space=[{first}, {second}]", "training.max_steps=2"]
    if method == "jasper":
        overrides.append("objective.options.stage_one_epochs=0")
    run(tiny_config(cache, tiny_student, tmp_path / "run", *overrides))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["space"]["dims"] == 32
    assert [part["slug"] for part in record["space"]["spaces"]] == [first, second]
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path / "run"))
    assert f"{first}+{second}" in (tmp_path / "run" / "final" / "README.md").read_text()
    assert run(tiny_config(cache, tiny_student, tmp_path / "run", *overrides)).finished_before
    with pytest.raises(RunFolderError, match="was trained with the space of fingerprint"):
        run(tiny_config(cache, tiny_student, tmp_path / "run", *overrides, f"space=[{second}, {first}]"))


def test_an_online_teacher_with_several_spaces_is_an_error(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "few.txt").write_text("".join(f"{text}\n" for text in varied_texts(60)))
    for dims in (12, 20):
        build(Corpus.open(tmp_path / "few.txt"), TeacherOptions(model="toy", dims=dims), cache)
    with TeacherCache.open(cache) as opened:
        names = ", ".join(sorted(opened.space_records()))
    online = ("teacher.mode=online", "teacher.model=toy")
    with pytest.raises(ConfigError, match="runs one teacher, but several spaces are named"):
        run(tiny_config(cache, tiny_student, tmp_path / "run", f"space=[{names}]", *online))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("teacher.mode=sometimes",), "teacher.mode is 'sometimes'; expected cached or online"),
        (("teacher.mode=online",), "set both for an online teacher"),
        (("teacher.model=toy",), "neither to train from the cache"),
        (
            ("teacher.mode=online", "teacher.model=toy", "training.dataloader_num_workers=2"),
            "dataloader_num_workers must be 0 with an online teacher",
        ),
    ],
)
def test_contradictory_teacher_settings_are_an_error(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(toy_cache, tiny_student, tmp_path / "run", *overrides)


def test_a_run_keeps_its_space_and_corpus_when_the_cache_gets_others(tiny_student: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "few.txt").write_text("".join(f"{text}\n" for text in varied_texts(60)))
    build(Corpus.open(tmp_path / "few.txt"), TeacherOptions(model="toy"), cache)
    config = tiny_config(cache, tiny_student, tmp_path / "run", "corpus=null", "training.max_steps=2")
    run(config)
    build(Corpus.open(tmp_path / "few.txt"), TeacherOptions(model="toy", dims=12), cache, name="second")
    assert run(config).finished_before
    check_run(config)
    with pytest.raises(SpaceNotFound, match="name one with `space`"):
        run(tiny_config(cache, tiny_student, tmp_path / "new", "corpus=few", "training.max_steps=2"))
    with TeacherCache.open(cache) as opened:
        other = next(slug for slug, record in opened.space_records().items() if record.space.dims == 12)
    with pytest.raises(RunFolderError, match="was trained with the space of fingerprint"):
        run(tiny_config(cache, tiny_student, tmp_path / "run", "training.max_steps=2", f"space={other}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective.options.temperatur=1",), "talas has no option 'temperatur'; did you mean temperature?"),
        (("objective.options.zzz=1",), "talas has no option 'zzz'; its options: anchored_layers, "),
        (
            ("sharpness.name=sam", "sharpness.ascent_terms=[tamdd]"),
            "objective talas has no term 'tamdd'; it has tamd, lasd, simcse",
        ),
        (("objective.options.views=pair",), "views=pair needs two texts per record"),
        (("sharpness.name=disam",), "--domain-key"),
        (("sharpness.rho=0.1",), "sharpness rho: method 'none' has no such option"),
        (("sharpness.name=sam", "sharpness.eta=0.1"), "sharpness eta: method 'sam' has no such option"),
        (("objective.options.anchored_layers=7",), "a student of 2 layers"),
        (("training.arguments.nonsense=1",), "not one of transformers' TrainingArguments"),
    ],
)
def test_an_invalid_option_is_an_error_before_the_folder_is_created(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path / "run", *overrides)
    for refuse in (check_run, run):
        with pytest.raises(KnownError) as error:
            refuse(config)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_student_shape_equals_the_shape_of_the_loaded_student(tiny_student: Path) -> None:
    config = RunConfig.load(None, [f"student.model={tiny_student}"]).student
    assert student_shape(config) == Student.load(config).shape
