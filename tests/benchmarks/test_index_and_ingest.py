"""`benchmarks/index.py` and `benchmarks/ingest.py` run and print their figures in the last line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import index, ingest


def run(
    module: Any,
    sizes: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[list[dict[str, Any]], str]:
    """Its figures and the last line of its output."""
    target = tmp_path / "figures.json"
    for name, value in (("QUICK_SIZES", sizes), ("ROUNDS", 1)):
        monkeypatch.setattr(module, name, value)
    command = [module.__name__, "--quick", "--json", str(target), "--scratch", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    return json.loads(target.read_text()), capsys.readouterr().out.splitlines()[-1]


def test_the_index_is_measured_beside_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index, "LOOKUP_BATCHES", 2)
    monkeypatch.setattr(index, "OPENINGS", 2)
    figures, last = run(index, (1000, 20_000), tmp_path, monkeypatch, capsys)
    assert [of["rows"] for of in figures] == [1000, 20_000]
    for name in ("index_put_8192", "sqlite3_put_65536", "index_known", "sqlite3_unknown", "seal", "sealed_known"):
        assert all(of[name] > 0 for of in figures), name
    assert 34 < figures[-1]["sealed_bytes"] < 40
    assert last.startswith("index of 20,000 keys: ")


def test_a_wrong_result_stops_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="returned a wrong row"):
        index.look_up(lambda keys: [0, 2], [b"a", b"b"], [0, 1])


def test_ingestion_is_measured_by_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, last = run(ingest, (100, 300), tmp_path, monkeypatch, capsys)
    assert [of["rows"] for of in figures] == [100, 300]
    for of in figures:
        built = of["build"]
        assert built["seconds"] == pytest.approx(sum(built[phase] for phase in ingest.PHASES))
        assert 0 < built["anonymous"] <= built["resident"]
        assert of["bare"]["seconds"] > 0
        assert of["serve"]["seconds"] > 0
        assert of["disk"]["all"] >= sum(of["disk"][part] for part in ("texts", "keys", "index", "vectors", "corpus"))
    assert "times that of 100 rows" in last
