"""A build with token columns asks for what is missing, once, and can be cut off anywhere."""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from teacher_cache.building.workers import EncodedBatches, LocalWorkers, Workers
from teacher_cache.errors import CacheError, SpaceMismatch, TeacherError
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.info import describe
from teacher_cache.maintenance.seal import seal
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions, TeacherSpec
from teacher_cache.teachers.base import Encoded
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES, TOKEN_ENCODINGS
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, passing_folder, unequal_rows
from tests.teacher_cache.token_caches import (
    LAYERS,
    STATES_ONLY,
    assert_said,
    columns_of,
    opened,
    small_shards,
    token_cache,
    token_files,
    tokens_said,
)
from tests.teacher_cache.toy_variants import BadTokens, BadVectors, Changeable, OtherWidth, Silent, Variant

TEXTS = numbered(20)


class Recorded(Workers):
    """Local workers that remember the batches they were given, and may answer in any order."""

    def __init__(self, arrange: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self.batches: list[list[str]] = []
        self.arrange = arrange

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        def noted() -> Iterable[list[str]]:
            for batch in batches:
                self.batches.append(batch)
                yield batch

        answers: Iterable[tuple[int, Encoded]] = LocalWorkers().encode(spec, noted())
        yield from answers if self.arrange is None else self.arrange(list(answers))

    @property
    def asked(self) -> list[str]:
        return [text for batch in self.batches for text in batch]


def outcome(report: BuildReport) -> tuple[int, int, int, int, int]:
    return report.distinct, report.cached, report.encoded, report.quarantined, report.token_texts


def bytes_said(texts: Sequence[str], request: TokenRequest = LAYERS, storage: str = "float16") -> int:
    """Of the token columns of texts, by counting."""
    encoding, layers = TOKEN_ENCODINGS[storage], len(request.attention or ())
    counts = [len(said.pieces) for said in tokens_said(texts, request)]
    maps = sum(2 * count + 2 * layers * count**2 for count in counts) if layers else 0
    return sum(counts) * (encoding.row_bytes(24) + 16) + maps


def test_one_build_gives_vectors_tokens_and_attention(tmp_path: Path) -> None:
    path, report = token_cache(tmp_path, [*TEXTS, TEXTS[3]])
    assert outcome(report) == (20, 0, 20, 0, 20)
    assert report.columns == ("vectors", "tokens", "attention")
    assert report.token_bytes == bytes_said(TEXTS)
    view = opened(path)
    assert columns_of(view).shard_rows == 4
    assert_said(view, TEXTS)
    assert unequal_rows(view, TEXTS) == []
    assert verify(path, deep=True).ok
    workers = Recorded()
    assert outcome(built(tmp_path, TEXTS, tokens=LAYERS, workers=workers)) == (20, 20, 0, 0, 0)
    assert workers.asked == []


def test_tokens_join_vectors_that_are_there_and_change_none(tmp_path: Path) -> None:
    built(tmp_path, TEXTS[:13])
    (folder,) = (tmp_path / "cache/spaces").iterdir()
    before = {file: file.read_bytes() for file in (folder / "vectors.zarr/c/0").iterdir()}
    workers = Recorded()
    path, report = token_cache(tmp_path, TEXTS, tokens=STATES_ONLY, workers=workers)
    assert sorted(workers.asked) == sorted(TEXTS)
    assert outcome(report) == (20, 0, 20, 0, 20)
    assert {file: file.read_bytes() for file in before} == before
    assert_said(opened(path), TEXTS, STATES_ONLY)
    assert unequal_rows(opened(path), TEXTS) == []
    # Attention later: asked for again, states and pieces stay.
    states = token_files(path, STATES) | token_files(path, PIECES)
    again = built(tmp_path, TEXTS, tokens=LAYERS)
    assert outcome(again) == (20, 0, 20, 0, 20)
    assert again.token_bytes == bytes_said(TEXTS) - bytes_said(TEXTS, STATES_ONLY)
    assert token_files(path, STATES) | token_files(path, PIECES) == states
    assert_said(opened(path), TEXTS)
    assert verify(path, deep=True).ok


def test_a_build_of_vectors_alone_never_touches_token_columns(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS[:10])
    before = token_files(path)
    workers = Recorded()
    assert outcome(built(tmp_path, TEXTS, workers=workers)) == (20, 10, 10, 0, 0)
    assert sorted(workers.asked) == sorted(TEXTS[10:])
    assert token_files(path) == before
    view = opened(path)
    assert columns_of(view).present(np.arange(20)).tolist() == [True] * 10 + [False] * 10
    assert view.record.columns is not None
    # And the next one with tokens asks for the rest alone; without attention it leaves that as it is.
    workers = Recorded()
    assert outcome(built(tmp_path, TEXTS, tokens=STATES_ONLY, workers=workers)) == (20, 10, 10, 0, 10)
    assert sorted(workers.asked) == sorted(TEXTS[10:])
    assert columns_of(opened(path)).present(np.arange(20), attention=True).tolist() == [True] * 10 + [False] * 10
    assert_said(opened(path), TEXTS, STATES_ONLY)
    assert verify(path, deep=True).ok


def test_layers_are_those_that_are_held_or_the_last(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS[:3], tokens=TokenRequest(attention=()))
    assert columns_of(opened(path)).record.attention == (3,)
    built(tmp_path, TEXTS[:5], tokens=TokenRequest(attention=()))
    with pytest.raises(CacheError, match="has attention maps of layers 3, not 1,3; leave `attention_layers` out"):
        built(tmp_path, TEXTS, tokens=LAYERS)
    with pytest.raises(CacheError, match="has tokens as float16, not int8; leave `token_storage` out"):
        built(tmp_path, TEXTS, tokens=STATES_ONLY, token_storage="int8")
    assert verify(path, deep=True).ok


def test_a_mistake_in_what_is_asked_leaves_no_folder(tmp_path: Path) -> None:
    corpus, path = corpus_of(tmp_path, TEXTS), tmp_path / "cache"
    with pytest.raises(TeacherError, match="attention layers 4: expected ascending numbers from 1 to 3"):
        build(corpus, TOY, path, tokens=TokenRequest(attention=(4,)))
    with pytest.raises(CacheError, match="'float32' of token states"):
        build(corpus, TOY, path, tokens=STATES_ONLY, token_storage="float32")
    assert not path.exists()


def test_refused_states_leave_the_vector_and_are_told_and_not_asked_for_again(tmp_path: Path) -> None:
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
    told = describe(path)["spaces"][view.slug]["columns"]
    assert (told["tokens"]["present"], told["tokens"]["quarantined"], told["attention"]["quarantined"]) == (2, 5, 5)
    workers = Recorded()
    again = built(tmp_path, [*texts, "nan 3"], teacher=BadTokens.options(), tokens=LAYERS, workers=workers)
    assert workers.asked == ["nan 3"]
    assert outcome(again) == (8, 2, 0, 6, 0)
    assert outcome(built(tmp_path, texts, teacher=BadTokens.options())) == (7, 7, 0, 0, 0)
    assert verify(path, deep=True).ok


def test_a_text_whose_vector_is_refused_is_not_asked_for_tokens(tmp_path: Path) -> None:
    texts = ["nan 1", "fine 1"]
    built(tmp_path, texts, teacher=BadVectors.options())
    workers = Recorded()
    path, report = token_cache(tmp_path, texts, teacher=BadVectors.options(), workers=workers)
    assert workers.asked == ["fine 1"]
    assert outcome(report) == (2, 0, 1, 1, 1)
    assert report.reasons == {"NaN in the teacher output": 1}
    assert verify(path, deep=True).ok


def test_another_teacher_under_the_same_name_is_refused_in_one_line(tmp_path: Path) -> None:
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
def test_a_teacher_that_breaks_its_promise_is_told_and_leaves_no_columns(
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
def test_every_text_has_every_column_that_was_ever_asked_of_it_or_was_refused_it(
    builds: list[tuple[list[str], TokenRequest | None]], batch_rows: int, always_commit: bool, random: Any
) -> None:
    has: dict[str, set[str]] = {"vectors": set(), "tokens": set(), "attention": set()}

    def shuffled(answers: list[Any]) -> list[Any]:
        random.shuffle(answers)
        return answers

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
            # A text whose attention was once refused was refused its tokens with it.
            assert {text for text, there in tokens.items() if there} <= has["tokens"]
            assert {text for text in has["tokens"] if text.startswith("fine")} == {
                text for text, there in tokens.items() if there and text.startswith("fine")
            }
            assert_said(view, sorted(text for text in has["attention"] if text.startswith("fine")))
        assert verify(path, deep=True).damage == []


def test_vectors_and_tokens_of_a_row_become_true_in_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_batch_is_cut_by_what_the_teacher_may_say_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["word " * (number + 1) for number in range(16)]
    monkeypatch.setattr(pending, "BATCH_BYTES", 3000)
    workers = Recorded()
    built(tmp_path, texts, tokens=LAYERS, workers=workers)
    assert sorted(workers.asked) == sorted(texts)
    sizes = [len(batch) for batch in workers.batches]
    assert max(sizes) > 1
    assert sizes[-1] == 1
    for batch in workers.batches:
        said = sum(
            said.states.nbytes + (said.attention.nbytes if said.attention is not None else 0)
            for said in tokens_said(batch)
        )
        assert said <= 3000 or len(batch) == 1


@pytest.mark.parametrize("array", [STATES, PIECES, ATTENTION])
def test_a_first_build_cut_off_between_its_files_shows_nothing_and_goes_on(
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
    assert_said(opened(path), TEXTS)
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


def test_a_token_build_killed_at_any_moment_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    texts = numbered(1200)
    corpus_of(tmp_path, texts)
    path, log = tmp_path / "cache", tmp_path / "asked.log"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "corpus-0.jsonl"), str(path), str(log)]
    moments = random.Random(11)
    settled: set[str] = set()  # texts whose columns were committed before the latest kill
    read = 0

    def asked_since() -> list[str]:
        nonlocal read
        data = log.read_bytes() if log.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # a kill may cut the last line
        new, read = whole[read:], len(data)
        return [json.loads(line) for line in new.splitlines()]

    kills = 0
    while kills < 5:
        with subprocess.Popen(command) as process:
            while process.poll() is None and not (log.exists() and log.stat().st_size > read):
                time.sleep(0.005)
            time.sleep(moments.uniform(0.02, 0.2))
            process.kill()
        if process.returncode == 0:  # it had ended by then
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        assert not settled & set(asked_since())
        assert verify(path, deep=True).damage == []
        with TeacherCache.open(path) as cache:
            rows = np.arange(cache.rows)
            for view in cache.spaces().values():
                there = view.present(rows)
                assert columns_of(view).present(rows, attention=True).tolist() == there.tolist()
                known = cache.texts(rows[there])
                assert_said(view, known[:50])
                assert settled <= set(known)
                settled = set(known)
    assert kills > 0
    assert settled
    subprocess.run(command, check=True)
    last = asked_since()
    assert not settled & set(last)
    assert settled | set(last) == set(texts)
    assert max(Counter(last).values(), default=1) == 1
    assert verify(path, deep=True).ok
    assert_said(opened(path), texts)


@pytest.mark.parametrize("storage", TOKEN_ENCODINGS)
@pytest.mark.parametrize("request_", [STATES_ONLY, LAYERS])
def test_a_plan_foretells_the_bytes_that_a_build_writes(tmp_path: Path, storage: str, request_: TokenRequest) -> None:
    corpus, path = corpus_of(tmp_path, TEXTS), tmp_path / "cache"
    foretold = plan(corpus, TOY, path, tokens=request_)
    assert foretold.token_bytes[storage] == bytes_said(TEXTS, request_, storage)
    report = build(corpus, TOY, path, tokens=request_, token_storage=storage)
    assert report.token_bytes == foretold.token_bytes[storage]
    assert plan(corpus, TOY, path, tokens=request_).token_bytes == dict.fromkeys(TOKEN_ENCODINGS, 0)
    # With a text more, and with attention where there was none.
    more = corpus_of(tmp_path, [*TEXTS, "a text of five words"])
    foretold = plan(more, TOY, path, tokens=LAYERS)
    assert (foretold.missing, foretold.bytes["float16-raw"]) == (1 if request_ is LAYERS else 21, 64)
    assert plan(more, TOY, path).token_bytes == {}


def test_info_tells_rows_bytes_and_layers(tmp_path: Path) -> None:
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


def test_a_sealed_copy_tells_of_token_columns(tmp_path: Path) -> None:
    path, _ = token_cache(tmp_path, TEXTS)
    seal(path)
    with TeacherCache.open(path, sealed=True) as cache:
        assert_said(cache.space(), TEXTS)


@pytest.mark.slow
def test_ray_workers_bring_tokens_too(tmp_path: Path) -> None:
    from teacher_cache.building.workers import RayWorkers

    path, report = token_cache(tmp_path, TEXTS, workers=RayWorkers(2))
    assert outcome(report) == (20, 0, 20, 0, 20)
    assert_said(opened(path), TEXTS)


def test_a_real_teacher_speaks_into_every_column(tmp_path: Path, minilm: Path) -> None:
    texts = ["Where is the station?", "Der Zug kommt spät.", "naïve café 😀", "a " * 300]
    teacher = TeacherOptions(model=str(minilm), dtype="float32")
    request = TokenRequest(attention=(2, 6))
    corpus = corpus_of(tmp_path, texts)
    foretold = plan(corpus, teacher, tmp_path / "cache", tokens=request)
    built(tmp_path, texts, teacher=teacher)
    report = built(tmp_path, texts, teacher=teacher, tokens=request)
    assert outcome(report) == (4, 0, 4, 0, 4)
    assert report.token_bytes == foretold.token_bytes["float16"]
    view = opened(tmp_path / "cache")
    tokens = columns_of(view)
    stored = tokens.gather(np.arange(4), attention=True)
    for said, text in zip(stored, tokens_said(texts, request, teacher), strict=True):
        np.testing.assert_array_equal(said.pieces, text.pieces)
        np.testing.assert_allclose(said.states, text.states, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(said.importance, text.importance, rtol=2e-3)  # type: ignore[arg-type]
        np.testing.assert_allclose(said.attention, text.attention, rtol=2e-3, atol=1e-5)  # type: ignore[arg-type]
        assert said.attention is not None
        np.testing.assert_allclose(said.attention.sum(axis=2), 1, atol=2e-3)
    # The vector is what its pooling makes of the states.
    pooled = np.stack([said.states.mean(axis=0) for said in stored])
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, view.gather(np.arange(4)), atol=2e-3)
    assert verify(tmp_path / "cache", deep=True).ok
