"""The space of vectors that no back end of ours computed: what their owner says of them."""

from collections.abc import Mapping
from typing import Any

from teacher_cache.errors import CorpusError
from teacher_cache.space import EmbeddingSpace

# Together with `weights`, which no digest looks like, it keeps such a space apart from all that a build fills.
BACKEND = "imported"
UNKNOWN = "unknown"
# What may be stated, and what stands for "not stated". Whether vectors have unit length is seen.
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
    """A space of which `teacher` is the name and `fields`, of `FIELDS`, say more; a string may spell any value.

    Raises:
        CorpusError: there is no such field, it does not hold that, or the vectors show otherwise.
    """
    stated = FIELDS | {"normalize": unit_length} | {name: _value(name, value) for name, value in fields.items()}
    if stated["normalize"] != unit_length:
        raise CorpusError(
            f"--field normalize={str(stated['normalize']).lower()}: the vectors "
            f"{'all have' if unit_length else 'do not all have'} unit length; leave it out"
        )
    return EmbeddingSpace(
        teacher=teacher,
        backend=BACKEND,
        # Labels are no part of the identity, and nothing else tells one foreign teacher from another.
        weights=f"{BACKEND}:{teacher}@{stated['revision']}",
        dims=dims,
        **stated,
    )


def _value(name: str, value: Any) -> Any:
    if name not in FIELDS:
        raise CorpusError(f"--field {name}: imported vectors have no such field; known: {', '.join(FIELDS)}")
    kind = _KINDS.get(name, str)
    if isinstance(value, str):
        if kind is bool:
            value = {"true": True, "false": False}.get(value.lower(), value)
        elif kind is int and value.isdecimal():
            value = int(value)
    if type(value) is not kind:
        raise CorpusError(f"--field {name}={value}: expected {_EXPECTED[kind]}")
    return value
