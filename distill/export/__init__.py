"""Formats a trained student can leave in: one file a format, one line in the table."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from distill.errors import ConfigError
from teacher_cache.errors import optional_import

# name -> "module:function"; the function takes (student, projection, normalize, folder, texts), writes `folder`
# and returns the smallest cosine between its vectors and the trainer's on `texts`.
EXPORTS: dict[str, str] = {
    "sentence_transformer": "distill.export.sentence_transformer:export",
}


def load_export(name: str) -> Callable[..., float]:
    """The function behind a name of `EXPORTS`, or behind "package.module:function".

    Raises:
        ConfigError: no such format.
    """
    module, colon, attribute = EXPORTS.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"export.format is {name!r}; known: {', '.join(EXPORTS)}, or package.module:function")
    try:
        with optional_import(f"export.format {name!r}"):
            found: Any = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"export.format {name!r} cannot be imported: {error}") from error
    return found
