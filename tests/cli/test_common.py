"""What all commands share: the default cache, flags in errors, progress, and counts in output."""

import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from cli import common
from cli.common import CONTEXT, Commands, common_options, count, duration, print_status, progress_bar, with_flags
from cli.distill import main as distill
from cli.tcache import main as tcache
from teacher_cache.errors import CorpusError, KnownError


def run(group: click.Group, *words: object) -> Result:
    return CliRunner().invoke(group, [str(word) for word in words])


def output(group: click.Group, *words: object) -> Any:
    result = run(group, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# The cache


@pytest.fixture
def home(tcache_home: Path, toy_cache: Path) -> Path:
    """A copy of the toy cache as the default cache."""
    return Path(shutil.copytree(toy_cache, tcache_home))


def test_the_cache_is_the_argument_the_option_or_the_default(home: Path, toy_cache: Path) -> None:
    for words in ((toy_cache,), ("--cache", toy_cache), ()):
        assert output(tcache, "info", *words)["rows"] == 360
    result = run(tcache, "info", toy_cache, "--cache", home)
    assert result.exit_code == 2
    assert "named twice" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("verify",),
        ("repair",),
        ("seal",),
        ("gc", "--dry-run"),
        ("convert", "--storage", "float32"),
        ("export", "--format", "npy", "--output", "OUT", "--corpus", "few"),
    ],
)
@pytest.mark.parametrize("flag", [False, True])
def test_commands_on_a_cache_take_the_option_and_the_default(
    home: Path, tmp_path: Path, words: tuple[str, ...], flag: bool
) -> None:
    cache = Path(shutil.move(home, tmp_path / "moved")) if flag else home
    given = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    result = run(tcache, *given, *(["--cache", cache] if flag else []))
    assert result.exit_code == 0, result.output


def test_get_takes_one_text_from_the_default_cache_and_several_after_a_cache(home: Path, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("one\ntwo\n", encoding="utf-8")
    run(tcache, "build", tmp_path / "c.txt", "--teacher", "toy")
    assert [entry["text"] for entry in output(tcache, "get", "one")] == ["one"]
    assert [entry["text"] for entry in output(tcache, "get", home, "one", "two")] == ["one", "two"]
    assert [entry["text"] for entry in output(tcache, "get", "one", "two", "--cache", home)] == ["one", "two"]


def test_merge_and_import_write_to_the_default_cache(tcache_home: Path, toy_cache: Path, tmp_path: Path) -> None:
    assert run(tcache, "export", toy_cache, "--format", "npy", "--output", tmp_path / "out").exit_code == 0
    assert output(tcache, "import", tmp_path / "out")["cache"] == str(tcache_home)
    shutil.rmtree(tcache_home)
    assert output(tcache, "merge", toy_cache)["cache"] == str(tcache_home)


def test_run_and_sweep_use_the_default_cache_unless_their_file_or_a_flag_names_one(
    home: Path, tmp_path: Path, tiny_student: Path
) -> None:
    def cache_of(*words: object) -> str:
        result = run(distill, "run", *words, "--print-config")
        assert result.exit_code == 0, result.output
        return str(yaml.safe_load(result.stdout)["cache"])

    (tmp_path / "run.yaml").write_text("cache: here\n", encoding="utf-8")
    assert cache_of() == str(home)
    assert cache_of(tmp_path / "run.yaml") == "here"
    assert cache_of(tmp_path / "run.yaml", "--cache", "there") == "there"
    sweep = {"output_dir": str(tmp_path / "runs"), "grid": {"training.seed": [1, 2]}}
    base: dict[str, Any] = {"student": {"model": str(tiny_student)}, "corpus": "few", "data": {"window": 64}}
    for cache, flags, found in ((None, (), True), ("gone", (), False), ("gone", ("--cache", home), True)):
        sweep["base"] = base | ({} if cache is None else {"cache": cache})
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
        result = run(distill, "sweep", tmp_path / "sweep.yaml", "--dry-run", *flags)
        assert result.exit_code == (0 if found else 1), result.output


class Asked(KnownError):
    """What a part of a command was called with."""


def test_plan_uses_the_default_cache_unless_the_teacher_is_given(
    home: Path, tiny_student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", "--student", tiny_student, "--sharpness", "none", "--no-suggestions")
    result = run(distill, *words, "--corpus", "few", "--teacher-dim", "24")
    assert "--cache" in result.stderr
    assert result.exit_code == 1

    def trace(config: Any, student: Any, teacher: Any, lengths: Sequence[int], **_: object) -> None:
        raise Asked(f"{config.cache} {len(lengths)}")

    monkeypatch.setattr("distill.plan.estimate.trace", trace)
    assert f"{home} 32" in run(distill, *words, "--corpus", "few").stderr


def test_bench_uses_the_default_cache_without_random_weights(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(settings: Any, **_: object) -> None:
        raise Asked(f"{settings.cache or 'none'} {settings.lengths}")

    monkeypatch.setattr("distill.bench.measure.bench", measure)
    assert f"{home} ('corpus',)" in run(distill, "bench").stderr
    assert "none (64,)" in run(distill, "bench", "--random-weights", "bge-m3").stderr


# Errors


def test_a_backticked_argument_in_an_error_is_the_flag_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CorpusError("give `text_key`, `model` or `attn_implementation`, not `other` or `tcache info`")

    monkeypatch.setattr("teacher_cache.corpus.corpus.Corpus.open", fail)
    result = run(tcache, "plan", "c.txt", "--teacher", "toy")
    assert result.stderr == "error: give --text-key, --teacher or --attn-implementation, not `other` or `tcache info`\n"


def test_the_settings_of_a_run_are_flags_in_its_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CorpusError("`output_dir`, `resume` and `learning_rate`")

    monkeypatch.setattr("distill.runs.run.run", fail)
    result = run(distill, "run", "--output-dir", tmp_path)
    assert result.stderr == "error: --output-dir, --resume and --learning-rate\n"


def test_a_flag_is_chosen_by_its_own_name_before_the_name_of_its_value() -> None:
    @click.command()
    @click.option("-o", "--output", "path")
    @click.option("--path", "folder")
    @click.argument("sources", nargs=-1)
    def command() -> None:
        pass

    ctx = click.Context(command)
    assert with_flags("`path` `output` `folder` `sources`", command, ctx) == "--path --output --path `sources`"


def test_status_lines_name_flags_too() -> None:
    @click.command()
    @click.option("--data")
    @common_options
    def command(data: str | None) -> None:
        print_status("without `data` nothing is scored")

    group = Commands("tool", commands={"command": command}, context_settings=CONTEXT)
    assert CliRunner().invoke(group, ["command"]).stderr == "without --data nothing is scored\n"


# Output


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12345, "12,345 rows")], ids=str
)
def test_counts_have_the_right_plural(number: int, text: str) -> None:
    assert count(number, "row") == text
    assert count(1, "query", "queries") == "1 query"
    assert count(3, "query", "queries") == "3 queries"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59, "59.0 s"), (150, "2 min"), (5400, "1.5 h"), (400000, "111.1 h")]
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Progress


def test_the_bar_shows_one_phase_at_a_time() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with common._live_bar(console) as update:
        update("reading records", 5000, 0, "")
        update("loading the teacher", 0, 0, "")
        update("encoding texts", 10, 40, "3 tokens/s")
        assert isinstance(console.file, io.StringIO)
        before = len(console.file.getvalue())
        update("encoding texts", 20, 40, "4 tokens/s")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()[before:])
    assert "encoding texts" in shown
    assert "20/40" in shown
    assert "4 tokens/s" in shown
    assert "reading" not in shown
    assert "loading" not in shown


def test_lines_are_printed_every_30_seconds_with_the_time_left_of_the_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: clock[0])
    update = common._plain_lines()
    for seconds, progress in (
        (10, ("reading records", 100, 0, "")),
        (31, ("reading records", 900, 0, "")),
        (40, ("training steps", 500, 1000, "")),
        (50, ("training steps", 510, 1000, "")),
        (100, ("training steps", 600, 1000, "loss 1.0")),
        (200, ("exporting the student", 0, 0, "")),
    ):
        clock[0] = seconds
        update(*progress)
    # 100 of the 500 steps that were left took 60 s: the steps before a resume do not count.
    assert capsys.readouterr().err.splitlines() == [
        "reading records: 900",
        "training steps: 600/1,000 (60%), about 4 min left; loss 1.0",
        "exporting the student",
    ]


def test_quiet_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "SECONDS_BETWEEN_LINES", -1.0)

    @click.command()
    @common_options
    def command() -> None:
        with progress_bar() as update:
            update("loading", 0, 0, "")

    assert CliRunner().invoke(command, []).stderr == "loading\n"
    assert CliRunner().invoke(command, ["-q"]).stderr == ""
