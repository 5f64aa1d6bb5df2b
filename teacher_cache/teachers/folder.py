"""A model folder as its files describe it: configuration, weights and tokenizer, read without torch.

The digests say what would change a vector and nothing else: the folder's own path and the libraries'
version stamps are left out, so that a moved or re-downloaded model stays the same teacher.
"""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, Self

from teacher_cache.errors import TeacherError
from teacher_cache.storage.files import digest
from teacher_cache.tokens.request import TokenShape

# A run folder has this record, and its student in this folder.
RUN_RECORD = "run.json"
STUDENT = "final"

# Stamps of who wrote a file and where, and the precision weights were saved in (their bytes are hashed).
_NOT_IDENTITY = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"})
_TOKENIZER_PATHS = frozenset({"name_or_path", "_name_or_path", "special_tokens_map_file", "tokenizer_file"})
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)

# Their position table starts after the padding id, so two of its rows hold no position.
_ROBERTA_LIKE = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm"}
    | {"xlm-roberta", "xlm-roberta-xl", "xmod"}
)

# Single-file names, best first; shards stand in NAME.index.json. The second is a pickle: it is loaded with
# torch's weights_only, which makes tensors of it and runs nothing.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

# Modules that cannot be without weights.
_WEIGHTED = frozenset({"Transformer", "Dense", "LayerNorm"})

# Decoders: only the last token has seen the whole text.
_CAUSAL = frozenset(
    {"gemma", "gemma2", "gpt2", "gpt_neox", "llama", "ministral", "mistral", "mixtral", "olmo2", "opt"}
    | {"phi", "phi3", "qwen2", "qwen3"}
)


@dataclass(frozen=True)
class ModelFolder:
    """A local folder that holds one encoder.

    Attributes:
        path: absolute, symbolic links followed.
    """

    path: Path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Look at `path` and make sure that it can be loaded safely.

        Raises:
            TeacherError: no folder, no configuration, no weights, or an adapter without its base.
        """
        folder = cls(path.expanduser().resolve())
        if not folder.path.is_dir():
            raise TeacherError(f"model folder {folder.path} is not there: check the path, or give a hub id")
        if not (folder.encoder / "config.json").is_file():
            raise TeacherError(
                f"{folder.path} holds no model: no {'' if folder.modules else 'modules.json and no '}"
                "config.json, expected a folder written by save_pretrained"
            )
        if (folder.encoder / "adapter_config.json").is_file():
            raise TeacherError(
                f"{folder.path} holds an adapter whose base weights lie elsewhere: "
                "merge them with peft's merge_and_unload() and save the merged model"
            )
        needed = {folder.encoder} | {
            folder.path / module["path"]
            for module, kind in zip(folder.modules, folder.module_kinds(), strict=True)
            if kind in _WEIGHTED
        }
        for part in folder.parts:
            if not weight_files(part) and part in needed:
                raise TeacherError(f"{part} holds no weights: expected {' or '.join(_WEIGHTS)}")
        return folder

    # -- what the files say ------------------------------------------------------------------------------

    @cached_property
    def label(self) -> str:
        """Hub id when the folder is a snapshot in the hub's cache, the run's name when it is a run's student,
        otherwise the folder's name.
        """
        parent = self.path.parent
        if self.path.name == STUDENT and (parent / RUN_RECORD).is_file():
            return parent.name
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent.name.removeprefix("models--").replace("--", "/")
        return self.path.name

    @cached_property
    def revision(self) -> str:
        """Commit of a hub snapshot, "" for a folder of one's own."""
        return self.path.name if "/" in self.label else ""

    @cached_property
    def modules(self) -> list[dict[str, Any]]:
        """Entries of modules.json, empty for a plain transformers folder."""
        path = self.path / "modules.json"
        if not path.is_file():
            return []
        modules = json.loads(_read_text(path))
        if not isinstance(modules, list) or not all(
            isinstance(m, dict) and isinstance(m.get("path"), str) and isinstance(m.get("type"), str) for m in modules
        ):
            raise TeacherError(f"{path} is not a list of modules with a path and a type each")
        for module in modules:
            relative = PurePosixPath(module["path"])
            if relative.is_absolute() or ".." in relative.parts:
                raise TeacherError(f"{path} names the module path {module['path']!r}, outside the folder")
        return modules

    def module_kinds(self) -> list[str]:
        """Class names of the modules in order, e.g. `["Transformer", "Pooling", "Normalize"]`."""
        return [module["type"].rsplit(".", 1)[-1] for module in self.modules]

    def module_config(self, index: int) -> dict[str, Any]:
        """config.json of one module; empty when it has none."""
        return self._json(self.path / self.modules[index]["path"] / "config.json")

    @cached_property
    def encoder(self) -> Path:
        """Folder of the transformer itself: the first module's, or the folder."""
        return self.path / self.modules[0]["path"] if self.modules else self.path

    @cached_property
    def parts(self) -> list[Path]:
        """Every folder that holds files of the model, the encoder's first, each once."""
        return list(dict.fromkeys([self.encoder, *(self.path / m["path"] for m in self.modules)]))

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._json(self.encoder / "config.json")

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The text tower's configuration of a model with several, otherwise the configuration."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._json(self.encoder / "tokenizer_config.json")

    @cached_property
    def sentence_config(self) -> dict[str, Any]:
        """sentence_bert_config.json, or the file that older releases named after the architecture."""
        found = sorted(self.encoder.glob("sentence_*_config.json"))
        return self._json(found[0]) if found else {}

    @cached_property
    def usage_config(self) -> dict[str, Any]:
        """config_sentence_transformers.json: prompts, default prompt, cut width."""
        return self._json(self.path / "config_sentence_transformers.json")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def is_causal(self) -> bool:
        """Whether only the last token has seen the whole text."""
        config = self.text_config
        if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
            return False
        architectures = self.config.get("architectures") or [""]
        return self.model_type in _CAUSAL or str(architectures[0]).endswith("ForCausalLM")

    @property
    def hidden_size(self) -> int:
        """Width of the encoder's token states.

        Raises:
            TeacherError: config.json names no width.
        """
        return self._number("hidden_size", "d_model", "dim", "n_embd")

    def token_shape(self) -> TokenShape:
        """Sizes of the encoder.

        Raises:
            TeacherError: config.json names no width, number of layers or number of heads.
        """
        layers = self._number("num_hidden_layers", "n_layers", "n_layer", "num_layers")
        heads = self._number("num_attention_heads", "n_heads", "n_head", "num_heads")
        return TokenShape(width=self.hidden_size, layers=layers, heads=heads, causal=self.is_causal)

    def _number(self, *names: str) -> int:
        """The first of the names that the configuration knows: each architecture has its own."""
        for name in names:
            if isinstance(number := self.text_config.get(name), int):
                return number
        raise TeacherError(f"{self.encoder / 'config.json'} names no {names[0]}")

    @property
    def positions(self) -> int | None:
        """Longest input in tokens that the model has positions for; None when nothing bounds it."""
        count = self.text_config.get("max_position_embeddings")
        if not isinstance(count, int) or count <= 0:
            return None
        return count - 2 if self.model_type in _ROBERTA_LIKE else count

    # -- digests -----------------------------------------------------------------------------------------

    def weights_digest(self) -> str:
        """Hex digest of configurations, module list, the folder's own code and weights."""
        files: list[Path] = [*self.path.glob("*.py")]
        for part in self.parts:
            files += [*part.glob("*.py"), *part.glob("*.safetensors"), *weight_files(part)]
        configs: dict[str, Any] = {"modules": self.modules}
        for part in self.parts:
            configs[self._relative(part)] = _without(self._json(part / "config.json"), _NOT_IDENTITY)
        # The maximum length is a field of the space on its own.
        configs["sentence"] = _without(self.sentence_config, frozenset({"max_seq_length"}))
        return self._digest(configs, files)

    def tokenizer_digest(self) -> str:
        """Hex digest of every file the tokenizer is read from."""
        files = [self.encoder / name for name in _TOKENIZER_FILES if name != "tokenizer_config.json"]
        files = [path for path in files if path.is_file()]
        files += [*self.encoder.glob("*.model"), *self.encoder.glob("*.spm")]
        return self._digest(_without(self.tokenizer_config, _TOKENIZER_PATHS), files)

    def _digest(self, settings: Any, files: Iterable[Path]) -> str:
        total = blake2b(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode(), digest_size=16)
        paths = sorted(set(files), key=self._relative)
        # Hashing releases the interpreter lock: the shards of a large model are read side by side.
        with ThreadPoolExecutor(max_workers=8) as pool:
            for path, found in zip(paths, pool.map(digest, paths), strict=True):
                total.update(self._relative(path).encode() + b"\0" + found)
        return total.hexdigest()

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _json(self, path: Path) -> dict[str, Any]:
        return _read_json(path) if path.is_file() else {}


def weight_files(part: Path) -> list[Path]:
    """The files that a part's weights are loaded from; empty when it has none.

    Safetensors, else PyTorch's pickles: both libraries prefer them in this order.

    Raises:
        TeacherError: an index names files that are not there.
    """
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
                f"{part} is incomplete: {len(absent)} weight files are missing, first {absent[0]}; "
                "download the model again"
            )
        return [part / file for file in sorted(named)]
    return []


def has_safetensors(part: Path) -> bool:
    return any(path.suffix == ".safetensors" for path in weight_files(part))


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
        raise TeacherError(f"{path} holds {type(record).__name__}, expected an object")
    return record
