"""Caches with token columns are checked, repaired, reindexed, cleaned and merged like others."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.building.build import BuildReport
from teacher_cache.errors import DamagedCache
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.gc import reclaim
from teacher_cache.maintenance.rebuild import reindex
from teacher_cache.maintenance.repair import repair
from teacher_cache.storage.index import Change, quarantine_key, shard_key
from teacher_cache.table.cache import TeacherCache
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES
from teacher_cache.transfer.convert import convert
from teacher_cache.transfer.exporter import export
from teacher_cache.transfer.merge import merge
from tests.teacher_cache.damaged_caches import commit_shard, flip, lose_index
from tests.teacher_cache.small_caches import built, numbered, unequal_rows
from tests.teacher_cache.token_caches import (
    LAYERS,
    STATES_ONLY,
    assert_stored_tokens,
    columns_of,
    opened,
    token_cache,
    token_files,
)
from tests.teacher_cache.toy_variants import BadTokens

TEXTS = numbered(20)
ARRAYS = (STATES, PIECES, ATTENTION)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 20 texts with every column in token shards of 4."""
    return token_cache(tmp_path_factory.mktemp("made"), TEXTS)[0]


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "cache"))


def shard(path: Path, array: str, number: int) -> Path:
    (found,) = path.glob(f"spaces/*/{array}/c/{number}")
    return found


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def other_values(file: Path) -> None:
    """Replace a shard by another valid one."""
    other = file.with_name("1" if file.name != "1" else "0")
    file.write_bytes(other.read_bytes())


def kinds(path: Path, *, deep: bool = True) -> dict[str, int]:
    return {damage.kind: damage.rows for damage in verify(path, deep=deep).damage}


def filled_again(path: Path) -> BuildReport:
    """Build the cache of the fixture again."""
    return built(path.parent, TEXTS, tokens=LAYERS)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize(
    ("damage", "kind", "quick"),
    [
        (Path.unlink, "missing_shard", True),
        (cut, "damaged_shard", True),
        (flip, "damaged_shard", False),
        (other_values, "digest", False),
    ],
)
def test_a_damaged_token_shard_is_found_and_the_next_build_fills_only_its_rows(
    path: Path, array: str, damage: Callable[[Path], None], kind: str, quick: bool
) -> None:
    damage(shard(path, array, 2))
    assert kinds(path) == {kind: 4}
    if quick:
        assert kinds(path, deep=False) == {kind: 4}
    report = repair(path)
    assert report.ok
    assert report.missing == 4
    (action,) = report.repaired
    assert action.rows == 4
    assert f"--columns vectors,tokens{',attention' * (array == ATTENTION)}` encodes them" in action.action
    assert verify(path, deep=True).ok
    lost = [8, 9, 10, 11]
    tokens = columns_of(opened(path))
    assert np.flatnonzero(~tokens.present(np.arange(20), attention=True)).tolist() == lost
    assert np.flatnonzero(~tokens.present(np.arange(20))).tolist() == (lost if array != ATTENTION else [])
    assert opened(path).present(np.arange(20)).all()
    again = filled_again(path)
    assert (again.cached, again.encoded, again.token_texts) == (16, 4, 4)
    assert_stored_tokens(opened(path), TEXTS)
    assert verify(path, deep=True).ok


def test_two_damaged_arrays_of_one_shard_count_its_rows_once(path: Path) -> None:
    flip(shard(path, STATES, 1))
    flip(shard(path, PIECES, 1))
    flip(shard(path, ATTENTION, 3))
    report = repair(path)
    assert report.ok
    assert sorted(action.rows for action in report.repaired) == [0, 4, 4]
    assert report.missing == 8
    assert filled_again(path).encoded == 8
    assert_stored_tokens(opened(path), TEXTS)


@pytest.mark.parametrize("array", ARRAYS)
def test_a_build_adds_no_rows_to_a_damaged_token_shard(tmp_path: Path, array: str) -> None:
    path, _ = token_cache(tmp_path, TEXTS[:18])
    other_values(shard(path, array, 4))
    before = shard(path, array, 4).read_bytes()
    with pytest.raises(DamagedCache, match="does not hold the values that were written, so nothing is added"):
        built(tmp_path, TEXTS, tokens=LAYERS)
    assert shard(path, array, 4).read_bytes() == before
    assert set(kinds(path)) == {"digest"}
    assert repair(path).ok
    assert built(tmp_path, TEXTS, tokens=LAYERS).encoded == 4
    assert_stored_tokens(opened(path), TEXTS)


def test_columns_of_different_lengths_are_found_even_if_every_digest_is_right(path: Path) -> None:
    with TeacherCache.open(path, "r+") as cache:
        tokens = columns_of(cache.space())
        column = tokens.columns[PIECES]
        record = column.record(0)
        assert record is not None
        values = column.array.read_shard(0, record.present)
        values[2] = values[2][:-16]  # one piece fewer than states
        commit_shard(column, 0, values, record.present)
    assert kinds(path) == {"tokens": 1}
    (damage,) = verify(path, deep=True).damage
    assert damage.where.endswith("row 2")
    assert repair(path).missing == 4
    filled_again(path)
    assert_stored_tokens(opened(path), TEXTS)


def test_states_without_pieces_are_found_by_a_quick_check(path: Path) -> None:
    with TeacherCache.open(path, "r+") as cache:
        name = columns_of(cache.space()).columns[PIECES].name
        cache.index.commit([Change("shards", shard_key(name, 1), None)])
    assert kinds(path, deep=False) == {"count": 4}
    assert repair(path).ok
    assert filled_again(path).encoded == 4
    assert_stored_tokens(opened(path), TEXTS)


@pytest.mark.parametrize("array", ARRAYS)
def test_lost_metadata_of_an_array_are_rewritten(path: Path, array: str) -> None:
    (file,) = path.glob(f"spaces/*/{array}/zarr.json")
    before = file.read_bytes()
    file.unlink()
    assert kinds(path, deep=False) == {"damaged_space": 0}
    report = repair(path)
    assert [action.kind for action in report.repaired] == ["damaged_space"]
    assert report.ok
    assert json.loads(file.read_bytes()) == json.loads(before)
    assert verify(path, deep=True).ok
    assert_stored_tokens(opened(path), TEXTS)


def test_a_rebuilt_index_has_the_token_columns(path: Path) -> None:
    lose_index(path)
    report = reindex(path)
    assert report.ok
    assert list(report.tokens.values()) == [20]
    assert verify(path, deep=True).ok
    assert_stored_tokens(opened(path), TEXTS)
    assert filled_again(path).encoded == 0


def test_invalid_tokens_are_left_out_of_a_new_index_and_filled_by_a_build(path: Path) -> None:
    flip(shard(path, STATES, 0))
    other_values(shard(path, PIECES, 4))  # pieces of texts with other lengths
    shard(path, PIECES, 1).unlink()
    flip(shard(path, ATTENTION, 2))
    lose_index(path)
    assert not reindex(path).ok
    tokens = columns_of(opened(path))
    assert np.flatnonzero(tokens.present(np.arange(20))).tolist() == list(range(8, 16))
    assert np.flatnonzero(tokens.present(np.arange(20), attention=True)).tolist() == list(range(12, 16))
    assert verify(path, deep=True).ok
    assert filled_again(path).encoded == 16
    assert_stored_tokens(opened(path), TEXTS)
    assert verify(path, deep=True).ok


def test_tokens_without_a_text_are_left_out_of_a_new_index(path: Path) -> None:
    (path / "texts/text/c/2").unlink()
    (path / "texts/keys/c/2/0").unlink()
    lose_index(path)
    assert list(reindex(path).tokens.values()) == [16]
    assert columns_of(opened(path)).present(np.arange(16)).all()


def test_a_rebuilt_index_lacks_only_the_token_columns_that_cannot_be_opened(path: Path) -> None:
    (file,) = path.glob(f"spaces/*/{STATES}/zarr.json")
    file.unlink()
    lose_index(path)
    assert not reindex(path).ok
    assert unequal_rows(opened(path), TEXTS) == []
    assert opened(path).tokens is None
    assert filled_again(path).token_texts == 20
    assert_stored_tokens(opened(path), TEXTS)


def test_a_dropped_space_loses_its_token_columns(tmp_path: Path) -> None:
    path, report = token_cache(tmp_path, [*TEXTS[:6], "nan 1"], teacher=BadTokens.options())
    reclaim(path, spaces=[report.space])
    assert not list((path / "spaces").iterdir())
    with TeacherCache.open(path) as cache:
        for array in ARRAYS:
            name = f"spaces/{report.space}/{array}"
            assert list(cache.index.iter_shards(name)) == []
            assert cache.index.quarantined(name) == {}
    assert verify(path, deep=True).ok
    assert token_cache(tmp_path, TEXTS[:6], teacher=BadTokens.options())[1].token_texts == 6


def test_token_columns_that_were_never_published_are_removed(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    path = tmp_path / "cache"
    with TeacherCache.open(path, "r+") as cache:
        from teacher_cache.tokens.request import TokenShape
        from teacher_cache.tokens.token_columns import TokenRecord

        view = cache.ensure_tokens(cache.space(), TokenRecord(TokenShape(24, 3, 2, False), "float16", (1, 3)))
    planned = {one.where for one in reclaim(path, dry_run=True).freed}
    assert planned == {f"spaces/{view.slug}/{array}" for array in ARRAYS}
    assert {one.where for one in reclaim(path).freed} == planned
    assert "columns" not in json.loads((view.folder / "space.json").read_text())
    assert verify(path, deep=True).ok
    assert reclaim(path).freed == []


def test_gc_keeps_published_columns_and_removes_temporary_files(path: Path) -> None:
    before = token_files(path)
    left = shard(path, STATES, 0).with_name(f"0.{os.getpid()}.writing")
    left.write_bytes(b"half")
    assert verify(path).leftovers == [str(left.relative_to(path))]
    assert [one.what for one in reclaim(path).freed] == ["leftover"]
    assert token_files(path) == before


def test_a_conversion_does_not_change_token_columns_and_reports_it(path: Path) -> None:
    before = token_files(path)
    assert convert(path, "int8").token_columns == "tokens of 24 as float16, attention of layers 1, 3"
    reclaim(path)
    assert token_files(path) == before
    assert_stored_tokens(opened(path), TEXTS)
    lose_index(path)
    reindex(path)
    assert_stored_tokens(opened(path), TEXTS)
    assert verify(path, deep=True).ok


def test_an_export_reports_that_it_leaves_token_columns_out(path: Path, tmp_path: Path) -> None:
    assert export(path, tmp_path / "out", "npy").token_columns == "tokens of 24 as float16, attention of layers 1, 3"


def test_caches_are_merged_with_their_token_columns(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, _ = token_cache(tmp_path / "a", TEXTS[:9], name="a")
    other, _ = token_cache(tmp_path / "b", TEXTS[5:][::-1], tokens=STATES_ONLY, storage="float16-raw", name="b")
    into = tmp_path / "merged"
    report = merge([one, other], into)
    assert report.left_out == []
    assert report.token_texts == 9 + 11
    assert verify(into, deep=True).ok
    view = opened(into)
    assert_stored_tokens(view, TEXTS, STATES_ONLY)
    assert_stored_tokens(view, TEXTS[:9])
    with TeacherCache.open(into) as cache:
        rows = cache.lookup(TEXTS)
    assert columns_of(view).present(rows, attention=True).tolist() == [True] * 9 + [False] * 11
    assert merge([one, other], into).token_texts == 0


def test_attention_of_one_cache_is_added_to_states_of_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, _ = token_cache(tmp_path / "a", TEXTS, tokens=STATES_ONLY, name="a")
    other, _ = token_cache(tmp_path / "b", TEXTS[:7], name="b")
    states = token_files(one, STATES)
    report = merge([other], one)
    assert (report.token_texts, report.left_out) == (7, [])
    assert token_files(one, STATES) == states
    assert_stored_tokens(opened(one), TEXTS[:7])
    assert_stored_tokens(opened(one), TEXTS, STATES_ONLY)
    assert verify(one, deep=True).ok


def test_token_columns_in_another_encoding_are_not_merged_and_reported(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, _ = token_cache(tmp_path / "a", TEXTS[:9], name="a")
    other, _ = token_cache(tmp_path / "b", TEXTS[9:], token_storage="int8", name="b")
    report = merge([other], one)
    (line,) = report.left_out
    assert line.startswith(f"tokens of 24 as int8, attention of layers 1, 3 of {other}: space ")
    assert "has tokens as float16, not int8" in line
    assert report.token_texts == 0
    assert_stored_tokens(opened(one), TEXTS[:9])
    assert unequal_rows(opened(one), TEXTS) == []
    assert verify(one, deep=True).ok


def test_damaged_token_columns_are_not_copied_into_another_cache(path: Path, tmp_path: Path) -> None:
    other_values(shard(path, STATES, 2))
    with pytest.raises(DamagedCache, match="does not hold the values that were written"):
        merge([path], tmp_path / "merged")
    assert verify(tmp_path / "merged", deep=True).ok


def test_valid_tokens_end_the_quarantine_of_a_row(path: Path) -> None:
    with TeacherCache.open(path, "r+") as cache:
        view = cache.space()
        tokens = columns_of(view)
        name = tokens.columns[STATES].name
        stored = dict(enumerate(tokens.gather_stored(np.arange(4), attention=True)))
        changes = [Change("shards", shard_key(column.name, 0), None) for column in tokens.columns.values()]
        cache.index.commit([*changes, Change("quarantine", quarantine_key(name, 2), b"tokens: once NaN")])
        fresh = columns_of(cache.space())
        assert fresh.missing_rows(np.arange(20)).tolist() == [0, 1, 3]
        cache.index.commit(fresh.write(0, stored, dict.fromkeys(stored, 0.0), {}))
        assert fresh.quarantined() == {}
    assert_stored_tokens(opened(path), TEXTS)
