"""`benchmarks/token_targets.py`: its figures are right, and it runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import token_models, token_targets

ARRAYS = {"vectors", "tokens", "pieces", "attention"}


def measured(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], list[str]]:
    """Its figures and its output."""
    target = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["token_targets.py", "--quick", "--json", str(target), *arguments])
    token_targets.main()
    return json.loads(target.read_text()), capsys.readouterr().out.splitlines()


def test_both_sides_have_equal_losses_and_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = measured(["--wider", "128x5"], tmp_path, monkeypatch, capsys)
    assert [teacher["teacher"] for teacher in found["teachers"]] == ["teacher", "128x5"]
    narrow, wide = found["teachers"]
    assert wide["parameters"] > narrow["parameters"] > found["student"]["parameters"]
    assert wide["bytes_per_text"]["tokens"] > narrow["bytes_per_text"]["tokens"]
    for teacher in found["teachers"]:
        assert set(teacher["bytes_per_text"]) == ARRAYS
        assert list(teacher["methods"]) == ["emo", "dskd", "cdm", "talas"]
        for name, method in teacher["methods"].items():
            assert method["tokens"] == (name != "talas")
            assert method["ratio"] > 0
            for mode in ("cached", "online"):
                parts = method[mode]["batch_ms"], method[mode]["student_ms"]
                assert 0 < max(parts) < method[mode]["step_ms"] * 1.5
    for name, method in narrow["methods"].items():
        assert method["losses_differ"] < found["tolerance"], name
        assert method["curves_differ"] < found["tolerance"], name
        assert method["terms_differ"]["simcse"] == 0  # it knows no teacher: masks and weights are the same
    assert found["agree"]
    ratios = {name: f"{name} {method['ratio']:.2f}" for name, method in narrow["methods"].items()}
    assert lines[-1] == "cached step / online step: " + ", ".join(ratios[name] for name in ("emo", "dskd", "cdm"))


def test_methods_without_attention_are_measured_on_a_cache_without_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = measured(["--methods", "cdm"], tmp_path, monkeypatch, capsys)
    (teacher,) = found["teachers"]
    assert set(teacher["bytes_per_text"]) == ARRAYS - {"attention"}
    assert lines[-1] == f"cached step / online step: cdm {teacher['methods']['cdm']['ratio']:.2f}"


@pytest.mark.slow
def test_memory_is_measured_in_new_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = measured(["--methods", "cdm", "--memory"], tmp_path, monkeypatch, capsys)
    peaks = found["teachers"][0]["methods"]["cdm"]["peak_bytes"]
    assert all(size > 2**26 for size in peaks.values())
    assert f"; cached peak {peaks['cached'] / 2**20:,.0f} MiB; online peak " in lines[-2]


def test_another_teacher_gives_different_losses() -> None:
    mine = [{"loss": 1.0, "token": 2.0}, {"loss": 4.0, "token": 1.0}]
    theirs = [{"loss": 1.1, "token": 2.0}, {"loss": 5.0, "token": 1.0}]
    assert token_targets.largest_difference(mine, theirs, "loss") == pytest.approx(0.2)
    assert token_targets.largest_difference(mine, theirs, "token") == 0


@pytest.mark.parametrize("size", ["1024", "100x2", "0x2", "64x0", "ax2"])
def test_an_invalid_teacher_size_is_an_error(size: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - argparse says the rest
        token_models.checked_size(size)


def test_different_losses_end_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(token_targets.TOLERANCES, "int8", 0.0)
    with pytest.raises(SystemExit) as stopped:
        measured(["--methods", "dskd", "--storage", "int8"], tmp_path, monkeypatch, capsys)
    assert stopped.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "losses differ by more than 0.0e+00: dskd"
    assert not json.loads((tmp_path / "figures.json").read_text())["agree"]


def test_model_folders_are_required_without_quick(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["token_targets.py", "--steps", "2"])
    with pytest.raises(SystemExit):
        token_targets.main()
    assert "--teacher, --student and --corpus are needed" in capsys.readouterr().err
