"""Measurements in a report: tables, bars and notes."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.analyses import report as report_command
from distill.errors import RunFolderError
from distill.report.bench import as_markdown, bench_plots, bench_tables, columns, notes, part_columns, read_bench

PARTS = {"data": 2.0, "teacher": 0.0, "first_pass": 0.0, "forward": 60.0, "backward": 110.0, "optimizer": 25.0}


def row(method: str, times: float, **given: Any) -> dict[str, Any]:
    found = {
        "method": method,
        "teacher": "online" if method.endswith("@online") else "cached",
        "failed": None,
        "step_ms_p50": 195.0 * times,
        "step_ms_p90": 201.0 * times,
        "with_data_ms_p50": 197.0 * times,
        "with_data_ms_p90": 209.0 * times,
        "processor_ms_p50": None,
        "parts_ms": {part: value * times for part, value in PARTS.items()},
        "steps": 24,
        "rounds": 3,
        "tokens_per_second": 10_500.0 / times,
        "peak_bytes": round(3.98e9 * times),
        "loaded_bytes": 450_000_000,
        "weights_bytes": 446_000_000,
        "cache_bytes_a_sample": 5120.0,
        "teacher_bytes": None,
        "ratio": {"step": times, "with_data": times, "memory": times},
    }
    return {**found, **given}


@pytest.fixture
def record() -> dict[str, Any]:
    online = row("emo@online", 5.5, cache_bytes_a_sample=None, teacher_bytes=8_040_000_000)
    online["parts_ms"]["teacher"] = 400.0
    return {
        "kind": "bench",
        "settings": {
            "student": "models/small",
            "teacher": "",
            "random_weights": "Qwen3-Embedding-4B",
            "memory": "default",
            "sets": [],
            "batch_size": 32,
        },
        "device": "a GPU",
        "precision": "fp16",
        "baseline": "talas",
        "versions": {},
        "tables": [
            {
                "lengths": 64,
                "tokens": 2048.0,
                "positions": 2048.0,
                "rows": [
                    row("talas", 1.0),
                    row("talas+asam", 1.92),
                    online,
                    {"method": "cdm@online", "teacher": "online", "failed": "out of memory at 15.0 GB"},
                ],
            }
        ],
    }


def test_a_table_has_a_row_per_method_and_dashes_for_missing_figures(record: dict[str, Any]) -> None:
    cells = {column.header: column.cells for column in columns(record["tables"][0])}
    assert cells["method"] == ("talas", "talas+asam", "emo@online", "cdm@online")
    assert cells["ms/step"] == ("195", "374", "1,072", "-")
    assert cells["time ratio"] == ("1.00", "1.92", "5.50", "-")
    assert cells["peak memory"] == ("3.98 GB", "7.64 GB", "21.89 GB", "-")
    assert cells["teacher"] == ("-", "-", "8.04 GB", "-")
    assert cells["cache/text"] == ("5.1 kB", "5.1 kB", "-", "-")
    parts = {column.header for column in part_columns(record["tables"][0])}
    assert "teacher ms" in parts
    assert "first pass ms" not in parts  # no method has one


def test_notes_have_the_setup_and_the_errors(record: dict[str, Any]) -> None:
    lines = list(notes(record["tables"][0], record))
    assert lines[-1] == "cdm@online: out of memory at 15.0 GB"
    assert "student small" in lines[0]
    assert "2,048 tokens per batch, 100% of its positions" in lines[0]
    assert lines[1].startswith("medians of 24 steps in 3 rounds")
    assert "cdm@online: out of memory" in as_markdown(record)


def test_bars_are_as_long_as_the_sum_of_their_parts(record: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    (plot,) = bench_plots(record)
    time, memory = plot.panels
    assert {key.label for key in plot.keys} == {"teacher", "forward", "backward", "optimizer", "wait for data"}
    axes = Figure().subplots()
    time.draw(axes)
    ends: dict[float, float] = {}
    for bar in axes.patches:
        middle = bar.get_y() + bar.get_height() / 2
        ends[middle] = max(ends.get(middle, 0), bar.get_x() + bar.get_width())
    assert list(ends.values()) == pytest.approx([197.0, 197.0 * 1.92, 197.0 * 5.5 + 400.0])
    assert [text.get_text() for text in axes.texts] == ["×1", "×1.92", "×5.5"]
    assert "talas+asam 7.64 GB ×1.92" in memory.description


def test_without_memory_there_is_no_panel(record: dict[str, Any]) -> None:
    for one in record["tables"][0]["rows"][:3]:
        one["peak_bytes"] = one["loaded_bytes"] = None
    (plot,) = bench_plots(record)
    assert [panel.title for panel in plot.panels] == ["time of a step (ms)"]


def test_texts_without_measurements_have_a_table_and_no_plot(record: dict[str, Any]) -> None:
    table = record["tables"][0]
    table["rows"], table["tokens"] = table["rows"][3:], None
    assert list(bench_plots(record)) == []
    (measured,) = bench_tables(record)
    assert measured.heading == "64 tokens per text"
    assert measured.notes[-1] == "cdm@online: out of memory at 15.0 GB"


def test_the_page_has_measurements_with_or_without_runs(record: dict[str, Any], tmp_path: Path) -> None:
    kept = tmp_path / "cost.json"
    kept.write_text(json.dumps(record), encoding="utf-8")
    done = CliRunner().invoke(report_command, ["--bench", str(kept), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<section id="bench">' in page
    assert "64 tokens per text" in page
    assert "emo@online" in page
    assert "var(--mark-2)" in page[page.index('id="bench"') :]  # its colors are the page's, light or dark
    assert json.loads((tmp_path / "page.json").read_text(encoding="utf-8"))["bench"] == record
    assert (tmp_path / "page_files" / "page-bench-0.png").is_file()


def test_a_file_without_measurements_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text('{"tasks": {}}', encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"scores\.json holds no measurements"):
        read_bench(tmp_path / "scores.json")
    with pytest.raises(RunFolderError, match=r"none\.json"):
        read_bench(tmp_path / "none.json")
    assert CliRunner().invoke(report_command, ["-o", str(tmp_path / "page.html")]).exit_code == 2
