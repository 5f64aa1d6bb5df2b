"""Tiny teachers of the real classes with random weights, written as model folders."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

WIDTH = 16
_WORDS = ["the", "cat", "sat", "on", "mat", "and", "a", "river", "ran", "through", "old", "town", "sea", "dogs"]


def write_tokenizer(folder: Path, *, bos: str | None, eos: str | None, pad: str, max_length: int) -> int:
    """Write a tokenizer of words, in which pad is id 1 as in RoBERTa; returns the vocabulary size."""
    names = ["[UNK]", pad, *(name for name in (bos, eos) if name and name != pad), *_WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = " ".join(name for name in (bos, "$A", eos) if name)
    specials = [(name, vocab[name]) for name in dict.fromkeys((bos, eos)) if name]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    named = {k: v for k, v in {"cls_token": bos, "sep_token": eos, "eos_token": eos}.items() if v}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[UNK]", pad_token=pad, model_max_length=max_length, **named
    )
    tokenizer.save_pretrained(folder)
    return len(vocab)


def write_bert(folder: Path, *, seed: int = 0) -> Path:
    size = write_tokenizer(folder, bos="[CLS]", eos="[SEP]", pad="[PAD]", max_length=64)
    return _write(folder, BertModel, BertConfig(**_sizes(size, 64), pad_token_id=1), seed)


def write_xlm_roberta(folder: Path, *, seed: int = 0) -> Path:
    size = write_tokenizer(folder, bos="<s>", eos="</s>", pad="<pad>", max_length=10**30)
    return _write(folder, XLMRobertaModel, XLMRobertaConfig(**_sizes(size, 66), pad_token_id=1), seed)


def write_mpnet(folder: Path, *, seed: int = 0) -> Path:
    size = write_tokenizer(folder, bos="<s>", eos="</s>", pad="<pad>", max_length=64)
    return _write(folder, MPNetModel, MPNetConfig(**_sizes(size, 66), pad_token_id=1), seed)


def write_qwen3(folder: Path, *, seed: int = 0) -> Path:
    # As in the real tokenizer, the end token is also the padding token.
    size = write_tokenizer(folder, bos=None, eos="<|end|>", pad="<|end|>", max_length=131072)
    return _write(folder, Qwen3Model, Qwen3Config(**_sizes(size, 128), num_key_value_heads=1, head_dim=8), seed)


def write_sentence_transformer(folder: Path, *, dense: int = 12, include_prompt: bool = True) -> Path:
    """Write a BERT with mean pooling, a Dense module and Normalize, saved by sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    write_bert(folder / "bert")
    torch.manual_seed(1)
    modules = [
        Transformer(str(folder / "bert")),
        Pooling(WIDTH, "mean", include_prompt=include_prompt),
        Dense(WIDTH, dense, activation_function=torch.nn.Tanh()),
        Normalize(),
    ]
    prompts = {"query": "the river ", "document": ""}
    model = SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    model.max_seq_length = 40
    model.save(str(folder / "st"), create_model_card=False)
    return folder / "st"


def write_models(root: Path) -> dict[str, Path]:
    """Write one model folder of each kind; returns them by name."""
    return {
        "bert": write_bert(root / "tiny-bert"),
        "xlm-roberta": write_xlm_roberta(root / "tiny-xlm-roberta"),
        "mpnet": write_mpnet(root / "tiny-mpnet"),
        "qwen3": write_qwen3(root / "tiny-qwen3"),
        "st": write_sentence_transformer(root / "tiny"),
    }


def edit_json(path: Path, **change: object) -> None:
    """Set fields of a JSON object in place."""
    record = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**record, **change}))


def _sizes(vocabulary: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": positions,
        "initializer_range": 0.5,
    }


def _write(folder: Path, model_class: type[PreTrainedModel], config: object, seed: int) -> Path:
    torch.manual_seed(seed)
    model_class(config).save_pretrained(folder)
    return folder
