"""`benchmarks/plan.py` compares estimates with measured memory."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import plan


@pytest.mark.slow
def test_the_largest_deviation_is_printed_and_within_10_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    monkeypatch.setattr(sys, "argv", ["plan", "--quick", "--json", str(file)])
    plan.main()
    found = json.loads(file.read_text())
    deviations = [row["estimated"] / row["measured"] - 1 for row in found["settings"]]
    assert found["largest"] == pytest.approx(max(deviations, key=abs))
    assert abs(found["largest"]) < 0.1
    assert capsys.readouterr().out.splitlines()[-1].startswith("largest deviation: ")
