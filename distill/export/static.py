"""The files of a static student: a StaticEmbedding folder of sentence-transformers that model2vec reads too."""

import json
from pathlib import Path
from typing import Any

import torch

from distill.student.student import Student
from teacher_cache.teachers.folder import UNLIMITED


def write_static(student: Student, projection: torch.Tensor | None, normalize: bool, folder: Path) -> None:
    """Write the table, the tokenizer and the configurations of both libraries.

    Args:
        projection: `(d_T, d_s)`, multiplied into the table: the mean of projected rows is the projected mean.
    """
    from safetensors.torch import save_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from tokenizers import Tokenizer

    embeddings: Any = student.word_embeddings
    rows = embeddings.weight.detach().float().cpu()
    if projection is not None:
        rows = rows @ projection.detach().float().cpu().T
    tokenizer = Tokenizer.from_str(student.tokenizer.backend_tokenizer.to_str())
    limited = student.max_length < UNLIMITED
    # Both libraries truncate as the tokenizer's file says; the state of the last call in training is not in it.
    tokenizer.no_padding()
    if limited:
        tokenizer.enable_truncation(student.max_length)
    else:
        tokenizer.no_truncation()
    modules: list[Any] = [StaticEmbedding(tokenizer, embedding_weights=rows), *([Normalize()] if normalize else [])]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)
    # The name that both libraries know, and the configuration without which model2vec would not normalize.
    save_file({"embeddings": rows.contiguous()}, folder / "model.safetensors")
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "tokenizer_name": student.name,
        "hidden_dim": rows.shape[1],
        "seq_length": UNLIMITED,
        "max_length": student.max_length if limited else None,
        "normalize": normalize,
        "embedding_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
