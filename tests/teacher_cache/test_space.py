"""Embedding spaces: identity, folder name, JSON."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_cache.space import LABELS, EmbeddingSpace

SPACE = EmbeddingSpace(
    teacher="org/some model",
    revision="abc",
    backend="toy",
    weights="w",
    tokenizer="t",
    pooling="mean",
    padding_side="right",
    prompt="query: ",
    max_length=128,
    truncation_side="right",
    normalize=True,
    dims=32,
    dtype="float32",
)
CHANGES = {
    "teacher": "other",
    "revision": "def",
    "backend": "transformer",
    "weights": "w2",
    "tokenizer": "t2",
    "pooling": "cls",
    "padding_side": "left",
    "prompt": "query:",
    "max_length": 129,
    "truncation_side": "left",
    "normalize": False,
    "dims": 33,
    "dtype": "bfloat16",
}


def test_changes_cover_every_field() -> None:
    assert set(CHANGES) == {field.name for field in fields(EmbeddingSpace)}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_except_labels_changes_the_fingerprint(field: str) -> None:
    other = replace(SPACE, **{field: CHANGES[field]})
    assert (other.fingerprint == SPACE.fingerprint) == (field in LABELS)
    pair = {field: (getattr(SPACE, field), CHANGES[field])}
    assert SPACE.difference(other) == ({} if field in LABELS else pair)
    assert SPACE.difference(other, labels=True) == pair


def test_a_fingerprint_never_changes() -> None:
    # Folders of existing caches are named after it.
    assert SPACE.fingerprint == "8bcba2b8906b4e4e1171599f1d31e1e9"


@pytest.mark.parametrize(
    ("teacher", "name"),
    [
        ("org/some model", "some-model"),
        ("/a/folder/", "folder"),
        ("..", "teacher"),
        ("é/", "teacher"),
        ("a" * 3 + ":Class", "aaa-Class"),
    ],
)
def test_a_slug_is_a_valid_folder_name(teacher: str, name: str) -> None:
    space = replace(SPACE, teacher=teacher)
    assert space.slug == f"{name}@{space.fingerprint[:8]}"


@given(st.text(), st.text(), st.integers(1, 10**6))
def test_a_space_round_trips_through_json(prompt: str, teacher: str, length: int) -> None:
    space = replace(SPACE, prompt=prompt, teacher=teacher, max_length=length)
    assert EmbeddingSpace.from_json(space.to_json()) == space


def test_missing_and_unknown_fields_are_refused_by_name() -> None:
    record = SPACE.to_json()
    del record["prompt"]
    record["color"] = "red"
    with pytest.raises(ValueError, match=r"missing fields \['prompt'\], unknown fields \['color'\]"):
        EmbeddingSpace.from_json(record)


def test_a_description_has_prompt_pooling_length_width_and_precision() -> None:
    assert SPACE.describe() == (
        "org/some model · mean pooling · prompt 'query: ' · at most 128 tokens · 32 dims, unit length · float32"
    )
    assert "no prompt" in replace(SPACE, prompt="").describe()
    assert "not normalized" in replace(SPACE, normalize=False).describe()
