"""A build with token columns encodes each missing text once, and can be killed at any moment."""

import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.building import build as build_module
from teacher_cache.building import pending
from teacher_cache.building.build import BuildReport, Progress, build
from teacher_cache.building.plan import plan
from teacher_cache.errors import CacheError, SpaceMismatch, TeacherError
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.info import describe
from teacher_cache.maintenance.seal import seal
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES, TOKEN_ENCODINGS
from tests.teacher_cache.observed_builds import EncodedLog, Recorded
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, passing_folder, unequal_rows
from tests.teacher_cache.token_caches import (
    LAYERS,
    STATES_ONLY,
    assert_stored_tokens,
    columns_of,
    opened,
    small_shards,
    teacher_tokens,
    token_cache,
    token_files,
)
from tests.teacher_cache.toy_variants import BadTokens, BadVectors, Changeable, OtherWidth, Silent, Variant

TEXTS = numbered(20)


def outcome(report: BuildReport) -> tuple[int, int, int, int, int]:
    return report.distinct, report.cached, report.encoded, report.quarantined, report.token_texts


def expected_bytes(texts: Sequence[str], request: TokenRequest = LAYERS, storage: str = "float16") -> int:
    """Bytes of the token columns of texts."""
    encoding, layers = TOKEN_ENCODINGS[storage], len(request.attention or ())
    counts = [len(text.pieces) for text in teacher_tokens(texts, request)]
    maps = sum(2 * count + 2 * layers * count**2 for count in counts) if layers else 0
    return sum(counts) * (encoding.row_bytes(24) + 16) + maps


def test_one_build_stores_vectors_tokens_and_attention(tmp_path: Path) -> None:
    path, report = token_cache(tmp_path, [*TEXTS, TEXTS[3]])
    assert outcome(report) == (20, 0, 20, 0, 20)
    assert report.columns == ("vectors", "tokens", "attention")
    assert report.token_bytes == expected_bytes(TEXTS)
    view = opened(path)
    assert columns_of(view).shard_rows == 4
    assert_stored_tokens(view, TEXTS)
    assert unequal_rows(view, TEXTS) == []
    assert verify(path, deep=True).ok
    workers = Recorded()
    assert outcome(built(tmp_path, TEXTS, tokens=LAYERS, workers=workers)) == (20, 20, 0, 0, 0)
    assert workers.texts == []


def test_tokens_are_added_without_changing_existing_vectors(tmp_path: Path) -> None:
    built(tmp_path, TEXTS[:13])
    (folder,) = (tmp_path / "cache/spaces").iterdir()
    before = {file: file.read_bytes() for file in (folder / "vectors.zarr/c/0").iterdir()}
    workers = Recorded()
    path, report = token_cache(tmp_path, TEXTS, tokens=STATES_ONLY, workers=workers)
    assert sorted(workers.texts) == sorted(TEXTS)
    assert outcome(report) == (20, 0, 20, 0, 20)
    assert {file: file.read_bytes() for file in before} == before
    assert_stored_tokens(opened(path), TEXTS, STATES_ONLY)
    assert unequal_rows(opened(path), TEXTS) == []
    # Adding attention encodes the texts again but keeps states and pieces.
    states = token_files(path, STATES) | token_files(path, PIECES)
    again = built(tmp_path, TEXTS, tokens=LAYERS)
    assert outcome(again) == (20, 0, 20, 0, 20)
    assert again.token_bytes == expected_bytes(TEXTS) - expected_bytes(TEXTS, STATES_ONLY)
    assert token_files(path, STATES) | token_files(path, PIECES) == states
    assert_stored_tokens(opened(path), TEXTS)
    assert verify(path, deep=True).ok


def test_a_build_of_vectors_only_never_changes_token_columns(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS[:10])
    before = token_files(path)
    workers = Recorded()
    assert outcome(built(tmp_path, TEXTS, workers=workers)) == (20, 10, 10, 0, 0)
    assert sorted(workers.texts) == sorted(TEXTS[10:])
    assert token_files(path) == before
    view = opened(path)
    assert columns_of(view).present(np.arange(20)).tolist() == [True] * 10 + [False] * 10
    assert view.record.columns is not None
    # The next build with tokens encodes only the rest; without attention it keeps the stored attention.
    workers = Recorded()
    assert outcome(built(tmp_path, TEXTS, tokens=STATES_ONLY, workers=workers)) == (20, 10, 10, 0, 10)
    assert sorted(workers.texts) == sorted(TEXTS[10:])
    assert columns_of(opened(path)).present(np.arange(20), attention=True).tolist() == [True] * 10 + [False] * 10
    assert_stored_tokens(opened(path), TEXTS, STATES_ONLY)
    assert verify(path, deep=True).ok


def test_default_layers_are_the_stored_ones_or_the_last(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS[:3], tokens=TokenRequest(attention=()))
    assert columns_of(opened(path)).record.attention == (3,)
    built(tmp_path, TEXTS[:5], tokens=TokenRequest(attention=()))
    with pytest.raises(CacheError, match="has attention maps of layers 3, not 1,3; leave `attention_layers` out"):
        built(tmp_path, TEXTS, tokens=LAYERS)
    with pytest.raises(CacheError, match="has tokens as float16, not int8; leave `token_storage` out"):
        built(tmp_path, TEXTS, tokens=STATES_ONLY, token_storage="int8")
    assert verify(path, deep=True).ok


def test_an_invalid_request_leaves_no_folder(tmp_path: Path) -> None:
    corpus, path = corpus_of(tmp_path, TEXTS), tmp_path / "cache"
    with pytest.raises(TeacherError, match="attention layers 4: expected ascending numbers from 1 to 3"):
        build(corpus, TOY, path, tokens=TokenRequest(attention=(4,)))
    with pytest.raises(CacheError, match="'float32' of token states"):
        build(corpus, TOY, path, tokens=STATES_ONLY, token_storage="float32")
    assert not path.exists()


def test_quarantined_states_keep_the_vector_are_reported_and_not_encoded_again(tmp_path: Path) -> None:
    texts = ["nan 1", "fine 1", "inf 1", "nan 2", "huge 1", "blind 1", "fine 2"]
    path, report = token_cache(tmp_path, texts, teacher=BadTokens.options())
    assert outcome(report) == (7, 0, 2, 5, 2)
    assert report.reasons == {
        "tokens: NaN in the teacher output": 2,
        "tokens: infinite value in the teacher output": 1,
        "tokens: overflows float16: largest value 1e+06": 1,
        "tokens: attention is not finite": 1,
    }
    view = opened(path)
    assert view.present(np.arange(7)).all()
    assert columns_of(view).present(np.arange(7)).tolist() == [text.startswith("fine") for text in texts]
    columns = describe(path)["spaces"][view.slug]["columns"]
    assert (columns["tokens"]["present"], columns["tokens"]["quarantined"], columns["attention"]["quarantined"]) == (
        2,
        5,
        5,
    )
    workers = Recorded()
    again = built(tmp_path, [*texts, "nan 3"], teacher=BadTokens.options(), tokens=LAYERS, workers=workers)
    assert workers.texts == ["nan 3"]
    assert outcome(again) == (8, 2, 0, 6, 0)
    assert outcome(built(tmp_path, texts, teacher=BadTokens.options())) == (7, 7, 0, 0, 0)
    assert verify(path, deep=True).ok


def test_a_text_with_a_quarantined_vector_gets_no_tokens(tmp_path: Path) -> None:
    texts = ["nan 1", "fine 1"]
    built(tmp_path, texts, teacher=BadVectors.options())
    workers = Recorded()
    path, report = token_cache(tmp_path, texts, teacher=BadVectors.options(), workers=workers)
    assert workers.texts == ["fine 1"]
    assert outcome(report) == (2, 0, 1, 1, 1)
    assert report.reasons == {"NaN in the teacher output": 1}
    assert verify(path, deep=True).ok


def test_another_teacher_with_the_same_name_is_refused(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    built(tmp_path, TEXTS, teacher=Changeable.options(switch))
    switch.touch()
    with pytest.raises(
        SpaceMismatch, match=r"vector of 'text .* differs from the one in space .*: 1 - cos .*build into"
    ):
        token_cache(tmp_path, TEXTS, teacher=Changeable.options(switch))
    path = tmp_path / "cache"
    assert opened(path).tokens is None
    assert verify(path, deep=True).ok
    switch.unlink()
    assert token_cache(tmp_path, TEXTS, teacher=Changeable.options(switch))[1].token_texts == 20


@pytest.mark.parametrize(
    ("teacher", "message"),
    [(OtherWidth, "returned tokens of shapes"), (Silent, "returned no token columns for 4 texts")],
)
def test_wrong_token_output_of_a_teacher_is_refused_and_leaves_no_columns(
    tmp_path: Path, teacher: type[Variant], message: str
) -> None:
    with pytest.raises(TeacherError, match=message):
        token_cache(tmp_path, TEXTS, teacher=teacher.options())
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.spaces() == {}
    assert verify(tmp_path / "cache", deep=True).ok


words = st.sampled_from(["nan", "inf", "fine", "blind", "huge"])
small_texts = st.builds("{} {}".format, words, st.integers(0, 9))
requests = st.sampled_from([None, STATES_ONLY, LAYERS])


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.lists(small_texts, min_size=1, max_size=30), requests), min_size=1, max_size=4),
    st.integers(1, 9),
    st.booleans(),
    st.randoms(),
)
def test_every_text_has_each_requested_column_or_is_quarantined(
    builds: list[tuple[list[str], TokenRequest | None]], batch_rows: int, always_commit: bool, random: Any
) -> None:
    has: dict[str, set[str]] = {"vectors": set(), "tokens": set(), "attention": set()}

    def shuffled(results: list[Any]) -> list[Any]:
        random.shuffle(results)
        return results

    with pytest.MonkeyPatch.context() as patch, passing_folder() as folder, small_shards():
        patch.setattr(build_module, "BATCH_ROWS", batch_rows)
        patch.setattr(build_module, "COMMIT_SECONDS", 0.0 if always_commit else 1e9)
        teacher = BadTokens.options()
        path = Path(folder) / "cache"
        for texts, request in builds:
            report = built(Path(folder), texts, teacher=teacher, tokens=request, workers=Recorded(shuffled))
            whole = {text for text in texts if text.split()[0] == "fine"}
            seeing = {text for text in texts if text.split()[0] in ("fine", "blind")}
            good = {None: set(texts), STATES_ONLY: seeing, LAYERS: whole}[request]
            assert report.quarantined == len(set(texts)) - report.cached - report.encoded
            assert report.cached + report.encoded <= len(set(texts))
            has["vectors"] |= set(texts)
            if request is not None:
                has["tokens"] |= good
            if request is LAYERS:
                has["attention"] |= good
        view = opened(path)
        assert unequal_rows(view, sorted(has["vectors"])) == []
        if view.tokens is not None:
            rows = np.arange(len(has["vectors"]))
            with TeacherCache.open(path) as cache:
                everything = cache.texts(rows)
            tokens = dict(zip(everything, view.tokens.present(rows).tolist(), strict=True))
            # Refused attention also quarantines the tokens of a text.
            assert {text for text, there in tokens.items() if there} <= has["tokens"]
            assert {text for text in has["tokens"] if text.startswith("fine")} == {
                text for text, there in tokens.items() if there and text.startswith("fine")
            }
            assert_stored_tokens(view, sorted(text for text in has["attention"] if text.startswith("fine")))
        assert verify(path, deep=True).damage == []


def test_vectors_and_tokens_of_a_row_are_committed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "BATCH_ROWS", 3)
    monkeypatch.setattr(build_module, "COMMIT_SECONDS", 0.0)
    seen: list[int] = []

    def report(progress: Progress) -> None:
        if progress.phase == "encoding" and progress.done:
            with TeacherCache.open(tmp_path / "cache") as reader:
                (view,) = reader.spaces().values()
                rows = np.arange(20)
                there = view.present(rows)
                assert columns_of(view).present(rows, attention=True).tolist() == there.tolist()
                seen.append(int(there.sum()))

    token_cache(tmp_path, TEXTS, report=report)
    assert seen[-1] == 20
    assert seen == sorted(seen)
    assert len(set(seen)) > 5


def test_the_size_of_token_outputs_limits_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["word " * (number + 1) for number in range(16)]
    monkeypatch.setattr(pending, "BATCH_BYTES", 3000)
    workers = Recorded()
    built(tmp_path, texts, tokens=LAYERS, workers=workers)
    assert sorted(workers.texts) == sorted(texts)
    sizes = [len(batch) for batch in workers.batches]
    assert max(sizes) > 1
    assert sizes[-1] == 1
    for batch in workers.batches:
        size = sum(
            text.states.nbytes + (text.attention.nbytes if text.attention is not None else 0)
            for text in teacher_tokens(batch)
        )
        assert size <= 3000 or len(batch) == 1


@pytest.mark.parametrize("array", [STATES, PIECES, ATTENTION])
def test_a_first_build_stopped_between_files_publishes_nothing_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str
) -> None:
    real = ShardedArray.write_shard

    def cut_off(self: ShardedArray, *arguments: Any) -> object:
        receipt = real(self, *arguments)
        if self.folder.name == array:
            raise KeyboardInterrupt
        return receipt

    built(tmp_path, TEXTS[:10])
    monkeypatch.setattr(ShardedArray, "write_shard", cut_off)
    try:
        token_cache(tmp_path, TEXTS)
    except KeyboardInterrupt:
        monkeypatch.undo()
    path = tmp_path / "cache"
    assert opened(path).tokens is None
    assert verify(path, deep=True).ok
    assert token_cache(tmp_path, TEXTS)[1].token_texts == 20
    assert_stored_tokens(opened(path), TEXTS)
    assert verify(path, deep=True).ok


KILLED = """
import sys
from teacher_cache.building import build as build_module
from teacher_cache.tokens import token_columns
from teacher_cache.table.cache import TeacherCache
from teacher_cache.corpus.corpus import Corpus
from tests.teacher_cache.token_caches import FOUR_ROWS, LAYERS
from tests.teacher_cache.toy_variants import Logged

build_module.BATCH_ROWS = 8
build_module.COMMIT_SECONDS = 0.05
token_columns.SHARD_BYTES = 4 * FOUR_ROWS
corpus, cache, log = sys.argv[1:]
TeacherCache.open(cache, "a", shard_rows=64).close()
build_module.build(Corpus.open(corpus), Logged.options(log), cache, name="corpus", tokens=LAYERS)
"""


def test_a_killed_token_build_loses_only_uncommitted_work(tmp_path: Path) -> None:
    texts = numbered(1200)
    corpus_of(tmp_path, texts)
    path, log = tmp_path / "cache", EncodedLog(tmp_path / "encoded.log")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "corpus-0.jsonl"), str(path), str(log.path)]
    moments = random.Random(11)
    committed: set[str] = set()  # texts whose columns were committed before the latest kill
    kills = 0
    while kills < 5:
        with subprocess.Popen(command) as process:
            while process.poll() is None and not log.has_grown():
                time.sleep(0.005)
            time.sleep(moments.uniform(0.02, 0.2))
            process.kill()
        if process.returncode == 0:  # it had already finished
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        assert not committed & set(log.new_texts())
        assert verify(path, deep=True).damage == []
        with TeacherCache.open(path) as cache:
            rows = np.arange(cache.rows)
            for view in cache.spaces().values():
                there = view.present(rows)
                assert columns_of(view).present(rows, attention=True).tolist() == there.tolist()
                known = cache.texts(rows[there])
                assert_stored_tokens(view, known[:50])
                assert committed <= set(known)
                committed = set(known)
    assert kills > 0
    assert committed
    subprocess.run(command, check=True)
    last = log.new_texts()
    assert not committed & set(last)
    assert committed | set(last) == set(texts)
    assert max(Counter(last).values(), default=1) == 1
    assert verify(path, deep=True).ok
    assert_stored_tokens(opened(path), texts)


@pytest.mark.parametrize("storage", TOKEN_ENCODINGS)
@pytest.mark.parametrize("request_", [STATES_ONLY, LAYERS])
def test_a_plan_estimates_the_bytes_that_a_build_writes(tmp_path: Path, storage: str, request_: TokenRequest) -> None:
    corpus, path = corpus_of(tmp_path, TEXTS), tmp_path / "cache"
    estimate = plan(corpus, TOY, path, tokens=request_)
    assert estimate.token_bytes[storage] == expected_bytes(TEXTS, request_, storage)
    report = build(corpus, TOY, path, tokens=request_, token_storage=storage)
    assert report.token_bytes == estimate.token_bytes[storage]
    assert plan(corpus, TOY, path, tokens=request_).token_bytes == dict.fromkeys(TOKEN_ENCODINGS, 0)
    # One more text, and attention where there was none.
    more = corpus_of(tmp_path, [*TEXTS, "a text of five words"])
    estimate = plan(more, TOY, path, tokens=LAYERS)
    assert (estimate.missing, estimate.bytes["float16-raw"]) == (1 if request_ is LAYERS else 21, 64)
    assert plan(more, TOY, path).token_bytes == {}


def test_info_reports_rows_bytes_and_layers(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS)
    (space,) = describe(path)["spaces"].values()
    sizes = {
        array: sum(len(data) for name, data in token_files(path, array).items() if "/c/" in name)
        for array in (STATES, PIECES, ATTENTION)
    }
    worst = space["columns"]["tokens"].pop("worst_error")
    assert 0 < worst < 1e-6
    assert space["columns"] == {
        "tokens": {
            "present": 20,
            "quarantined": 0,
            "bytes": sizes[STATES] + sizes[PIECES],
            "storage": "float16",
            "width": 24,
        },
        "attention": {"present": 20, "quarantined": 0, "bytes": sizes[ATTENTION], "layers": [1, 3]},
    }
    built(tmp_path, TEXTS, teacher=dataclasses.replace(TOY, dims=8))
    assert [space["columns"] == {} for space in describe(path)["spaces"].values()].count(True) == 1


def test_a_sealed_copy_has_token_columns(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS)
    seal(path)
    with TeacherCache.open(path, sealed=True) as cache:
        assert_stored_tokens(cache.space(), TEXTS)


@pytest.mark.slow
def test_ray_workers_return_tokens(tmp_path: Path) -> None:
    from teacher_cache.building.workers import RayWorkers

    path, report = token_cache(tmp_path, TEXTS, workers=RayWorkers(2))
    assert outcome(report) == (20, 0, 20, 0, 20)
    assert_stored_tokens(opened(path), TEXTS)


def test_a_real_teacher_fills_every_column(tmp_path: Path, minilm: Path) -> None:
    texts = ["Where is the station?", "Der Zug kommt spät.", "naïve café 😀", "a " * 300]
    teacher = TeacherOptions(model=str(minilm), dtype="float32")
    request = TokenRequest(attention=(2, 6))
    corpus = corpus_of(tmp_path, texts)
    estimate = plan(corpus, teacher, tmp_path / "cache", tokens=request)
    built(tmp_path, texts, teacher=teacher)
    report = built(tmp_path, texts, teacher=teacher, tokens=request)
    assert outcome(report) == (4, 0, 4, 0, 4)
    assert report.token_bytes == estimate.token_bytes["float16"]
    view = opened(tmp_path / "cache")
    tokens = columns_of(view)
    stored = tokens.gather(np.arange(4), attention=True)
    for row, text in zip(stored, teacher_tokens(texts, request, teacher), strict=True):
        np.testing.assert_array_equal(row.pieces, text.pieces)
        np.testing.assert_allclose(row.states, text.states, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(row.importance, text.importance, rtol=2e-3)  # type: ignore[arg-type]
        np.testing.assert_allclose(row.attention, text.attention, rtol=2e-3, atol=1e-5)  # type: ignore[arg-type]
        assert row.attention is not None
        np.testing.assert_allclose(row.attention.sum(axis=2), 1, atol=2e-3)
    # The vector is the pooled states.
    pooled = np.stack([row.states.mean(axis=0) for row in stored])
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, view.gather(np.arange(4)), atol=2e-3)
    assert verify(tmp_path / "cache", deep=True).ok
