"""Encoders by role."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.errors import EvaluationError
from distill.evaluation.base import (
    DOCUMENT,
    QUERY,
    ROLES,
    TEACHER,
    TEACHER_DOCUMENT,
    TEACHER_QUERY,
    TEXT,
)
from distill.evaluation.encoders import CachedEncoder, ModelEncoder, resolved_dtype
from distill.evaluation.evaluator import evaluate_model
from distill.evaluation.roles import TeacherSource, model_encoders, run_record, teacher_encoders
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from tests.teacher_cache import tiny_teachers

TEXTS = ["the cat sat", "a river"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a prompt for queries."""
    return tiny_teachers.write_sentence_transformer(tmp_path_factory.mktemp("models"))


def options(model: Path, **more: Any) -> TeacherOptions:
    return TeacherOptions(model=str(model), device="cpu", **{"dtype": "float32", **more})


def test_only_the_given_roles_have_an_encoder(model: Path) -> None:
    assert model_encoders(options(model), {QUERY, TEACHER_DOCUMENT}).keys() == {QUERY}
    assert teacher_encoders(TeacherSource(), {TEXT, QUERY}) == {}
    found = teacher_encoders(TeacherSource(model=options(model)), ROLES)
    assert found.keys() == {TEACHER, TEACHER_QUERY, TEACHER_DOCUMENT}


def test_roles_with_equal_settings_share_an_encoder(model: Path) -> None:
    said: list[str] = []
    found = model_encoders(options(model), ROLES, announce=said.append)
    assert found[TEXT] is found[DOCUMENT] is not found[QUERY]
    assert [line.partition(":")[0] for line in said] == ["text, document", "query"]


def test_the_evaluated_model_is_not_normalized_and_its_teacher_is(model: Path) -> None:
    assert not model_encoders(options(model), {TEXT})[TEXT].space.normalize
    assert model_encoders(options(model, normalize=True), {TEXT})[TEXT].space.normalize
    assert teacher_encoders(TeacherSource(model=options(model)), {TEACHER})[TEACHER].space.normalize


def test_an_auto_precision_is_resolved_by_rule_and_equally_for_all_roles(model: Path, tmp_path: Path) -> None:
    rule = resolved_dtype("auto")
    for cache in (None, tmp_path / "new"):
        found = model_encoders(options(model, dtype="auto"), {QUERY, DOCUMENT}, cache=cache)
        assert {encoder.space.dtype for encoder in found.values()} == {rule}
    toy = model_encoders(TeacherOptions(model="toy"), {TEXT})
    assert toy[TEXT].space.dtype == "float32"
    # The precision of the teacher's cached space is used, also for a prompt that the cache does not have yet.
    other = "float32" if rule == "bfloat16" else "bfloat16"
    CachedEncoder(tmp_path / "held", teacher=options(model, dtype=other)).encode(TEXTS)
    source = TeacherSource(cache=tmp_path / "held", model=options(model, dtype="auto"))
    found = teacher_encoders(source, {TEACHER_QUERY, TEACHER_DOCUMENT})
    assert {encoder.space.dtype for encoder in found.values()} == {other}


def test_a_teacher_without_a_cache_is_the_model_itself(model: Path) -> None:
    (encoder,) = teacher_encoders(TeacherSource(model=options(model)), {TEACHER}).values()
    assert isinstance(encoder, ModelEncoder)
    assert encoder.encode(TEXTS).shape == (2, 12)


def test_a_space_defines_how_the_teacher_encodes(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    CachedEncoder(cache, teacher=options(model, prompt="all: ", max_length=9, dims=8)).encode(TEXTS)
    with TeacherCache.open(cache) as table:
        held = table.space_record().space
    for space, asked in ((None, None), (held, None), (held.slug, options(model)), (held, options(model, dtype="auto"))):
        source = TeacherSource(cache=cache, space=space, model=asked)
        (encoder,) = teacher_encoders(source, {TEACHER}).values()
        assert encoder.space == held
        np.testing.assert_array_equal(encoder.encode(TEXTS), CachedEncoder(cache).encode(TEXTS))
    # The model has a prompt for queries; texts and documents have the space's.
    found = teacher_encoders(TeacherSource(cache=cache, space=held, model=options(model)), ROLES)
    assert {role: encoder.space.prompt for role, encoder in found.items()} == {
        TEACHER: "all: ",
        TEACHER_QUERY: "the river ",
        TEACHER_DOCUMENT: "",
    }
    assert {(encoder.space.max_length, encoder.space.dims) for encoder in found.values()} == {(9, 8)}
    # Without a model: the space's prompt, unless one is given.
    found = teacher_encoders(TeacherSource(cache=cache, space=held, query_prompt="all: "), ROLES)
    assert {encoder.space.prompt for encoder in found.values()} == {"all: "}


def test_a_teacher_without_cache_and_model_is_an_error(model: Path) -> None:
    with pytest.raises(EvaluationError, match="vectors are needed: name a cache"):
        teacher_encoders(TeacherSource(), {TEACHER})
    with pytest.raises(EvaluationError, match=r"vectors are needed: name a cache .*`cache`, and `space`"):
        teacher_encoders(TeacherSource(space="bert", model=options(model)), {TEACHER})


def test_a_run_with_two_teachers_needs_a_space(tmp_path: Path) -> None:
    record = {"cache": str(tmp_path), "space": {"slug": "a@1+b@2", "spaces": []}}
    with pytest.raises(EvaluationError, match=r"trained on several spaces, a@1\+b@2; name .*`space`"):
        TeacherSource().for_run(record)
    assert TeacherSource(space="a").for_run(record) == TeacherSource(space="a", cache=tmp_path)


def test_the_record_of_a_run_is_found_from_its_folder_and_from_its_student(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "run.json").write_text('{"status": "finished"}')
    assert run_record(str(tmp_path)) == run_record(str(tmp_path / "final")) == {"status": "finished"}
    assert run_record("toy") is None
    assert run_record(str(tmp_path / "other")) is None


@pytest.mark.parametrize("given", [{}, {"names": ["stsb"]}])
def test_nothing_to_evaluate_on_is_an_error_before_the_model_is_resolved(given: Any) -> None:
    evaluate: Callable[..., Any] = evaluate_model
    with pytest.raises(EvaluationError, match="nothing to evaluate on"):
        evaluate(TeacherOptions(model="no such model"), **given)
