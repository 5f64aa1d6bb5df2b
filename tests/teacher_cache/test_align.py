"""Alignments of a corpus, computed once and stored in the cache."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.building.align import AlignmentSettings, align_corpus, stored_alignments
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import DamagedCache, MissingRows, TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.teachers.token_offsets import tokenize_with_offsets
from teacher_cache.tokens.alignment import Alignment, align
from teacher_cache.tokens.request import TokenRequest
from tests.conftest import varied_texts

SHARD_ROWS = 16


def filled(folder: Path, count: int = 40, *, tokens: bool = True) -> Path:
    """A cache of the toy teacher whose tokens are words, in shards of 16 rows."""
    source = folder / "texts.txt"
    source.write_text("".join(f"{text}\n" for text in varied_texts(count)))
    if not (folder / "cache").exists():
        TeacherCache.open(folder / "cache", "a", shard_rows=SHARD_ROWS).close()
    request = TokenRequest() if tokens else None
    build(Corpus.open(source), TeacherOptions(model="toy"), folder / "cache", tokens=request)
    return folder / "cache"


def student_space(student: Path) -> EmbeddingSpace:
    return resolve(TeacherOptions(model=str(student), backend="transformer", dtype="float32", prompt="")).space


def settings_of(student: Path, method: str = "offset") -> AlignmentSettings:
    space = student_space(student)
    return AlignmentSettings(method, space.tokenizer, space.max_length, "", False)


def same(first: Alignment, second: Alignment) -> bool:
    pairs = ((first.student, second.student), (first.teacher, second.teacher), (first.weight, second.weight))
    return all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("method", ["offset", "dtw_mean"])
def test_stored_alignments_equal_computed_ones(tmp_path: Path, tiny_student: Path, method: str) -> None:
    from transformers import AutoTokenizer

    path = filled(tmp_path)
    report = align_corpus(path, str(tiny_student), method)
    assert (report.rows, report.aligned, report.cached, report.without_tokens) == (40, 40, 0, 0)
    # Words are tokens on both sides; the toy teacher has no counterparts of [CLS] and [SEP].
    assert report.mapped == report.student_tokens - 2 * 40
    with TeacherCache.open(path) as cache:
        view = cache.space()
        stored = stored_alignments(view, settings_of(tiny_student, method))
        assert stored is not None
        assert view.tokens is not None
        rows = np.random.default_rng(0).permutation(40)
        texts, teacher_pieces = cache.texts(rows), view.tokens.gather_pieces(rows)
        student_pieces = tokenize_with_offsets(AutoTokenizer.from_pretrained(tiny_student), texts, max_length=64)
        assert stored.present(rows).all()
        found = stored.gather(rows)
        again = pickle.loads(pickle.dumps(stored)).gather(rows)
        for text, teacher, student, one, two in zip(texts, teacher_pieces, student_pieces, found, again, strict=True):
            assert same(one, align(text, teacher, student, method, lower=False))
            assert same(one, two)


def test_only_texts_without_an_alignment_are_aligned(tmp_path: Path, tiny_student: Path) -> None:
    align_corpus(filled(tmp_path, 20), str(tiny_student), "offset")
    path = filled(tmp_path, 50)
    done: list[tuple[int, int]] = []
    report = align_corpus(path, str(tiny_student), "offset", report=lambda *counts: done.append(counts))
    assert (report.rows, report.cached, report.aligned) == (50, 20, 30)
    assert done[-1] == (30, 30)
    again = align_corpus(path, str(tiny_student), "offset")
    assert (again.cached, again.aligned, again.student_tokens) == (50, 0, 0)


def test_other_tokenizer_settings_are_another_column(tmp_path: Path, tiny_student: Path) -> None:
    path = filled(tmp_path)
    arrays = {
        align_corpus(path, str(tiny_student), "offset").array,
        align_corpus(path, str(tiny_student), "mined_dp").array,
        align_corpus(path, str(tiny_student), "offset", prompt="the ").array,
        align_corpus(path, str(tiny_student), "offset", max_length=8).array,
    }
    assert len(arrays) == 4
    with TeacherCache.open(path) as cache:
        view = cache.space()
        settings = settings_of(tiny_student)
        short = stored_alignments(view, replace(settings, max_length=8))
        assert short is not None
        assert max(int(one.student.max()) for one in short.gather(np.arange(40))) < 7
        for other in ({"method": "dtw_strict"}, {"prompt": "a "}, {"tokenizer": "x"}, {"lower": True}):
            assert stored_alignments(view, replace(settings, **other)) is None  # type: ignore[arg-type]


def test_an_interrupted_run_keeps_its_finished_shards(tmp_path: Path, tiny_student: Path) -> None:
    path = filled(tmp_path)

    def stop(done: int, total: int) -> None:
        if done > SHARD_ROWS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        align_corpus(path, str(tiny_student), "offset", report=stop)
    with TeacherCache.open(path) as cache:
        stored = stored_alignments(cache.space(), settings_of(tiny_student))
        assert stored is not None
        assert stored.present(np.arange(40)).tolist() == [True] * SHARD_ROWS + [False] * 24
        with pytest.raises(MissingRows):
            stored.gather(np.array([20]))
    assert align_corpus(path, str(tiny_student), "offset").cached == SHARD_ROWS


def test_a_missing_or_damaged_column_is_reported_with_the_command_that_repairs_it(
    tmp_path: Path, tiny_student: Path
) -> None:
    path = filled(tmp_path)
    report = align_corpus(path, str(tiny_student), "offset")
    folder = path / "spaces" / report.space / report.array
    shard = folder / "c" / "0"
    shard.write_bytes(shard.read_bytes()[:-40] + bytes(40))
    with TeacherCache.open(path) as cache:
        stored = stored_alignments(cache.space(), settings_of(tiny_student))
        assert stored is not None
        with pytest.raises(DamagedCache, match=r"alignment-offset-.*remove .* and run `tcache align` again"):
            stored.gather(np.array([0]))
    shutil.rmtree(folder)
    with TeacherCache.open(path) as cache:
        assert stored_alignments(cache.space(), settings_of(tiny_student)) is None
    assert align_corpus(path, str(tiny_student), "offset").aligned == 40


def test_a_space_without_tokens_is_refused_with_the_command_that_adds_them(tmp_path: Path, tiny_student: Path) -> None:
    path = filled(tmp_path, tokens=False)
    with pytest.raises(MissingRows, match="`tcache build --columns vectors,tokens` with the same teacher"):
        align_corpus(path, str(tiny_student), "offset")


def test_texts_without_tokens_are_counted_and_skipped(tmp_path: Path, tiny_student: Path) -> None:
    filled(tmp_path, 20)
    path = filled(tmp_path, 30, tokens=False)
    report = align_corpus(path, str(tiny_student), "offset")
    assert (report.rows, report.aligned, report.without_tokens) == (30, 20, 10)


def test_an_unknown_method_is_refused_before_the_cache_is_opened(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="unknown alignment 'nearest'"):
        align_corpus(tmp_path / "nowhere", "no model", "nearest")
