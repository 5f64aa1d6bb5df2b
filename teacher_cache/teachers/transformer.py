"""A teacher that is a plain transformers encoder: AutoModel, then pooling by the attention mask."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.families import family_of
from teacher_cache.teachers.folder import ModelFolder, has_safetensors
from teacher_cache.teachers.sentence_transformer import saved_pooling
from teacher_cache.teachers.settings import chosen_pooling, space_from_folder
from teacher_cache.tokens.request import TokenShape

if TYPE_CHECKING:
    import torch

    from teacher_cache.teachers.batching import Forward, LoadedModel

# Modules of a sentence-transformers folder that this back end does the work of.
_COVERED = frozenset({"Transformer", "Pooling", "Normalize"})


class TransformerTeacher(Teacher):
    """Any encoder or decoder that AutoModel loads.

    Pooling that nobody names is last_token for decoders and mean otherwise; vectors have unit length unless
    the family or the user says no.
    """

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        if folder is None:
            raise TeacherError(f"{options.model} is no model folder, which the transformer back end needs")
        files = ModelFolder.open(folder)
        if files.config.get("is_encoder_decoder"):
            raise TeacherError(
                f"{files.label} is an encoder-decoder: save its encoder as a sentence-transformers folder"
            )
        left_out = [kind for kind in files.module_kinds() if kind not in _COVERED]
        if left_out or files.sentence_config.get("do_lower_case"):
            raise TeacherError(
                f"{files.label} needs {', '.join(left_out) or 'lower-casing'}, which the back end "
                "transformer would leave out: use --backend sentence_transformer"
            )
        family = family_of(files.label)
        normalize = family.normalize if family else True
        pooling = chosen_pooling(options) or _pooling_of(files)
        space = space_from_folder(
            options,
            files,
            backend="transformer",
            pooling=pooling,
            normalize=normalize if options.normalize is None else options.normalize,
            width=files.hidden_size,
        )
        return TeacherSpec(options=options, space=space, folder=files.path)

    @classmethod
    def token_shape(cls, spec: TeacherSpec) -> TokenShape:
        if spec.folder is None:
            raise TeacherError(f"{spec.space.teacher} has no folder to read its sizes from")
        return ModelFolder(spec.folder).token_shape()

    def __init__(self, spec: TeacherSpec) -> None:
        from teacher_cache.teachers.batching import BatchedEncoder
        from teacher_cache.teachers.loading import choose_device

        if spec.folder is None:
            raise TeacherError(f"{spec.space.teacher} has no folder to load from")
        self.space = spec.space
        device = choose_device(spec.options.device)
        load = loader(spec, ModelFolder(spec.folder).encoder, device, load_encoder)
        self._encoder = BatchedEncoder(spec.space, device, load, spec.options.batch_tokens, spec.request)

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        return self._encoder.encode_counted(texts)

    @property
    def network(self) -> "torch.nn.Module | None":
        """The transformers model that it runs."""
        return self._encoder.network


def _pooling_of(files: ModelFolder) -> str:
    saved = saved_pooling(files)
    family = family_of(files.label)
    if saved:
        return saved
    if family:
        return family.pooling
    return "last_token" if files.is_causal else "mean"


def loader(
    spec: TeacherSpec, folder: Path, device: "torch.device", network: Callable[..., Any]
) -> Callable[["torch.dtype"], "LoadedModel"]:
    """What a `BatchedEncoder` loads the teacher with.

    Args:
        network: gives the transformers model, of the arguments of `load_encoder`.
    """

    def load(dtype: "torch.dtype") -> "LoadedModel":
        from transformers import AutoTokenizer

        from teacher_cache.teachers.batching import LoadedModel
        from teacher_cache.teachers.loading import loading

        with loading(folder):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=spec.options.trust_remote_code
            )
        model = network(folder, dtype, device, spec.options)
        return LoadedModel(_forward(model, spec.space.pooling, spec.space.padding_side), tokenizer, model)

    return load


def load_encoder(folder: Path, dtype: "torch.dtype", device: "torch.device", options: TeacherOptions) -> Any:
    """The transformers model in `folder`, on `device`, in `dtype`, ready for inference.

    Raises:
        TeacherError: it cannot be loaded, or its checkpoint lacks weights.
    """
    from transformers import AutoConfig, AutoModel

    from teacher_cache.teachers.bfloat16 import rounds_linear_layers
    from teacher_cache.teachers.loading import loading, require_all_weights

    rounds = rounds_linear_layers(dtype, device)
    with loading(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=options.trust_remote_code)
        model, info = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype="auto" if rounds else dtype,  # never more than the file takes
            local_files_only=True,
            use_safetensors=has_safetensors(folder),
            weights_only=True,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            **encoder_arguments(config, options),
        )
        require_all_weights(folder, info)
        return ready_encoder(model, dtype, device)


def encoder_arguments(config: Any, options: TeacherOptions) -> dict[str, Any]:
    """What `AutoModel` is given besides its configuration."""
    chosen = options.attn_implementation
    return without_pooler(config) | ({} if chosen is None else {"attn_implementation": chosen})


def ready_encoder(model: Any, dtype: "torch.dtype", device: "torch.device") -> Any:
    """A transformers model ready to be asked in `dtype` on `device`."""
    from teacher_cache.teachers.bfloat16 import settle_linear_layers

    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    settle_linear_layers(model, dtype, device)
    return model.to(device).eval()


def without_pooler(config: Any) -> dict[str, Any]:
    """What `AutoModel` is given so that a model has no pooler: nobody reads it, and many checkpoints lack its weights.

    Args:
        config: transformers' own; empty where its model has no such switch.
    """
    from transformers import MODEL_MAPPING

    model: Any = MODEL_MAPPING.get(type(config), None)
    has_switch = isinstance(model, type) and "add_pooling_layer" in inspect.signature(model).parameters
    return {"add_pooling_layer": False} if has_switch else {}


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
