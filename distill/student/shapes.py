"""Sizes of published models: `shape:bert-base` in place of a model where no weights are needed.

Sizes and dropout rates are those of the published configuration files (attention and hidden dropout as in training),
and so are pooling and position tables.
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
        pooling: "mean", "cls" or "last_token".
        max_length: published maximum length in tokens, special tokens included.
        hub_id: of the model, "" if several models have these sizes.
        values: configuration values that differ from transformers' defaults.
    """

    model_type: str
    pooling: str
    max_length: int
    hub_id: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """Longest input in tokens; position tables of RoBERTa-like models start after the padding id."""
        return int(self.values["max_position_embeddings"]) - 2 * (self.model_type in ("xlm-roberta", "mpnet"))

    @property
    def causal(self) -> bool:
        """Whether a token attends to those before it only; such models are padded on the left."""
        return self.model_type == "qwen3"


def _encoder_values(
    vocabulary: int, width: int, layers: int, heads: int, positions: int = 512, **more: Any
) -> dict[str, Any]:
    """Configuration values of BERT-like encoders."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": positions,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        **more,
    }


def _bert(width: int, layers: int, heads: int, pooling: str = "mean", length: int = 512, hub_id: str = "") -> Shape:
    return Shape("bert", pooling, length, hub_id, _encoder_values(30522, width, layers, heads))


def _xlm_roberta(width: int, layers: int, heads: int, positions: int, pooling: str, length: int, hub_id: str) -> Shape:
    values = _encoder_values(250002, width, layers, heads, positions, type_vocab_size=1)
    return Shape("xlm-roberta", pooling, length, hub_id, values)


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
        _encoder_values(30527, 768, 12, 12, 514, relative_attention_num_buckets=32),
    ),
    "multilingual-e5-small": Shape(
        "bert", "mean", 512, "intfloat/multilingual-e5-small", _encoder_values(250037, 384, 12, 12)
    ),
    "multilingual-e5-base": _xlm_roberta(768, 12, 12, 514, "mean", 512, "intfloat/multilingual-e5-base"),
    "multilingual-e5-large": _xlm_roberta(1024, 24, 16, 514, "mean", 512, "intfloat/multilingual-e5-large"),
    "bge-m3": _xlm_roberta(1024, 24, 16, 8194, "cls", 8192, "BAAI/bge-m3"),
    "qwen3-embedding-0.6b": _qwen3("0.6B", 1024, 28, 16, 3072, 151669),
    "qwen3-embedding-4b": _qwen3("4B", 2560, 36, 32, 9728, 151665),
    "qwen3-embedding-8b": _qwen3("8B", 4096, 36, 32, 12288, 151665),
}


def is_shape(name: str) -> bool:
    """Whether a model name is `shape:NAME`."""
    return name.startswith(PREFIX)


def shape_names() -> list[str]:
    """Sorted names that can follow `shape:`."""
    return sorted(SHAPES)


def has_shape(name: str) -> bool:
    """Whether `find_shape` finds a name, with or without `shape:`."""
    return _find(name) is not None


def find_shape(name: str) -> Shape:
    """The sizes of `shape:NAME`, of NAME, of a hub id or of its last part."""
    found = _find(name)
    if found is None:
        plain = name.removeprefix(PREFIX).lower()
        near = difflib.get_close_matches(plain, SHAPES, n=1, cutoff=0.5)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"expected one of {', '.join(shape_names())}"
        raise StudentError(f"unknown model shape {name.removeprefix(PREFIX)!r}; {hint}")
    return found


def shape_config(name: str) -> "PretrainedConfig":
    """transformers' configuration of these sizes, to build a model with random weights or none."""
    from transformers import AutoConfig

    shape = find_shape(name)
    config: PretrainedConfig = AutoConfig.for_model(shape.model_type, **shape.values)
    return config


def _find(name: str) -> Shape | None:
    plain = name.removeprefix(PREFIX).lower()
    by_hub = {shape.hub_id.lower(): shape for shape in SHAPES.values() if shape.hub_id}
    short = {hub_id.rpartition("/")[2]: shape for hub_id, shape in by_hub.items()}
    return SHAPES.get(plain) or by_hub.get(plain) or short.get(plain)
