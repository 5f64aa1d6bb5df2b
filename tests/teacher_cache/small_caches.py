"""Caches of a few rows, with a toy teacher and small shards."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.build import BuildReport, build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve
from teacher_cache.text_key import text_keys

TOY = TeacherOptions(model="toy")
SHARD_ROWS = 8


def passing_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for one hypothesis example, in memory if possible."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


def corpus_of(folder: Path, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Corpus:
    """A JSON lines corpus of texts or pairs."""
    folder.mkdir(exist_ok=True)
    path = folder / f"corpus-{len(list(folder.glob('corpus-*')))}.jsonl"
    records = [{"text": text} if isinstance(text, str) else {"a": text[0], "b": text[1]} for text in texts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    pairs = bool(texts) and not isinstance(texts[0], str)
    return Corpus.open(path, "a,b" if pairs else "text")


def built(
    folder: Path,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    teacher: TeacherOptions = TOY,
    name: str = "corpus",
    **options: Any,
) -> BuildReport:
    """Build the cache `folder / "cache"` with small shards from these texts."""
    path = folder / "cache"
    TeacherCache.open(path, "a", shard_rows=SHARD_ROWS).close()
    return build(corpus_of(folder, texts), teacher, path, name=name, **options)


def teacher_vectors(texts: Sequence[str], teacher: TeacherOptions = TOY) -> npt.NDArray[np.float32]:
    """Vectors of the texts, computed without a cache."""
    return load_teacher(resolve(teacher)).encode(texts)


def unequal_rows(view: SpaceView, texts: Sequence[str], teacher: TeacherOptions = TOY) -> list[str]:
    """Texts whose stored vector differs from the teacher's by more than the precision of float16."""
    stored = view.gather(view.index.find(text_keys(texts)))
    close = np.isclose(stored, teacher_vectors(texts, teacher), rtol=1e-3, atol=1e-6).all(axis=1)
    return [text for text, same in zip(texts, close, strict=True) if not same]


def numbered(count: int, start: int = 0) -> list[str]:
    """Distinct texts of different lengths."""
    return [f"text {number}" + " and more" * (number % 5) for number in range(start, start + count)]
