"""`distill bench`: flags, tables and JSON; and the benchmark script that calls it."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.bench import bench
from cli.distill import main

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "t4.sh"


SHORT = ["--batch-size", "6", "--steps", "1", "--warm_up", "0", "--rounds", "1", "--precision", "fp32", "--no-memory"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("measured")
    result = run(
        *("--cache", toy_cache, "--corpus", "few", "--student", tiny_student, "--methods", "talas,talas+asam,emo"),
        *("--lengths", "corpus,8", *SHORT, "-o", folder / "cost.md", "-o", folder / "cost.json"),
    )
    return result, folder


def test_tables_are_printed_and_written_also_with_methods_that_cannot_run(measured: tuple[Result, Path]) -> None:
    result, folder = measured
    assert result.exit_code == 0, result.output
    for text in (result.stdout, (folder / "cost.md").read_text(encoding="utf-8")):
        assert "The corpus's own lengths" in text
        assert "8 tokens per text" in text
        assert "talas+asam" in text
        assert "emo: " in text
        assert "tokens" in text
    assert f"next: distill report RUN... --bench {folder / 'cost.json'}" in result.stdout


def test_the_written_json_has_every_table_and_row(measured: tuple[Result, Path]) -> None:
    record = json.loads((measured[1] / "cost.json").read_text(encoding="utf-8"))
    assert record["kind"] == "bench"
    assert [table["lengths"] for table in record["tables"]] == ["corpus", 8]
    for table in record["tables"]:
        assert [row["method"] for row in table["rows"]] == ["talas", "talas+asam", "emo"]
        asam = table["rows"][1]
        assert asam["step_ms_p50"] <= asam["with_data_ms_p50"]
        assert set(asam["parts_ms"]) == {"data", "teacher", "first_pass", "forward", "backward", "optimizer"}
        assert set(asam["ratio"]) >= {"step", "with_data"}
    assert record["settings"]["steps"] == 1
    assert record["settings"]["lengths"] == ["corpus", 8]


def test_json_is_all_that_is_printed_on_stdout(toy_cache: Path, tiny_student: Path) -> None:
    result = run(
        "--cache", toy_cache, "--corpus", "few", "--student", tiny_student, "--methods", "leaf", *SHORT, "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["baseline"] == "leaf"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--methods", "talas"], 1, "--random-weights"),
        (["--cache", "c", "--methods", "talos"], 1, "talos"),
        (["--cache", "c", "--lengths", "long"], 2, "not a list of token counts"),
        (["--cache", "c", "--memory-cap", "15 apples"], 2, "not a size such as 15GB"),
        (["--cache", "nowhere"], 1, "nowhere"),
        (["--random-weights", "bge-m4"], 1, "bge-m4"),
        (["--random-weights", "bge-m3", "--student", "shape:bert-bass"], 1, "bert-bass"),
    ],
)
def test_wrong_settings_are_one_line(arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert code == 2 or len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("text", "size"), [("15GB", 15 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8)])
def test_a_size_is_read_in_powers_of_1000_or_1024(text: str, size: int) -> None:
    from cli.bench import read_size

    context: Any = None
    assert read_size(context, context, text) == size


def test_the_gpu_script_has_the_settings_of_the_paper(tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        [SCRIPT, tmp_path / "out"], env={**os.environ, "DISTILL": str(fake)}, capture_output=True, text=True, check=True
    )
    command, *flags = done.stdout.splitlines()
    parameters = bench.make_context("bench", flags).params
    assert command == "bench"
    assert (parameters["student"], parameters["random_weights"]) == ("shape:bert-base", "Qwen3-Embedding-4B")
    assert (parameters["precision"], parameters["batch_size"], parameters["memory_cap"]) == ("fp16", 32, 15 * 10**9)
    assert {"talas", "talas+asam", "jasper", "distillcse", "leaf", "emo", "emo@online", "dskd@online", "cdm"} <= set(
        parameters["methods"]
    )
    assert [output.name for output in parameters["output"]] == ["t4.json", "t4.md"]
    assert parameters["minutes"] <= 4


@pytest.mark.slow
def test_the_gpu_script_runs_to_its_end_on_this_machine(
    tmp_path: Path, tiny_student: Path, tiny_teacher_folder: Path
) -> None:
    root = SCRIPT.parents[1]
    command = tmp_path / "distill"
    command.write_text(
        '#!/usr/bin/env bash\nexec python -c "from cli.distill import main; main()" "$@"\n',
        encoding="utf-8",
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    settings = {"QUICK": "1", "STUDENT": str(tiny_student), "TEACHER": str(tiny_teacher_folder), "PRECISION": "fp32"}
    done = subprocess.run(
        [SCRIPT, tmp_path / "out"],
        env={**os.environ, **settings, "DISTILL": str(command), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((tmp_path / "out" / "t4.json").read_text(encoding="utf-8"))["tables"]
    assert [row["method"] for row in table["rows"] if row["failed"]] == []
    assert all(row["peak_bytes"] > 0 for row in table["rows"])
    assert "emo@online" in (tmp_path / "out" / "t4.md").read_text(encoding="utf-8")


@pytest.fixture
def tiny_teacher_folder(tmp_path: Path) -> Path:
    from tests.teacher_cache.tiny_teachers import write_qwen3

    return write_qwen3(tmp_path / "teacher")
