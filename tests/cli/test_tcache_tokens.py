"""Token columns on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.options import TOKEN_STORAGE
from cli.tcache import main
from teacher_cache.tokens.token_columns import TOKEN_ENCODINGS

ALL = ("--columns", "vectors,tokens,attention")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("one two\nthree\nfour five six\n")
    return path


def build(corpus: Path, name: str, *words: str) -> Result:
    return run("build", corpus, "--teacher", "toy", "--cache", corpus.parent / name, *words)


def test_token_storage_choices_are_the_token_encodings() -> None:
    assert set(TOKEN_STORAGE) == set(TOKEN_ENCODINGS)


def test_build_and_info_print_token_columns(corpus: Path) -> None:
    result = build(corpus, "c", *ALL, "--attention-layers", "1,3")
    assert "  tokens and attention of 3 texts, 452 B before compression" in result.stdout.splitlines()
    printed = run("info", corpus.parent / "c").stdout
    assert "  tokens of 24 as float16 of 3 texts" in printed
    assert "  attention of layers 1, 3 of 3 texts" in printed
    record = json.loads(build(corpus, "c", *ALL, "--json").stdout)
    assert record["columns"] == ["vectors", "tokens", "attention"]
    assert (record["cached"], record["token_texts"], record["token_bytes"]) == (3, 0, 0)


def test_plan_prints_the_bytes_of_token_columns_by_encoding(corpus: Path) -> None:
    words = ("plan", corpus, "--teacher", "toy", "--cache", corpus.parent / "c")
    assert (
        "token columns: 384 B as float16, 384 B as float16-raw, 252 B as int8"
        in run(*words, "--columns", "vectors,tokens").stdout
    )
    assert "token columns" not in run(*words).stdout
    estimated = json.loads(run(*words, *ALL, "--attention-layers", "1,3", "--json").stdout)["token_bytes"]
    assert estimated == {"float16": 452, "float16-raw": 452, "int8": 320}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--columns", "tokens"), "'tokens' is not one of"),
        (("--attention-layers", "3"), "--attention-layers goes with --columns vectors,tokens,attention"),
        (("--columns", "vectors,tokens", "--attention-layers", "3"), "--attention-layers goes with"),
        ((*ALL, "--attention-layers", "last"), "'last' is not a list of layers"),
        ((*ALL, "--attention-layers", ""), "'' is not a list of layers"),
        (("--token-storage", "float16-raw"), "--token-storage goes with --columns vectors,tokens"),
        (("--columns", "vectors,tokens", "--token-storage", "float32"), "'float32' is not one of"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(corpus: Path, words: tuple[str, ...], message: str) -> None:
    result = build(corpus, "c", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (corpus.parent / "c").exists()


def test_layers_that_the_teacher_does_not_have_are_a_known_error(corpus: Path) -> None:
    result = build(corpus, "c", *ALL, "--attention-layers", "3,4")
    assert result.exit_code == 1
    assert "expected ascending numbers from 1 to 3" in result.stderr


def test_commands_that_skip_token_columns_print_a_line(corpus: Path, tmp_path: Path) -> None:
    build(corpus, "c", "--columns", "vectors,tokens", "--name", "a")
    build(corpus, "d", "--columns", "vectors,tokens", "--token-storage", "raw", "--name", "b")
    path = tmp_path / "c"
    assert "tokens of 24 as float16 stay as they are stored" in run("convert", path, "--storage", "float16-raw").stdout
    exported = run("export", path, "--format", "npy", "-o", tmp_path / "out").stdout
    assert "only vectors are exported, not tokens of 24 as float16" in exported
    merged = run("merge", tmp_path / "d", "--into", path)
    assert merged.exit_code == 0
    assert "skipped: tokens of 24 as float16-raw of" in merged.stdout
    assert "token columns of 3 texts stored" in run("merge", path, "--into", tmp_path / "e").stdout


def test_reindex_prints_token_columns(corpus: Path) -> None:
    build(corpus, "c", "--columns", "vectors,tokens")
    assert ": tokens of 3 texts" in run("reindex", corpus.parent / "c").stdout
