"""A finished student is the teacher of the next run."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer

from cli.tcache import main as tcache
from distill.runs.run import run
from distill.student.student import Student
from teacher_cache.errors import TeacherError
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions, resolve
from tests.conftest import varied_texts
from tests.distill.tiny_runs import tiny_config


def test_a_run_folder_is_a_teacher_of_the_next_run(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    assistant = tmp_path / "assistant"
    run(tiny_config(toy_cache, tiny_student, assistant))
    texts = varied_texts(60, seed=4)
    (tmp_path / "corpus.txt").write_text("\n".join(texts))
    words = ["build", tmp_path / "corpus.txt", "--teacher", assistant, "--dtype", "fp32", "--cache", tmp_path / "cache"]
    result = CliRunner().invoke(tcache, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["encoded"] == 60
    with TeacherCache.open(tmp_path / "cache") as cache:
        # Named like the run, with the vectors of the exported student.
        assert cache.space().slug.startswith("assistant@")
        cached = cache.space().gather(cache.lookup(texts))
    expected = SentenceTransformer(str(assistant / "final"), device="cpu").encode(texts)
    assert np.allclose(cached, expected, atol=1e-3)
    second = run(tiny_config(tmp_path / "cache", tiny_student, tmp_path / "second", "corpus=null"))
    record = json.loads((tmp_path / "second" / "run.json").read_text())
    assert (second.steps, record["space"]["teacher"]) == (12, "assistant")


def test_a_student_can_start_from_a_finished_run(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run(tiny_config(toy_cache, tiny_student, first, "training.max_steps=1"))
    run(tiny_config(toy_cache, first, tmp_path / "second", "training.max_steps=1"))
    record = json.loads((tmp_path / "second" / "run.json").read_text())
    assert record["student"]["name"] == "first"
    assert Student.load(tiny_config(toy_cache, first, tmp_path / "x").student).shape.dim == 16


def test_an_unfinished_run_is_not_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(TeacherError, match="has not finished"):
        resolve(TeacherOptions(model=str(tmp_path)))
