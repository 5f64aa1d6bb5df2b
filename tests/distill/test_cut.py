"""`distill cut`, and runs whose student is cut in place."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, BertConfig, BertModel

import distill
from cli.distill import main
from distill.analyses.trained_run import TrainedRun
from distill.config import StudentConfig
from distill.errors import EvaluationError, StudentError
from distill.evaluation.agreement import fitted_agreement
from distill.plan.models import student_model
from distill.run_folder import read_record
from distill.runs.cut import RECORD
from distill.runs.cut_layers import CachedTexts
from distill.runs.demo import first_layers
from distill.runs.run import check_run, run
from distill.student.student import Student
from teacher_cache.table.cache import TeacherCache
from tests.conftest import varied_texts
from tests.distill.tiny_runs import tiny_config
from tests.teacher_cache.tiny_teachers import edit_json, write_tokenizer

TEXTS = ["the cat sat", "a river ran through the old town", "dogs"]


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of 4 layers that knows the words of the tests, and has a prompt."""
    folder = tmp_path_factory.mktemp("models") / "four-layers"
    size = write_tokenizer(folder, bos="[CLS]", eos="[SEP]", pad="[PAD]", max_length=64)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=size, max_position_embeddings=64, pad_token_id=1, initializer_range=0.5, **sizes)
    BertModel(config).save_pretrained(folder)
    edit_json(folder / "config_sentence_transformers.json", prompts={"query": "dogs "})
    return folder


def unit(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_best_layers_are_chosen_with_a_cache(four_layers: Path, toy_cache: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    result = distill.cut(
        str(four_layers), tmp_path / "cut", depth=2, cache=toy_cache, corpus="sentences", announce=lines.append
    )
    figures = [candidate.score.cosine for candidate in result.candidates if candidate.score]
    assert sorted(candidate.layers for candidate in result.candidates) == [(0, 1), (0, 2), (0, 3)]
    assert len(lines) == len(figures) == 3
    assert figures == sorted(figures, reverse=True)
    assert result.layers == result.candidates[0].layers
    assert result.score == result.candidates[0].score
    assert result.score is not None
    assert (result.score.fitted, result.score.texts) == (288, 72)
    assert (result.before.layers, result.after.layers) == (4, 2)
    assert result.after.parameters == sum(p.numel() for p in Student.load(result.output_dir).parameters())
    assert result.before.parameters - result.after.parameters == 2 * (4 * 16 * 17 + 2 * 16 * 32 + 32 + 16 + 4 * 16)
    assert 0 < result.after.bytes < result.before.bytes
    assert result.after.texts_per_second > 0
    assert result.vocabulary is None


def test_without_enough_cached_texts_the_first_layers_and_the_last_are_kept(
    four_layers: Path, toy_cache: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    result = distill.cut(
        str(four_layers), tmp_path / "cut", depth=3, cache=toy_cache, corpus="few", announce=lines.append
    )
    assert result.layers == (0, 1, 3)
    assert (result.score, [candidate.score for candidate in result.candidates]) == (None, [None])
    assert lines == [
        "the first layers and the last one are kept: no cache, or one with too few texts, to choose them with"
    ]


def test_the_folder_loads_everywhere(four_layers: Path, tmp_path: Path) -> None:
    config = StudentConfig(str(four_layers), pooling="cls", max_length=20)
    result = distill.cut(config, tmp_path / "cut", layers=[0, 2])
    assert (result.layers, result.candidates, result.score) == ((0, 2), (), None)
    student = Student.load(result.output_dir)
    assert (student.pooling, student.max_length) == ("cls", 20)
    expected = student.encode(TEXTS)
    library = SentenceTransformer(result.output_dir, device="cpu")
    assert np.allclose(library.encode(TEXTS), expected, atol=1e-5)
    assert library.prompts["query"] == "dogs "
    model = AutoModel.from_pretrained(result.output_dir, add_pooling_layer=False)
    with torch.no_grad():
        state = model(**student.tokenizer(TEXTS[:1], return_tensors="pt")).last_hidden_state[:, 0]
    assert np.allclose(state.numpy(), expected[:1], atol=1e-5)
    assert json.loads((tmp_path / "cut" / RECORD).read_text())["layers"] == [0, 2]


def test_the_vocabulary_is_that_of_the_words(four_layers: Path, tmp_path: Path) -> None:
    result = distill.cut(str(four_layers), tmp_path / "cut", words=["the cat sat on the mat", "the sea"])
    found = result.vocabulary
    assert found is not None
    assert result.layers == (0, 1, 2, 3)
    # "dogs" is in the model's own prompt; [UNK], [PAD], [CLS] and [SEP] are obligatory.
    assert (found.texts, found.same_tokens, found.resegmented, found.seen) == (2, 2, 0, 9)
    assert (found.kept, result.after.vocabulary) == (11, 11)
    small, large = Student.load(result.output_dir), Student.load(str(four_layers))
    kept = ["the cat sat on mat", "sea dogs"]
    assert np.allclose(small.encode(kept), large.encode(kept), atol=1e-5)
    assert not np.allclose(small.encode(["a river"]), large.encode(["a river"]), atol=1e-2)


def test_the_most_frequent_tokens_of_the_cached_corpus_are_kept(
    four_layers: Path, toy_cache: Path, tmp_path: Path
) -> None:
    result = distill.cut(
        str(four_layers), tmp_path / "cut", depth=1, keep=12, cache=toy_cache, corpus="sentences", space="toy"
    )
    found = result.vocabulary
    assert found is not None
    assert found.texts == 360
    assert 0 < found.same_tokens < 360
    assert found.same_tokens + found.resegmented == 360
    assert found.largest_difference <= 1e-5
    assert found.kept < result.before.vocabulary
    # The score is that of the model with both cuts.
    assert result.score is not None
    assert result.score != result.candidates[0].score


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to cut: give `layers`, `depth`, `words` or `keep`"),
        ({"depth": 1, "layers": [0]}, "both `layers` and `depth` were given"),
        ({"depth": 9}, "`depth` is 9, but .* has 4 layers"),
        ({"keep": 5}, "`keep` needs texts whose tokens are counted"),
        ({"depth": 1, "space": "toy"}, "`space` and `corpus` are parts of a cache"),
        ({"words": []}, "`words`: no texts"),
        ({"keep": 0, "words": ["a"]}, "`keep` is 0, expected a number of tokens"),
    ],
)
def test_bad_input_is_one_line(four_layers: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(StudentError, match=message):
        distill.cut(str(four_layers), tmp_path / "cut", **arguments)
    assert not (tmp_path / "cut").exists()


def test_an_existing_folder_is_not_replaced(four_layers: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    with pytest.raises(StudentError, match="already exists"):
        distill.cut(str(four_layers), tmp_path / "cut", depth=1)


def test_scored_texts_have_a_vector_and_are_not_held_out(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        rows = cache.corpus("sentences").distinct_rows(cache.rows)
        texts = CachedTexts.of(cache, cache.space(), "sentences", without=rows[::2])
        assert set(texts.scored.tolist()) == set(rows[1::2].tolist())
        assert sorted(text for batch in texts.batches() for text in batch) == sorted(cache.texts(rows))
        assert not CachedTexts.of(cache, cache.space(), "few").can_score


def test_agreement_after_a_linear_head() -> None:
    random = np.random.default_rng(0)
    student = random.normal(size=(600, 8))
    teacher = student @ random.normal(size=(8, 5)) + 1.0
    held_out = np.arange(600) % 5 == 4
    perfect = fitted_agreement(student, teacher, held_out)
    assert (perfect.fitted, perfect.texts) == (480, 120)
    assert perfect.cosine > 0.9999
    assert perfect.spearman > 0.999
    nothing = fitted_agreement(random.normal(size=(600, 8)), teacher - 1.0, held_out)
    assert abs(nothing.spearman) < 0.1
    assert abs(nothing.cosine) < 0.2
    with pytest.raises(EvaluationError, match="more than neighbors"):
        fitted_agreement(student[:20], teacher[:20], held_out[:20])


def test_a_run_cuts_its_student_once(four_layers: Path, toy_cache: Path, tmp_path: Path) -> None:
    spec = f"cut:{four_layers},depth=2,keep=all"
    settings = ("corpus=sentences", f"student.model={spec}", "training.max_steps=2")
    config = tiny_config(toy_cache, four_layers, tmp_path / "run", *settings)
    check_run(config)
    assert not (tmp_path / "run").exists()
    lines: list[str] = []
    first = run(config, announce=lines.append)
    folder = tmp_path / "run" / "student" / "four-layers-depth2-keepall"
    assert any(line.startswith("cut: layers 0,") for line in lines)
    assert Student.load(first.final).shape.layers == 2
    record = read_record(tmp_path / "run")
    assert record is not None
    assert (record["student"]["name"], record["student"]["layers"]) == (folder.name, 2)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = run(config)
    assert again.finished_before
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with TrainedRun.open(tmp_path / "run") as trained:
        assert trained.initial().student.digests["weights"] == record["student"]["weights"]
    other = replace(config, student=StudentConfig(f"cut:{four_layers},depth=3"))
    with pytest.raises(distill.errors.RunFolderError, match=r"student\.model"):
        run(other)


def test_a_student_of_a_run_that_never_started_is_cut_again(
    four_layers: Path, toy_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "run" / "student" / "four-layers-layers0+2"
    distill.cut(str(four_layers), stale, layers=[1, 3])
    config = tiny_config(
        toy_cache, four_layers, tmp_path / "run", f"student.model=cut:{four_layers},layers=0+2", "training.max_steps=1"
    )
    run(config)
    assert json.loads((stale / RECORD).read_text())["layers"] == [0, 2]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StudentError, match="is cut by one process; run `distill cut` first"):
        run(replace(config, output_dir=str(tmp_path / "other")))


def test_a_plan_needs_no_weights(four_layers: Path) -> None:
    model = student_model(StudentConfig(f"cut:{four_layers},depth=3,keep=10"))
    encoder: Any = model.build()
    assert (encoder.config.num_hidden_layers, encoder.config.vocab_size) == (3, 10)
    assert student_model(StudentConfig("cut:shape:bert-base,depth=2")).config.num_hidden_layers == 2
    with pytest.raises(StudentError, match="has 4 layers"):
        student_model(StudentConfig(f"cut:{four_layers},depth=5"))


def test_the_command_prints_sizes_and_json(four_layers: Path, toy_cache: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(varied_texts(30)))
    words = ["cut", str(four_layers), "--words", str(corpus), "--cache", str(toy_cache), "--corpus", "sentences"]
    result = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "a"), "--depth", "2"])
    assert result.exit_code == 0, result.output
    assert "layers: 0," in result.stdout
    assert "30 texts have the same tokens as before (checked), 0 are split" in result.stdout
    assert "agreement with the teacher before training" in result.stdout
    assert result.stderr.count("agreement with the teacher before training") == 3
    printed = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "b"), "--layers", "0,3", "--json"])
    assert json.loads(printed.stdout)["layers"] == [0, 3]
    refused = CliRunner().invoke(main, ["cut", str(four_layers), "-o", str(tmp_path / "c")])
    assert refused.exit_code == 1
    assert "give --layers, --depth, --words or --keep" in refused.stderr
    assert CliRunner().invoke(main, [*words, "-o", str(tmp_path / "c"), "--layers", "a"]).exit_code == 2
    assert CliRunner().invoke(main, [*words, "-o", str(tmp_path / "c"), "--keep", "few"]).exit_code == 2


@pytest.mark.slow
def test_a_real_model_keeps_its_vectors(minilm: Path, tmp_path: Path) -> None:
    texts = ["A man is playing a guitar.", "The Zeppelin landed – near Düsseldorf!", "unaffordable 12,345 😀"]
    result = distill.cut(str(minilm), tmp_path / "cut", depth=6, words=texts)
    small, large = Student.load(result.output_dir), Student.load(str(minilm))
    assert np.abs(unit(small.encode(texts)) - unit(large.encode(texts))).max() <= 1e-5
    assert (result.before.vocabulary, result.after.vocabulary) == (30522, len(small.tokenizer))
    assert result.after.vocabulary < 2100
    first_layers(minilm, tmp_path / "first", 2)
    states = large.encode_layers(texts)[2]
    assert np.abs(Student.load(str(tmp_path / "first")).encode(texts) - states).max() <= 1e-5
