"""Models of which only the sizes are known: `shape:bert-base` in place of a model where no weights are needed.

The sizes and dropout rates are those of the published configuration files; attention and hidden dropout are those
the models were trained with. Pooling and position tables are the model's own too.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distill.errors import StudentError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PREFIX = "shape:"


@dataclass(frozen=True)
class Shape:
    """The sizes of one published model.

    Attributes:
        model_type: transformers' name of the architecture.
        values: what differs from transformers' own defaults of that architecture.
        pooling: "mean", "cls" or "last_token", as published.
        max_length: tokens, specials included, that texts are cut to as published.
        hub_id: of the model, "" where several have these sizes.
    """

    model_type: str
    pooling: str
    max_length: int
    hub_id: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """Longest input in tokens; RoBERTa-like tables of positions begin behind the padding id."""
        return int(self.values["max_position_embeddings"]) - 2 * (self.model_type in ("xlm-roberta", "mpnet"))

    @property
    def causal(self) -> bool:
        """Whether a token sees those before it alone; such models are padded on the left."""
        return self.model_type == "qwen3"


def _bert(width: int, layers: int, heads: int, pooling: str = "mean", length: int = 512, hub_id: str = "") -> Shape:
    return Shape(
        "bert",
        pooling,
        length,
        hub_id,
        {
            "vocab_size": 30522,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
    )


def _xlm_roberta(width: int, layers: int, heads: int, positions: int, pooling: str, length: int, hub_id: str) -> Shape:
    return Shape(
        "xlm-roberta",
        pooling,
        length,
        hub_id,
        {
            "vocab_size": 250002,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "max_position_embeddings": positions,
            "type_vocab_size": 1,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
    )


def _qwen3(size: str, width: int, layers: int, heads: int, inner: int, vocabulary: int) -> Shape:
    return Shape(
        "qwen3",
        "last_token",
        8192,
        f"Qwen/Qwen3-Embedding-{size}",
        {
            "vocab_size": vocabulary,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": inner,
            "max_position_embeddings": 40960 if size != "0.6B" else 32768,
            "max_window_layers": layers,
            "tie_word_embeddings": size != "8B",
            "attention_dropout": 0.0,
            "use_cache": False,
        },
    )


SHAPES: Mapping[str, Shape] = {
    "bert-base": _bert(768, 12, 12, "cls"),
    "bert-large": _bert(1024, 24, 16, "cls"),
    "minilm-l12-h384": _bert(384, 12, 12, hub_id="microsoft/MiniLM-L12-H384-uncased"),
    "minilm-l6-h384": _bert(384, 6, 12, length=256, hub_id="sentence-transformers/all-MiniLM-L6-v2"),
    "minilm-l3-h384": _bert(384, 3, 12, length=128, hub_id="sentence-transformers/paraphrase-MiniLM-L3-v2"),
    "mpnet-base": Shape(
        "mpnet",
        "mean",
        384,
        "sentence-transformers/all-mpnet-base-v2",
        {
            "vocab_size": 30527,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 514,
            "relative_attention_num_buckets": 32,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
    ),
    "multilingual-e5-small": Shape(
        "bert",
        "mean",
        512,
        "intfloat/multilingual-e5-small",
        {**_bert(384, 12, 12).values, "vocab_size": 250037},
    ),
    "multilingual-e5-base": _xlm_roberta(768, 12, 12, 514, "mean", 512, "intfloat/multilingual-e5-base"),
    "multilingual-e5-large": _xlm_roberta(1024, 24, 16, 514, "mean", 512, "intfloat/multilingual-e5-large"),
    "bge-m3": _xlm_roberta(1024, 24, 16, 8194, "cls", 8192, "BAAI/bge-m3"),
    "qwen3-embedding-0.6b": _qwen3("0.6B", 1024, 28, 16, 3072, 151669),
    "qwen3-embedding-4b": _qwen3("4B", 2560, 36, 32, 9728, 151665),
    "qwen3-embedding-8b": _qwen3("8B", 4096, 36, 32, 12288, 151665),
}


def is_shape(name: str) -> bool:
    """Whether a model name asks for sizes alone: `shape:NAME`."""
    return name.startswith(PREFIX)


def shape_names() -> list[str]:
    """What may stand behind `shape:`, sorted."""
    return sorted(SHAPES)


def has_shape(name: str) -> bool:
    """Whether `find_shape` knows the sizes of a name, with or without `shape:`."""
    return _known(name) is not None


def find_shape(name: str) -> Shape:
    """The sizes behind `shape:NAME`, behind a plain NAME, a hub id or its last part.

    Raises:
        StudentError: nothing is called so.
    """
    found = _known(name)
    if found is None:
        plain = name.removeprefix(PREFIX).lower()
        near = difflib.get_close_matches(plain, SHAPES, n=1, cutoff=0.5)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known: {', '.join(shape_names())}"
        raise StudentError(f"no model shape is called {name.removeprefix(PREFIX)!r}; {hint}")
    return found


def shape_config(name: str) -> "PretrainedConfig":
    """transformers' configuration of these sizes, to build a model with random or without any weights.

    Raises:
        StudentError: nothing is called so.
    """
    from transformers import AutoConfig

    shape = find_shape(name)
    config: PretrainedConfig = AutoConfig.for_model(shape.model_type, **shape.values)
    return config


def _known(name: str) -> Shape | None:
    plain = name.removeprefix(PREFIX).lower()
    by_hub = {shape.hub_id.lower(): shape for shape in SHAPES.values() if shape.hub_id}
    short = {hub_id.rpartition("/")[2]: shape for hub_id, shape in by_hub.items()}
    return SHAPES.get(plain) or by_hub.get(plain) or short.get(plain)
