"""Run every command in a process in which no optional library can be imported; print the results as JSON."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import yaml
from click.testing import CliRunner

from cli.distill import main as distill
from cli.tcache import main as tcache
from teacher_cache.errors import EXTRAS


class BaseInstall(PathFinder):
    """Finds installed modules, except those of the extras."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in EXTRAS else super().find_spec(fullname, path, target)


def commands(folder: Path) -> list[tuple[str, ...]]:
    """The command lines, in an order in which each finds what it needs."""
    texts, table, cache, run = (str(folder / name) for name in ("c.txt", "c.parquet", "cache", "run"))
    Path(texts).write_text("one\ntwo\n", encoding="utf-8")
    Path(table).write_bytes(b"PAR1")
    (folder / "model").mkdir()
    config = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (folder / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    Path(run).mkdir()
    (folder / "run" / "config.yaml").write_text(f"cache: {cache}\noutput_dir: {run}\n", encoding="utf-8")
    sweep = {"output_dir": str(folder / "sweep"), "grid": {"training.seed": [1, 2]}, "base": {"cache": cache}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    model = str(folder / "model")
    (argument,) = (one for one in distill.commands["list"].params if isinstance(one.type, click.Choice))
    return [
        ("tcache", "plan", texts, "--teacher", "toy"),
        ("tcache", "build", texts, "--teacher", "toy", "--cache", cache, "--columns", "vectors,tokens"),
        ("tcache", "build", texts, "--teacher", "bge-m3", "--cache", cache),
        ("tcache", "build", table, "--teacher", "toy", "--cache", cache),
        ("tcache", "build", texts, "--teacher", "toy", "--cache", str(folder / "ray"), "--workers", "ray"),
        ("tcache", "align", cache, "--student", model),
        ("tcache", "info", cache),
        ("tcache", "get", cache, "one"),
        ("tcache", "export", cache, "--format", "npy", "--output", str(folder / "npy")),
        ("tcache", "export", cache, "--format", "parquet", "--output", str(folder / "out.parquet")),
        ("tcache", "import", str(folder / "npy"), "--cache", str(folder / "other")),
        ("tcache", "import", table, "--cache", cache),
        ("tcache", "merge", cache, "--into", str(folder / "merged")),
        ("tcache", "verify", cache),
        ("tcache", "repair", cache),
        ("tcache", "seal", cache),
        ("tcache", "convert", cache, "--storage", "int8"),
        ("tcache", "gc", cache),
        ("tcache", "reindex", cache),
        ("tcache", "doctor"),
        ("distill", "run", "--cache", cache, "--student", model, "--output-dir", str(folder / "new")),
        ("distill", "sweep", str(folder / "sweep.yaml")),
        ("distill", "cut", model, "--output-dir", str(folder / "cut"), "--depth", "1"),
        ("distill", "static", model, "--output-dir", str(folder / "static")),
        ("distill", "plan", "--student", "shape:bert-base", "--teacher-dim", "8", "--length", "8"),
        ("distill", "bench", "--random-weights", "bge-m3"),
        ("distill", "eval", model, "--texts", texts),
        ("distill", "eval", "toy", "--mteb", "STS12"),
        ("distill", "compare", run),
        ("distill", "analyze", run),
        ("distill", "report", run, "--output", str(folder / "page.html")),
        ("distill", "demo", "--output-dir", str(folder / "demo")),
        *(("distill", "list", kind) for kind in argument.type.choices),
    ]


def main(folder: Path) -> None:
    sys.meta_path[:] = [BaseInstall if finder is PathFinder else finder for finder in sys.meta_path]
    os.environ["TCACHE_HOME"] = str(folder / "home")
    groups = {"tcache": tcache, "distill": distill}
    results: list[dict[str, Any]] = []
    for group, *arguments in commands(folder):
        if arguments[0] == "reindex":
            shutil.rmtree(Path(arguments[1]) / "index.lmdb")
        result = CliRunner().invoke(groups[group], arguments)
        results.append(
            {
                "command": " ".join([group, *arguments]).replace(f"{folder}/", ""),
                "code": result.exit_code,
                "stdout": result.stdout,
                "stderr": result.stderr,
                "exception": None if isinstance(result.exception, SystemExit) else repr(result.exception),
            }
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
