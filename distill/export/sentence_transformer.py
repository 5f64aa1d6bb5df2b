"""Export as a sentence-transformers folder: Transformer, Pooling, optionally the learned projection, Normalize.

A static student becomes a StaticEmbedding (`distill.export.static`).
The folder is loaded and its vectors are compared with the trained student's before it gets its final name.
"""

import inspect
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distill.errors import ExportError
from distill.export.static import write_static
from distill.student.student import Student
from teacher_cache.errors import TeacherError
from teacher_cache.teachers.loading import loading

# Smallest cosine between an exported and a trained vector; float32 kernels differ by less than 1e-6.
MIN_COSINE = 0.9999
LENGTH_TOLERANCE = 0.01
POOLING_MODES = {"mean": "mean", "cls": "cls", "last_token": "lasttoken"}


def export(
    student: Student, projection: torch.Tensor | None, normalize: bool, folder: Path, texts: Sequence[str]
) -> float:
    """Write a sentence-transformers folder; an older one is replaced only if the new one passes the check.

    Args:
        projection: `(d_T, d_s)` weight of a bias-free Dense module, None to leave it out.
        texts: about 50, on which the loaded folder must reproduce the trained student's vectors.

    Returns:
        The smallest cosine between an exported and a trained vector.

    Raises:
        ExportError: a vector differs; nothing is replaced, and the new folder is kept as `NAME.writing`.
    """
    from sentence_transformers import SentenceTransformer

    writing = folder.with_name(f"{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        with loading(writing):
            write = write_static if student.is_static else _write
            write(student, projection, normalize, writing)
            # safetensors writes files that only their owner can read.
            for weights in writing.rglob("*.safetensors"):
                weights.chmod((writing / "modules.json").stat().st_mode)
            loaded = SentenceTransformer(str(writing), device="cpu", local_files_only=True)
    except TeacherError as error:
        raise ExportError(f"the exported student cannot be loaded: {error}") from error
    exported = np.asarray(loaded.encode(list(texts), convert_to_numpy=True, show_progress_bar=False))
    trained = expected_vectors(student, projection, normalize, texts)
    lengths = np.linalg.norm(exported, axis=1), np.linalg.norm(trained, axis=1)
    # A text without a known token has no direction in a static student; its vectors must both be 0.
    products = np.maximum(lengths[0] * lengths[1], 1e-12)
    cosines = np.where(lengths[0] + lengths[1] == 0, 1.0, (exported * trained).sum(axis=1) / products)
    worst, same_length = float(cosines.min()), np.allclose(*lengths, rtol=LENGTH_TOLERANCE)
    if not (worst >= MIN_COSINE and same_length):
        raise ExportError(
            f"the exported student has other vectors than the trained one: smallest cosine {worst:.6f} "
            f"over {len(texts)} texts, expected at least {MIN_COSINE}, lengths "
            f"{'equal' if same_length else 'differ'}; see {writing}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)
    return worst


def expected_vectors(
    student: Student, projection: torch.Tensor | None, normalize: bool, texts: Sequence[str]
) -> npt.NDArray[np.float32]:
    """The vectors of `texts` that the exported folder must reproduce, from the trained student."""
    vectors = student.encode(texts, projection=projection)
    return torch.nn.functional.normalize(torch.from_numpy(vectors), dim=-1).numpy() if normalize else vectors


def _write(student: Student, projection: torch.Tensor | None, normalize: bool, folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    encoder = folder.with_name(f"{folder.name}.encoder")
    shutil.rmtree(encoder, ignore_errors=True)
    student.save_encoder(encoder)
    # A pooler that the student was trained without would be loaded with random weights.
    optional_pooler = "add_pooling_layer" in inspect.signature(type(student.encoder)).parameters
    options = {"add_pooling_layer": False} if optional_pooler else {}
    modules: list[Any] = [
        Transformer(str(encoder), max_seq_length=student.max_length, model_kwargs=options),
        Pooling(student.shape.dim, POOLING_MODES[student.pooling]),
    ]
    if projection is not None:
        width, dim = projection.shape
        dense = Dense(dim, width, bias=False, activation_function=None)
        dense.linear.weight.data.copy_(projection.detach().float().cpu())
        modules.append(dense)
    if normalize:
        modules.append(Normalize())
    prompts = {"prompts": {"default": student.prompt}, "default_prompt_name": "default"} if student.prompt else {}
    model = SentenceTransformer(modules=modules, device="cpu", **prompts)
    model.save_pretrained(str(folder), create_model_card=False)
    if options:  # the library reads this key but does not write it
        path = folder / "sentence_bert_config.json"
        record = json.loads(path.read_text(encoding="utf-8")) | {"model_args": options}
        path.write_text(json.dumps(record, indent=2), encoding="utf-8")
    shutil.rmtree(encoder)
