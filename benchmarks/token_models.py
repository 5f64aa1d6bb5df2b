"""Models for `benchmarks/token_targets.py`: random ones of any size, and small ones with their texts."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.models import WordPiece
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, BertModel, set_seed

from distill.bench.synthetic import write_tokenizer
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.teachers.folder import ModelFolder

SEED = 42


def encoder_of(model: Path) -> Path:
    spec = resolve(TeacherOptions(model=str(model)))
    return ModelFolder(spec.folder or model).encoder


def parameters_of(model: Path) -> int:
    with torch.device("meta"):
        return sum(one.numel() for one in AutoModel.from_config(config_of(model)).parameters())


def config_of(model: Path) -> Any:
    return AutoConfig.from_pretrained(encoder_of(model), local_files_only=True)


def write_wider(teacher: Path, size: str, folder: Path) -> Path:
    """A random teacher of the class and with the tokenizer of another one.

    Args:
        size: "HIDDENxLAYERS"; heads are 64 wide.
    """
    hidden, layers = dimensions(size)
    config = config_of(teacher)
    heads = max(1, hidden // 64)
    wider = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    wider |= {"intermediate_size": 4 * hidden, "num_key_value_heads": heads, "head_dim": hidden // heads}
    for name, value in wider.items():
        if hasattr(config, name):
            setattr(config, name, value)
    set_seed(SEED)
    AutoModel.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_of(teacher), local_files_only=True).save_pretrained(folder)
    return folder


def dimensions(size: str) -> tuple[int, int]:
    """Width and layers of "HIDDENxLAYERS".

    Raises:
        ValueError: it is something else, or heads of 64 do not fill the width.
    """
    hidden, layers = map(int, size.split("x"))
    if hidden < 64 or hidden % 64 or layers < 1:
        raise ValueError(size)
    return hidden, layers


def checked_size(text: str) -> str:
    dimensions(text)
    return text


def made_up(folder: Path) -> tuple[Path, Path, Path]:
    """A small random teacher with letter tokens, a smaller student with word tokens, and texts."""
    words = ["the", "cat", "sat", "on", "mat", "and", "river", "ran", "through", "old", "town", "sea", "dogs"]
    letters = [mark + letter for letter in sorted(set("".join(words))) for mark in ("", "##")]
    models = []
    for name, vocabulary, width, layers in (("teacher", letters, 64, 4), ("student", words, 32, 2)):
        tokens = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *vocabulary])}
        size = write_tokenizer(folder / name, WordPiece(tokens, unk_token="[UNK]"), 128)
        config = BertConfig(
            vocab_size=size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=128,
            initializer_range=0.3,  # attention that is not uniform
        )
        set_seed(SEED)
        BertModel(config).save_pretrained(folder / name)
        models.append(folder / name)
    random = np.random.default_rng(SEED)
    lines = [" ".join(random.choice(words, size=random.integers(4, 16))) for _ in range(200)]
    (folder / "texts.txt").write_text("\n".join(lines))
    return models[0], models[1], folder / "texts.txt"


def write_texts(source: Path, target: Path, limit: int) -> None:
    """The first distinct texts of a corpus."""
    texts: dict[str, None] = {}
    for batch in Corpus.open(source).batches(limit):
        texts |= dict.fromkeys(record[0] for record in batch)
        if len(texts) >= limit:
            break
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in islice(texts, limit)))
