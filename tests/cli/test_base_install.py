"""Without the optional libraries, a command works or prints one line that names the extra to install."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.distill import main as distill
from cli.tcache import main as tcache

ROOT = Path(__file__).resolve().parents[2]
# Beginning of a command line -> the extra that it needs; the others need none.
EXTRA = {
    "tcache build c.txt --teacher bge-m3": "train",
    "tcache build c.parquet": "formats",
    "tcache build c.txt --teacher toy --cache ray": "ray",
    "tcache align": "train",
    "tcache export cache --format parquet": "formats",
    "tcache import c.parquet": "formats",
    "distill run": "train",
    "distill sweep": "train",
    "distill cut": "train",
    "distill static": "train",
    "distill plan": "train",
    "distill bench": "train",
    "distill eval model": "eval",
    "distill eval toy --mteb": "mteb",
    "distill analyze": "train",
    "distill report": "eval",
    "distill demo": "train",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process for all commands: each would import numpy and zarr again."""
    command = [sys.executable, "-m", "tests.cli.base_install", str(tmp_path_factory.mktemp("base"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def test_each_command_works_or_names_the_extra_in_one_line(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["exception"] in (None, "None"), result
        assert "Traceback" not in result["stderr"]
        extra = next((extra for start, extra in EXTRA.items() if result["command"].startswith(start)), None)
        errors = [line for line in result["stderr"].splitlines() if line.startswith("error: ")]
        if extra is None:
            assert (result["code"], errors) == (0, []), result
        else:
            assert result["code"] == 1, result
            (line,) = errors
            assert f"pip install 'teacher-cache[{extra}]'" in line
            assert result["stderr"].splitlines()[-1] == line


def test_the_error_of_a_command_names_the_command_and_the_library(results: list[dict[str, Any]]) -> None:
    (run,) = [result for result in results if result["command"].startswith("distill run")]
    assert run["stderr"] == "error: `distill run` needs torch: pip install 'teacher-cache[train]'\n"


def test_every_command_is_tried(results: list[dict[str, Any]]) -> None:
    tried = {tuple(result["command"].split()[:2]) for result in results}
    assert tried == {(group.name, name) for group in (tcache, distill) for name in group.commands}
