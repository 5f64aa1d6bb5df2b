"""Defaults of well-known teachers that are in their model cards but not in their files.

A family is found by hub id, or by the name of a local folder. Options of the user come first. For pooling, prompts and
length the model's files come before the family; for the padding side they come after it, because tokenizer files often
have a side that nobody chose.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

QWEN3_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
SEARCH_QUERY = "Represent this sentence for searching relevant passages: "
E5_PROMPTS = {"query": "query: ", "passage": "passage: "}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Defaults of one published model.

    Attributes:
        max_length: tokens, at most 8,192: attention memory grows with the square of the length on most devices, and
            sentences are far shorter.
        prompts: name -> text before the input.
        prompt_required: the model was trained with a prompt on every text and is silently worse without one. It never
            runs without an explicit choice.
        trust_remote_code: the model's code is not part of transformers.
    """

    hub_id: str
    pooling: str
    dims: int
    max_length: int
    padding_side: str = "right"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_required: bool = False
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        return self.hub_id.rsplit("/", 1)[-1]


def _qwen3(size: str, dims: int) -> Family:
    return Family(
        hub_id=f"Qwen/Qwen3-Embedding-{size}",
        pooling="last_token",
        padding_side="left",
        dims=dims,
        max_length=8192,
        prompts={"query": QWEN3_QUERY, "document": ""},
    )


def _e5(name: str, dims: int) -> Family:
    return Family(
        hub_id=f"intfloat/{name}", pooling="mean", dims=dims, max_length=512, prompts=E5_PROMPTS, prompt_required=True
    )


def _arctic(name: str, dims: int, max_length: int = 512, query: str = SEARCH_QUERY) -> Family:
    return Family(
        hub_id=f"Snowflake/snowflake-arctic-embed-{name}",
        pooling="cls",
        dims=dims,
        max_length=max_length,
        prompts={"query": query},
    )


def _mean(hub_id: str, dims: int, max_length: int) -> Family:
    return Family(hub_id=hub_id, pooling="mean", dims=dims, max_length=max_length)


FAMILIES: Mapping[str, Family] = {
    family.name.lower(): family
    for family in (
        _qwen3("0.6B", 1024),
        _qwen3("4B", 2560),
        _qwen3("8B", 4096),
        Family(hub_id="BAAI/bge-m3", pooling="cls", dims=1024, max_length=8192),
        _e5("multilingual-e5-small", 384),
        _e5("multilingual-e5-base", 768),
        _e5("multilingual-e5-large", 1024),
        _e5("e5-small-v2", 384),
        _e5("e5-base-v2", 768),
        _e5("e5-large-v2", 1024),
        _mean("thenlper/gte-small", 384, 512),
        _mean("thenlper/gte-base", 768, 512),
        _mean("thenlper/gte-large", 1024, 512),
        Family(
            hub_id="Alibaba-NLP/gte-multilingual-base", pooling="cls", dims=768, max_length=8192, trust_remote_code=True
        ),
        _arctic("xs", 384),
        _arctic("s", 384),
        _arctic("m", 768),
        _arctic("l", 1024),
        _arctic("m-v1.5", 768),
        _arctic("l-v2.0", 1024, max_length=8192, query="query: "),
        Family(
            hub_id="mixedbread-ai/mxbai-embed-large-v1",
            pooling="cls",
            dims=1024,
            max_length=512,
            normalize=False,
            prompts={"query": SEARCH_QUERY},
        ),
        _mean("sentence-transformers/all-MiniLM-L6-v2", 384, 256),
        _mean("sentence-transformers/all-mpnet-base-v2", 768, 384),
    )
}


def find_family(label: str) -> Family | None:
    """The family of a hub id (`owner/name`, which must match as a whole) or of a model name."""
    family = FAMILIES.get(label.rsplit("/", 1)[-1].lower())
    if family is None or ("/" in label and label.lower() != family.hub_id.lower()):
        return None
    return family


def similar_names(name: str, count: int = 3) -> list[str]:
    """Names of families similar to `name`, best first; empty if there are none."""
    return difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), FAMILIES, n=count, cutoff=0.5)
