"""A teacher that is a sentence-transformers folder: its own modules do the work, in their order.

Text goes through the folder's tokenizer, transformer, pooling and dense modules as in
`SentenceTransformer.encode`; batching, counting, cutting to width and unit length are ours. Everything after
the transformer runs in float32, and padding is zeroed before it, since 0 times NaN is NaN.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.folder import ModelFolder, has_safetensors
from teacher_cache.teachers.settings import chosen_pooling, space_from_folder
from teacher_cache.tokens.request import TokenShape

if TYPE_CHECKING:
    import torch

    from teacher_cache.teachers.batching import Forward, LoadedModel

# Modules whose effect on the width is known. Others need trust_remote_code, and are checked when loaded.
_KNOWN = frozenset({"Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"})

# In the order in which sentence-transformers concatenates them.
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last_token",
}


class SentenceTransformerTeacher(Teacher):
    """A folder with modules.json; unit length as its last module says, pooling and width as its files say."""

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        if folder is None:
            raise TeacherError(f"{options.model} is no folder, which the sentence_transformer back end needs")
        files = ModelFolder.open(folder)
        _require_plain_text_modules(files, options)
        pooling = chosen_pooling(options)
        space = space_from_folder(
            options,
            files,
            backend="sentence_transformer",
            pooling=pooling or saved_pooling(files) or "module",
            normalize=_ends_in_normalize(files) if options.normalize is None else options.normalize,
            width=_width(files, pooling),
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
        load = _loader(spec, ModelFolder(spec.folder), device)
        self._encoder = BatchedEncoder(spec.space, device, load, spec.options.batch_tokens, spec.request)

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        return self._encoder.encode_counted(texts)

    @property
    def network(self) -> "torch.nn.Module | None":
        """The transformers model that it runs."""
        return self._encoder.network


def saved_pooling(files: ModelFolder) -> str | None:
    """The pooling that the folder's Pooling module names, several joined by "+"; None without a module."""
    modes = _saved_modes(files)
    return "+".join(modes) if modes else None


def _saved_modes(files: ModelFolder) -> list[str]:
    kinds = files.module_kinds()
    if "Pooling" not in kinds:
        return []
    config = files.module_config(kinds.index("Pooling"))
    named = config.get("pooling_mode")
    if named is not None:
        modes = [named] if isinstance(named, str) else [str(mode) for mode in named]
        return ["last_token" if mode == "lasttoken" else mode for mode in modes]
    return [mode for flag, mode in _LEGACY_POOLING.items() if config.get(flag)] or ["mean"]


def _ends_in_normalize(files: ModelFolder) -> bool:
    return files.module_kinds()[-1:] == ["Normalize"]


def _require_plain_text_modules(files: ModelFolder, options: TeacherOptions) -> None:
    kinds = files.module_kinds()
    if kinds[:1] != ["Transformer"]:
        first = kinds[0] if kinds else "no module"
        raise TeacherError(
            f"{files.label} starts with {first}, expected a Transformer: use --backend transformer, or one "
            "of your own (package.module:Class)"
        )
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown and not options.trust_remote_code:
        raise TeacherError(
            f"{files.label} has modules this back end does not know ({', '.join(unknown)}): read their code, "
            "then allow them with --trust-remote-code"
        )
    for index, kind in enumerate(kinds):
        activation = str(files.module_config(index).get("activation_function", "torch."))
        # The library would put Tanh in its place and go on.
        if kind == "Dense" and not activation.startswith("torch.") and not options.trust_remote_code:
            raise TeacherError(
                f"the Dense module of {files.label} uses {activation}, which is not torch's: read its code, "
                "then allow it with --trust-remote-code"
            )
    special = sorted({"chat_template", "common", "text"} & set(files.sentence_config.get("processing_kwargs") or {}))
    if "message" in (files.sentence_config.get("modality_config") or {}):
        special.append("message")
    if special:
        raise TeacherError(
            f"{files.label} prepares its texts in a way this back end does not follow ({', '.join(special)} "
            "in sentence_bert_config.json): use a back end of your own (package.module:Class)"
        )


def _width(files: ModelFolder, pooling: str | None) -> int:
    """Numbers in a vector after the last module.

    Raises:
        TeacherError: a Dense module does not take what the pooling before it gives.
    """
    width = files.hidden_size
    for index, kind in enumerate(files.module_kinds()):
        config = files.module_config(index)
        if kind == "Pooling":
            base = config.get("embedding_dimension", config.get("word_embedding_dimension", width))
            width = base * (1 if pooling else max(1, len(_saved_modes(files))))
        elif kind == "Dense" and config.get("module_input_name", "sentence_embedding") == "sentence_embedding":
            if config.get("in_features", width) != width:
                raise TeacherError(
                    f"the Dense module of {files.label} takes vectors of {config['in_features']} numbers, "
                    f"but its pooling gives {width}: leave the pooling as the model has it"
                )
            width = config.get("out_features", width)
    return int(width)


def _loader(spec: TeacherSpec, files: ModelFolder, device: "torch.device") -> Callable[["torch.dtype"], "LoadedModel"]:
    def load(dtype: "torch.dtype") -> "LoadedModel":
        from sentence_transformers import SentenceTransformer

        from teacher_cache.teachers.batching import LoadedModel
        from teacher_cache.teachers.bfloat16 import rounds_linear_layers, settle_linear_layers
        from teacher_cache.teachers.loading import loading, require_all_weights

        rounds = rounds_linear_layers(dtype, device)
        # Said outright, as the folder's sentence_bert_config.json may say otherwise.
        weights = {"use_safetensors": has_safetensors(files.encoder), "weights_only": True}
        model_kwargs: dict[str, Any] = {"dtype": "auto" if rounds else dtype, **weights}
        if spec.options.attn_implementation is not None:
            model_kwargs["attn_implementation"] = spec.options.attn_implementation
        with loading(files.path):
            model = SentenceTransformer(
                str(files.path),
                device=str(device),
                local_files_only=True,
                trust_remote_code=spec.options.trust_remote_code,
                model_kwargs=model_kwargs,
            )
            # The library loads without a report: match the names once more, on no device.
            network = model[0].model
            _, info = type(network).from_pretrained(
                files.encoder,
                config=network.config,
                device_map="meta",
                local_files_only=True,
                **weights,
                output_loading_info=True,
            )
            require_all_weights(files.encoder, info)
            settle_linear_layers(network, dtype, device)
            return LoadedModel(_forward(model.eval(), spec), model.tokenizer, network)

    return load


def _forward(model: Any, spec: TeacherSpec) -> "Forward":
    from teacher_cache.teachers.pooling import needs_position_ids, position_ids

    modules = [module for _, module in model.named_children()]
    if type(modules[-1]).__name__ == "Normalize":
        del modules[-1]  # done after the cut to width, or not wanted
    encoder, rest = modules[0], [_with_pooling(module, spec).float() for module in modules[1:]]
    with_positions = needs_position_ids(encoder.model, spec.space.padding_side)
    # Only a pooling that leaves the prompt out reads its length.
    prompt_length = None
    if spec.space.prompt:
        prompt_length = model.preprocess([""], prompt=spec.space.prompt).get("prompt_length")

    def forward(batch: "dict[str, torch.Tensor]") -> "torch.Tensor":
        features: dict[str, Any] = dict(batch)
        mask = batch["attention_mask"]
        if with_positions:
            features["position_ids"] = position_ids(mask)
        if prompt_length is not None:
            features["prompt_length"] = prompt_length
        features = encoder(features)
        if "token_embeddings" in features:
            states = features["token_embeddings"].float()
            features["token_embeddings"] = states.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        for module in rest:
            features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    return forward


def _with_pooling(module: Any, spec: TeacherSpec) -> Any:
    """`module`, or its like with the pooling that the user asked for."""
    if spec.options.pooling is None or type(module).__name__ != "Pooling":
        return module
    from sentence_transformers.sentence_transformer.modules import Pooling

    mode = "lasttoken" if spec.options.pooling == "last_token" else spec.options.pooling
    return Pooling(module.embedding_dimension, mode, include_prompt=module.include_prompt)
