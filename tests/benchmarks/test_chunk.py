import json
import sys
from pathlib import Path

import pytest

from benchmarks import chunk


def test_the_steps_of_a_chunk_add_up_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["chunk.py", "--rows", "9000", "--dims", "32", "--json", str(target)])
    chunk.main()
    found = json.loads(target.read_text())["microseconds"]
    assert list(found) == ["read", "checksum", "decompress", "everything else"]
    first, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{sum(found.values()):.1f} us per chunk")
    assert [line.partition(":")[0] for line in steps] == list(found)
