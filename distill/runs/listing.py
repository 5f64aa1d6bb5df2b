"""The names a user can write, by kind; read from the tables themselves."""

from collections.abc import Callable, Iterable


def names(kind: str) -> list[str]:
    """Sorted names of one kind: "objectives", "sharpness", "teachers", "families", "tasks",
    "analyses", "exports".

    Raises:
        KeyError: no such kind.
    """
    return sorted(KINDS[kind]())


def _objectives() -> Iterable[str]:
    from distill.objectives import OBJECTIVES

    return OBJECTIVES


def _sharpness() -> Iterable[str]:
    from distill.sharpness import PRESETS

    return ["none", *PRESETS]


def _teachers() -> Iterable[str]:
    from teacher_cache.teachers import BACKENDS

    return BACKENDS


def _families() -> Iterable[str]:
    from teacher_cache.teachers.families import FAMILIES

    return FAMILIES


def _tasks() -> Iterable[str]:
    from distill.evaluation.evaluator import NINE

    return NINE


def _analyses() -> Iterable[str]:
    from distill.analyses import ANALYSES

    return ANALYSES


def _exports() -> Iterable[str]:
    from distill.export import EXPORTS

    return EXPORTS


KINDS: dict[str, Callable[[], Iterable[str]]] = {
    "objectives": _objectives,
    "sharpness": _sharpness,
    "teachers": _teachers,
    "families": _families,
    "tasks": _tasks,
    "analyses": _analyses,
    "exports": _exports,
}
