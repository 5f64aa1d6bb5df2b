"""The structure holds: imports go one way, heavy libraries stay in the modules that wrap them."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from teacher_cache import build

ROOT = Path(__file__).parent.parent
PACKAGES = ("teacher_cache", "distill", "cli")

# Packages and modules of each root, lowest layer first; one imports its own layer's packages never, lower ones freely.
LAYERS = (
    "teacher_cache.errors teacher_cache.space teacher_cache.text_key",
    "teacher_cache.corpus teacher_cache.storage",
    "teacher_cache.tokens",
    "teacher_cache.teachers",
    "teacher_cache.table",
    "teacher_cache.building teacher_cache.reading",
    "teacher_cache.transfer",
    "teacher_cache.maintenance",
    "distill.errors",
    "distill.registry",
    "distill.config distill.run_folder",
    "distill.objectives",
    "distill.sharpness",
    "distill.student distill.evaluation",
    "distill.data distill.export distill.report",
    "distill.training",
    "distill.analyses distill.plan",
    "distill.bench",
    "distill.runs",
    "cli",
)
LAYER = {place: number for number, places in enumerate(LAYERS) for place in places.split()}
# A root holds few things, so that a newcomer sees the structure at once.
MOST_ENTRIES = {"teacher_cache": 12, "distill": 16}

# Library -> modules (by prefix) that may import it at module level. Inside a function is free elsewhere.
HEAVY = {
    "ray": (),
    "torch": (
        "teacher_cache.reading.dataset",
        "teacher_cache.teachers.attention",
        "teacher_cache.teachers.batching",
        "teacher_cache.teachers.linear",
        "teacher_cache.teachers.loading",
        "teacher_cache.teachers.pooling",
        "teacher_cache.teachers.token_table",
        "distill.objectives",
        "distill.sharpness",
        "distill.data",
        "distill.student.static",
        "distill.student.student",
        "distill.student.cutting",
        "distill.student.vocabulary",
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
        "distill.training.averaging",
        "distill.training.callbacks",
        "distill.training.head_init",
        "distill.training.method",
        "distill.training.parameter_groups",
        "distill.training.target_transform",
        "distill.training.trainer",
        "distill.analyses.trained_run",
        "distill.analyses",
        "distill.runs.cut",
        "distill.runs.run",
        "distill.export.sentence_transformer",
        "distill.export.static",
    ),
    "transformers": (
        "teacher_cache.teachers.loading",
        "distill.bench.timed_run",
        "distill.training.arguments",
        "distill.training.callbacks",
        "distill.training.trainer",
    ),
    "sentence_transformers": (),
    "safetensors": ("distill.training.averaging", "distill.training.trainer"),
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


def place(module: str) -> str:
    """The package or module of a root that a module stands in."""
    return "cli" if module.startswith("cli") else ".".join(module.split(".")[:2])


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


@pytest.mark.parametrize("module", [name for name in MODULES if name not in PACKAGES])
def test_a_package_imports_lower_layers_only(module: str) -> None:
    here = place(module)
    assert here in LAYER, f"{here} has no layer: add it to LAYERS"
    for name in imported(MODULES[module]):
        other = place(name)
        if name in MODULES and name not in PACKAGES and other != here:
            assert LAYER[other] < LAYER[here], f"{module} must not import {name}: {other} is not below {here}"


@pytest.mark.parametrize("package", ["teacher_cache", "distill", "cli"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    ours = {name: path for name, path in MODULES.items() if name.startswith(f"{package}.")}
    graph = {
        name: {other for other in imported(path) if other in ours and other != name} for name, path in ours.items()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", MOST_ENTRIES)
def test_a_root_has_few_entries(package: str) -> None:
    entries = {entry for entry in LAYER if entry.startswith(f"{package}.")}
    on_disk = {
        f"{package}.{path.stem}"
        for path in (ROOT / package).iterdir()
        if not path.name.startswith("__") and path.name != "py.typed"
    }
    assert on_disk == entries
    assert len(entries) <= MOST_ENTRIES[package]


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


def test_reading_vectors_loads_neither_torch_nor_token_columns(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from teacher_cache import TeacherCache\n"
        "with TeacherCache.open('cache') as cache:\n"
        "    print(cache.space()['one text'].shape, len(cache.corpus()))\n"
        "print('LOADED', sorted(name for name in sys.modules if name.startswith(('torch', 'teacher_cache.tokens.'))))\n"
    )
    build(["one text", "another"], "toy", tmp_path / "cache")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "(32,) 2\nLOADED []\n"
