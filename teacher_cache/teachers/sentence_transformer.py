"""A teacher that is a sentence-transformers folder: the library runs its modules, in their order.

Tokenizer, transformer, pooling and dense modules work as in `SentenceTransformer.encode`; batching, counting, cutting
to `dims` and normalizing are done here. Everything after the transformer runs in float32, on token states whose
padding is zeroed, because 0 times NaN is NaN.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import TeacherOptions, TeacherSpec
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.settings import check_pooling, space_from_folder
from teacher_cache.teachers.transformer import FolderTeacher

if TYPE_CHECKING:
    import torch

    from teacher_cache.teachers.batching import Forward, LoadedModel

# Modules whose output width is known. Others need `trust_remote_code`, and their width is checked when loaded.
_KNOWN = frozenset({"Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"})


class SentenceTransformerTeacher(FolderTeacher):
    """A folder with modules.json; pooling, width and normalization are those of its modules by default."""

    @classmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        files = cls.open_folder(options, folder)
        _check_modules(files, options)
        pooling = check_pooling(options)
        space = space_from_folder(
            options,
            files,
            backend="sentence_transformer",
            pooling=pooling or "+".join(files.pooling_modes) or "module",
            normalize=files.module_kinds()[-1:] == ["Normalize"],
            width=_width(files, pooling),
        )
        return TeacherSpec(options=options, space=space, folder=files.path)

    def load(self, dtype: "torch.dtype") -> "LoadedModel":
        from sentence_transformers import SentenceTransformer

        from teacher_cache.teachers.batching import LoadedModel
        from teacher_cache.teachers.linear import prepare_linear_layers
        from teacher_cache.teachers.loading import check_weights, dtype_and_attention, loading, safe_weights

        files, options = self.spec.model_folder, self.spec.options
        # Explicit, because sentence_bert_config.json may set other arguments.
        weights = safe_weights(files.encoder)
        with loading(files.path):
            model = SentenceTransformer(
                str(files.path),
                device=str(self.device),
                local_files_only=True,
                trust_remote_code=options.trust_remote_code,
                model_kwargs=dtype_and_attention(dtype, self.device, options) | weights,
            )
            # The library does not return the loading report: match the weights again, on no device.
            network = model[0].model
            _, info = type(network).from_pretrained(
                files.encoder,
                config=network.config,
                device_map="meta",
                local_files_only=True,
                **weights,
                output_loading_info=True,
            )
            check_weights(files.encoder, info)
            prepare_linear_layers(network, dtype, self.device)
            return LoadedModel(_forward(model.eval(), self.spec), model.tokenizer, network)


def _check_modules(files: ModelFolder, options: TeacherOptions) -> None:
    """Refuse modules that this backend would not run as the library does."""
    kinds = files.module_kinds()
    if kinds[:1] != ["Transformer"]:
        first = kinds[0] if kinds else "no module"
        raise TeacherError(
            f"{files.path} starts with {first}, expected a Transformer: use `backend` transformer, or a Teacher class "
            "(package.module:Class)"
        )
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown and not options.trust_remote_code:
        raise TeacherError(
            f"{files.path} has custom modules ({', '.join(unknown)}), expected {', '.join(sorted(_KNOWN))}: read their "
            "code, then allow it with `trust_remote_code`"
        )
    for index, kind in enumerate(kinds):
        activation = str(files.module_config(index).get("activation_function", "torch."))
        # The library would silently use Tanh instead.
        if kind == "Dense" and not activation.startswith("torch.") and not options.trust_remote_code:
            raise TeacherError(
                f"the Dense module of {files.path} has the activation {activation}, expected one of torch: read its "
                "code, then allow it with `trust_remote_code`"
            )
    special = sorted({"chat_template", "common", "text"} & set(files.sentence_config.get("processing_kwargs") or {}))
    if "message" in (files.sentence_config.get("modality_config") or {}):
        special.append("message")
    if special:
        raise TeacherError(
            f"sentence_bert_config.json of {files.path} preprocesses texts by {', '.join(special)}, which this backend "
            "does not do: use a Teacher class of your own (`backend` package.module:Class)"
        )


def _width(files: ModelFolder, pooling: str | None) -> int:
    """Width of the vectors after the last module."""
    width = files.hidden_size
    for index, kind in enumerate(files.module_kinds()):
        config = files.module_config(index)
        if kind == "Pooling":
            base = config.get("embedding_dimension", config.get("word_embedding_dimension", width))
            width = base * (1 if pooling else max(1, len(files.pooling_modes)))
        elif kind == "Dense" and config.get("module_input_name", "sentence_embedding") == "sentence_embedding":
            if config.get("in_features", width) != width:
                raise TeacherError(
                    f"the Dense module of {files.path} expects vectors of width {config['in_features']}, but pooling "
                    f"returns {width}: leave out `pooling`"
                )
            width = config.get("out_features", width)
    return int(width)


def _forward(model: Any, spec: TeacherSpec) -> "Forward":
    from teacher_cache.teachers.pooling import needs_position_ids, position_ids

    modules = [module for _, module in model.named_children()]
    if type(modules[-1]).__name__ == "Normalize":
        del modules[-1]  # BatchedEncoder normalizes, after the cut to `dims`
    encoder, rest = modules[0], [_with_pooling(module, spec).float() for module in modules[1:]]
    with_positions = needs_position_ids(encoder.model, spec.space.padding_side)
    # Read by poolings that exclude the prompt.
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
    """`module`, or if it is a Pooling a copy with the pooling of the options."""
    if spec.options.pooling is None or type(module).__name__ != "Pooling":
        return module
    from sentence_transformers.sentence_transformer.modules import Pooling

    mode = "lasttoken" if spec.options.pooling == "last_token" else spec.options.pooling
    return Pooling(module.embedding_dimension, mode, include_prompt=module.include_prompt)
