"""`benchmarks/evaluation.py`: its figures are right, and it runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import evaluation
from distill.evaluation.evaluator import nine_tasks
from tests.distill.tiny_tasks import TASKS, write_tasks


def test_ratios_are_taken_within_rounds_and_differences_are_the_largest_of_all() -> None:
    def answer(seconds: float, score: float) -> dict[str, Any]:
        scores = {"stsb": {"metric": "spearman", "score": score}}
        return {"seconds": seconds, "processor": 2 * seconds, "peak": 1, "dtype": "bfloat16", "tasks": scores}

    # The machine is ten times slower in the second round: of each contender alone, the medians say little.
    rounds = [
        {name: answer(slower * seconds, score) for name, seconds, score in contenders}
        for slower, contenders in (
            (1, (("sentence_transformers", 10, 50.0), ("encode_auto", 4, 0.0), ("distill_eval", 5, 50.01))),
            (10, (("sentence_transformers", 10, 50.0), ("encode_auto", 4, 0.0), ("distill_eval", 6, 49.8))),
            (1, (("sentence_transformers", 10, 50.0), ("encode_auto", 4, 0.0), ("distill_eval", 7, 50.0))),
        )
    ]
    found = evaluation.summary(rounds)
    whole = found["contenders"]["distill_eval"]
    assert whole["seconds_ratio"] == whole["processor_ratio"] == pytest.approx(0.6)
    assert whole["seconds"] == 7
    assert found["tasks"]["stsb"]["difference"] == pytest.approx(-0.2)


def test_a_sample_keeps_whole_rows_in_order(tmp_path: Path) -> None:
    whole = nine_tasks(write_tasks(tmp_path / "data"), TASKS)
    (tmp_path / "some").mkdir()
    data = evaluation.sampled(whole, 42, tmp_path / "some")
    assert len(evaluation.distinct_texts(whole)) == 60
    for task, part in zip(whole, nine_tasks(data, TASKS), strict=True):
        lines, kept = (one.files()[0].read_text().splitlines() for one in (task, part))
        assert len(kept) == 1 + 21  # of 30 rows, 42 / 60
        assert [line for line in lines if line in set(kept)] == kept


def test_vectors_replace_their_encoder() -> None:
    timed = evaluation.Encoding.timed(["a", "bb"], lambda texts: np.array([[len(text)] for text in texts], np.float32))
    assert timed.encode(["bb", "a", "bb"]).tolist() == [[2], [1], [2]]
    assert timed.to_json().keys() == {"seconds", "processor", "peak"}


@pytest.mark.slow
def test_the_benchmark_runs_and_both_sides_agree(
    tmp_path: Path, tiny_student: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tasks(tmp_path / "data")
    arguments = ["--model", str(tiny_student), "--data", str(data), "--tasks", ",".join(TASKS), "--quick"]
    evaluation.main([*arguments, "--json", str(tmp_path / "found.json")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("distill eval of 60 distinct texts: ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["contenders"].keys() == evaluation.CONTENDERS.keys()
    assert found["contenders"]["sentence_transformers"]["seconds_ratio"] == 1
    # The whole command's process holds torch and the model; its time has both imports and probes.
    assert found["contenders"]["distill_eval"]["peak"] > 2**27
    assert found["contenders"]["distill_eval"]["seconds"] > found["contenders"]["encode_fp32"]["seconds"]
    for task in TASKS:
        assert found["tasks"][task]["difference"] == pytest.approx(0, abs=5)  # 30 pairs, in bfloat16 on one side
