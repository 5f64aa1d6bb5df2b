"""The public Python API: lazy imports, vectors by text, checked rows, a torch dataset, encoding on demand."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import distill
import teacher_cache
from teacher_cache import TeacherCache, VectorDataset, load_teacher
from teacher_cache.errors import CacheError, MissingRows
from teacher_cache.teachers import TeacherOptions, resolve
from tests.teacher_cache.small_caches import TOY, built, numbered, teacher_vectors
from tests.teacher_cache.toy_variants import BadVectors

TEXTS = numbered(20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twenty")
    built(folder, TEXTS)
    return folder / "cache"


# Names


@pytest.mark.parametrize("package", [teacher_cache, distill])
def test_every_public_name_exists(package: Any) -> None:
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("package", [teacher_cache, distill])
def test_type_checkers_see_what_is_exported(package: Any) -> None:
    assert Path(package.__file__).with_name("py.typed").is_file()
    source = Path(package.__file__).read_text()
    public = set(package.__all__) - {"__version__"}
    assert {name for name in public if f"import {name} as {name}\n" in source} == public


def test_importing_the_packages_loads_no_heavy_library() -> None:
    code = (
        "import sys, teacher_cache, distill\n"
        "print(sorted({'numpy', 'torch', 'transformers', 'zarr', 'lmdb', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The cache


def test_a_cache_has_a_length_and_contains_texts(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        assert len(cache) == 20
        assert TEXTS[3] in cache
        assert "unknown" not in cache
        assert 3 not in cache


def test_an_empty_cache_and_an_empty_space_are_true(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path, "a") as cache:
        assert len(cache) == 0
        assert cache
        assert cache.ensure_space(resolve(TOY).space, "float16")


def test_a_cache_and_a_space_describe_themselves(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        slug = cache.space().slug
        assert repr(cache) == f"<TeacherCache '{path}': 20 texts; spaces: {slug}; corpora: corpus>"
        assert repr(cache.space()) == f"<SpaceView '{slug}': 20 vectors of 32 dims, float16>"


@pytest.mark.parametrize("texts", ["one string", b"bytes", [1], [["nested"]], [None]])
def test_look_up_takes_a_sequence_of_strings(path: Path, texts: Any) -> None:
    with TeacherCache.open(path) as cache, pytest.raises(TypeError, match="expected"):
        cache.lookup(texts)


def test_an_unknown_mode_is_refused_without_taking_the_lock(path: Path) -> None:
    with pytest.raises(ValueError, match="mode is 'w'; expected 'r', 'r\\+' or 'a'"):
        TeacherCache.open(path, "w")  # type: ignore[call-overload]
    with TeacherCache.open(path, "a"):  # nobody holds the lock
        pass


# Vectors by text


def test_a_text_gives_a_vector_and_a_list_of_texts_a_matrix(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        space = cache.space()
        wanted = teacher_vectors(TEXTS[:2])
        np.testing.assert_allclose(space[TEXTS[0]], wanted[0], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(space[TEXTS[:2]], wanted, rtol=1e-3, atol=1e-6)
        assert space[[]].shape == (0, 32)
        assert (space[TEXTS[0]].shape, space[TEXTS[0]].dtype) == ((32,), np.float32)


def test_an_unknown_text_is_a_key_error_with_a_readable_message(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        space = cache.space()
        for texts, count in (("unknown", "1 of 1"), ([TEXTS[0], "unknown", "other"], "2 of 3")):
            with pytest.raises(KeyError) as error:
                space[texts]
            assert isinstance(error.value, MissingRows)
            assert str(error.value).startswith(f"space {space.slug} has no vector for {count} texts, first 'unknown'")
        assert TEXTS[0] in space
        assert "unknown" not in space
        assert len(space) == 20


def test_get_has_a_default_for_missing_texts(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        space = cache.space()
        assert space.get("unknown") is None
        assert space.get("unknown", missing="nothing") == "nothing"
        np.testing.assert_array_equal(space.get(TEXTS[1]), space[TEXTS[1]])
        first, second = space.get([TEXTS[1], "unknown"])
        np.testing.assert_array_equal(first, space[TEXTS[1]])
        assert second is None
        filled = space.get(["unknown", TEXTS[1]], missing=np.nan)
        assert filled.shape == (2, 32)
        assert np.isnan(filled[0]).all()
        np.testing.assert_array_equal(filled[1], space[TEXTS[1]])


# Rows


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (np.array([True, False, True]), TypeError),
        ([0.0, 1.0], TypeError),
        (["0"], TypeError),
        ([[0, 1]], ValueError),
        (3, ValueError),
    ],
)
def test_rows_are_one_dimensional_integers(path: Path, rows: Any, error: type[Exception]) -> None:
    with TeacherCache.open(path) as cache:
        for read in (cache.space().gather, cache.space().present, cache.texts):
            with pytest.raises(error, match="expected"):
                read(rows)


def test_rows_may_be_a_list_a_tensor_or_any_integer_array(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        space = cache.space()
        wanted = space.gather(np.array([2, 0]))
        for rows in ([2, 0], torch.tensor([2, 0]), np.array([2, 0], dtype=np.uint8)):
            np.testing.assert_array_equal(space.gather(rows), wanted)
            assert cache.texts(rows) == [TEXTS[2], TEXTS[0]]
        assert space.gather([]).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gather_fills_a_tensor_of_any_float_dtype(path: Path, dtype: torch.dtype) -> None:
    with TeacherCache.open(path) as cache:
        space = cache.space()
        out = torch.empty(2, 32, dtype=dtype)
        assert space.gather([2, 0], out) is out
        torch.testing.assert_close(out, torch.from_numpy(space.gather([2, 0])).to(dtype), rtol=0, atol=0)


def test_gather_refuses_tensors_that_cannot_hold_the_vectors(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        for out in (torch.empty(3, 32, dtype=torch.bfloat16), torch.empty(2, 32, dtype=torch.int64)):
            with pytest.raises(ValueError, match=r"expected \(2, 32\) floats to write into"):
                cache.space().gather([2, 0], out)


@pytest.mark.gpu
def test_gather_fills_a_tensor_on_a_gpu(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        out = torch.empty(2, 32, device="cuda")
        torch.testing.assert_close(
            cache.space().gather([2, 0], out).cpu(), torch.from_numpy(cache.space().gather([2, 0]))
        )


def test_rows_outside_the_table_are_named(path: Path) -> None:
    with TeacherCache.open(path) as cache, pytest.raises(MissingRows, match="row 9999 is outside the table of 20 rows"):
        cache.space().gather([0, 9999])


def test_a_number_is_no_text(path: Path) -> None:
    with TeacherCache.open(path) as cache, pytest.raises(TypeError, match="expected texts, found int"):
        cache.space()[3]  # type: ignore[index]


# A dataset


def test_a_dataset_gives_texts_and_vectors(path: Path) -> None:
    dataset = VectorDataset(path)
    assert len(dataset) == 20
    text, vector = dataset[-1]
    assert text == TEXTS[-1]
    np.testing.assert_allclose(vector, teacher_vectors([text])[0], rtol=1e-3, atol=1e-6)
    with pytest.raises(IndexError, match="has 20 records, found record 20"):
        dataset[20]
    assert VectorDataset(path, dtype=torch.bfloat16)[0][1].dtype == torch.bfloat16


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_loaded_by_worker_processes(path: Path, workers: int) -> None:
    dataset = VectorDataset(TeacherCache.open(path))
    assert dataset[0][0] == TEXTS[0]  # handles are open in this process before the workers fork
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    found = {text: vector for texts, vectors in loader for text, vector in zip(texts, vectors, strict=True)}
    assert sorted(found) == sorted(TEXTS)
    np.testing.assert_allclose(np.stack([found[text] for text in TEXTS]), teacher_vectors(TEXTS), rtol=1e-3, atol=1e-6)


def test_a_pickled_dataset_opens_the_cache_itself(path: Path) -> None:
    assert pickle.loads(pickle.dumps(VectorDataset(path)))[4][0] == TEXTS[4]


def test_a_dataset_of_pairs_gives_tuples_of_texts(tmp_path: Path) -> None:
    built(tmp_path, [("a", "b"), ("c", "a")])
    texts, vector = VectorDataset(tmp_path / "cache")[1]
    assert texts == ("c", "a")
    np.testing.assert_allclose(vector, teacher_vectors(["c"])[0], rtol=1e-3, atol=1e-6)


def test_a_dataset_with_missing_vectors_is_refused(tmp_path: Path) -> None:
    built(tmp_path, TEXTS[:3])
    with TeacherCache.open(tmp_path / "cache", "a") as cache:
        cache.get_or_encode(["more"], TeacherOptions(model="toy", prompt="query: "))
        slugs = {view.space.prompt: view.slug for view in cache.spaces().values()}
    with pytest.raises(MissingRows, match="has no vector for 3 texts of corpus 'corpus', first row 0"):
        VectorDataset(tmp_path / "cache", slugs["query: "])


# Encoding on demand


def test_missing_texts_are_encoded_once_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["b", "a", "b", *TEXTS]  # more than two shards of 8 rows
    TeacherCache.open(tmp_path, "a", shard_rows=8).close()
    with TeacherCache.open(tmp_path, "a") as cache:
        np.testing.assert_allclose(cache.get_or_encode(texts, "toy"), teacher_vectors(texts), rtol=1e-3, atol=1e-6)
        assert (len(cache), cache.corpora()) == (22, {})
        monkeypatch.setattr("teacher_cache.teachers.load_teacher", lambda spec: pytest.fail("a teacher was loaded"))
        np.testing.assert_array_equal(cache.get_or_encode(texts, TOY), cache.space()[texts])
    with TeacherCache.open(tmp_path) as cache:
        assert cache.get_or_encode(["a"], "toy").shape == (1, 32)


def test_a_loaded_teacher_is_used_as_it_is(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path, "a") as cache:
        teacher = load_teacher(resolve(TOY))
        np.testing.assert_allclose(cache.get_or_encode(["a"], teacher), teacher_vectors(["a"]), rtol=1e-3, atol=1e-6)
        assert cache.space().space == teacher.space


def test_a_cache_open_for_reading_encodes_nothing(path: Path) -> None:
    with TeacherCache.open(path) as cache, pytest.raises(CacheError, match="open it with mode='a'"):
        cache.get_or_encode(["unknown"], "toy")


def test_a_quarantined_text_is_refused_with_its_reason(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path, "a") as cache, pytest.raises(MissingRows, match="is quarantined: "):
        cache.get_or_encode(["good", "nan"], BadVectors.options())
