"""A real teacher end to end: vectors are read back as encoded, and a student improves."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import load_teacher, resolve
from teacher_cache.teachers.base import TeacherOptions

TEXTS = 400
CHECKED = 200


def cosines(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(axis=1) / lengths


def demo_sentences() -> list[str]:
    return (files("distill.runs") / "demo_corpus.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def options(minilm: Path) -> TeacherOptions:
    return TeacherOptions(model=str(minilm), dtype="float32")


@pytest.fixture(scope="module")
def cache(options: TeacherOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    source = folder / "corpus.txt"
    source.write_text("\n".join(demo_sentences()[:TEXTS]), encoding="utf-8")
    report = build(Corpus.open(source), options, folder / "cache", name="demo")
    assert (report.distinct, report.encoded, report.quarantined) == (TEXTS, TEXTS, 0)
    return folder / "cache"


@pytest.fixture(scope="module")
def checked() -> list[str]:
    texts = demo_sentences()[:TEXTS]
    return [texts[place] for place in np.random.default_rng(0).choice(TEXTS, CHECKED, replace=False)]


def read(cache: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    with TeacherCache.open(cache) as opened:
        return opened.space().gather(opened.lookup(texts))


def test_every_stored_row_equals_the_teacher_output_of_its_text(
    cache: Path, options: TeacherOptions, checked: list[str]
) -> None:
    expected = load_teacher(resolve(options)).encode(checked)
    assert cosines(read(cache, checked), expected).min() >= 0.9999


def test_rows_equal_the_vectors_of_sentence_transformers(cache: Path, minilm: Path, checked: list[str]) -> None:
    from sentence_transformers import SentenceTransformer

    expected = np.asarray(SentenceTransformer(str(minilm), device="cpu").encode(checked, show_progress_bar=False))
    assert cosines(read(cache, checked), expected).min() >= 0.9999


def test_a_process_with_another_hash_seed_reads_the_same_rows(cache: Path, checked: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from teacher_cache.table.cache import TeacherCache\n"
        "with TeacherCache.open(sys.argv[1]) as cache:\n"
        "    vectors = cache.space().gather(cache.lookup(json.load(sys.stdin)))\n"
        "sys.stdout.buffer.write(vectors.tobytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache)],
        input=json.dumps(checked).encode(),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        check=True,
    )
    assert done.stdout == read(cache, checked).tobytes()


def test_zarr_reads_the_same_numbers(cache: Path) -> None:
    import zarr

    with TeacherCache.open(cache) as opened:
        view = opened.space()
        ours = view.gather(np.arange(opened.rows))
        folder = cache / "spaces" / view.slug / "vectors.zarr"
    assert np.array_equal(zarr.open_array(folder, mode="r")[:].astype(np.float32), ours)


# Least gains of the demo on its held-out texts: about half of those in docs/results.md.
DEMO_GAIN_SPEARMAN = 0.10
DEMO_GAIN_OVERLAP = 0.05


@pytest.mark.slow
def test_the_demo_improves_the_student_and_writes_a_cache_and_a_run(tmp_path: Path) -> None:
    from distill.runs.demo import run_demo
    from teacher_cache.maintenance.check import verify

    result = run_demo(tmp_path / "demo")
    before, after = result.run["agreement"]["before"], result.run["agreement"]["after"]
    assert after["spearman"] >= before["spearman"] + DEMO_GAIN_SPEARMAN
    assert after["overlap"] >= before["overlap"] + DEMO_GAIN_OVERLAP
    assert verify(result.cache, deep=True).ok
    assert all(Path(path).exists() for path in (result.teacher, result.corpus, result.student, result.run["final"]))
    assert json.loads((Path(result.run["output_dir"]) / "run.json").read_text())["status"] == "finished"
    again = run_demo(tmp_path / "demo")
    assert again.build["encoded"] == 0
    assert again.run["finished_before"]
