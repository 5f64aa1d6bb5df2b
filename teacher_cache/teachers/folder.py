"""A model folder: configuration, weights and tokenizer files, read without torch.

The digests cover only what changes a vector. Paths and library versions are left out, so that a model that was moved
or downloaded again stays the same teacher.
"""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, Self

from teacher_cache.errors import TeacherError, optional_import
from teacher_cache.storage.files import digest
from teacher_cache.tokens.request import TokenShape

# The record of a run in its folder, and the subfolder of its student.
RUN_RECORD = "run.json"
STUDENT = "final"

# Where and by which version a file was written, and the dtype of the weights (their bytes are hashed).
_NOT_IDENTITY = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"})
_TOKENIZER_PATHS = frozenset({"name_or_path", "_name_or_path", "special_tokens_map_file", "tokenizer_file"})
# Besides tokenizer_config.json.
_TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt"}
)

# Models whose position table starts after the padding id, so that two of its rows are unused.
_ROBERTA_LIKE = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm"}
    | {"xlm-roberta", "xlm-roberta-xl", "xmod"}
)

# Single-file names in order of preference; NAME.index.json lists shards. The second is a pickle, which is loaded with
# torch's weights_only: that creates tensors and runs no code.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

# Modules that have weights.
_WEIGHTED = frozenset({"Transformer", "StaticEmbedding", "Dense", "LayerNorm"})

# Most tokens of a text that a static model without a limit of its own encodes.
UNLIMITED = 10**6

# Pooling flags of older sentence-transformers releases, in the order in which the library concatenates them.
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last_token",
}

# Decoders: only the last token attends to the whole text.
_CAUSAL = frozenset(
    {"gemma", "gemma2", "gpt2", "gpt_neox", "llama", "ministral", "mistral", "mixtral", "olmo2", "opt"}
    | {"phi", "phi3", "qwen2", "qwen3"}
)


@dataclass(frozen=True)
class ModelFolder:
    """A local folder of one encoder; `path` is absolute, symbolic links resolved."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Self:
        """The model folder at `path`, checked."""
        folder = cls(path.expanduser().resolve())
        if not folder.path.is_dir():
            raise TeacherError(f"no folder at {folder.path}: check the path, or give a hub id")
        if not folder.is_static and not (folder.encoder / "config.json").is_file():
            raise TeacherError(
                f"no model in {folder.path}: no {'' if folder.modules else 'modules.json and no '}config.json, "
                "expected a folder written by save_pretrained"
            )
        if (folder.encoder / "adapter_config.json").is_file():
            raise TeacherError(
                f"{folder.path} is an adapter without its base model, expected a whole model: merge them with peft's "
                "merge_and_unload() and save the merged model"
            )
        needed = {folder.encoder} | {
            folder.path / module["path"]
            for module, kind in zip(folder.modules, folder.module_kinds(), strict=True)
            if kind in _WEIGHTED
        }
        for part in folder.parts:
            if not weight_files(part) and part in needed:
                raise TeacherError(f"no weights in {part}: expected {' or '.join(_WEIGHTS)}; save the model again")
        return folder

    @cached_property
    def label(self) -> str:
        """Hub id of a snapshot in the hub's cache, name of the run of a student, otherwise the folder's name."""
        parent = self.path.parent
        if self.path.name == STUDENT and (parent / RUN_RECORD).is_file():
            return parent.name
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent.name.removeprefix("models--").replace("--", "/")
        return self.path.name

    @cached_property
    def revision(self) -> str:
        """Commit of a hub snapshot, "" for other folders."""
        return self.path.name if "/" in self.label else ""

    @cached_property
    def modules(self) -> list[dict[str, Any]]:
        """Entries of modules.json; empty for a plain transformers folder."""
        path = self.path / "modules.json"
        if not path.is_file():
            return []
        modules = json.loads(_read_text(path))
        if not isinstance(modules, list) or not all(
            isinstance(m, dict) and isinstance(m.get("path"), str) and isinstance(m.get("type"), str) for m in modules
        ):
            raise TeacherError(
                f"{path} is damaged, expected a list of modules with path and type: save the model again"
            )
        for module in modules:
            relative = PurePosixPath(module["path"])
            if relative.is_absolute() or ".." in relative.parts:
                raise TeacherError(f"{path} has the module path {module['path']!r}, expected one inside the folder")
        return modules

    def module_kinds(self) -> list[str]:
        """Class names of the modules in order, e.g. `["Transformer", "Pooling", "Normalize"]`."""
        return [module["type"].rsplit(".", 1)[-1] for module in self.modules]

    @property
    def is_static(self) -> bool:
        """Whether it is a table of token vectors, whose mean is the vector of a text."""
        return self.module_kinds()[:1] == ["StaticEmbedding"]

    def module_config(self, index: int) -> dict[str, Any]:
        """config.json of one module; empty when it has none."""
        return self._json(self.path / self.modules[index]["path"] / "config.json")

    @cached_property
    def pooling_modes(self) -> list[str]:
        """Modes that the Pooling module concatenates; empty without such a module."""
        kinds = self.module_kinds()
        if "Pooling" not in kinds:
            return []
        config = self.module_config(kinds.index("Pooling"))
        named = config.get("pooling_mode")
        if named is not None:
            modes = [named] if isinstance(named, str) else [str(mode) for mode in named]
            return ["last_token" if mode == "lasttoken" else mode for mode in modes]
        return [mode for flag, mode in _LEGACY_POOLING.items() if config.get(flag)] or ["mean"]

    @cached_property
    def encoder(self) -> Path:
        """Folder of the transformer: that of the first module, or the folder itself."""
        return self.path / self.modules[0]["path"] if self.modules else self.path

    @cached_property
    def parts(self) -> list[Path]:
        """Folders with files of the model, each once, starting with the encoder's."""
        return list(dict.fromkeys([self.encoder, *(self.path / m["path"] for m in self.modules)]))

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._json(self.encoder / "config.json")

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """Configuration of the text tower of a multimodal model, otherwise the whole configuration."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._json(self.encoder / "tokenizer_config.json")

    @cached_property
    def sentence_config(self) -> dict[str, Any]:
        """sentence_bert_config.json, or the file that older releases name after the architecture."""
        found = sorted(self.encoder.glob("sentence_*_config.json"))
        return self._json(found[0]) if found else {}

    @cached_property
    def usage_config(self) -> dict[str, Any]:
        """config_sentence_transformers.json: prompts, default prompt, truncated width."""
        return self._json(self.path / "config_sentence_transformers.json")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to those before it only."""
        config = self.text_config
        if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
            return False
        architectures = self.config.get("architectures") or [""]
        return self.model_type in _CAUSAL or str(architectures[0]).endswith("ForCausalLM")

    @property
    def hidden_size(self) -> int:
        """Width of the encoder's token states."""
        if self.is_static:
            return self.table_shape[1]
        return self._number("hidden_size", "d_model", "dim", "n_embd")

    def token_shape(self) -> TokenShape:
        """Sizes of the encoder."""
        if self.is_static:
            return TokenShape(width=self.hidden_size, layers=0, heads=1, causal=False)
        layers = self._number("num_hidden_layers", "n_layers", "n_layer", "num_layers")
        heads = self._number("num_attention_heads", "n_heads", "n_head", "num_heads")
        return TokenShape(width=self.hidden_size, layers=layers, heads=heads, causal=self.is_causal)

    @cached_property
    def table_shape(self) -> tuple[int, int]:
        """Rows and width of the table of a static model."""
        with optional_import(f"the static model {self.path}"):
            from safetensors import safe_open
        for file in weight_files(self.encoder):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy") as tensors:
                    for name in {"embeddings", "embedding.weight"} & {*tensors.keys()}:
                        rows, width = tensors.get_slice(name).get_shape()
                        return int(rows), int(width)
        raise TeacherError(f"no table in {self.encoder}, expected embeddings or embedding.weight in model.safetensors")

    @cached_property
    def static_length(self) -> int:
        """Most tokens of a text that a static model encodes: those to which its tokenizer truncates."""
        truncation = self._json(self.encoder / "tokenizer.json").get("truncation") or {}
        return int(truncation.get("max_length", UNLIMITED))

    def _number(self, *names: str) -> int:
        """The value of the first of `names` in the configuration; architectures name sizes differently."""
        for name in names:
            if isinstance(number := self.text_config.get(name), int):
                return number
        raise TeacherError(f"{self.encoder / 'config.json'} has no {names[0]}, expected a number: save the model again")

    @property
    def positions(self) -> int | None:
        """Most tokens that the model has positions for; None if there is no bound."""
        count = self.text_config.get("max_position_embeddings")
        if not isinstance(count, int) or count <= 0:
            return None
        return count - 2 if self.model_type in _ROBERTA_LIKE else count

    def weights_digest(self) -> str:
        """Hex digest of configurations, module list, code and weights."""
        files: list[Path] = [*self.path.glob("*.py")]
        for part in self.parts:
            files += [*part.glob("*.py"), *part.glob("*.safetensors"), *weight_files(part)]
        configs: dict[str, Any] = {"modules": self.modules}
        for part in self.parts:
            configs[self._relative(part)] = _without(self._json(part / "config.json"), _NOT_IDENTITY)
        # The maximum length is a separate field of the space.
        configs["sentence"] = _without(self.sentence_config, frozenset({"max_seq_length"}))
        return self._digest(configs, files)

    def tokenizer_digest(self) -> str:
        """Hex digest of the files of the tokenizer."""
        files = [self.encoder / name for name in _TOKENIZER_FILES if (self.encoder / name).is_file()]
        files += [*self.encoder.glob("*.model"), *self.encoder.glob("*.spm")]
        return self._digest(_without(self.tokenizer_config, _TOKENIZER_PATHS), files)

    def _digest(self, settings: Any, files: Iterable[Path]) -> str:
        total = blake2b(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode(), digest_size=16)
        paths = sorted(set(files), key=self._relative)
        # Hashing releases the interpreter lock, so threads read the shards of a large model in parallel.
        with ThreadPoolExecutor(max_workers=8) as pool:
            for path, found in zip(paths, pool.map(digest, paths), strict=True):
                total.update(self._relative(path).encode() + b"\0" + found)
        return total.hexdigest()

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _json(self, path: Path) -> dict[str, Any]:
        return _read_json(path) if path.is_file() else {}


def weight_files(part: Path) -> list[Path]:
    """Weight files of a part of a model: safetensors, otherwise PyTorch pickles, as the libraries prefer; or none."""
    for name in _WEIGHTS:
        if (part / name).is_file():
            return [part / name]
        index = part / f"{name}.index.json"
        if not index.is_file():
            continue
        named = set(_read_json(index).get("weight_map", {}).values())
        absent = sorted(named - {path.name for path in part.iterdir()})
        if absent:
            raise TeacherError(
                f"{part} is incomplete: {len(absent)} weight files of {index.name} are missing, first {absent[0]}; "
                "download the model again"
            )
        return [part / file for file in sorted(named)]
    return []


def _without(record: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {
        key: _without(value, names) if isinstance(value, dict) else value
        for key, value in record.items()
        if key not in names
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TeacherError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise TeacherError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise TeacherError(f"{path} contains a {type(record).__name__}, expected a JSON object")
    return record
