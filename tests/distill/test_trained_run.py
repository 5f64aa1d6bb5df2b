"""A trained run is opened as it was trained, or an error."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from distill.analyses.trained_run import TrainedRun
from distill.config import StudentConfig
from distill.errors import RunFolderError
from distill.runs.run import run
from distill.student.student import Student
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.teachers.base import TeacherOptions
from tests.distill.tiny_runs import tiny_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    """Twelve steps on "sentences", a checkpoint every 4; 45 texts are held out."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    keep = ("corpus=sentences", "training.save_steps=4", "training.save_total_limit=9")
    run(tiny_config(toy_cache, tiny_student, folder, *keep))
    return folder


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_every_checkpoint_loads_its_weights(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        found = trained.checkpoints()
        assert [path.name for path in found] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
        for path in found:
            model = trained.load(path)
            assert not model.training
            stored = load_file(path / "model.safetensors")
            assert all(torch.equal(weights(model)[name], stored[name]) for name in stored)


def test_the_newest_checkpoint_has_the_vectors_of_the_exported_student(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        texts = trained.cache.texts(trained.held_out_rows()[:5])
        mine = trained.load().student.encode(texts)
        final = Student.load(StudentConfig(model=str(finished / "final"))).encode(texts)
        np.testing.assert_allclose(mine, final, atol=1e-6)


def test_initial_is_the_student_before_training_with_the_runs_random_projections(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    still = [f"training.{key}=0" for key in ("learning_rate", "head_learning_rate", "weight_decay")]
    once = ("corpus=sentences", "training.max_steps=1", *still)
    run(tiny_config(toy_cache, tiny_student, tmp_path / "still", *once))
    stored = load_file(tmp_path / "still" / "checkpoint-1" / "model.safetensors")
    with TrainedRun.open(finished) as trained:
        began = weights(trained.initial())
    assert all(torch.equal(began[name], stored[name]) for name in stored)


def test_held_out_texts_are_never_in_the_batches_of_training_records(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        held_out = set(trained.held_out_rows().tolist())
        assert len(held_out) == trained.record["corpus"]["held_out"] == 45
        batches = list(trained.batches(trained.load(), texts=1000, size=32))
        seen = {row for batch in batches for row in batch["text_ids"].tolist()}
        assert not seen & held_out
        assert len(seen) == 360 - 45
        again = list(trained.batches(trained.load(), texts=1000, size=32))
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))


def test_a_last_batch_of_one_record_is_dropped(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        sizes = [len(batch["text_ids"]) for batch in trained.batches(trained.load(), texts=33, size=32)]
    assert sizes == [32]


def test_the_state_of_the_random_generator_is_preserved(finished: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with TrainedRun.open(finished) as trained:
        trained.initial()
        trained.load()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_whose_student_was_moved_loads_from_its_export(
    finished: Path, tmp_path: Path, tiny_student: Path, toy_cache: Path
) -> None:
    began = tmp_path / "began"
    shutil.copytree(tiny_student, began)
    run(tiny_config(toy_cache, began, tmp_path / "run"))
    shutil.rmtree(began)
    with TrainedRun.open(tmp_path / "run") as trained:
        assert trained.load() is not None


def test_a_run_that_exported_its_projection_loads(tmp_path: Path, tiny_student: Path, toy_cache: Path) -> None:
    run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "export.projection=true", "training.max_steps=2"))
    stored = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    with TrainedRun.open(tmp_path / "run") as trained:
        loaded = weights(trained.load())
        assert trained.initial() is not None
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_a_changed_initial_student_is_an_error(tmp_path: Path, tiny_student: Path, toy_cache: Path) -> None:
    began = tmp_path / "began"
    shutil.copytree(tiny_student, began)
    run(tiny_config(toy_cache, began, tmp_path / "run"))
    shutil.rmtree(began)
    shutil.copytree(tmp_path / "run" / "final", began)
    with (
        TrainedRun.open(tmp_path / "run") as trained,
        pytest.raises(RunFolderError, match="trained from the student"),
    ):
        trained.initial()


def test_a_folder_without_a_run_and_a_run_without_checkpoints_are_an_error(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"run\.json is missing"):
        TrainedRun.open(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    with TrainedRun.open(copy) as trained, pytest.raises(RunFolderError, match="no complete checkpoint"):
        trained.load()


def test_a_changed_tokenizer_is_an_error(tmp_path: Path, tiny_student: Path, toy_cache: Path) -> None:
    began = tmp_path / "began"
    shutil.copytree(tiny_student, began)
    run(tiny_config(toy_cache, began, tmp_path / "run", "export.projection=true", "training.max_steps=1"))
    tokenizer = began / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"lowercase": true', '"lowercase": false') + " ")
    with TrainedRun.open(tmp_path / "run") as trained, pytest.raises(RunFolderError, match="the student of tokenizer"):
        trained.load()


def test_a_missing_checkpoint_of_the_exported_student_is_an_error(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("checkpoint-12"))
    with TrainedRun.open(copy) as trained:
        assert trained.load(copy / "checkpoint-8") is not None
        with pytest.raises(RunFolderError, match=r"step 12, whose checkpoint is missing; it has those of 4, 8"):
            trained.load()


def test_other_held_out_texts_are_an_error(tmp_path: Path, tiny_student: Path, toy_cache: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(toy_cache, cache)
    config = tiny_config(cache, tiny_student, tmp_path / "run", "corpus=sentences", "training.max_steps=2")
    run(config)
    (tmp_path / "run" / "final").rename(tmp_path / "final")  # as if it had been killed before its end
    texts = [json.loads(line)["text"] for line in (toy_cache.parent / "sentences.jsonl").read_text().splitlines()]
    shutil.rmtree(cache)
    # The same corpus in a cache with other row numbers.
    (tmp_path / "before.txt").write_text("".join(f"{text}\n" for text in reversed(texts)))
    build(Corpus.open(tmp_path / "before.txt"), TeacherOptions(model="toy"), cache, name="before")
    build(Corpus.open(toy_cache.parent / "sentences.jsonl"), TeacherOptions(model="toy"), cache, name="sentences")
    with TrainedRun.open(tmp_path / "run") as trained, pytest.raises(RunFolderError, match="held other texts out"):
        trained.held_out_rows()
    with pytest.raises(RunFolderError, match="held other texts out"):
        run(config)


def test_the_folder_of_a_moved_cache_can_be_given(finished: Path, toy_cache: Path, tmp_path: Path) -> None:
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    shutil.copytree(finished, copy)
    shutil.copytree(toy_cache, moved)
    record = json.loads((copy / "run.json").read_text()) | {"cache": str(tmp_path / "gone")}
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunFolderError, match=r"gone, which is missing; if it was moved, name it \(`cache`\)"):
        TrainedRun.open(copy)
    with TrainedRun.open(copy, cache=moved) as trained:
        assert trained.cache.path == moved


def test_the_setting_of_a_run_folder_does_not_enable_remote_code(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    settings = copy / "config.yaml"
    values = yaml.safe_load(settings.read_text())
    values["student"]["trust_remote_code"] = True
    settings.write_text(yaml.safe_dump(values))
    with TrainedRun.open(copy) as trained:
        assert not trained.config.student.trust_remote_code
    with TrainedRun.open(copy, trust_remote_code=True) as trained:
        assert trained.config.student.trust_remote_code
