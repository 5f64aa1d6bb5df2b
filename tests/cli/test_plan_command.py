"""`distill plan` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_distill import distill, refused

WORDS = ["plan", "--student", "shape:minilm-l3-h384", "--teacher-dim", "24"]
WORDS += ["--sharpness", "none", "--batch-size", "4", "--length", "16", "--precision", "fp16"]
LARGER = [*WORDS, "--batch-size", "32", "--length", "64", "--json"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(distill(*LARGER).stdout)
    return result


def test_the_json_has_the_documented_names(found: dict[str, Any]) -> None:
    assert found["peak_bytes"] == sum(found["breakdown"].values())
    assert found["flops_per_step"] > 0
    assert {"T4", "L4", "A100", "H100", "H200", "this CPU"} == set(found["devices"])
    assert all({"step_ms", "fits"} <= set(device) for device in found["devices"].values())


def test_low_memory_is_a_flag(found: dict[str, Any]) -> None:
    low = json.loads(distill(*LARGER, "--memory", "low").stdout)
    assert low["allocated_bytes"] < found["allocated_bytes"]


def test_the_lines_say_whether_it_fits_and_what_helps() -> None:
    # Settings with one change left to suggest.
    least = ["--memory", "low", "--freeze-embeddings", "true", "--batch-size", "2"]
    result = distill(*WORDS, *least, "--device-memory", "100MB")
    assert result.exit_code == 0, result.output
    assert "does not fit into 100.0 MB; what helps:" in result.stdout
    assert "--set training.optim=adamw_bnb_8bit" in result.stdout


def test_a_cache_gives_the_width_the_lengths_and_the_steps(toy_cache: Path, tiny_student: Path) -> None:
    words: list[str | Path] = ["plan", "--cache", toy_cache, "--corpus", "sentences", "--student", tiny_student]
    words += ["--epochs", "2", "--sharpness", "none"]
    found = json.loads(distill(*words, "--batch-size", "10", "--json").stdout)
    assert found["steps"] == 2 * 40
    assert found["lengths"]["quantiles"]["1"] == found["lengths"]["largest"]["longest"]
    assert found["devices"]["T4"]["hours"] is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--length", "600"], "positions for 512"),
        (["--objective", "dskd"], "give --teacher (a model folder or shape:NAME)"),
        (["--device-memory", "much"], "expected a size"),
        (["--student", "shape:bert"], "did you mean"),
        (["--corpus", "c"], "give --cache too"),
        (["--device-memory", "0.5"], "expected a size"),
    ],
)
def test_missing_or_wrong_settings_are_one_line(more: list[str], message: str) -> None:
    assert message in refused(distill(*WORDS, *more))
