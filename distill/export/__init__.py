"""Export formats of a trained student: one file and one line in the table each."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from distill.errors import ConfigError
from teacher_cache.errors import optional_import

# Name -> "module:function"; the function takes (student, projection, normalize, folder, texts), writes `folder` and
# returns the smallest cosine between its vectors and the trained student's on `texts`.
EXPORTS: dict[str, str] = {"sentence_transformer": "distill.export.sentence_transformer:export"}


def load_export(name: str) -> Callable[..., float]:
    """The export function of a name in `EXPORTS`, or "package.module:function"."""
    module, colon, attribute = EXPORTS.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"export.format is {name!r}; known: {', '.join(EXPORTS)}, or package.module:function")
    try:
        with optional_import(f"export.format {name!r}"):
            found: Any = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"export.format {name!r} cannot be imported: {error}") from error
    return found
