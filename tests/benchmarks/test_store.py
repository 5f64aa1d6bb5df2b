"""`benchmarks/store.py`: its figures are right, and it runs."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import store
from benchmarks.contender import Streamed
from benchmarks.contest import Absent, Contest, Failed, Size
from benchmarks.own import cosine_errors, format_size
from benchmarks.peers import CONTENDERS, DEFAULT, HF_MAP, LITDATA, MEMORY_MAP, RAW, REPEATED, ZARR
from benchmarks.peers.base import BATCH, permutation, windows
from benchmarks.resources import PeakMemory, bytes_below, resident_share, warm
from benchmarks.store_report import main_figure, markdown, ratio, ratios
from benchmarks.vectors import (
    RowFinder,
    blocks_of,
    expected_pairs,
    random_vectors,
    same_source_pairs,
    source_of,
    write_vectors,
)
from teacher_cache.storage.codec import ENCODINGS


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # Ratios 2, 4 and 3; the ratio of the medians would be 40 / 10 = 4.
    assert ratio([20, 40, 300], [10, 10, 100]) == 3


def test_the_rate_of_a_complete_epoch_includes_its_start() -> None:
    assert Streamed(first_rows=256, first_seconds=1.0, rows=1000, seconds=4.0).rate(1000) == 250


def test_the_rate_of_a_partial_epoch_counts_its_start_once() -> None:
    # A second until the first 100 rows, then 100 rows a second: 900 more take nine seconds.
    assert Streamed(first_rows=100, first_seconds=1.0, rows=300, seconds=3.0).rate(1000) == 100
    # Two seconds until the first 100 rows: 1,000 rows in 2 + 9 seconds.
    assert Streamed(first_rows=100, first_seconds=2.0, rows=300, seconds=4.0).rate(1000) == pytest.approx(1000 / 11)


def test_pairs_of_one_source_are_counted() -> None:
    assert same_source_pairs(np.array([7, 7, 7, 2, 2, 5])) == 3 + 1


def test_expected_pairs_are_those_of_drawing_without_replacement() -> None:
    # 200 rows, 100 sources of 2: each of 6 pairs is one of 100 same-source pairs out of 19,900.
    assert expected_pairs(4, 200) == pytest.approx(6 * 100 / 19_900)


def test_sources_are_contiguous_and_of_equal_size() -> None:
    sources = source_of(np.arange(1000), 1000)
    assert (np.diff(sources) >= 0).all()
    assert set(Counter(sources.tolist()).values()) == {10}


def test_random_vectors_have_unit_length_and_are_reproducible(tmp_path: Path) -> None:
    write_vectors(tmp_path / "vectors.npy", 8200, 16)
    again = list(random_vectors(8200, 16))
    assert [len(block) for block in again] == [8192, 8]
    for block, written in zip(again, blocks_of(tmp_path / "vectors.npy"), strict=True):
        np.testing.assert_array_equal(block, written)
        np.testing.assert_allclose(np.linalg.norm(block.astype(np.float32), axis=1), 1, atol=1e-3)


def test_rows_are_found_by_their_vectors(tmp_path: Path) -> None:
    write_vectors(tmp_path / "vectors.npy", 500, 8)
    vectors = np.load(tmp_path / "vectors.npy")
    rows = np.array([499, 0, 17, 17])
    finder = RowFinder(tmp_path / "vectors.npy")
    assert finder.find(vectors[rows]).tolist() == rows.tolist()
    with pytest.raises(ValueError, match="1 of 2 vectors"):
        finder.find(np.concatenate([vectors[:1], -vectors[:1]]))


@given(sizes=st.lists(st.integers(1, 700), max_size=8), window=st.integers(1, 2000), epoch=st.integers(0, 9))
@settings(max_examples=50)
def test_windows_serve_every_row_once_in_batches(sizes: list[int], window: int, epoch: int) -> None:
    ends = np.cumsum([0, *sizes])
    blocks = (np.arange(ends[i], ends[i + 1]) for i in range(len(sizes)))
    batches = list(windows(blocks, window, epoch))
    assert all(1 <= len(batch) <= BATCH for batch in batches)
    served = np.concatenate(batches) if batches else np.arange(0)
    assert sorted(served.tolist()) == list(range(sum(sizes)))


def test_each_epoch_has_another_permutation() -> None:
    assert sorted(permutation(50, 1).tolist()) == list(range(50))
    assert permutation(50, 1).tolist() != permutation(50, 2).tolist()


def test_cosine_errors_are_exact_near_one() -> None:
    # Unit vectors an angle t apart: 1 - cos t = t^2 / 2 to the fourth order.
    t = 1e-6
    found = cosine_errors(np.array([[2.0, 0], [0, 3]]), np.array([[np.cos(t), np.sin(t)], [0, 1]]))
    assert found == pytest.approx([t**2 / 2, 0], rel=1e-6)


def test_the_error_of_an_encoding_is_measured_on_rows_read_back(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((100, 32)).astype(np.float32)
    vectors[3] = np.nan
    found = format_size(vectors, "float16-raw", tmp_path)
    # 99 rows of 32 float16 and an inner chunk or two that the refused row shares.
    assert found["stored"] == 99
    assert 99 * 64 <= found["bytes"] < 100 * 64 + 8192
    assert 0 < found["mean"] < found["worst"] < 1e-6


def test_peak_memory_includes_freed_memory() -> None:
    with PeakMemory() as memory:
        before = memory.anonymous
        taken = np.ones(8 * 2**20)
        np.multiply(taken, 2, out=taken)
        del taken
    assert memory.peak - before >= 60 * 2**20


def test_a_file_is_in_the_page_cache_after_reading(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(100_000))
    (tmp_path / "empty").touch()
    warm(tmp_path)
    assert resident_share(tmp_path) == 1
    assert bytes_below(tmp_path) == 100_000


def figures(rates: dict[str, list[float]]) -> dict[str, Any]:
    memory = {"peak": 2**20, "anonymous_growth": 0, "file_growth": 0, "bytes": 2**20}
    return {name: {"rates": found, **memory} for name, found in rates.items()}


def test_the_last_ratio_is_of_the_default_encoding_to_the_fastest_training_store() -> None:
    stream = figures({MEMORY_MAP: [10, 10], DEFAULT: [8, 6], HF_MAP: [2, 2], LITDATA: [1, 1]})
    found = ratios({"stream": stream})
    assert list(found)[-1] == f"rows/s: {DEFAULT} / {HF_MAP}, the fastest of these"
    assert main_figure(found) == f"rows/s: {DEFAULT} / {HF_MAP}, the fastest of these = 3.50"
    assert found[f"rows/s: {DEFAULT} / {MEMORY_MAP}"] == pytest.approx(0.7)
    assert not any("MosaicML" in label for label in found)


def test_gather_ratios_are_times_of_the_slower_to_the_faster() -> None:
    def took(**medians: float) -> dict[str, Any]:
        names = {"mapped": MEMORY_MAP, "raw": RAW, "hf": HF_MAP, "zarr": ZARR, "default": DEFAULT}
        return {names[key]: {"medians": [value], "p95": value} for key, value in medians.items()}

    found = ratios(
        {"gather": {"hot": took(mapped=1, raw=1.2, hf=12, zarr=60, default=3), "cold": took(mapped=90, raw=3)}}
    )
    assert found == {
        f"hot gather time: {RAW} / {MEMORY_MAP}": pytest.approx(1.2),
        f"hot gather time: {HF_MAP} / {RAW}": pytest.approx(10),
        f"hot gather time: {ZARR} / {DEFAULT}": pytest.approx(20),
        f"cold gather time: {MEMORY_MAP} / {RAW}": pytest.approx(30),
    }


def test_size_ratios_are_to_four_bytes_per_stored_number() -> None:
    formats = {"int8": {"stored": 10, "bytes": 100, "worst": 1e-5, "mean": 1e-6}}
    found = ratios({"size": {"real.npy": {"rows": 12, "dims": 8, "formats": formats}}})
    assert found == {"bytes of real.npy: float32 / int8": pytest.approx(3.2)}


def test_there_is_no_ratio_without_figures() -> None:
    assert ratios({}) == {}
    assert main_figure({}).startswith("no ratio")


def test_an_absent_contender_is_skipped_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contest = Contest(tmp_path, Size(100, 8))
    with contest.noting(LITDATA):
        raise Absent("no module named litdata")
    with contest.noting(ZARR):
        raise Failed("ValueError: no")
    assert contest.missing == {LITDATA: "absent", ZARR: "failed: ValueError: no"}
    assert contest.wanted([LITDATA, MEMORY_MAP, ZARR]) == [MEMORY_MAP]
    assert capsys.readouterr().err.splitlines()[0] == f"{LITDATA}: absent"


@pytest.mark.skipif(importlib.util.find_spec("litdata") is not None, reason="litdata is installed")
def test_a_library_that_is_not_installed_is_absent(tmp_path: Path) -> None:
    contest = Contest(tmp_path, Size(100, 8))
    assert contest.rounds([LITDATA], 1, lambda process, number: process.request("stream", epoch=0, limit=1.0)) == {}
    assert contest.missing == {LITDATA: "absent"}


@pytest.mark.parametrize("name", [*CONTENDERS, *REPEATED])
def test_every_contender_can_be_constructed_without_its_library(name: str, tmp_path: Path) -> None:
    assert {**CONTENDERS, **REPEATED}[name].make(tmp_path, 100, 8).rows == 100


def test_a_quick_run_measures_streams_and_writes_json_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [f"--{kind}={tmp_path / f'out.{kind}'}" for kind in ("json", "markdown")]
    data = ["--rows=600", "--dims=16", f"--folder={tmp_path / 'data'}"]
    store.main(["stream", "shuffle", "--quick", f"--only={MEMORY_MAP}", f"--only={RAW}", *data, *written])
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results["stream"]) == {MEMORY_MAP, RAW, f"{RAW}, window 64k"}
    for name, found in results["stream"].items():
        assert len(found["rates"]) == 2
        assert not found["torch"]
        assert results["shuffle"][name]["rows"] == 600
        assert results["shuffle"][name]["twice"] == 0
    assert results["missing"] == {}
    said = capsys.readouterr().out
    assert (tmp_path / "out.markdown").read_text() in said
    assert f"| {RAW} / {MEMORY_MAP}" in said.replace("rows/s: ", "")
    assert said.splitlines()[-1] == main_figure(results["ratios"])


@pytest.mark.slow
def test_a_quick_run_measures_everything_and_reuses_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "real.npy", np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32))
    arguments = ["--quick", "--rows=9000", "--dims=32", f"--folder={tmp_path / 'data'}", f"--json={tmp_path / 'json'}"]
    arguments += [
        "--only=ours",
        "--only=zarr",
        "--only=memory map",
        "--only=LMDB",
        f"--vectors={tmp_path / 'real.npy'}",
    ]
    store.main(arguments)
    results = json.loads((tmp_path / "json").read_text())
    assert results["missing"] == {}
    assert (
        set(results["gather"]["cold"])
        == set(results["gather"]["hot"])
        == {MEMORY_MAP, DEFAULT, RAW, ZARR, "LMDB values"}
    )
    assert set(results["memory"][DEFAULT]) == {"900", "9000"}
    assert set(results["write"]) == {DEFAULT, ZARR}
    assert set(results["size"]["real.npy"]["formats"]) == set(ENCODINGS)
    assert markdown(results) in capsys.readouterr().out
    store.main(["shuffle", *arguments])
    assert "writing" not in capsys.readouterr().err
