"""The table of well-known teachers."""

import pytest

from teacher_cache.teachers.families import FAMILIES, find_family, similar_names
from teacher_cache.teachers.settings import POOLINGS


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_complete(name: str) -> None:
    family = FAMILIES[name]
    owner, _, model = family.hub_id.partition("/")
    assert owner
    assert name == model.lower() == family.name.lower()
    assert family.pooling in POOLINGS
    assert family.padding_side in ("left", "right")
    assert family.dims % 64 == 0
    assert 256 <= family.max_length <= 8192
    assert family.prompts or not family.prompt_required


def test_last_token_models_are_padded_on_the_left_and_the_others_on_the_right() -> None:
    for family in FAMILIES.values():
        assert (family.padding_side == "left") == (family.pooling == "last_token")


@pytest.mark.parametrize("label", ["Qwen3-Embedding-4B", "qwen3-embedding-4b", "Qwen/Qwen3-Embedding-4B"])
def test_a_family_is_found_by_name_and_by_hub_id(label: str) -> None:
    family = find_family(label)
    assert family is not None
    assert family.hub_id == "Qwen/Qwen3-Embedding-4B"


@pytest.mark.parametrize("label", ["someone/bge-m3", "bge", "", "bge-m3-finetuned"])
def test_a_model_of_another_owner_is_not_in_the_family(label: str) -> None:
    assert find_family(label) is None


def test_prompts_are_those_of_the_model_cards() -> None:
    assert FAMILIES["multilingual-e5-small"].prompts == {"query": "query: ", "passage": "passage: "}
    assert FAMILIES["qwen3-embedding-0.6b"].prompts["query"] == (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    )
    assert FAMILIES["snowflake-arctic-embed-l-v2.0"].prompts == {"query": "query: "}
    assert FAMILIES["mxbai-embed-large-v1"].prompts == FAMILIES["snowflake-arctic-embed-m"].prompts
    assert not FAMILIES["mxbai-embed-large-v1"].normalize


def test_only_models_trained_with_a_prompt_on_every_text_require_one() -> None:
    demanding = {name for name, family in FAMILIES.items() if family.prompt_required}
    assert demanding == {name for name in FAMILIES if "e5-" in name}


def test_a_misspelled_name_finds_similar_names() -> None:
    assert similar_names("bge-m4")[0] == "bge-m3"
    assert similar_names("Qwen/Qwen3-Embeding-4B")[0] == "qwen3-embedding-4b"
    assert similar_names("zzzzzzzzzzzzzz") == []
