"""Comparison of runs: their records, groups of seeds, and warnings."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console
from safetensors.numpy import load_file

from cli.distill import main
from distill.errors import ConfigError, RunFolderError
from distill.report.columns import comparison_columns, console_tables, markdown, notes
from distill.report.comparison import Comparison, compare_runs
from distill.report.references import model_size
from distill.runs.run import run
from tests.distill.tiny_runs import tiny_config
from tests.distill.tiny_tasks import TASKS, write_tasks


@pytest.fixture(scope="module")
def trained(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("runs") / "talas-seed=1"
    run(tiny_config(toy_cache, tiny_student, folder, "corpus=sentences", "training.max_steps=2", "training.seed=1"))
    return folder


def edit(path: Path, change: dict[str, Any]) -> None:
    """Merge nested values into a JSON or YAML file."""

    def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return old | {k: merged(old.get(k) or {}, v) if isinstance(v, dict) else v for k, v in new.items()}

    values = yaml.safe_load(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(merged(values, change)))  # JSON is YAML


def copied(
    trained: Path,
    folder: Path,
    config: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    scores: dict[str, float] | None = None,
) -> Path:
    shutil.copytree(trained, folder)
    edit(folder / "config.yaml", config or {})
    edit(folder / "run.json", record or {})
    if scores is not None:
        average = {"in_domain": scores.get("stsb"), "out_of_domain": scores.get("mrpc"), "all": 50.0}
        tasks = {name: {"metric": "spearman", "score": score} for name, score in scores.items()}
        edit(folder / "eval.json", {"tasks": tasks, "average": average, "dtype": "float32", "files": {"a": "1"}})
    return folder


def seeds(trained: Path, folder: Path, method: str, spearman: list[float], stsb: list[float]) -> list[Path]:
    return [
        copied(
            trained,
            folder / f"{method}-seed={number}",
            {"objective": {"name": method}, "training": {"seed": number}},
            {
                "agreement": {"after": {"spearman": value}},
                "cost": {"step_seconds_p50": number / 10, "peak_memory_bytes": 2_500_000_000, "device": "cpu"},
            },
            {"stsb": score},
        )
        for number, (value, score) in enumerate(zip(spearman, stsb, strict=True), 1)
    ]


def cells(comparison: Comparison) -> dict[str, list[str]]:
    return {column.header: list(column.cells) for column in comparison_columns(comparison)}


def test_seeds_share_a_row_with_mean_and_sample_deviation(trained: Path, tmp_path: Path) -> None:
    folders = seeds(trained, tmp_path, "talas", [0.2, 0.4, 0.9], [10, 20, 30])
    folders += seeds(trained, tmp_path, "simcse", [0.5], [70])
    table = cells(compare_runs(folders))
    assert table["run"] == ["talas", "simcse-seed=1"]
    assert table["runs"] == ["3", "1"]
    assert table["objective.name"] == ["talas", "simcse"]
    # (0.3^2 + 0.1^2 + 0.4^2) / 2 = 0.13, its root 0.3606.
    assert table["Spearman"] == ["0.500 ± 0.361", "0.500"]
    assert table["stsb *"] == ["20.00 ± 10.00", "70.00"]
    assert table["s/step"] == ["0.2000 ± 0.1000", "0.1000"]
    assert table["peak memory"] == ["2.50 GB", "2.50 GB"]
    assert "seed" not in table
    assert "mrpc" not in table
    assert "average out-of-domain" not in table


def test_a_folder_of_runs_is_compared_and_the_table_written(trained: Path, tmp_path: Path) -> None:
    seeds(trained, tmp_path / "sweep", "talas", [0.2, 0.4], [10, 20])
    seeds(trained, tmp_path / "sweep", "simcse", [0.5, 0.5], [70, 80])
    (tmp_path / "sweep" / "talas-seed=1.log").write_text("x")
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "sweep"), "-o", str(tmp_path / "table.md")])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0].startswith("| run | runs | objective.name | stsb * | average in-domain | average all |")
    assert lines[1].startswith("| --- | ---: | --- | ---: |")
    assert lines[2].startswith("| simcse | 2 | simcse | 75.00 ± 7.07 | 75.00 ± 7.07 |")
    assert lines[3].startswith("| talas | 2 | talas | 15.00 ± 7.07 |")
    assert len(lines) == 4
    for text in ("75.00 ± 7.07", "2.50 GB"):
        assert text in result.stdout


def test_only_settings_that_differ_have_a_column(trained: Path, tmp_path: Path) -> None:
    one = copied(trained, tmp_path / "one", {"cache": "elsewhere", "output_dir": "elsewhere"})
    two = copied(
        trained,
        tmp_path / "two",
        {"training": {"learning_rate": 0.5, "seed": 7}, "objective": {"options": {"anchored_layers": 1}}},
    )
    comparison = compare_runs([one, two])
    assert comparison.differing == ("objective.options.anchored_layers", "training.learning_rate", "training.seed")
    table = cells(comparison)
    assert table["anchored_layers"] == ["-", "1"]
    assert table["learning_rate"] == ["0.001", "0.5"]
    assert table["seed"] == ["1", "7"]
    assert "runs" not in table
    assert comparison.warnings == ()


@pytest.mark.parametrize(
    ("record", "scores", "expected"),
    [
        ({"space": {"fingerprint": "f" * 32}}, None, "read different spaces: toy@"),
        ({"corpus": {"name": "wiki"}}, None, "read different corpora: sentences ("),
        ({"precision": "bf16"}, None, "trained in different precisions: fp32: one; bf16: two"),
        ({"cost": {"device": "H200"}}, None, "timed on different devices: cpu: one; H200: two"),
        ({}, {"dtype": "bfloat16"}, "scored in different precisions: float32: one; bfloat16: two"),
        ({}, {"files": {"a": "2"}}, "scored on different files: one; two"),
    ],
)
def test_different_sources_are_a_warning_and_separate_seeds(
    trained: Path, tmp_path: Path, record: dict[str, Any], scores: dict[str, Any] | None, expected: str
) -> None:
    cost = {"cost": {"device": "cpu"}}
    one = copied(trained, tmp_path / "one", None, cost, {"stsb": 1.0})
    two = copied(trained, tmp_path / "two", {"training": {"seed": 2}}, cost | record, {"stsb": 2.0})
    if scores:
        edit(two / "eval.json", scores)
        if "files" in scores:
            edit(one / "eval.json", {"files": {"a": "1"}})
    comparison = compare_runs([one, two])
    (warning,) = comparison.warnings
    assert expected in warning
    assert notes(comparison) == [f"warning: {warning}"]
    assert len(comparison.groups) == (2 if record and "cost" not in record else 1)


def test_an_unfinished_run_has_no_figures(trained: Path, tmp_path: Path) -> None:
    done = copied(trained, tmp_path / "a-seed=1", None, None, {"stsb": 1.0})
    begun = copied(trained, tmp_path / "a-seed=2", {"training": {"seed": 2}}, {"status": "running"}, {"stsb": 9.0})
    comparison = compare_runs([done, begun])
    table = cells(comparison)
    assert (table["run"], table["runs"]) == (["a"], ["1 of 2, unfinished"])
    assert table["stsb *"] == ["1.00"]
    assert notes(comparison) == ["a-seed=2 is unfinished"]
    assert [row["status"] for row in comparison.to_json()["runs"]] == ["finished", "unfinished"]


def test_runs_with_equal_names_are_named_by_path(trained: Path, tmp_path: Path) -> None:
    one = copied(trained, tmp_path / "a" / "run")
    two = copied(trained, tmp_path / "b" / "run", {"objective": {"name": "simcse"}})
    assert [row.name for row in compare_runs([one, two]).rows] == [str(one), str(two)]


def test_a_folder_without_runs_is_an_error(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds none"):
        compare_runs([tmp_path])
    with pytest.raises(ConfigError, match="name the folder of the tasks"):
        compare_runs([trained], baseline="x")
    (copied(trained, tmp_path / "run") / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"run\.json is not JSON"):
        compare_runs([tmp_path / "run"])
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "absent")])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_model_size_is_that_of_the_weights(trained: Path) -> None:
    tensors = load_file(trained / "final" / "model.safetensors")
    assert model_size(trained / "final") == {
        "bytes": (trained / "final" / "model.safetensors").stat().st_size,
        "parameters": sum(tensor.size for tensor in tensors.values()),
    }


def test_runs_are_scored_once_with_baseline_and_teacher(trained: Path, tiny_student: Path, tmp_path: Path) -> None:
    from tests.teacher_cache.tiny_teachers import write_sentence_transformer

    folder = copied(trained, tmp_path / "run")
    data = write_tasks(tmp_path / "data")
    teacher = write_sentence_transformer(tmp_path / "teacher")
    said: list[str] = []

    def compared() -> Comparison:
        return compare_runs(
            [folder],
            data=data,
            tasks=TASKS,
            dtype="fp32",
            baseline=str(tiny_student),
            teacher=str(teacher),
            progress=lambda phase, done, total, detail: said.append(phase),
        )

    first = compared()
    assert [group.name for group in first.groups] == ["before training: tiny-bert", "teacher: st", "run"]
    baseline, asked, student = first.rows
    scores = [[row.figures[f"tasks.{task}"] for task in TASKS] for row in (baseline, asked, student)]
    assert all(scores.count(its) == 1 for its in scores)
    assert baseline.figures["student.bytes"] == (tiny_student / "model.safetensors").stat().st_size
    assert baseline.sources["dtype"] == student.sources["dtype"] == "float32"
    # The vectors are of the toy teacher.
    assert first.warnings == (f"no run was trained on vectors of {teacher}; it is not their teacher",)
    kept = json.loads((folder / "eval.json").read_text())
    assert kept["tasks"]["stsb"]["score"] == student.figures["tasks.stsb"]
    assert kept["dtype"] == "float32"
    written = (folder / "eval.json").stat().st_mtime_ns
    assert compared() == first
    assert (folder / "eval.json").stat().st_mtime_ns == written
    table = cells(first)
    assert table["runs"] == ["-", "-", "1"] if "runs" in table else True
    assert table["Spearman"][:2] == ["-", "-"]


def test_a_changed_student_is_scored_again(trained: Path, tiny_student: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    data = write_tasks(tmp_path / "data")
    first = compare_runs([folder], data=data, tasks=TASKS, dtype="fp32").rows[0]
    shutil.copy(tiny_student / "model.safetensors", folder / "final" / "model.safetensors")
    second = compare_runs([folder], data=data, tasks=TASKS, dtype="fp32").rows[0]
    assert first.figures["tasks.stsb"] != second.figures["tasks.stsb"]


def test_a_table_wider_than_the_terminal_is_split_into_several_with_names(trained: Path, tmp_path: Path) -> None:
    folders = seeds(trained, tmp_path, "talas", [0.2, 0.4], [10, 20]) + seeds(trained, tmp_path, "simcse", [0.5], [70])
    columns = comparison_columns(compare_runs(folders))
    for width in (50, 80, 300):
        out = Console(file=io.StringIO(), width=width)
        tables = list(console_tables(columns, width))
        for table in tables:
            out.print(table)
        text = out.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert text.count("simcse-seed=1") == len(tables)
        assert "15.00 ± 7.07" in text
    assert len(tables) == 1


def test_pipes_are_escaped_in_markdown(trained: Path, tmp_path: Path) -> None:
    comparison = compare_runs([copied(trained, tmp_path / "a|b")])
    assert r"| a\|b |" in markdown(comparison_columns(comparison))


def test_equal_seeds_are_not_grouped(trained: Path, tmp_path: Path) -> None:
    paths = [
        copied(trained, tmp_path / name / "talas-seed=1", record={"agreement": {"after": {"spearman": value}}})
        for name, value in (("a", 0.4), ("b", 0.6))
    ]
    comparison = compare_runs(paths)
    assert [len(group.rows) for group in comparison.groups] == [1, 1]
