"""`benchmarks/alignment.py`: its figures are right, and it runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import alignment
from teacher_cache.tokens.request import CLOSING, OTHER, TEXT_TOKEN
from tests.conftest import varied_texts
from tests.teacher_cache.tiny_teachers import write_xlm_roberta


def test_shares_include_special_tokens_and_exclude_prompts() -> None:
    # "river": the student has it whole, the teacher as riv|er behind a prompt's token; both close.
    student = np.array([[1, 0, 5, TEXT_TOKEN], [2, 0, 0, CLOSING]], np.int32)
    teacher = np.array([[9, 0, 0, OTHER], [1, 0, 3, TEXT_TOKEN], [2, 3, 5, TEXT_TOKEN], [3, 0, 0, CLOSING]], np.int32)
    found = alignment.measure("offset", ["river"], [teacher], [student], lower=True)
    assert found["student"] == 1
    assert found["teacher"] == pytest.approx(2 / 3)
    assert found["of_fewer"] == 1
    assert found["equal"] == 0
    found = alignment.measure("dtw_strict", ["river"], [teacher], [student], lower=True)
    assert (found["student"], found["equal"]) == (0.5, 0)  # the closing tokens alone


def test_the_benchmark_runs_and_prints_its_figure_last(
    tmp_path: Path, tiny_student: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = varied_texts(20)
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in [*texts, *texts[:5]]))
    teacher = write_xlm_roberta(tmp_path / "teacher")
    arguments = [str(tmp_path / "texts.txt"), "--teacher", str(teacher), "--student", str(tiny_student), "--quick"]
    alignment.main([*arguments, "--json", str(tmp_path / "found.json")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("mapped one to one, of the side with fewer tokens: 100.0% by offsets, ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["texts"] == 20
    assert found["methods"]["dtw_strict"]["student"] == 1
    assert found["methods"]["mined_types"]["student"] < 1  # repeated words count once
