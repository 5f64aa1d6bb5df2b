"""Students and teachers of real sizes with random weights, and random teacher outputs, to measure costs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distill.config import StudentConfig
from distill.student.shapes import find_shape, shape_config
from teacher_cache.building.workers import EncodedBatches, Workers
from teacher_cache.teachers.base import Encoded, TeacherSpec
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.loading import loading, pooler_arguments, prepare_encoder
from teacher_cache.teachers.token_offsets import tokenize_with_offsets
from teacher_cache.teachers.transformer import TransformerTeacher
from teacher_cache.tokens.request import TextTokens, TokenRequest

# `SyntheticTeacher` as `TeacherOptions.backend`.
BACKEND = "distill.bench.synthetic:SyntheticTeacher"
SEED = 42
# Token states are slices of this many normal numbers: drawing each one would take longer than training on it.
DRAWN = 2**22


def model_config(name: str) -> Any:
    """transformers' configuration of a known shape or a model folder.

    Raises:
        StudentError: an unknown shape.
        TeacherError: the folder is not a model.
    """
    from transformers import AutoConfig

    if Path(name).is_dir():
        return AutoConfig.from_pretrained(ModelFolder.open(Path(name)).encoder, local_files_only=True)
    return shape_config(name)


def write_student(name: str, folder: Path) -> StudentConfig:
    """Write a student folder with random weights of a known shape and a tokenizer of synthetic words.

    Raises:
        StudentError: an unknown shape.
    """
    from transformers import AutoModel, set_seed

    shape, config = find_shape(name), shape_config(name)
    set_seed(SEED)
    with loading(folder):  # hides progress bars
        AutoModel.from_config(config).save_pretrained(folder)
    longest = min(shape.max_length, shape.positions)
    write_tokenizer(folder, _words(int(config.vocab_size), int(config.pad_token_id or 0)), longest)
    return StudentConfig(str(folder), pooling=shape.pooling)


def write_teacher(config: Any, tokenizer: Any, folder: Path) -> Path:
    """Write the folder of a `SyntheticTeacher`: configuration and tokenizer, no weights."""
    from safetensors.torch import save_file

    config.vocab_size = max(config.vocab_size, len(tokenizer))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def _words(size: int, pad: int) -> Any:
    """A tokenizer model of `size` words, w0, w1, ..., BERT's special tokens included."""
    from tokenizers.models import WordLevel

    names = ["[UNK]", "[CLS]", "[SEP]"]
    names.insert(min(pad, len(names)), "[PAD]")
    names += [f"w{number}" for number in range(size - len(names))]
    return WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")


def write_tokenizer(folder: Path, model: Any, max_length: int) -> int:
    """Write a whitespace tokenizer with BERT's special tokens around a text; returns its vocabulary size.

    Args:
        model: of the `tokenizers` library, with [PAD], [UNK], [CLS] and [SEP] in its vocabulary.
    """
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, core.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=max_length,
    ).save_pretrained(folder)
    return int(core.get_vocab_size())


class SyntheticTeacher(TransformerTeacher):
    """A transformers model with random weights, of the sizes in its folder's config.json."""

    @classmethod
    def resolve(cls, options: Any, folder: Path | None) -> TeacherSpec:
        spec = super().resolve(options, folder)
        return replace(spec, space=replace(spec.space, backend=BACKEND))

    checks_padding = False  # with random weights, padding changes vectors in half precision

    def load_network(self, dtype: torch.dtype) -> Any:
        """A network with random weights of the sizes in config.json."""
        from transformers import AutoConfig, AutoModel, set_seed

        set_seed(SEED)
        config = AutoConfig.from_pretrained(self.spec.model_folder.encoder, local_files_only=True)
        attention = self.spec.options.attn_implementation
        chosen = {} if attention is None else {"attn_implementation": attention}
        with torch.device(self.device):
            network = AutoModel.from_config(config, dtype=dtype, **chosen, **pooler_arguments(config))
        return prepare_encoder(network, dtype, self.device)


class SyntheticOutputs(Workers):
    """Random vectors, token states and attention in place of a teacher."""

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        from transformers import AutoTokenizer

        folder = spec.model_folder
        tokenizer = AutoTokenizer.from_pretrained(folder.encoder, local_files_only=True)
        width = 0 if spec.request is None else folder.token_shape().width
        random = _RandomOutputs(tokenizer, spec, width)
        for number, texts in enumerate(batches):
            yield number, random.encode(texts)


class _RandomOutputs:
    def __init__(self, tokenizer: Any, spec: TeacherSpec, width: int) -> None:
        self.tokenizer, self.space, self.request, self.width = tokenizer, spec.space, spec.request, width
        self.random = np.random.default_rng(SEED)
        self.numbers = self.random.standard_normal(DRAWN, dtype=np.float32)

    def encode(self, texts: Sequence[str]) -> Encoded:
        vectors = self.random.standard_normal((len(texts), self.space.dims), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        pieces = tokenize_with_offsets(
            self.tokenizer, texts, prompt=self.space.prompt, max_length=self.space.max_length
        )
        none = np.zeros(len(texts), dtype=np.bool_)
        counts = np.array([len(one) for one in pieces], dtype=np.int32)
        tokens = None if self.request is None else [self._tokens(one, self.request) for one in pieces]
        return Encoded(vectors, counts, none, none.copy(), tokens)

    def _tokens(self, pieces: npt.NDArray[np.int32], request: TokenRequest) -> TextTokens:
        count = len(pieces)
        start = int(self.random.integers(DRAWN))
        states = self.numbers.take(np.arange(start, start + count * self.width), mode="wrap")
        importance = attention = None
        if request.attention is not None:
            attention = self.random.random((len(request.attention), count, count), dtype=np.float32)
            attention /= attention.sum(axis=2, keepdims=True)
            importance = self.random.random(count, dtype=np.float32)
            importance *= count / importance.sum()
        return TextTokens(states.reshape(count, self.width), pieces, importance, attention)
