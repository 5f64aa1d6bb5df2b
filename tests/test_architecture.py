"""The house keeps its shape: imports go one way, heavy libraries stay in the rooms that wrap them."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("teacher_cache", "distill", "cli")

# Layer of a module by the longest prefix that fits; a module imports its own layer or lower ones only.
LAYERS = {
    "teacher_cache.errors": 0,
    "teacher_cache.text_key": 0,
    "teacher_cache.space": 0,
    "teacher_cache.tokens.request": 0,
    "teacher_cache": 0,  # the package itself: a version
    "teacher_cache.corpus.formats": 1,
    "teacher_cache.corpus.corpus": 1,
    "teacher_cache.storage": 1,
    "teacher_cache.teachers": 1,
    "teacher_cache.reading.shuffle": 1,
    "teacher_cache.tokens.token_columns": 2,
    "teacher_cache.table.view": 2,
    "teacher_cache.table.cache": 2,
    "teacher_cache.tokens.alignment": 1,
    "teacher_cache.building.align": 4,
    "teacher_cache.building.pending": 4,
    "teacher_cache.table.joint": 3,
    "teacher_cache.reading.stream": 3,
    "teacher_cache.building.workers": 3,
    "teacher_cache.building.build": 4,
    "teacher_cache.table.intake": 3,
    "teacher_cache.transfer.convert": 4,
    "teacher_cache.transfer.merge": 4,
    "teacher_cache.transfer": 4,
    "teacher_cache.maintenance.seal": 4,
    "teacher_cache.maintenance.inspection": 4,
    "teacher_cache.maintenance.metadata": 4,
    "teacher_cache.maintenance.verify": 4,
    "teacher_cache.maintenance.repair": 5,
    "teacher_cache.maintenance.rebuild": 5,
    "teacher_cache.maintenance.gc": 5,
    "teacher_cache.maintenance.info": 4,
    "teacher_cache.building.plan": 4,
    "teacher_cache.maintenance.doctor": 5,
    "distill": 0,
    "distill.errors": 1,
    "distill.config": 2,
    "distill.registry": 2,
    "distill.objectives": 2,
    "distill.sharpness": 2,
    "distill.student.micro_batches": 5,
    "distill.student.packing": 5,
    "distill.training.memory": 7,
    "distill.student.shapes": 2,
    "distill.plan": 8,
    "distill.training.assembly": 8,
    "distill.bench": 9,
    "distill.data": 6,
    "distill.student.internals": 6,
    "distill.data.online": 6,
    "distill.student.student": 6,
    "distill.training.loss": 7,
    "distill.training.targets": 7,
    "distill.evaluation": 7,
    "distill.training.callbacks": 7,
    "distill.training.arguments": 7,
    "distill.training.checkpoints": 7,
    "distill.training.validation": 7,
    "distill.training.method": 7,
    "distill.analyses.trained_run": 8,
    "distill.analyses": 8,
    "distill.training.trainer": 7,
    "distill.export": 7,
    "distill.report": 8,
    "distill.runs.run": 9,
    "distill.run_folder": 7,
    "distill.runs.job": 10,
    "distill.runs.launch": 10,
    "distill.report.comparison": 8,
    "distill.runs.sweep": 11,
    "distill.runs.listing": 9,
    "distill.runs.demo": 10,
    "cli": 12,
}

# Library -> modules (by prefix) that may import it at module level. Inside a function is free elsewhere.
HEAVY = {
    "ray": (),
    "torch": (
        "teacher_cache.teachers.attention",
        "teacher_cache.teachers.batching",
        "teacher_cache.teachers.bfloat16",
        "teacher_cache.teachers.linear",
        "teacher_cache.teachers.loading",
        "teacher_cache.teachers.pooling",
        "distill.objectives",
        "distill.sharpness",
        "distill.data",
        "distill.student.student",
        "distill.student.micro_batches",
        "distill.student.packing",
        "distill.training.memory",
        "distill.plan.kernels",
        "distill.plan.models",
        "distill.plan.step",
        "distill.plan.tracker",
        "distill.bench.",
        "distill.student.internals",
        "distill.data.online",
        "distill.training.loss",
        "distill.training.arguments",
        "distill.training.callbacks",
        "distill.training.method",
        "distill.training.trainer",
        "distill.analyses.trained_run",
        "distill.analyses",
        "distill.runs.run",
        "distill.export.sentence_transformer",
    ),
    "transformers": (
        "teacher_cache.teachers.loading",
        "distill.bench.turn",
        "distill.training.arguments",
        "distill.training.callbacks",
        "distill.training.trainer",
    ),
    "sentence_transformers": (),
    "safetensors": ("distill.training.trainer", "distill.analyses.trained_run"),
    "datasets": (),
    "mteb": (),
    "pyarrow": (),
    "zarr": (),
    "lmdb": ("teacher_cache.storage.environment", "teacher_cache.storage.index"),
    "numcodecs": ("teacher_cache.storage.chunks",),
    "sklearn": ("distill.evaluation.classification", "distill.evaluation.pairs"),
    "scipy": ("distill.evaluation.sts",),
    "matplotlib": (),
    "jinja2": (),
    "rich": ("distill.report",),
}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common_utils"}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def layer(module: str) -> int:
    while module not in LAYERS:
        assert "." in module, f"{module} has no layer: say in LAYERS where it stands"
        module = module.rpartition(".")[0]
    return LAYERS[module]


@functools.cache
def imported(path: Path, *, top_level: bool = False) -> tuple[str, ...]:
    """Names of modules that a file imports; with `top_level` those that importing the file imports."""
    return tuple(_imported(path, top_level))


def _imported(path: Path, top_level: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[ast.AST] = set()
    if top_level:
        for node in ast.walk(tree):
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if deferred or typing_only:
                inside.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_house_only(module: str) -> None:
    known = set(MODULES)
    for name in imported(MODULES[module]):
        if name in known and name != module:
            assert layer(name) <= layer(module), f"{module} must not import {name}: it stands above it"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("teacher_cache")])
def test_the_cache_does_not_know_who_trains_on_it(module: str) -> None:
    assert not [name for name in imported(MODULES[module]) if name.split(".")[0] in ("distill", "cli")]


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith(("distill.objectives", "distill.sharpness"))]
)
def test_objectives_and_sharpness_are_tensor_arithmetic(module: str) -> None:
    allowed = ("distill.objectives", "distill.sharpness", "distill.errors", "distill.registry", "teacher_cache.errors")
    ours = [name for name in imported(MODULES[module]) if name.split(".")[0] in PACKAGES]
    assert [name for name in ours if not name.startswith(allowed)] == []


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_where_they_are_wrapped(module: str) -> None:
    for name in imported(MODULES[module], top_level=True):
        library = name.split(".")[0]
        if library in HEAVY:
            assert module.startswith(HEAVY[library] or "-"), f"{module} must import {library} inside a function"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("cli")])
def test_the_command_line_imports_the_standard_library_and_click(module: str) -> None:
    allowed = {*sys.stdlib_module_names, "click", "cli"}
    found = {name.split(".")[0] for name in imported(MODULES[module], top_level=True)}
    assert found <= allowed


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_a_noun_of_the_field(module: str) -> None:
    assert not FORBIDDEN_NAMES & set(module.split("."))


@pytest.mark.parametrize("command", ["tcache", "distill"])
def test_help_loads_neither_numpy_nor_torch(command: str) -> None:
    code = (
        "import sys\n"
        f"from cli.{command} import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'torch', 'transformers', 'zarr', 'lmdb', 'ray', 'rich', 'yaml'} & set(sys.modules)\n"
        "print('LOADED', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("LOADED []\n")


def test_a_cached_look_up_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from cli.tcache import main\n"
        "source = pathlib.Path('corpus.txt'); source.write_text('one text\\nanother')\n"
        "for args in (['build', 'corpus.txt', '--teacher', 'toy', '--cache', 'c'], ['get', 'c', 'one text']):\n"
        "    try:\n        main(args)\n"
        "    except SystemExit as stop:\n        assert not stop.code, stop.code\n"
        "print('LOADED', sorted({'torch', 'transformers', 'ray', 'sentence_transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.endswith("LOADED []\n")
