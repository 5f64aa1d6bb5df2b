"""Static students: the table, its files, its training, and who else reads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models

from cli.distill import main
from distill import build_static
from distill.config import ObjectiveConfig, RunConfig, StudentConfig
from distill.errors import ConfigError, NeedsNotMet, RunFolderError, StudentError
from distill.export.sentence_transformer import export
from distill.plan.estimate import plan
from distill.runs.run import check_run, run
from distill.student.static import (
    counted_probabilities,
    plain_tokenizer,
    principal_components,
    ranked_probabilities,
    sif_weights,
    static_student,
    token_counts,
    token_vectors,
)
from distill.student.student import Student
from distill.student.vocabulary import choose_tokens, count_tokens, cut_vocabulary
from teacher_cache import TeacherCache, build
from teacher_cache.errors import TeacherError
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve
from tests.conftest import WORDS, varied_texts
from tests.distill.tiny_runs import tiny_config

CORPUS = varied_texts(40, seed=3)
# Known words, none, an unknown one, only unknown ones, more tokens than `LENGTH`, and names of special tokens.
TEXTS = ["the cat sat", "", "the unknown cat", "unknown", " ".join(WORDS * 4), "the [SEP] cat [PAD]"]
LENGTH = 12


@pytest.fixture(scope="module")
def static(tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static") / "table"
    build_static(str(tiny_student), folder, dims=8, words=CORPUS, max_length=LENGTH)
    return folder


def load(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def rows_of(folder: Path) -> torch.Tensor:
    table = Student.load(str(folder)).word_embeddings
    assert isinstance(table, torch.nn.Embedding)
    return table.weight.detach()


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


# The table


def test_a_token_s_vector_is_that_of_a_text_of_this_token(tiny_student: Path) -> None:
    model = Student.load(StudentConfig(str(tiny_student), pooling="mean"))
    vectors, ids = token_vectors(model), [model.tokenizer.convert_tokens_to_ids(word) for word in WORDS]
    assert len(vectors) == len(model.tokenizer)
    np.testing.assert_allclose(vectors[ids], model.encode(WORDS), atol=1e-6)


def test_components_are_those_of_the_singular_value_decomposition() -> None:
    vectors = (np.random.default_rng(0).normal(size=(50, 6)) * [5, 4, 3, 2, 1, 1] + 7).astype(np.float32)
    reduced, share = principal_components(vectors, 2)
    centered = vectors - vectors.mean(0)
    _, values, directions = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(np.abs(reduced), np.abs(centered @ directions[:2].T), atol=1e-4)
    assert share == pytest.approx((values[:2] ** 2).sum() / (values**2).sum(), abs=1e-5)


def test_weights_of_counted_tokens() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    counts = token_counts(tokenizer, [["a", "b"], ["a"]], 3)
    assert counts.tolist() == [2, 1, 0]
    # (count + 1) / (3 tokens + 3 rows)
    np.testing.assert_allclose(counted_probabilities(counts), [3 / 6, 2 / 6, 1 / 6])
    np.testing.assert_allclose(sif_weights(np.array([0.5, 0.25]), 0.25), [1 / 3, 1 / 2])


def test_weights_of_token_ids_are_those_of_model2vec() -> None:
    tokenizer = Tokenizer(models.WordPiece({f"t{i}": i for i in range(3)}, unk_token="t0"))
    total = 1 / 2 + 1 / 3 + 1 / 4
    np.testing.assert_allclose(ranked_probabilities(tokenizer, 3), [1 / 2 / total, 1 / 3 / total, 1 / 4 / total])


def test_token_ids_that_are_in_no_order_are_refused(tmp_path: Path, tiny_student: Path) -> None:
    with pytest.raises(ConfigError, match="WordLevel tokenizer are not in the order of their frequency: give `words`"):
        build_static(str(tiny_student), tmp_path / "table")
    # Equal weights need no frequencies.
    assert build_static(str(tiny_student), tmp_path / "table", sif=0.0).weights == "none"


def test_frequent_tokens_get_shorter_rows(tiny_student: Path, static: Path, tmp_path: Path) -> None:
    build_static(str(tiny_student), tmp_path / "equal", dims=8, sif=0.0)
    weighted, equal = rows_of(static), rows_of(tmp_path / "equal")
    tokenizer = Student.load(str(static)).tokenizer
    counts = token_counts(tokenizer.backend_tokenizer, [CORPUS], len(equal))
    expected = sif_weights(counted_probabilities(counts), 3e-3)
    torch.testing.assert_close(weighted, equal * torch.from_numpy(expected)[:, None], atol=1e-6, rtol=1e-4)


def test_special_and_unknown_tokens_have_no_vector(static: Path) -> None:
    zero = (rows_of(static) == 0).all(1)
    tokenizer = Student.load(str(static)).tokenizer
    assert {tokenizer.convert_ids_to_tokens(i) for i in zero.nonzero().flatten().tolist()} == {
        "[UNK]",
        "[PAD]",
        "[CLS]",
        "[SEP]",
    }


def test_a_corpus_of_a_cache_counts_as_its_texts(tiny_student: Path, toy_cache: Path, tmp_path: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        manifest = cache.corpus("sentences")
        texts = cache.texts(manifest.rows_of(np.arange(len(manifest))).ravel())
    one = build_static(str(tiny_student), tmp_path / "cache", cache=toy_cache, corpus="sentences")
    other = build_static(str(tiny_student), tmp_path / "texts", words=texts)
    assert one.counted_tokens == other.counted_tokens == sum(len(text.split()) for text in texts)
    assert torch.equal(rows_of(tmp_path / "cache"), rows_of(tmp_path / "texts"))


def test_what_cannot_be_built_is_refused(tiny_student: Path, static: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`dims` is 17, expected 1 to 16"):
        build_static(str(tiny_student), tmp_path / "table", dims=17, words=CORPUS)
    with pytest.raises(ConfigError, match="both `words` and `cache`"):
        build_static(str(tiny_student), tmp_path / "table", words=CORPUS, cache=tmp_path)
    with pytest.raises(ConfigError, match="is a static model already"):
        build_static(str(static), tmp_path / "table", words=CORPUS)
    with pytest.raises(RunFolderError, match="is not empty; choose another `output_dir`"):
        build_static(str(tiny_student), static, words=CORPUS)
    assert list(tmp_path.iterdir()) == []


def test_the_command(tiny_student: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    arguments = ["static", str(tiny_student), "--words", str(tmp_path / "corpus.txt"), "-o", str(tmp_path / "table")]
    result = CliRunner().invoke(main, [*arguments, "--dims", "4", "--json", "-q"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["dims"], record["weights"], record["vocabulary"]) == (4, "corpus", 4 + len(WORDS))
    assert record["texts_per_second"] > 0
    assert "mean of its tokens' rows" in (tmp_path / "table" / "README.md").read_text()
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert "choose another --output-dir" in again.stderr


# Its files


def test_all_loaders_agree(static: Path) -> None:
    student = Student.load(str(static))
    expected = unit(student.encode(TEXTS))
    table, words = rows_of(static).numpy(), student.tokenizer.get_vocab()
    # By hand: an unknown token counts in the mean, and no token is a vector of zeros.
    known = table[[words[word] for word in ("the", "cat")]].sum(0)
    np.testing.assert_allclose(student.encode(["the unknown cat"])[0], known / 3, atol=1e-7)
    np.testing.assert_allclose(
        student.encode([TEXTS[4]])[0], table[[words[w] for w in WORDS[:LENGTH]]].mean(0), atol=1e-6
    )
    assert not expected[1].any()
    assert not expected[3].any()
    np.testing.assert_allclose(load(static).encode(TEXTS), expected, atol=1e-6)
    teacher = load_teacher(resolve(TeacherOptions(model=str(static))))
    np.testing.assert_allclose(teacher.encode(TEXTS), expected, atol=1e-6)
    assert (teacher.space.pooling, teacher.space.max_length, teacher.space.normalize) == ("mean", LENGTH, True)


def test_model2vec_reads_it(static: Path) -> None:
    model2vec = pytest.importorskip("model2vec")
    model = model2vec.StaticModel.from_pretrained(str(static))
    # That library cuts a text first, after LENGTH times the median number of characters of a token.
    texts = [text for text in TEXTS if len(text.split()) <= LENGTH]
    np.testing.assert_allclose(model.encode(texts), load(static).encode(texts), atol=1e-6)
    assert (model.max_length, model.normalize) == (LENGTH, True)


def test_a_folder_of_sentence_transformers_is_a_student_without_a_limit(static: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = Tokenizer.from_file(str(static / "tokenizer.json"))
    tokenizer.no_truncation()
    module = StaticEmbedding(tokenizer, embedding_weights=rows_of(static))
    SentenceTransformer(modules=[module], device="cpu").save_pretrained(str(tmp_path / "theirs"))
    student = Student.load(str(tmp_path / "theirs"))
    np.testing.assert_allclose(student.encode(TEXTS), load(tmp_path / "theirs").encode(TEXTS), atol=1e-6)
    assert not resolve(TeacherOptions(model=str(tmp_path / "theirs"))).space.normalize
    # Exported again it still has no limit.
    export(student, None, False, tmp_path / "ours", TEXTS[:1])
    assert json.loads((tmp_path / "ours" / "tokenizer.json").read_text())["truncation"] is None


def test_a_projection_is_multiplied_into_the_table(static: Path, tmp_path: Path) -> None:
    student, projection = Student.load(str(static)), torch.randn(5, 8)
    assert export(student, projection, True, tmp_path / "final", TEXTS[:1]) > 1 - 1e-6
    np.testing.assert_allclose(
        load(tmp_path / "final").encode(TEXTS), unit(student.encode(TEXTS, projection=projection)), atol=1e-6
    )
    assert rows_of(tmp_path / "final").shape[1] == 5


def test_a_table_with_fewer_rows_than_tokens_is_refused(static: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name in ("modules.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((static / name).read_bytes())
    save_file({"embeddings": rows_of(static)[:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(StudentError, match="token ids up to 17, but the table has 17 rows"):
        Student.load(str(tmp_path))


# As a student and as a teacher


@pytest.mark.parametrize(
    "overrides",
    [
        ("objective.name=cosine", "export.projection=true"),
        ("objective.name=rkd", "sharpness.name=sam"),
        ("objective.name=talas", "objective.options={anchored_layers: 1, lasd_weight: 0}"),
        ("objective.name=leaf", "training.memory=low"),
    ],
    ids=lambda one: one[0].partition("=")[2],
)
def test_training(toy_cache: Path, static: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = run(tiny_config(toy_cache, static, tmp_path / "run", *overrides, "training.weight_decay=0"))
    trained = rows_of(Path(result.final))
    if "export.projection=true" in overrides:
        with TeacherCache.open(toy_cache) as cache:
            assert trained.shape[1] == cache.space(None).dims
        return
    before = rows_of(static)
    tokenizer = Student.load(result.final).tokenizer
    assert not torch.equal(trained, before)
    # The unknown token keeps no vector, whatever is in the texts.
    assert not trained[tokenizer.convert_tokens_to_ids("[UNK]")].any()
    assert "static, a table of token vectors of width 8" in (Path(result.final) / "README.md").read_text()


def test_unknown_words_in_training_get_no_vector(static: Path) -> None:
    student = Student.load(str(static))
    tokens = student.tokenizer(["the unknown"], return_tensors="pt")
    student(tokens["input_ids"], tokens["attention_mask"]).sum().backward()
    gradient, table = student.word_embeddings.weight.grad, student.tokenizer.get_vocab()
    assert isinstance(gradient, torch.Tensor)
    assert gradient[table["the"]].tolist() == [0.5] * 8
    assert not gradient[table["[UNK]"]].any()


@pytest.mark.parametrize("name", ["emo", "dskd", "cdm"])
def test_an_objective_on_tokens_is_refused(toy_cache: Path, static: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(NeedsNotMet, match=f"objective {name} compares the states of tokens .* static student has none"):
        check_run(tiny_config(toy_cache, static, tmp_path, f"objective.name={name}"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("objective.name=talas", "anchored_layers=1 and lasd_weight=0, or use objective cosine"),
        ("student.prompt=query", "student.prompt is 'query', but student .* is static"),
        ("student.pooling=cls", "`pooling` is cls, but .* is a static model"),
        ("training.freeze_embeddings=true", "all that is trained; set training.freeze_embeddings=false"),
    ],
)
def test_settings_that_a_static_student_has_no_use_for(
    toy_cache: Path, static: Path, tmp_path: Path, setting: str, message: str
) -> None:
    with pytest.raises((ConfigError, StudentError), match=message):
        run(tiny_config(toy_cache, static, tmp_path / "run", "objective.name=cosine", setting))


def test_it_is_a_teacher_too(static: Path, tmp_path: Path) -> None:
    report = build(CORPUS, TeacherOptions(model=str(static)), tmp_path / "cache", name="corpus", storage="float32")
    assert report.encoded == len(CORPUS)
    with TeacherCache.open(tmp_path / "cache") as cache:
        np.testing.assert_allclose(
            cache.space(None).gather(cache.lookup(CORPUS)), unit(Student.load(str(static)).encode(CORPUS)), atol=1e-6
        )
    with pytest.raises(TeacherError, match="starts with StaticEmbedding"):
        resolve(TeacherOptions(model=str(static), backend="sentence_transformer"))


def test_its_vocabulary_can_be_cut(minilm: Path, tmp_path: Path) -> None:
    tokenizer = plain_tokenizer(Student.load(str(minilm)))
    table = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 4)).astype(np.float32)
    student = static_student(table, tokenizer, max_length=LENGTH, name="static")
    texts = ["A cat sat on the mat.", "Rivers run unbelievably slowly"]
    smaller = cut_vocabulary(student, choose_tokens(student, count_tokens(student, [texts])))
    assert len(smaller.tokenizer) < len(student.tokenizer) / 2
    np.testing.assert_allclose(smaller.encode([*texts, ""]), student.encode([*texts, ""]), atol=1e-6)
    assert export(smaller, None, True, tmp_path / "cut", texts) > 1 - 1e-6


def test_its_memory_is_estimated(static: Path) -> None:
    config = RunConfig(student=StudentConfig(str(static)), objective=ObjectiveConfig("cosine"))
    found = plan(config, length=8, teacher_dim=4, suggest=False)
    # Rows of 18 tokens, in float32.
    assert found.breakdown["weights"] >= 18 * 8 * 4
    assert found.parameters == 18 * 8
