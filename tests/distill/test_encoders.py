"""Encoders: cached vectors are read, missing ones are encoded once and stored."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.errors import EvaluationError
from distill.evaluation import encoders
from distill.evaluation.base import DOCUMENT, QUERY, TEXT
from distill.evaluation.encoders import CachedEncoder, ModelEncoder, ModelSlot, encode_all, options_by_role
from teacher_cache.building import workers
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CacheNotFound, MissingRows, SpaceMismatch
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import Encoded, Teacher, TeacherOptions, TeacherSpec, load_teacher, resolve
from tests.conftest import varied_texts
from tests.teacher_cache import tiny_teachers

TEXTS = ["the cat sat", "dogs ran through the old town", "a river", "the sea and the mat"]


def options(model: Path, **more: Any) -> TeacherOptions:
    return TeacherOptions(model=str(model), device="cpu", **{"dtype": "float32", **more})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_teachers.write_sentence_transformer(tmp_path_factory.mktemp("models"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[TeacherSpec]:
    """Specs of the models that are loaded in the test."""
    loaded: list[TeacherSpec] = []

    def load(spec: TeacherSpec) -> Teacher:
        loaded.append(spec)
        return load_teacher(spec)

    for module in (workers, encoders):
        monkeypatch.setattr(module, "load_teacher", load)
    return loaded


def test_stored_vectors_are_the_models(model: Path, tmp_path: Path) -> None:
    encoder = CachedEncoder(tmp_path / "cache", teacher=options(model))
    said = load_teacher(resolve(options(model))).encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), said, atol=1e-6)
    with TeacherCache.open(tmp_path / "cache") as table:
        assert table.space_record().storage == "float32"


def test_a_second_evaluation_encodes_nothing_and_loads_no_model(
    model: Path, tmp_path: Path, loads: list[TeacherSpec]
) -> None:
    said: list[str] = []
    first = CachedEncoder(tmp_path / "cache", teacher=options(model), announce=said.append)
    vectors = first.encode(TEXTS)
    assert (first.encoded, len(loads)) == (4, 1)
    again = CachedEncoder(tmp_path / "cache", teacher=options(model), announce=said.append)
    np.testing.assert_array_equal(again.encode([*reversed(TEXTS), TEXTS[1]]), vectors[[3, 2, 1, 0, 1]])
    assert (again.encoded, len(loads)) == (0, 1)
    assert len(said) == 1
    assert "lacks 4 of 4 texts in space st@" in said[0]


def test_filling_a_cache_does_not_change_its_corpora(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine.txt"
    source.write_text("one text of mine\nthe cat sat\n")
    build(Corpus.open(source), options(model), tmp_path / "cache", name="evaluation")
    CachedEncoder(tmp_path / "cache", teacher=options(model)).encode(TEXTS)
    with TeacherCache.open(tmp_path / "cache") as table:
        assert list(table.corpora()) == ["evaluation"]
        assert len(table.corpus()) == 2
    assert [path.name for path in (tmp_path / "cache" / "corpora").iterdir()] == ["evaluation"]


def test_only_missing_texts_are_encoded(model: Path, tmp_path: Path) -> None:
    CachedEncoder(tmp_path / "cache", teacher=options(model)).encode(TEXTS[:3])
    said: list[str] = []
    encoder = CachedEncoder(tmp_path / "cache", teacher=options(model), announce=said.append)
    encoder.encode(TEXTS)
    assert encoder.encoded == 1
    assert "lacks 1 of 4 texts" in said[0]


def test_missing_texts_of_all_chunks_are_encoded_at_once(
    model: Path, tmp_path: Path, loads: list[TeacherSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.evaluation.encoders.CHUNK", 3)
    texts = varied_texts(10)
    matrix = encode_all(CachedEncoder(tmp_path / "cache", teacher=options(model)), texts)
    assert len(loads) == 1
    np.testing.assert_allclose(matrix, load_teacher(resolve(options(model))).encode(texts), atol=1e-6)


def test_a_cache_without_a_model_is_read_and_missing_texts_are_an_error(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as table:
        texts = table.texts(np.arange(5))
    encoder = CachedEncoder(toy_cache)
    assert encoder.space.teacher == "toy"
    # The build stores float16.
    np.testing.assert_allclose(
        encoder.encode(texts), load_teacher(resolve(TeacherOptions(model="toy"))).encode(texts), atol=1e-3
    )
    with pytest.raises(MissingRows, match=r"no vector for 1 of 2 texts, first 'not there'; name .*`teacher`"):
        encoder.encode([texts[0], "not there"])


def test_a_cached_space_is_filled_only_by_its_own_model(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    CachedEncoder(cache, teacher=options(model, prompt="a river ", max_length=8)).encode(TEXTS[:2])
    slug = next(path.name for path in (cache / "spaces").iterdir())
    # The space's prompt and length take precedence over the options'.
    filled = CachedEncoder(cache, slug, options(model, dtype="auto")).encode(TEXTS)
    expected = load_teacher(resolve(options(model, prompt="a river ", max_length=8))).encode(TEXTS)
    np.testing.assert_allclose(filled, expected, atol=1e-6)
    other = tiny_teachers.write_bert(tmp_path / "other", seed=1)
    with pytest.raises(SpaceMismatch, match="does not match the cached space"):
        CachedEncoder(cache, slug, options(other))


def test_another_prompt_is_another_space_of_the_same_cache(model: Path, tmp_path: Path) -> None:
    plain = CachedEncoder(tmp_path / "cache", teacher=options(model))
    prompted = CachedEncoder(tmp_path / "cache", teacher=options(model, prompt_name="query"))
    assert not np.allclose(plain.encode(TEXTS), prompted.encode(TEXTS))
    with TeacherCache.open(tmp_path / "cache") as table:
        assert sorted(record.space.prompt for record in table.space_records().values()) == ["", "the river "]
        assert table.rows == len(TEXTS)


def test_a_space_with_a_measured_precision_is_found_without_measuring_again(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    CachedEncoder(cache, teacher=options(model, dtype="bfloat16")).encode(TEXTS)
    encoder = CachedEncoder(cache, teacher=options(model, dtype="auto"))
    assert encoder.space.dtype == "bfloat16"
    encoder.encode(TEXTS)
    assert encoder.encoded == 0


def test_a_missing_cache_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound, match="no teacher cache"):
        CachedEncoder(tmp_path / "none")


@pytest.mark.parametrize(("text", "what"), [(" ", "1 of 2 texts are empty"), ("\ud800", "surrogate pair")])
def test_texts_that_a_cache_cannot_store_are_an_error(model: Path, tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(EvaluationError, match=what):
        CachedEncoder(tmp_path / "cache", teacher=options(model)).encode(["dogs", text])
    assert not (tmp_path / "cache").exists()


def test_vectors_that_cannot_be_stored_are_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, spec: TeacherSpec) -> None:
            self.teacher = load_teacher(spec)

        def encode_counted(self, texts: list[str]) -> Encoded:
            encoded = self.teacher.encode_counted(texts)
            encoded.vectors[texts.index("a river")] = np.nan
            return encoded

    monkeypatch.setattr(workers, "load_teacher", Broken)
    with pytest.raises(EvaluationError, match="1 of 4 texts have no vector in space"):
        CachedEncoder(tmp_path / "cache", teacher=options(model)).encode(TEXTS)


def test_models_that_share_a_slot_are_loaded_one_at_a_time(model: Path, loads: list[TeacherSpec]) -> None:
    slot = ModelSlot()
    one, other = (ModelEncoder(resolve(options(model, prompt=prompt)), slot) for prompt in ("", "a river "))
    assert not loads
    first = one.encode(TEXTS)
    one.encode(TEXTS)
    assert len(loads) == 1
    assert not np.allclose(other.encode(TEXTS), first)
    assert [spec.space.prompt for spec in loads] == ["", "a river "]


def prompts(model: Path, *given: str | None, **more: Any) -> list[str]:
    by_role = options_by_role(options(model, **more), *given)
    return [resolve(by_role[role]).space.prompt for role in (TEXT, QUERY, DOCUMENT)]


def test_queries_and_documents_have_the_models_own_prompts(model: Path, tmp_path: Path) -> None:
    assert prompts(model) == ["", "the river ", ""]
    assert prompts(model, "ask: ") == ["", "ask: ", ""]
    assert prompts(model, None, "say: ") == ["", "the river ", "say: "]
    assert prompts(model, prompt="all: ") == ["all: ", "all: ", "all: "]
    assert prompts(model, "", prompt="all: ") == ["all: ", "", "all: "]
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    config = copy / "config_sentence_transformers.json"
    tiny_teachers.edit_json(config, prompts={"query": "q: ", "passage": "p: "}, default_prompt_name="query")
    assert prompts(copy) == ["q: ", "q: ", "p: "]
    # Empty placeholders: the default prompt is used.
    tiny_teachers.edit_json(config, prompts={"query": "", "document": "", "all": "x: "}, default_prompt_name="all")
    assert prompts(copy) == ["x: ", "x: ", "x: "]


def test_a_model_without_files_has_no_prompts_of_its_own() -> None:
    toy = TeacherOptions(model="toy")
    assert options_by_role(toy) == {TEXT: toy, QUERY: toy, DOCUMENT: toy}
