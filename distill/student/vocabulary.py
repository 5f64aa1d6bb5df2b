"""A student whose vocabulary is the tokens of a corpus: fewer rows of word embeddings, the same vectors.

A text whose tokens are all kept has the same tokens as before. Besides the tokens of a corpus, these are obligatory:
special and added tokens and those of the configuration; single characters and bytes, so that other texts are split
further instead of becoming unknown; of BPE, all that a kept token is merged from. Load What You Need (arXiv 2010.05609)
cuts multilingual models in this way; skeletoken has code for tokenizers.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from distill.errors import StudentError
from distill.student.cutting import copy_config, rebuild, with_encoder
from distill.student.student import Student
from teacher_cache.teachers.token_table import TokenTable, unknown_id

BATCH = 1024
MODELS = ("WordPiece", "BPE", "Unigram", "WordLevel")


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that a smaller vocabulary keeps.

    Attributes:
        old_ids: `(V',)` int64, the old id of each new one.
        seen: number of different tokens in the corpus.
        obligatory: number of kept tokens that were kept without being among the most frequent.
    """

    old_ids: npt.NDArray[np.int64]
    seen: int
    obligatory: int

    def new_ids(self, size: int) -> npt.NDArray[np.int64]:
        """`(size,)` new id of each old one, -1 for those that are dropped."""
        new = np.full(size, -1, dtype=np.int64)
        new[self.old_ids] = np.arange(len(self.old_ids))
        return new


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each whole text, without truncation, special tokens included."""
    found = tokenizer(list(texts), truncation=False, padding=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = found["input_ids"]
    return ids


def count_tokens(student: Student, batches: Iterable[Sequence[str]]) -> npt.NDArray[np.int64]:
    """`(V,)` occurrences of each token in texts, each with the student's prompt.

    Raises:
        StudentError: the tokenizer is not one of the tokenizers library.
    """
    backend(student)
    counts = np.zeros(len(student.tokenizer), dtype=np.int64)
    for texts in batches:
        ids = token_ids(student.tokenizer, [student.prompt + text for text in texts])
        counts += np.bincount(np.fromiter(chain.from_iterable(ids), dtype=np.int64), minlength=len(counts))
    return counts


def backend(student: Student) -> dict[str, Any]:
    """The content of the student's tokenizer.json."""
    tokenizer: Any = student.tokenizer
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or not hasattr(core, "to_str"):
        raise StudentError(
            f"the vocabulary of {student.name} cannot be cut: {type(tokenizer).__name__} has no tokenizer.json, "
            "expected a tokenizer of the tokenizers library"
        )
    content: dict[str, Any] = json.loads(core.to_str())
    if content["model"].get("type") not in MODELS:
        raise StudentError(
            f"the vocabulary of {student.name} cannot be cut: its tokenizer is of type "
            f"{content['model'].get('type')!r}, expected one of {', '.join(MODELS)}"
        )
    return content


def choose_tokens(student: Student, counts: npt.NDArray[np.int64], keep: int | None = None) -> KeptTokens:
    """The `keep` most frequent tokens with a count above 0, by default all of them, and the obligatory ones.

    Args:
        counts: `(V,)` from `count_tokens`.
    """
    content = backend(student)
    vocabulary = _Vocabulary(content)
    seen = np.flatnonzero(counts)
    # Of equally frequent tokens the one with the lower id, which is often the more frequent one elsewhere too.
    chosen = set(seen[np.argsort(-counts[seen], kind="stable")][:keep].tolist())
    kept = chosen | vocabulary.obligatory() | _configured(student, vocabulary)
    padding = _padding_with_positions(student.encoder)
    if padding is not None:  # RoBERTa counts positions from the padding id, so it must not change
        kept |= {number for number in vocabulary.names if number <= padding}
    kept = vocabulary.with_ancestors(kept)
    # Tokens outside of the model's vocabulary are numbered after it when a tokenizer is loaded.
    order = sorted(kept, key=lambda number: (number not in vocabulary.inner, number))
    return KeptTokens(np.array(order, dtype=np.int64), len(seen), len(kept - chosen))


def cut_vocabulary(student: Student, kept: KeptTokens) -> Student:
    """A student with these tokens only, with copies of the weights; the other one is not changed.

    Raises:
        StudentError: the model has no embedding table of its vocabulary, or more than one.
    """
    encoder: Any = student.encoder
    table = student.word_embeddings
    size = len(student.tokenizer)
    if not isinstance(table, nn.Embedding) or table.num_embeddings <= int(kept.old_ids.max()):
        raise StudentError(
            f"the vocabulary of {student.name} cannot be cut: {type(encoder).__name__} has no embedding table of its "
            f"{size:,} tokens"
        )
    rows = table.weight.detach()[torch.from_numpy(kept.old_ids)]
    if isinstance(encoder, TokenTable):
        tokenizer = _cut_tokenizer(student, kept.new_ids(max(size, table.num_embeddings)))
        return with_encoder(student, TokenTable(rows, unknown_id(tokenizer.backend_tokenizer)), tokenizer)
    name = next(name for name, module in encoder.named_modules() if module is table)
    new = kept.new_ids(max(size, table.num_embeddings))
    config = copy_config(encoder.config)
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if key.endswith("token_id"):
            setattr(text, key, _new_id(value, new))
    text.vocab_size = len(kept.old_ids)
    weights = dict(encoder.state_dict())
    weights[f"{name}.weight"] = rows
    return with_encoder(student, rebuild(encoder, config, weights), _cut_tokenizer(student, new))


def _new_id(value: Any, new: npt.NDArray[np.int64]) -> Any:
    if isinstance(value, list):
        return [_new_id(one, new) for one in value]
    if not isinstance(value, int) or not 0 <= value < len(new) or new[value] < 0:
        return None  # an id without a token
    return int(new[value])


def _cut_tokenizer(student: Student, new: npt.NDArray[np.int64]) -> Any:
    from tokenizers import Tokenizer

    tokenizer: Any = copy.deepcopy(student.tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(cut_content(backend(student), new), ensure_ascii=False))
    return tokenizer


def cut_content(content: Mapping[str, Any], new: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The content of a tokenizer.json with the tokens whose new id is not negative.

    Args:
        new: `(V,)` new id of each old one.
    """
    cut = copy.deepcopy(dict(content))
    model = cut["model"]
    if isinstance(model["vocab"], dict):
        listed = sorted(model["vocab"].items(), key=lambda item: item[1])
        model["vocab"] = {token: int(new[number]) for token, number in listed if new[number] >= 0}
    else:
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if new[number] >= 0]
        if model.get("unk_id") is not None:
            model["unk_id"] = int(new[model["unk_id"]])
    if "merges" in model:
        vocabulary = model["vocab"]
        kept = ((left, right, _merged(left, right, model)) for left, right in map(_pair, model["merges"]))
        model["merges"] = [[left, right] for left, right, made in kept if {left, right, made} <= vocabulary.keys()]
    cut["added_tokens"] = [
        token | {"id": int(new[token["id"]])} for token in content["added_tokens"] if new[token["id"]] >= 0
    ]
    if cut.get("padding"):
        cut["padding"]["pad_id"] = int(new[cut["padding"]["pad_id"]])
    for processor in _processors(cut.get("post_processor")):
        for name in ("sep", "cls"):
            if name in processor:
                processor[name] = [processor[name][0], int(new[processor[name][1]])]
        for special in (processor.get("special_tokens") or {}).values():
            special["ids"] = [int(new[number]) for number in special["ids"]]
    return cut


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """Both parts of a merge, which older files store as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _merged(left: str, right: str, model: Mapping[str, Any]) -> str:
    """The token that two are merged into."""
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _processors(processor: Mapping[str, Any] | None) -> Iterator[Any]:
    """A post-processor, and those that a sequence has."""
    if processor is not None:
        yield processor
        for inner in processor.get("processors", ()):
            yield from _processors(inner)


class _Vocabulary:
    """The tokens of a tokenizer.json.

    Attributes:
        ids: token -> id, added tokens included.
        names: id -> token.
        inner: ids of the model's own vocabulary.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._model = content["model"]
        listed = self._model["vocab"]
        own = listed if isinstance(listed, dict) else {entry[0]: number for number, entry in enumerate(listed)}
        self.inner = frozenset(own.values())
        self.ids = dict(own) | {token["content"]: token["id"] for token in content["added_tokens"]}
        self.names = {number: token for token, number in self.ids.items()}

    def obligatory(self) -> set[int]:
        """Ids of added tokens, tokens that a part of the tokenizer names, single characters and bytes."""
        kept = {token["id"] for token in self._content["added_tokens"]}
        kept |= {self.ids[token] for token in self._named() if token in self.ids}
        prefixes = tuple(filter(None, (self._model.get("continuing_subword_prefix"),)))
        suffix = self._model.get("end_of_word_suffix") or ""
        if self._model["type"] != "WordLevel":
            for token, number in self.ids.items():
                plain = token.removesuffix(suffix) or token
                for prefix in prefixes:
                    plain = plain.removeprefix(prefix) or plain
                if len(plain) == 1 or _is_byte(token):
                    kept.add(number)
        if self._model["type"] == "Unigram":
            # An unknown character costs 10 more than the least probable piece.
            kept.add(min(range(len(self._model["vocab"])), key=lambda number: self._model["vocab"][number][1]))
            if self._model.get("unk_id") is not None:
                kept.add(self._model["unk_id"])
        return kept

    def _named(self) -> Iterator[str]:
        if self._model.get("unk_token"):
            yield self._model["unk_token"]
        if self._content.get("padding"):
            yield self._content["padding"]["pad_token"]
        for processor in _processors(self._content.get("post_processor")):
            yield from (processor[name][0] for name in ("sep", "cls") if name in processor)
            for special in (processor.get("special_tokens") or {}).values():
                yield from special["tokens"]

    def with_ancestors(self, kept: set[int]) -> set[int]:
        """The tokens and all that they are merged from, in every way."""
        parts: dict[int, list[int]] = {}
        for left, right in map(_pair, self._model.get("merges", ())):
            made = self.ids.get(_merged(left, right, self._model))
            if made is not None and left in self.ids and right in self.ids:
                parts.setdefault(made, []).extend((self.ids[left], self.ids[right]))
        found, waiting = set(kept), list(kept)
        while waiting:
            new = [part for part in parts.get(waiting.pop(), ()) if part not in found]
            found.update(new)
            waiting += new
        return found


def _is_byte(token: str) -> bool:
    """Whether a token is one byte, such as <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _configured(student: Student, vocabulary: _Vocabulary) -> set[int]:
    """Ids of tokens that the configuration or the tokenizer names."""
    encoder: Any = student.encoder
    values = [value for key, value in encoder.config.get_text_config().to_dict().items() if key.endswith("token_id")]
    listed = [one for value in values for one in (value if isinstance(value, list) else [value])]
    tokenizer: Any = student.tokenizer
    return {one for one in [*listed, *tokenizer.all_special_ids] if one in vocabulary.names}


def _padding_with_positions(encoder: nn.Module) -> int | None:
    """The padding id if a table besides the word embeddings has one, as RoBERTa's table of positions."""
    table = encoder.get_input_embeddings()  # type: ignore[operator]
    others = (module for module in encoder.modules() if isinstance(module, nn.Embedding) and module is not table)
    return next((module.padding_idx for module in others if module.padding_idx is not None), None)
