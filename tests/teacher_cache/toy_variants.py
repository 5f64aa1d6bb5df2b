"""Faulty toy teachers, used as `package.module:Class` backends.

`TeacherOptions.revision` is a label, not part of a space, so it passes the path of a file that a variant needs.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import Encoded, TeacherOptions, TeacherSpec
from teacher_cache.teachers.toy import ToyTeacher


class Variant(ToyTeacher):
    @classmethod
    def name(cls) -> str:
        return f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def options(cls, file: Path | str = "") -> TeacherOptions:
        return TeacherOptions(model="toy", backend=cls.name(), revision=str(file))

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        spec = super().resolve(options, folder)
        return replace(spec, space=replace(spec.space, backend=cls.name()))

    def __init__(self, spec: TeacherSpec) -> None:
        super().__init__(spec)
        self.file = Path(spec.options.revision or "")


class BadVectors(Variant):
    """Returns NaN, infinite, zero or overflowing vectors for texts that start with that word."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        encoded = super().encode_counted(texts)
        for row, text in enumerate(texts):
            value = {"nan": np.nan, "inf": np.inf, "zero": 0.0, "huge": 1e6}.get(text.split()[0])
            if value is not None:
                encoded.vectors[row] = value
            encoded.repaired[row] = text.startswith("repaired")
        return encoded


class Logged(Variant):
    """Appends every text to its file before encoding it slowly."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        with self.file.open("a") as log:
            log.writelines(json.dumps(text) + "\n" for text in texts)
        time.sleep(0.003)
        return super().encode_counted(texts)


class DiesOnce(Variant):
    """Kills its process on the text "deadly" once, and creates its file."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        if "deadly" in texts and not self.file.exists():
            self.file.touch()
            os._exit(1)
        return super().encode_counted(texts)


class DiesAlways(Variant):
    """Kills its process on the text "deadly"."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        if "deadly" in texts:
            os._exit(1)
        return super().encode_counted(texts)


class Refuses(Variant):
    """Raises an error for every batch."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        raise TeacherError(f"no answer to {texts[0]!r}")


class BadTokens(Variant):
    """Returns NaN, infinite or too large token states, or NaN attention, for texts that start with that word."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        encoded = super().encode_counted(texts)
        for row, text in enumerate(texts if encoded.by_token is not None else ()):
            tokens = encoded.by_token[row]
            value = {"nan": np.nan, "inf": np.inf, "huge": 1e6}.get(text.split()[0])
            if value is not None:
                tokens.states[-1, 3] = value
            if text.startswith("blind") and tokens.attention is not None:
                tokens.attention[0, 0, 0] = np.nan
        return encoded


class Changeable(Variant):
    """Returns other vectors once its file exists."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        encoded = super().encode_counted(texts)
        return replace(encoded, vectors=encoded.vectors[:, ::-1].copy()) if self.file.exists() else encoded


class OtherWidth(Variant):
    """Returns tokens of another width than its configuration."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        encoded = super().encode_counted(texts)
        by_token = [replace(tokens, states=tokens.states[:, 1:]) for tokens in encoded.by_token or ()]
        return replace(encoded, by_token=by_token or None)


class Silent(Variant):
    """Returns no token columns."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        return replace(super().encode_counted(texts), by_token=None)
