"""Teachers with a model folder, and the plain transformers encoder: AutoModel, then pooling by the attention mask."""

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.families import find_family
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.settings import check_pooling, space_from_folder
from teacher_cache.tokens.request import TokenShape

if TYPE_CHECKING:
    import torch

    from teacher_cache.teachers.batching import Forward, LoadedModel

# Modules of a sentence-transformers folder that this backend replaces.
_COVERED = frozenset({"Transformer", "StaticEmbedding", "Pooling", "Normalize"})


class FolderTeacher(Teacher):
    """A teacher with a model folder; a subclass resolves it and loads its forward pass."""

    checks_padding = True  # at the start, that padding does not change a vector

    @classmethod
    def open_folder(cls, options: TeacherOptions, folder: Path | None) -> ModelFolder:
        """The checked files of the model."""
        if folder is None:
            raise TeacherError(f"{cls.__name__} needs a model folder, but {options.model} is none")
        return ModelFolder.open(folder)

    @classmethod
    def token_shape(cls, spec: TeacherSpec) -> TokenShape:
        return spec.model_folder.token_shape()

    def __init__(self, spec: TeacherSpec) -> None:
        from teacher_cache.teachers.batching import BatchedEncoder
        from teacher_cache.teachers.loading import choose_device

        self.spec = spec
        self.space = spec.space
        self.device = choose_device(spec.options.device)
        self._encoder = BatchedEncoder(
            spec.space,
            self.device,
            self.load,
            spec.options.batch_tokens,
            spec.request,
            check_padding=self.checks_padding,
        )

    @abstractmethod
    def load(self, dtype: "torch.dtype") -> "LoadedModel":
        """The forward pass in `dtype`; called again with float32 if `dtype` overflows."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        return self._encoder.encode_counted(texts)

    @property
    def network(self) -> "torch.nn.Module | None":
        return self._encoder.network


class TransformerTeacher(FolderTeacher):
    """Any encoder or decoder that AutoModel loads.

    By default pooling is that of the folder or the family, otherwise last_token for decoders and mean for encoders.
    Vectors have unit length unless the family or the options say otherwise.
    """

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        files = cls.open_folder(options, folder)
        if files.config.get("is_encoder_decoder"):
            raise TeacherError(
                f"{files.path} is an encoder-decoder model, expected an encoder: save its encoder as a "
                "sentence-transformers folder"
            )
        unsupported = [kind for kind in files.module_kinds() if kind not in _COVERED]
        if unsupported or files.sentence_config.get("do_lower_case"):
            raise TeacherError(
                f"{files.path} needs {', '.join(unsupported) or 'lower-casing'}, which the transformer backend does "
                "not do: use `backend` sentence_transformer, or a model of Transformer, Pooling and Normalize only"
            )
        family = find_family(files.label)
        normalize = family.normalize if family else True
        if files.is_static:
            if check_pooling(options) not in (None, "mean"):
                raise TeacherError(
                    f"`pooling` is {options.pooling}, but {files.path} is a static model, whose vectors are means"
                )
            # As its modules, because this backend is the default for it. No product gets faster in bfloat16.
            normalize = files.module_kinds()[-1] == "Normalize"
            options = replace(options, dtype="float32") if options.dtype == "auto" else options
        space = space_from_folder(
            options,
            files,
            backend="transformer",
            pooling=check_pooling(options) or _default_pooling(files),
            normalize=normalize,
            width=files.hidden_size,
        )
        return TeacherSpec(options=options, space=space, folder=files.path)

    def load(self, dtype: "torch.dtype") -> "LoadedModel":
        from teacher_cache.teachers import load_tokenizer
        from teacher_cache.teachers.batching import LoadedModel

        tokenizer = load_tokenizer(self.spec)
        network = self.load_network(dtype)
        return LoadedModel(_forward(network, self.space.pooling, self.space.padding_side), tokenizer, network)

    def load_network(self, dtype: "torch.dtype") -> Any:
        """The transformers model, ready for inference in `dtype`."""
        from teacher_cache.teachers.loading import load_encoder

        return load_encoder(self.spec.model_folder, dtype, self.device, self.spec.options)


def _default_pooling(files: ModelFolder) -> str:
    if files.pooling_modes:
        return "+".join(files.pooling_modes)
    if family := find_family(files.label):
        return family.pooling
    return "last_token" if files.is_causal else "mean"


def _forward(model: Any, pooling: str, padding_side: str) -> "Forward":
    from teacher_cache.teachers.pooling import needs_position_ids, pool, position_ids

    accepted = {"input_ids", "attention_mask", *inspect.signature(model.forward).parameters}
    with_positions = needs_position_ids(model, padding_side)

    def forward(batch: "dict[str, torch.Tensor]") -> "torch.Tensor":
        inputs = {name: tensor for name, tensor in batch.items() if name in accepted}
        if with_positions:
            inputs["position_ids"] = position_ids(batch["attention_mask"])
        return pool(model(**inputs).last_hidden_state, batch["attention_mask"], pooling)

    return forward
