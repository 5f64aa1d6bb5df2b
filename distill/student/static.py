"""Token vectors of a static student, computed by a model that reads every token of its vocabulary alone (model2vec).

A static student is a table: the vector of a text is the mean of its tokens' rows, so that encoding it costs little more
than tokenizing it. Its rows are the model's vectors of single tokens, reduced by PCA, and weighted by smooth inverse
frequency (SIF; Arora et al., A Simple but Tough-to-Beat Baseline for Sentence Embeddings, ICLR 2017), because a mean
over tokens is otherwise dominated by those that are in every text. The steps are those of model2vec (Tulkens and van
Dongen, 2024), which has no paper.
"""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from distill.errors import ConfigError, StudentError
from distill.student.student import Student
from teacher_cache.teachers.token_table import TokenTable, static_tokenizer, unknown_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tokens in one forward pass, and texts in one call of the tokenizer.
BATCH, CHUNK = 1024, 4096

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]


@torch.inference_mode()
def token_vectors(model: Student, report: Progress = lambda done, total: None) -> Floats:
    """`(V, d)` vectors of every token id alone, between the special tokens that the tokenizer adds to a text.

    Args:
        report: called with the number of tokens done, and of all.
    """
    size = 1 + max(model.tokenizer.get_vocab().values())
    table: Any = model.word_embeddings
    if table is not None and size > table.num_embeddings:
        raise StudentError(
            f"the tokenizer of {model.name} has token ids up to {size - 1}, but the model embeds "
            f"{table.num_embeddings}; expected a model with its own tokenizer"
        )
    opening, closing = _special_ids(model.tokenizer)
    device = next(model.parameters()).device
    vectors = np.empty((size, model.shape.dim), dtype=np.float32)
    model.eval()
    for start in range(0, size, BATCH):
        ids = torch.arange(start, min(start + BATCH, size))[:, None]
        around = [torch.tensor([special]).expand(len(ids), -1) for special in (opening, closing)]
        inputs = torch.cat([around[0].long(), ids, around[1].long()], dim=1).to(device)
        vectors[start : start + len(ids)] = model(inputs, torch.ones_like(inputs))[-1].float().cpu().numpy()
        report(start + len(ids), size)
    return np.nan_to_num(vectors)


def _special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    text = [place for place, is_special in enumerate(special) if not is_special] or [0]
    return ids[: text[0]], ids[text[-1] + 1 :]


def principal_components(vectors: Floats, dims: int) -> tuple[Floats, float]:
    """`(V, dims)` centered projections on the first principal components, and their share of the variance."""
    from sklearn.decomposition import PCA

    pca = PCA(dims, svd_solver="covariance_eigh")
    # Centered first: the solver subtracts the mean from the covariance, where float32 would cancel.
    reduced = pca.fit_transform(vectors - vectors.mean(axis=0))
    return reduced.astype(np.float32), float(pca.explained_variance_ratio_.sum())


def token_counts(tokenizer: "Tokenizer", texts: Iterable[list[str]], size: int) -> npt.NDArray[np.int64]:
    """`(V,)` occurrences of each token id in lists of texts, without special tokens."""
    counts = np.zeros(size, dtype=np.int64)
    for chunk in texts:
        for start in range(0, len(chunk), CHUNK):
            encoded = tokenizer.encode_batch_fast(chunk[start : start + CHUNK], add_special_tokens=False)
            ids = np.fromiter((token for one in encoded for token in one.ids), dtype=np.int64)
            counts += np.bincount(ids, minlength=size)
    return counts


def counted_probabilities(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`(V,)` add-one estimates (count + 1) / (sum + V) of how often a token occurs."""
    found: npt.NDArray[np.float64] = (counts + 1) / (counts.sum() + len(counts))
    return found


def ranked_probabilities(tokenizer: "Tokenizer", size: int) -> npt.NDArray[np.float64]:
    """`(V,)` estimates by Zipf's law, in which a token's rank is its id, as model2vec does.

    Raises:
        ConfigError: the ids are not in the order of frequency. Those of WordPiece vocabularies are, roughly; Unigram
            and byte-pair vocabularies start with special tokens, bytes or characters.
    """
    kind = json.loads(tokenizer.to_str())["model"]["type"]
    if kind != "WordPiece":
        raise ConfigError(
            f"the token ids of a {kind} tokenizer are not in the order of their frequency: give `words` or `cache` to "
            "count tokens, or set `sif` to 0 for equal weights"
        )
    inverse = 1 / np.arange(2, size + 2)
    found: npt.NDArray[np.float64] = inverse / inverse.sum()
    return found


def sif_weights(probabilities: npt.NDArray[np.float64], sif: float) -> Floats:
    """`(V,)` weights sif / (sif + p)."""
    return (sif / (sif + probabilities)).astype(np.float32)


def plain_tokenizer(model: Student) -> "Tokenizer":
    """A copy of a model's tokenizer that neither pads nor truncates.

    Raises:
        StudentError: the model has no fast tokenizer.
    """
    from tokenizers import Tokenizer

    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StudentError(f"{model.name} has no fast tokenizer, which a static student needs")
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def static_student(table: Floats, tokenizer: "Tokenizer", *, max_length: int, name: str) -> Student:
    """A student with these rows; those of special tokens and of the unknown token are set to 0."""
    rows = torch.from_numpy(table).clone()
    unknown = unknown_id(tokenizer)
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    rows[special + ([] if unknown is None else [unknown])] = 0.0
    return Student(
        TokenTable(rows, unknown), static_tokenizer(tokenizer), pooling="mean", max_length=max_length, name=name
    )
