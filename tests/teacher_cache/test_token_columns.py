"""Token columns are plain zarr, hold the teacher output, and quarantine what an encoding cannot hold."""

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.errors import CacheError, DamagedCache, MissingRows, TeacherError
from teacher_cache.storage.chunks import BLOBS
from teacher_cache.storage.codec import stored_name
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceRecord, SpaceView
from teacher_cache.tokens.request import TextTokens, TokenRequest, TokenShape
from teacher_cache.tokens.token_columns import TOKEN_ENCODINGS, StoredTokens, TokenColumns, TokenRecord, checked_layers
from tests.teacher_cache.small_caches import numbered, passing_folder
from tests.teacher_cache.token_caches import LAYERS, assert_stored_tokens, columns_of, opened, token_cache

# zarr-python has no specification yet for the byte strings that it writes itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*VariableLengthBytes.*:zarr.errors.UnstableSpecificationWarning")

SHARD = 16
SHAPE = TokenShape(width=6, layers=4, heads=2, causal=False)
blobs = st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=300)), min_size=SHARD, max_size=SHARD)


def ragged(folder: Path, *, compressed: bool = True, itemsize: int = 2) -> ShardedArray:
    return ShardedArray.create(
        folder, dtype=BLOBS, shard_rows=SHARD, chunk_rows=4, itemsize=itemsize, compressed=compressed
    )


def objects(values: list[bytes | None]) -> npt.NDArray[np.object_]:
    found = np.empty(len(values), dtype=object)
    found[:] = [value or b"" for value in values]
    return found


@settings(deadline=None, max_examples=40)
@given(blobs, st.booleans(), st.sampled_from([1, 2, 4]), st.randoms())
def test_byte_strings_of_any_length_are_read_in_any_order_also_by_zarr(
    values: list[bytes | None], compressed: bool, itemsize: int, random: st.randoms
) -> None:
    present = np.array([value is not None for value in values])
    rows = objects(values)
    order = np.flatnonzero(present).tolist() * 2
    random.shuffle(order)
    with passing_folder() as folder:
        array = ragged(Path(folder) / "a", compressed=compressed, itemsize=itemsize)
        receipt = array.write_shard(0, rows, present)
        array.grow(SHARD)
        assert receipt.size == array.shard_path(0).stat().st_size
        assert array.read(np.array(order, dtype=np.int64)).tolist() == rows[order].tolist()
        assert array.codec.digest(rows[present]) == receipt.digest
        assert zarr.open_array(Path(folder) / "a", mode="r")[:].tolist() == rows.tolist()


@pytest.mark.parametrize("compressed", [True, False])
def test_we_read_byte_strings_that_zarr_wrote(tmp_path: Path, compressed: bool) -> None:
    values = [bytes([number]) * (number * 7 % 50) for number in range(SHARD)]
    array = ragged(tmp_path / "a", compressed=compressed)
    array.grow(SHARD)
    zarr.open_array(tmp_path / "a", mode="r+")[:] = objects(list(values))
    assert array.read(np.arange(SHARD)[::-1].copy()).tolist() == values[::-1]


@pytest.mark.parametrize("compressed", [True, False])
def test_a_flipped_bit_in_byte_strings_is_found(tmp_path: Path, compressed: bool) -> None:
    array = ragged(tmp_path / "a", compressed=compressed)
    array.write_shard(0, objects([b"states of a text"] * SHARD), np.ones(SHARD, dtype=bool))
    whole = array.shard_path(0).read_bytes()
    for place in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        array.shard_path(0).write_bytes(damaged)
        array.forget(0)
        with pytest.raises(DamagedCache):
            array.read(np.arange(SHARD))


def record(storage: str = "float16", attention: tuple[int, ...] | None = (2, 4)) -> TokenRecord:
    return TokenRecord(SHAPE, storage, attention)


def columns(folder: Path, storage: str = "float16", attention: tuple[int, ...] | None = (2, 4)) -> TokenColumns:
    """Token columns of a cache with 40 texts and nothing else."""
    from tests.teacher_cache.small_caches import built

    built(folder, numbered(40))
    with TeacherCache.open(folder / "cache", "r+") as cache:
        return columns_of(cache.ensure_tokens(cache.space(), record(storage, attention)))


def random_tokens(lengths: list[int], seed: int = 0, scale: float = 1.0) -> list[TextTokens]:
    random = np.random.default_rng(seed)
    return [
        TextTokens(
            states=(scale * random.normal(size=(tokens, SHAPE.width))).astype(np.float32),
            pieces=random.integers(0, 2**31 - 1, (tokens, 4)).astype(np.int32),
            importance=random.random(tokens).astype(np.float32),
            attention=random.dirichlet(np.ones(tokens), size=(2, tokens)).astype(np.float32),
        )
        for tokens in lengths
    ]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.sampled_from(list(TOKEN_ENCODINGS)),
    st.booleans(),
    st.sampled_from([1e-2, 1.0, 100.0]),
    st.integers(0, 9),
)
def test_stored_tokens_are_restored_within_the_bounds_of_their_encoding(
    lengths: list[int], storage: str, attention: bool, scale: float, seed: int
) -> None:
    made = TokenColumns.__new__(TokenColumns)
    made.record = record(storage, (2, 4) if attention else None)
    made.encoding = made.record.encoding
    outputs = random_tokens(lengths, seed, scale)
    checked = made.check(outputs, attention=attention)
    assert not checked.quarantined
    for place, text in enumerate(outputs):
        stored = checked.stored[place]
        assert stored.tokens == lengths[place]
        assert stored.bytes == stored.tokens * made.record.token_bytes() + made.record.attention_bytes(stored.tokens)
        back = made.restore(stored)
        np.testing.assert_array_equal(back.pieces, text.pieces)
        step = {"int8": np.abs(text.states).max() / 127}.get(storage, np.abs(text.states) * 2**-11 + 2**-24)
        assert (np.abs(back.states - text.states) <= step * 1.01).all()
        assert checked.errors[place] <= made.encoding.max_cosine_error
        if attention:
            assert back.importance is not None
            assert back.attention is not None
            np.testing.assert_allclose(back.importance, text.importance, rtol=1e-3, atol=1e-7)
            np.testing.assert_allclose(back.attention, text.attention, rtol=1e-3, atol=1e-7)
        else:
            assert back.attention is None


def test_states_can_be_restored_into_a_padded_batch(tmp_path: Path) -> None:
    made = columns(tmp_path, attention=None)
    (outputs,) = random_tokens([5])
    stored = made.check([outputs], attention=False).stored[0]
    batch = np.zeros((2, 9, SHAPE.width), dtype=np.float32)
    made.restore(stored, batch[1, :5])
    np.testing.assert_allclose(batch[1, :5], outputs.states, rtol=1e-3)
    assert not batch[1, 5:].any()
    assert not batch[0].any()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, "tokens: NaN in the teacher output"),
        (np.inf, "tokens: infinite value in the teacher output"),
        (1e6, "tokens: overflows float16: largest value 1e+06"),
    ],
)
def test_only_the_text_with_an_invalid_state_is_quarantined(tmp_path: Path, value: float, reason: str) -> None:
    outputs = random_tokens([3, 4, 5])
    outputs[1].states[2, 0] = value
    checked = columns(tmp_path).check(outputs, attention=True)
    assert checked.quarantined == {1: reason}
    assert sorted(checked.stored) == [0, 2]


def test_a_text_without_tokens_or_with_non_finite_attention_is_quarantined(tmp_path: Path) -> None:
    outputs = random_tokens([3, 0, 5])
    assert outputs[2].attention is not None
    outputs[2].attention[1, 4, 4] = np.nan
    made = columns(tmp_path)
    assert made.check(outputs, attention=True).quarantined == {
        1: "tokens: none",
        2: "tokens: attention is not finite",
    }
    assert made.check(outputs[2:], attention=False).quarantined == {}


def test_shapes_that_differ_from_the_configuration_are_a_teacher_error(tmp_path: Path) -> None:
    made = columns(tmp_path)
    (text,) = random_tokens([4])
    wrong = [
        TextTokens(text.states[:, :5], text.pieces, text.importance, text.attention),
        TextTokens(text.states[:3], text.pieces, text.importance, text.attention),
        TextTokens(text.states, text.pieces, text.importance, None),
        TextTokens(text.states, text.pieces, text.importance, text.attention[:1]),  # type: ignore[index]
    ]
    for outputs in wrong:
        with pytest.raises(TeacherError, match=r"returned tokens of shapes .* its configuration gives"):
            made.check([outputs], attention=True)


@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("rows", [0, 7])
def test_int8_blocks_are_restored_equally_into_any_memory_layout(width: int, rows: int) -> None:
    encoding = TOKEN_ENCODINGS["int8"]
    stored = encoding.store(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32))
    dense, strided = np.empty((rows, width), dtype=np.float32), np.empty((rows, 2 * width), dtype=np.float32)[:, ::2]
    encoding.restore(stored, dense)
    encoding.restore(stored, strided)
    np.testing.assert_array_equal(dense, strided)
    scales = np.ascontiguousarray(stored[:, width:]).view("<f2").astype(np.float32).repeat(64, axis=1)[:, :width]
    np.testing.assert_array_equal(dense, stored[:, :width] * scales)


def test_every_encoding_keeps_a_few_huge_numbers_among_small_ones(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    states[:, 3] = 300.0
    outputs = [TextTokens(states, np.zeros((50, 4), dtype=np.int32))]
    for storage in TOKEN_ENCODINGS:
        made = TokenColumns.__new__(TokenColumns)
        made.record = TokenRecord(TokenShape(64, 4, 2, False), storage)
        made.encoding = made.record.encoding
        assert made.check(outputs, attention=False).quarantined == {}


def test_inconsistent_columns_are_damage(tmp_path: Path) -> None:
    made = columns(tmp_path)
    stored = made.check(random_tokens([4]), attention=True).stored[0]
    assert stored.attention is not None
    for wrong in (
        StoredTokens(stored.states[:-12], stored.pieces, stored.attention),
        StoredTokens(stored.states, stored.pieces[:-1], stored.attention),
        StoredTokens(stored.states, stored.pieces, stored.attention[:-2]),
        StoredTokens(b"", b"", None),
    ):
        with pytest.raises(DamagedCache, match=r"bytes of pieces|pieces, but"):
            made.restore(wrong)


def test_rows_are_read_in_order_and_missing_ones_name_the_command(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, numbered(20))
    view = opened(path)
    tokens = columns_of(view)
    texts = numbered(20)
    assert_stored_tokens(view, [texts[place] for place in (17, 3, 3, 0, 19)])
    assert [len(pieces) for pieces in tokens.gather_pieces(np.array([9, 1]))] == [14 - 4, 4]
    with TeacherCache.open(path, "r+") as cache, cache.appending() as appender:
        appender.add(["a new text"])
    view = opened(path)
    assert columns_of(view).present(np.array([19, 20, -1, 99])).tolist() == [True, False, False, False]
    for attention, columns_named in ((False, "vectors,tokens"), (True, "vectors,tokens,attention")):
        with pytest.raises(
            MissingRows, match=rf"1 of 2 rows, the first is row 20; `tcache build --columns {columns_named}`"
        ):
            columns_of(view).gather(np.array([3, 20]), attention=attention)


def test_missing_columns_and_missing_attention_are_errors(tmp_path: Path) -> None:
    from tests.teacher_cache.small_caches import built

    built(tmp_path, numbered(5))
    assert opened(tmp_path / "cache").tokens is None
    path, _ = token_cache(tmp_path, numbered(5), tokens=TokenRequest())
    tokens = columns_of(opened(path))
    assert tokens.present(np.arange(5)).all()
    assert not tokens.present(np.arange(5), attention=True).any()
    with pytest.raises(MissingRows, match="no attention for 2 of 2 rows"):
        tokens.gather_stored(np.array([0, 1]), attention=True)


def read_elsewhere(path: Path) -> list[StoredTokens]:
    return columns_of(opened(path)).gather_stored(np.arange(20), attention=True)


def test_two_processes_read_the_same_columns(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, numbered(20))
    here = read_elsewhere(path)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(read_elsewhere, [path, path]) == [here, here]


def test_a_view_with_open_columns_can_be_pickled(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, numbered(20))
    view = opened(path)
    before = columns_of(view).gather_stored(np.arange(4))
    there: SpaceView = pickle.loads(pickle.dumps(view))
    assert columns_of(there).gather_stored(np.arange(4)) == before


@pytest.mark.parametrize("storage", TOKEN_ENCODINGS)
def test_zarr_and_numpy_alone_read_a_cache_with_token_columns(tmp_path: Path, storage: str) -> None:
    path, _ = token_cache(tmp_path, numbered(20), token_storage=storage)
    (space,) = (path / "spaces").iterdir()
    written = json.loads((space / "space.json").read_text())["columns"]
    assert written == {
        "shape": {"width": 24, "layers": 3, "heads": 2, "causal": False},
        "storage": stored_name(storage),
        "attention": [1, 3],
    }
    blobs_of = {
        name: zarr.open_array(str(space / f"{name}.zarr"), mode="r")[:] for name in ("tokens", "pieces", "attention")
    }
    outputs = columns_of(opened(path)).gather(np.arange(20), attention=True)
    for row, text in enumerate(outputs):
        pieces = np.frombuffer(blobs_of["pieces"][row], "<i4").reshape(-1, 4)
        np.testing.assert_array_equal(pieces, text.pieces)
        halves = np.frombuffer(blobs_of["attention"][row], "<f2")
        np.testing.assert_array_equal(halves[: len(pieces)], text.importance)
        np.testing.assert_array_equal(halves[len(pieces) :].reshape(2, len(pieces), -1), text.attention)
        if storage == "int8":
            rows = np.frombuffer(blobs_of["tokens"][row], "i1").reshape(len(pieces), -1)
            states = rows[:, :24] * rows[:, 24:].copy().view("<f2").astype("f4").repeat(64, axis=1)[:, :24]
        else:
            states = np.frombuffer(blobs_of["tokens"][row], "<f2").reshape(len(pieces), 24)
        np.testing.assert_array_equal(states, text.states)


def test_shards_of_token_columns_are_small_and_divide_those_of_the_table() -> None:
    for width, attention, expected in ((384, None, 2048), (768, (12,), 1024), (2560, None, 256), (4096, (1, 2), 128)):
        one = TokenRecord(TokenShape(width, 32, 16, False), "float16", attention)
        rows = one.shard_rows(8192)
        assert rows == expected
        assert rows * (32 * one.token_bytes() + one.attention_bytes(32)) <= 64 * 2**20
    assert TokenRecord(TokenShape(10**8, 1, 1, False), "float16-raw").shard_rows(8192) == 1
    assert record().shard_rows(24) == 24


def test_a_space_record_survives_json_with_and_without_columns(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, numbered(3))
    found = opened(path).record
    assert SpaceRecord.from_json(found.to_json()) == found
    old = json.loads(found.to_json())
    del old["columns"]
    assert SpaceRecord.from_json(json.dumps(old).encode()).columns is None


@pytest.mark.parametrize("layers", [(), (0,), (5,), (2, 2), (3, 1)])
def test_layers_that_the_teacher_lacks_are_an_error(layers: tuple[int, ...]) -> None:
    with pytest.raises(TeacherError, match="expected ascending numbers from 1 to 4"):
        checked_layers(layers, SHAPE)


def test_columns_of_another_shape_encoding_or_layers_are_an_error(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, numbered(3))
    with TeacherCache.open(path, "r+") as cache:
        view = cache.space()
        held = view.record.columns
        assert held is not None
        for wanted, message in (
            (TokenRecord(held.shape, "float16-raw", held.attention), "has tokens as float16, not float16-raw"),
            (TokenRecord(held.shape, "float16", (2,)), "has attention maps of layers 1,3, not 2"),
            (TokenRecord(SHAPE, "float16", None), "has tokens of TokenShape"),
        ):
            with pytest.raises(CacheError, match=message):
                cache.ensure_tokens(view, wanted)
        assert cache.ensure_tokens(view, TokenRecord(held.shape, "float16", None)).record.columns == held
        assert LAYERS.attention == held.attention
    with pytest.raises(CacheError, match="unknown encoding 'float32' of token states"):
        TokenRecord(SHAPE, "float32").encoding  # noqa: B018


def test_a_view_opened_before_the_columns_does_not_remove_them(tmp_path: Path) -> None:
    from tests.teacher_cache.small_caches import built

    built(tmp_path, numbered(3))
    with TeacherCache.open(tmp_path / "cache", "r+") as cache:
        older = cache.space()
        wanted = cache.ensure_tokens(older, record(attention=None))
        nothing = np.empty((0, older.dims), dtype=np.float32)
        wanted.write(0, np.empty(0, dtype=np.int64), nothing)
        older.write(0, np.empty(0, dtype=np.int64), nothing, tokens=5)
        assert cache.space().record.columns == record(attention=None)
        assert cache.space().record.tokens == older.record.tokens + 5
