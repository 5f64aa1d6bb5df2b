"""Names that settings and flags take, by kind, each with a one-line description.

Descriptions come from the tables themselves. Docstrings and class attributes are parsed without importing the module,
so that listing is fast and works without torch and the optional libraries.
"""

import ast
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def describe(kind: str) -> dict[str, str]:
    """Name -> one-line description of a kind, one of `KINDS`.

    Raises:
        KeyError: an unknown kind.
    """
    return KINDS[kind]()


def _parse(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {module!r}", name=module)
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _definition(address: str) -> ast.ClassDef | ast.FunctionDef:
    """The class or function at "package.module:name"."""
    module, _, name = address.partition(":")
    definitions = (node for node in _parse(module).body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return next(node for node in definitions if node.name == name)


def _assigned(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> ast.expr:
    """The value of an annotated assignment in a module or class body."""
    assignments = (statement for statement in node.body if isinstance(statement, ast.AnnAssign))
    return next(found.value for found in assignments if found.value and ast.unparse(found.target) == name)


def _summaries(module: str, registry: str) -> dict[str, str]:
    """The first paragraph of the docstring of each member of a registry, on one line."""
    table: Mapping[str, str] = getattr(import_module(module), registry)
    docstrings = {name: ast.get_docstring(_definition(address)) or "" for name, address in table.items()}
    return {name: " ".join(docstring.partition("\n\n")[0].split()) for name, docstring in docstrings.items()}


def _presets() -> dict[str, str]:
    """Presets of objectives: the options that they change."""
    from distill.objectives import OBJECTIVES

    found = {}
    for objective, address in OBJECTIVES.items():
        presets: dict[str, dict[str, object]] = ast.literal_eval(_assigned(_definition(address), "presets"))
        for name, options in presets.items():
            changed = ", ".join(f"{option}={value}" for option, value in options.items())
            found[f"{objective}:{name}"] = changed or "the default options"
    return found


def _sharpness() -> dict[str, str]:
    """Parsed because the table refers to classes, whose modules import torch."""
    presets: Any = _assigned(_parse("distill.sharpness"), "PRESETS")
    found = {
        str(ast.literal_eval(name)): str(ast.literal_eval(preset.args[0]))
        for name, preset in zip(presets.keys, presets.values, strict=True)
    }
    return {"none": "One pass per step, without an ascent.", **found}


def _families() -> dict[str, str]:
    from teacher_cache.teachers.families import FAMILIES

    return {
        name: f"{family.hub_id}: {family.dims} wide, {family.pooling} pooling, at most {family.max_length} tokens"
        for name, family in FAMILIES.items()
    }


def _tasks() -> dict[str, str]:
    from distill.evaluation import TASKS
    from distill.evaluation.evaluator import NINE

    metrics = {
        kind: ast.literal_eval(_assigned(_definition(TASKS[kind]), "metric")).replace("_", " ")
        for kind, _ in NINE.values()
    }
    domains = {"in": "in-domain", "out": "out-of-domain"}
    return {name: f"{kind}, {metrics[kind]}, {domains[domain]}" for name, (kind, domain) in NINE.items()}


def _shapes() -> dict[str, str]:
    from distill.student.shapes import SHAPES

    return {
        name: f"{shape.model_type}: {shape.values['num_hidden_layers']} layers, {shape.values['hidden_size']} wide, "
        f"{shape.pooling} pooling" + (f", as {shape.hub_id}" if shape.hub_id else "")
        for name, shape in SHAPES.items()
    }


def _encodings() -> dict[str, str]:
    from teacher_cache.storage.codec import ENCODINGS

    return {
        name: f"{encoding.row_bytes(1024):,} bytes per vector of 1,024 numbers, "
        f"{'compressed' if encoding.compressed else 'uncompressed'}, "
        f"{'with' if encoding.checksum else 'without'} checksums"
        for name, encoding in ENCODINGS.items()
    }


def _recipes() -> dict[str, str]:
    from distill.config.recipes import recipes

    return recipes()


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "objectives": partial(_summaries, "distill.objectives", "OBJECTIVES"),
    "presets": _presets,
    "sharpness": _sharpness,
    "teachers": partial(_summaries, "teacher_cache.teachers", "BACKENDS"),
    "families": _families,
    "tasks": _tasks,
    "analyses": partial(_summaries, "distill.analyses", "ANALYSES"),
    "exports": partial(_summaries, "distill.export", "EXPORTS"),
    "shapes": _shapes,
    "encodings": _encodings,
    "recipes": _recipes,
}
