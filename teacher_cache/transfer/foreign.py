"""The embedding space of imported vectors, as described by the user."""

from collections.abc import Mapping
from typing import Any

from teacher_cache.errors import CorpusError
from teacher_cache.space import EmbeddingSpace

# With `weights`, which looks unlike a digest, it tells such a space from all spaces of a build.
BACKEND = "imported"
UNKNOWN = "unknown"
# Fields the user may give, and their defaults. `normalize` is measured.
FIELDS: dict[str, Any] = {
    "revision": "",
    "tokenizer": UNKNOWN,
    "pooling": UNKNOWN,
    "padding_side": UNKNOWN,
    "prompt": "",
    "max_length": 0,
    "truncation_side": UNKNOWN,
    "normalize": None,
    "dtype": UNKNOWN,
}
_KINDS = {"max_length": int, "normalize": bool}
_EXPECTED = {int: "a number", bool: "true or false", str: "text"}


def foreign_space(teacher: str, fields: Mapping[str, Any], *, dims: int, unit_length: bool) -> EmbeddingSpace:
    """The space of a teacher's vectors.

    Args:
        fields: more of its fields, of `FIELDS`; strings are converted.
        unit_length: whether all vectors have unit length; a stated `normalize` must agree.
    """
    stated = FIELDS | {"normalize": unit_length} | {name: _value(name, value) for name, value in fields.items()}
    if stated["normalize"] != unit_length:
        raise CorpusError(
            f"`fields` normalize={str(stated['normalize']).lower()}: the vectors "
            f"{'all have' if unit_length else 'do not all have'} unit length; leave it out"
        )
    return EmbeddingSpace(
        teacher=teacher,
        backend=BACKEND,
        # The teacher's name is not part of a space's identity, so it is included here.
        weights=f"{BACKEND}:{teacher}@{stated['revision']}",
        dims=dims,
        **stated,
    )


def _value(name: str, value: Any) -> Any:
    if name not in FIELDS:
        raise CorpusError(f"unknown field {name!r} in `fields`; expected one of {', '.join(FIELDS)}")
    kind = _KINDS.get(name, str)
    if isinstance(value, str):
        if kind is bool:
            value = {"true": True, "false": False}.get(value.lower(), value)
        elif kind is int and value.isdecimal():
            value = int(value)
    if type(value) is not kind:
        raise CorpusError(f"`fields` {name}={value}: expected {_EXPECTED[kind]}")
    return value
