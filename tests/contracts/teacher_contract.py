"""Tests that every teacher must pass; the test of a backend inherits one of these classes."""

import json
import pickle
import shutil
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teacher_cache.teachers import Teacher, TeacherOptions, TeacherSpec, load_teacher, resolve, resolve_dtype

TEXTS = [
    "the cat sat on the mat",
    "dogs",
    "",
    "a river ran through the old town and under the bridge and on to the sea",
    "The Cat Sat On The Mat",
    "naïve café 東京 🙂",
    "two  spaces and a\nline break ",
]
LONG = "the cat sat on the mat and " * 50


@lru_cache(maxsize=64)
def loaded(spec: TeacherSpec) -> Teacher:
    """The teacher of a spec, loaded once per session."""
    return load_teacher(spec)


class TeacherContract(ABC):
    """For any teacher."""

    tolerance = 1e-5

    @pytest.fixture
    @abstractmethod
    def options(self, request: pytest.FixtureRequest) -> TeacherOptions:
        """Options of the teacher under test, in float32."""

    @pytest.fixture
    def teacher(self, options: TeacherOptions) -> Teacher:
        return loaded(resolve_dtype(resolve(options)))

    def changed(self, options: TeacherOptions, **change: Any) -> Teacher:
        return loaded(resolve_dtype(resolve(replace(options, **change))))

    def test_vectors_are_finite_float32_of_the_width_of_the_space(self, teacher: Teacher) -> None:
        vectors = teacher.encode(TEXTS)
        assert vectors.shape == (len(TEXTS), teacher.space.dims)
        assert vectors.dtype == np.float32
        assert np.isfinite(vectors).all()

    def test_normalized_vectors_have_unit_length(self, options: TeacherOptions) -> None:
        norms = np.linalg.norm(self.changed(options, normalize=True).encode(TEXTS), axis=1)
        np.testing.assert_allclose(norms, 1.0, atol=1e-5)

    def test_without_normalization_only_the_length_differs(self, options: TeacherOptions) -> None:
        raw = self.changed(options, normalize=False).encode(TEXTS)
        unit = self.changed(options, normalize=True).encode(TEXTS)
        norms = np.linalg.norm(raw, axis=1, keepdims=True)
        assert np.abs(norms - 1).max() > 1e-3
        np.testing.assert_allclose(raw / norms, unit, atol=self.tolerance)

    def test_no_texts_give_no_rows(self, teacher: Teacher) -> None:
        encoded = teacher.encode_counted([])
        assert encoded.vectors.shape == (0, teacher.space.dims)
        assert encoded.vectors.dtype == np.float32
        assert len(encoded.tokens) == len(encoded.truncated) == len(encoded.repaired) == 0

    def test_the_order_of_texts_changes_nothing(self, teacher: Teacher) -> None:
        order = np.random.default_rng(0).permutation(len(TEXTS))
        shuffled = teacher.encode([TEXTS[i] for i in order])
        np.testing.assert_allclose(shuffled, teacher.encode(TEXTS)[order], atol=self.tolerance)

    def test_a_text_alone_has_the_vector_of_the_text_in_a_batch(self, teacher: Teacher) -> None:
        alone = np.concatenate([teacher.encode([text]) for text in TEXTS])
        np.testing.assert_allclose(alone, teacher.encode(TEXTS), atol=self.tolerance)

    def test_different_texts_get_different_vectors(self, teacher: Teacher) -> None:
        a, b = teacher.encode([TEXTS[0], TEXTS[3]])
        assert np.abs(a - b).max() > 1e-3

    def test_a_truncated_text_is_counted_and_equals_its_kept_part(self, options: TeacherOptions) -> None:
        teacher = self.changed(options, max_length=12)
        encoded = teacher.encode_counted([TEXTS[0], LONG, LONG + "with another end"])
        assert encoded.truncated.tolist() == [False, True, True]
        assert encoded.tokens[1] == encoded.tokens[2] == 12
        assert 0 < encoded.tokens[0] <= 12
        np.testing.assert_allclose(encoded.vectors[1], encoded.vectors[2], atol=self.tolerance)

    def test_a_text_of_exactly_the_maximum_length_is_not_truncated(self, options: TeacherOptions) -> None:
        length = int(self.changed(options).encode_counted([TEXTS[3]]).tokens[0])
        exact = self.changed(options, max_length=length).encode_counted([TEXTS[3]])
        shorter = self.changed(options, max_length=length - 1).encode_counted([TEXTS[3]])
        assert (exact.tokens[0], exact.truncated[0]) == (length, False)
        assert (shorter.tokens[0], shorter.truncated[0]) == (length - 1, True)

    def test_a_prompt_changes_the_vectors_and_is_counted(self, options: TeacherOptions) -> None:
        plain = self.changed(options, prompt="")
        prompted = self.changed(options, prompt="a river ")
        assert np.abs(plain.encode([TEXTS[0]]) - prompted.encode([TEXTS[0]])).max() > 1e-4
        by_hand = plain.encode_counted(["a river " + TEXTS[0]])
        encoded = prompted.encode_counted([TEXTS[0]])
        assert encoded.tokens.tolist() == by_hand.tokens.tolist()
        np.testing.assert_allclose(encoded.vectors, by_hand.vectors, atol=self.tolerance)

    def test_fewer_dims_are_cut_and_renormalized(self, options: TeacherOptions) -> None:
        whole = self.changed(options, normalize=True).encode(TEXTS)
        cut = self.changed(options, normalize=True, dims=8).encode(TEXTS)
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        if self.cuts_to_width:
            np.testing.assert_allclose(cut, expected, atol=self.tolerance)
        assert cut.shape == (len(TEXTS), 8)
        np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1.0, atol=1e-5)

    cuts_to_width = True

    def test_nothing_is_repaired_without_overflow(self, teacher: Teacher) -> None:
        assert not teacher.encode_counted(TEXTS).repaired.any()

    def test_a_spec_survives_pickle_and_gives_the_same_vectors(self, options: TeacherOptions) -> None:
        spec = resolve_dtype(resolve(options))
        copy = pickle.loads(pickle.dumps(spec))
        assert copy == spec
        np.testing.assert_allclose(load_teacher(copy).encode(TEXTS), loaded(spec).encode(TEXTS), atol=1e-6)

    def test_resolving_twice_gives_the_same_fingerprint(self, options: TeacherOptions) -> None:
        assert resolve(options).space.fingerprint == resolve(options).space.fingerprint

    @pytest.mark.parametrize(
        "change",
        [{"prompt": "find: "}, {"pooling": "cls"}, {"max_length": 9}, {"normalize": False}, {"dims": 4}],
        ids=lambda change: next(iter(change)),
    )
    def test_an_option_that_changes_vectors_changes_the_fingerprint(
        self, options: TeacherOptions, change: dict[str, Any]
    ) -> None:
        base = replace(options, prompt="", pooling="mean", normalize=True)
        assert resolve(base).space.fingerprint != resolve(replace(base, **change)).space.fingerprint

    def test_options_that_change_no_vector_keep_the_fingerprint(self, options: TeacherOptions) -> None:
        other = replace(options, batch_tokens=7, device="cpu")
        assert resolve(options).space.fingerprint == resolve(other).space.fingerprint


class FolderTeacherContract(TeacherContract):
    """For a teacher with a model folder."""

    def test_the_space_is_labeled_with_the_folders_name(self, options: TeacherOptions) -> None:
        space = resolve(options).space
        assert space.teacher == Path(options.model).name
        assert space.revision == ""

    def test_a_renamed_folder_is_the_same_space(self, options: TeacherOptions, tmp_path: Path) -> None:
        copy = shutil.copytree(options.model, tmp_path / "another-name")
        space = resolve(replace(options, model=str(copy))).space
        assert space.teacher == "another-name"
        assert space.fingerprint == resolve(options).space.fingerprint

    def test_a_changed_byte_of_the_weights_is_another_space(self, options: TeacherOptions, tmp_path: Path) -> None:
        copy = shutil.copytree(options.model, tmp_path / "copy")
        for weights in sorted(copy.rglob("*.safetensors")):
            before = resolve(replace(options, model=str(copy))).space
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(bytes(data))
            after = resolve(replace(options, model=str(copy))).space
            assert set(before.difference(after)) == {"weights"}

    def test_version_stamps_do_not_change_the_space(self, options: TeacherOptions, tmp_path: Path) -> None:
        copy = shutil.copytree(options.model, tmp_path / "copy")
        stamps = {"transformers_version": "0.0.1", "_name_or_path": "elsewhere", "dtype": "float16"}
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **stamps}))
        space = resolve(replace(options, model=str(copy))).space
        assert space.fingerprint == resolve(options).space.fingerprint

    def test_a_changed_tokenizer_is_another_space(self, options: TeacherOptions, tmp_path: Path) -> None:
        copy = shutil.copytree(options.model, tmp_path / "copy")
        path = copy / "tokenizer.json"
        path.write_text(path.read_text() + " ")
        changed = resolve(replace(options, model=str(copy))).space
        assert set(resolve(options).space.difference(changed)) == {"tokenizer"}

    def test_padding_on_either_side_gives_the_same_vectors(self, options: TeacherOptions) -> None:
        left = self.changed(options, padding_side="left").encode(TEXTS)
        right = self.changed(options, padding_side="right").encode(TEXTS)
        np.testing.assert_allclose(left, right, atol=self.tolerance)

    @pytest.mark.parametrize("batch_tokens", [1, 17, 100])
    def test_the_token_budget_changes_no_vector(self, options: TeacherOptions, batch_tokens: int) -> None:
        small = self.changed(options, batch_tokens=batch_tokens).encode(TEXTS)
        np.testing.assert_allclose(small, self.changed(options).encode(TEXTS), atol=self.tolerance)
