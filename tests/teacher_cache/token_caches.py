"""Caches with token columns, and the token output of the toy teacher."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teacher_cache.building.build import BuildReport
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve
from teacher_cache.text_key import text_keys
from teacher_cache.tokens import token_columns
from teacher_cache.tokens.request import TextTokens, TokenRequest
from teacher_cache.tokens.token_columns import TokenColumns
from tests.teacher_cache.small_caches import TOY, built

STATES_ONLY = TokenRequest()
LAYERS = TokenRequest(attention=(1, 3))
TOLERANCE = {"float16": 1e-3, "float16-raw": 1e-3, "int8": 1e-2}
# Bytes of four typical texts of the toy teacher in float16 with two layers of attention.
FOUR_ROWS = 4 * (32 * (24 * 2 + 16) + 2 * 32 * (1 + 2 * 32))


def teacher_tokens(
    texts: Sequence[str], request: TokenRequest = LAYERS, teacher: TeacherOptions = TOY
) -> list[TextTokens]:
    """Token output of the teacher, computed without a cache."""
    return load_teacher(replace(resolve(teacher), request=request)).encode_counted(texts).by_token or []


def columns_of(view: SpaceView) -> TokenColumns:
    assert view.tokens is not None
    return view.tokens


def rows_of(view: SpaceView, texts: Sequence[str]) -> Any:
    return view.index.find(text_keys(texts))


def assert_stored_tokens(view: SpaceView, texts: Sequence[str], request: TokenRequest = LAYERS) -> None:
    """Check that the stored tokens of the texts are the toy teacher's."""
    columns = columns_of(view)
    attention = request.attention is not None
    stored = columns.gather(rows_of(view, texts), attention=attention)
    close = TOLERANCE[columns.record.storage]
    for text, found, expected in zip(texts, stored, teacher_tokens(texts, request), strict=True):
        np.testing.assert_array_equal(found.pieces, expected.pieces, err_msg=text)
        np.testing.assert_allclose(found.states, expected.states, rtol=close, atol=close, err_msg=text)
        if attention:
            np.testing.assert_allclose(found.importance, expected.importance, rtol=1e-3)  # type: ignore[arg-type]
            np.testing.assert_allclose(found.attention, expected.attention, rtol=1e-3)  # type: ignore[arg-type]
        else:
            assert found.importance is None
            assert found.attention is None


@contextmanager
def small_shards(size: int = FOUR_ROWS) -> Iterator[None]:
    """Token shards of at most `size` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_columns, "SHARD_BYTES", size)
        yield


def token_cache(
    folder: Path, texts: Sequence[str], *, tokens: TokenRequest = LAYERS, **options: Any
) -> tuple[Path, BuildReport]:
    """A cache with vector shards of 8 rows, and token shards of 4 rows if it has attention."""
    with small_shards():
        report = built(folder, texts, tokens=tokens, **options)
    return folder / "cache", report


def token_files(path: Path, array: str = "*") -> dict[str, bytes]:
    """Contents of the files of token columns, by path in the space's folder."""
    names = ("tokens.zarr", "pieces.zarr", "attention.zarr") if array == "*" else (array,)
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for folder in (path / "spaces").iterdir()
        for name in names
        for file in (folder / name).rglob("*")
        if file.is_file()
    }


def opened(path: Path) -> SpaceView:
    """The only space of a cache, open for reading."""
    return TeacherCache.open(path).space()
