"""`benchmarks/encode.py`: its figures are right, and it runs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import encode
from tests.conftest import varied_texts


def test_ratios_are_taken_within_rounds() -> None:
    def round_of(slower: float, seconds: dict[str, float]) -> dict[str, dict[str, float]]:
        return {name: {"seconds": slower * one, "processor": 2 * slower * one} for name, one in seconds.items()}

    first = dict(zip(encode.BASELINES, (6.0, 3.0, 2.0, 10.0, 4.0, 5.0), strict=True))
    # The machine is ten times slower in the second round: of each contender alone, the medians say little.
    found = encode.summary([round_of(1, first), round_of(10, first), round_of(1, first | {"encode_auto": 3.0})])
    assert found["encode_fp32"]["speedup"] == pytest.approx(2)
    assert found["encode_auto"]["speedup"] == pytest.approx(3)
    assert found["build_fp32"]["processor_speedup"] == pytest.approx(2.5)
    assert found["sentence_transformers"]["speedup"] == found["save"]["speedup"] == 1


def test_a_sample_keeps_the_order_and_texts_are_distinct(tmp_path: Path) -> None:
    with (tmp_path / "corpus.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "source"], ["b", "1"], ["a", "1"], ["b", "2"], ["", "2"], ["c", "2"]])
    texts = encode.distinct(tmp_path / "corpus.csv", "text")
    assert texts == ["b", "a", "c"]
    assert encode.sample(texts, 2) in (["b", "a"], ["b", "c"], ["a", "c"])
    assert encode.sample(texts, 7) == texts


def test_the_smallest_cosine_is_of_the_worst_row() -> None:
    a = np.array([[1, 0], [3, 4]], dtype=np.float32)
    assert encode.smallest_cosine(a, np.array([[2, 0], [4, 3]], dtype=np.float32)) == pytest.approx(24 / 25)


@pytest.mark.slow
def test_the_benchmark_runs_and_contenders_give_equal_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.teacher_cache.tiny_teachers import write_sentence_transformer

    model = write_sentence_transformer(tmp_path / "model")
    with (tmp_path / "corpus.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in varied_texts(90))])
    encode.main(
        ["--model", str(model), "--corpus", str(tmp_path / "corpus.csv"), "--quick", "--json", str(tmp_path / "f")]
    )
    assert capsys.readouterr().out.splitlines()[-1].startswith("encoding 64 texts is ")
    found = json.loads((tmp_path / "f").read_text())
    assert found["contenders"].keys() == encode.BASELINES.keys()
    assert found["cosines"]["encode_fp32"] == pytest.approx(1, abs=1e-6)
    assert found["cosines"]["encode_auto"] == pytest.approx(1, abs=1e-3)
