"""A folder of `vectors.npy`, `keys.npy`, `texts.jsonl` and `space.json`, or a single .npy file of vectors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError
from teacher_cache.table.layout import SPACE_JSON
from teacher_cache.text_key import KEY_BYTES
from teacher_cache.transfer.base import Block, Origin, ReadOptions, VectorSource, read_origin

SUFFIX = ""
LIBRARY = ""

VECTORS = "vectors.npy"
KEYS_FILE = "keys.npy"
TEXTS = "texts.jsonl"
_MAGIC = b"\x93NUMPY"


def write(target: Path, blocks: Iterator[Block], origin: Origin, rows: int) -> None:
    """Write a new folder of `(rows, dims)` vectors, their keys and their texts."""
    target.mkdir()
    (target / SPACE_JSON).write_text(origin.to_json(), encoding="utf-8")
    with (
        open(target / VECTORS, "wb") as vectors,
        open(target / KEYS_FILE, "wb") as keys,
        open(target / TEXTS, "w", encoding="utf-8", newline="\n") as texts,
    ):
        for file, dtype, width in ((vectors, origin.dtype, origin.space.dims), (keys, "|u1", KEY_BYTES)):
            header = {"descr": dtype, "fortran_order": False, "shape": (rows, width)}
            np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            vectors.write(np.ascontiguousarray(block.vectors).data)
            keys.write(np.ascontiguousarray(block.keys).data)
            texts.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in block.texts)


def read(source: Path, options: ReadOptions) -> VectorSource:
    """An exported folder, or a single file with a vector for each text of `options.corpus`."""
    if options.corpus is not None:
        return VectorSource(options.corpus, _mapped(source))
    path = source / KEYS_FILE
    keys = _mapped(path) if path.exists() else None
    if keys is not None and (keys.dtype != np.uint8 or keys.shape[1:] != (KEY_BYTES,)):
        raise CorpusError(f"{path} is {keys.dtype} of shape {keys.shape}, expected uint8 (rows, {KEY_BYTES})")
    return VectorSource(Corpus.open(source / TEXTS), _mapped(source / VECTORS), keys, read_origin(source / SPACE_JSON))


def _mapped(path: Path) -> npt.NDArray[Any]:
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("not a .npy file")
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{path} is not an array of numbers that can be memory-mapped: {error}; write one with numpy.save (pickles "
            "and .npz are not supported)"
        ) from error
    return array
