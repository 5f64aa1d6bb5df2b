"""`distill eval`: retrieval in three modes, and vectors that are reused."""

import json
import math
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from distill.evaluation.scores import score
from distill.runs.run import run
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from tests.cli.test_distill import distill, refused
from tests.conftest import varied_texts
from tests.distill.tiny_runs import tiny_config
from tests.distill.tiny_tasks import write_tasks
from tests.teacher_cache.tiny_teachers import write_bert, write_sentence_transformer

MODES = ["student", "asymmetric", "teacher"]


def each_mode() -> list[str]:
    return [word for mode in MODES for word in ("--mode", mode)]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 documents and 5 queries of words that the tiny student knows, in no cache."""
    folder = tmp_path_factory.mktemp("beir") / "small"
    folder.mkdir()
    texts = varied_texts(30, seed=9)
    for name, part in (("corpus", texts[5:]), ("queries", texts[:5])):
        lines = [json.dumps({"_id": str(place), "text": text}) for place, text in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "qrels.tsv").write_text("".join(f"{n}\t{n}\t2\n{n}\t{n + 7}\t1\n" for n in range(5)))
    return folder


@pytest.fixture(scope="module")
def runs(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the toy cache, "cache", and two runs on it: "projected" into the teacher's space, and "plain"."""
    root = tmp_path_factory.mktemp("runs")
    cache = Path(shutil.copytree(toy_cache, root / "cache"))
    for name, *more in (("projected", "export.projection=true"), ("plain",)):
        run(tiny_config(cache, tiny_student, root / name, "training.max_steps=2", *more))
    return root


def scores(*words: str | Path) -> dict[str, Any]:
    result = distill("eval", *words, "--json")
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_a_run_is_scored_by_itself_and_against_its_teacher(runs: Path, collection: Path, tmp_path: Path) -> None:
    model = runs / "projected"
    result = distill("eval", model, "--retrieval", collection, *each_mode(), "--teacher", "toy", "-o", tmp_path / "s")
    assert result.exit_code == 0, result.output
    for name in ("small", "small (asymmetric)", "small (teacher)"):
        assert f"│ {name} " in result.stdout
        assert f"{name}: recall at 100 100.0, MRR at 10 " in result.stdout
    assert "average" not in result.stdout  # retrieval counts in none
    assert result.stderr.startswith("projected · mean pooling")
    assert "teacher query, teacher document: toy · " in result.stderr
    assert "lacks 30 of 30 texts in space toy@" in result.stderr
    record = json.loads((tmp_path / "s").read_text())
    asymmetric = record["tasks"]["small (asymmetric)"]
    assert asymmetric["metric"] == "ndcg_at_10"
    assert asymmetric["figures"].keys() == {"recall_at_100", "mrr_at_10", "queries", "documents"}

    # The teacher's vectors are in the run's cache now: nothing is encoded, and the teacher need not be named.
    again = distill("eval", model, "--retrieval", collection, *each_mode(), "--json")
    assert "lacks" not in again.stderr
    assert json.loads(again.stdout)["tasks"] == record["tasks"]


def test_each_mode_scores_as_the_models_do_alone(runs: Path, collection: Path, tmp_path: Path) -> None:
    student = scores(runs / "projected", "--retrieval", collection)["tasks"]["small"]
    teacher = scores("toy", "--retrieval", collection)["tasks"]["small"]
    words: list[str | Path] = ["--teacher", "toy", "--retrieval", collection, *each_mode()]
    together = scores(runs / "projected", *words)["tasks"]
    assert together["small"] == student
    assert together["small (teacher)"]["score"] == pytest.approx(teacher["score"])
    of_itself = scores("toy", "--retrieval", collection, "--mode", "asymmetric", "--teacher", "toy")
    assert of_itself["tasks"]["small (asymmetric)"] == teacher


def test_asymmetric_retrieval_needs_a_student_in_its_teachers_space(
    runs: Path, collection: Path, tiny_student: Path, tmp_path: Path
) -> None:
    asymmetric: list[str | Path] = ["--retrieval", collection, "--mode", "asymmetric"]
    for model in (runs / "plain", runs / "plain" / "final"):
        line = refused(distill("eval", model, *asymmetric))
        assert "is not in its teacher's space" in line
        assert "export.projection=true" in line
    line = refused(distill("eval", tiny_student, *asymmetric, "--teacher", "toy"))
    assert "has vectors of 16 dimensions and toy of 32" in line


def test_a_teacher_other_than_that_of_the_run_is_refused(runs: Path, collection: Path, tmp_path: Path) -> None:
    words: list[str | Path] = ["eval", runs / "projected", "--retrieval", collection, "--mode", "teacher"]
    line = refused(distill(*words, "--teacher", write_bert(tmp_path / "other")))
    assert "does not match the cached space toy@" in line
    other = tmp_path / "cache"
    scores(write_bert(tmp_path / "bert"), "--retrieval", collection, "--cache", other)
    line = refused(distill(*words[:-1], "asymmetric", "--cache", other, "--space", "bert"))
    assert "was trained on toy, so its vectors cannot be compared with those of bert" in line


def test_a_text_without_a_vector_needs_the_model(toy_cache: Path, collection: Path) -> None:
    words: list[str | Path] = ["eval", "toy", "--retrieval", collection, "--mode", "teacher"]
    space = TeacherCache.open(toy_cache).space_record().space.slug
    line = refused(distill(*words, "--cache", toy_cache, "--space", space))
    assert "no vector for 30 of 30 texts" in line
    assert "--teacher" in line
    line = refused(distill(*words))
    assert "the teacher's vectors are needed: name a cache" in line


def test_a_second_evaluation_reuses_the_vectors_of_the_first(
    tiny_student: Path, collection: Path, tmp_path: Path
) -> None:
    data = write_tasks(tmp_path / "data")
    words: list[str | Path] = [
        tiny_student,
        "--data",
        data,
        "--tasks",
        "stsb,mrpc",
        "--retrieval",
        collection,
        "--dtype",
        "fp32",
    ]
    without = scores(*words)
    first = distill("eval", *words, "--cache", tmp_path / "cache", "--json")
    assert "lacks 90 of 90 texts" in first.stderr
    again = distill("eval", *words, "--cache", tmp_path / "cache", "--json")
    assert "lacks" not in again.stderr
    assert json.loads(again.stdout)["tasks"] == json.loads(first.stdout)["tasks"]
    for name, task in without["tasks"].items():
        assert json.loads(first.stdout)["tasks"][name]["score"] == pytest.approx(task["score"], abs=1e-3)
    assert without["average"]["all"] == (without["tasks"]["stsb"]["score"] + without["tasks"]["mrpc"]["score"]) / 2


def test_queries_and_documents_are_encoded_with_their_prompts(collection: Path, tmp_path: Path) -> None:
    model = write_sentence_transformer(tmp_path)
    words: list[str | Path] = ["eval", model, "--retrieval", collection]
    printed = distill(*words).stderr
    assert "query: st · mean pooling · prompt 'the river '" in printed
    assert "document: st · mean pooling · no prompt" in printed
    printed = distill(*words, "--query-prompt", "", "--document-prompt", "").stderr
    assert "query, document: st" not in printed  # with one prompt for all roles, the roles are not named
    assert "st · mean pooling · no prompt" in printed
    cache = tmp_path / "cache"
    teacher: list[str | Path] = [
        "--mode",
        "teacher",
        "--teacher",
        model,
        "--teacher-document-prompt",
        "a mat ",
        "--cache",
        cache,
    ]
    assert "teacher document: st · mean pooling · prompt 'a mat '" in distill(*words, *teacher).stderr
    with TeacherCache.open(cache) as table:
        held = {record.space.prompt: record.space.slug for record in table.space_records().values()}
    assert held.keys() == {"the river ", "a mat "}
    # Without the model: the named space, with the given prompt.
    from_cache: list[str | Path] = ["--mode", "teacher", "--cache", cache, "--space", held["the river "]]
    result = distill(*words, *from_cache, "--teacher-document-prompt", "a mat ", "--json")
    assert result.exit_code == 0, result.output
    line = refused(distill(*words, *from_cache, "--teacher-document-prompt", "no such "))
    assert "prompt: wanted 'no such '" in line


def test_nothing_to_evaluate_on_is_refused(tiny_student: Path, collection: Path) -> None:
    line = refused(distill("eval", tiny_student))
    assert "--retrieval" in line
    assert "--data" in refused(distill("eval", tiny_student, "--retrieval", collection, "--tasks", "stsb"))
    assert "'studnet': did you mean 'student'" in refused(
        distill("eval", tiny_student, "--retrieval", collection, "--mode", "studnet")
    )


def test_modes_without_a_retrieval_task_and_unknown_modes_are_refused(tiny_student: Path, tmp_path: Path) -> None:
    data = write_tasks(tmp_path / "data")
    words: list[str | Path] = ["eval", tiny_student, "--data", data, "--tasks", "stsb,mrpc"]
    result = distill(*words, "--mode", "teacher")
    assert result.exit_code == 2
    assert "Invalid value for --mode: it is a mode of --retrieval: give a folder with --retrieval" in result.stderr
    assert "'nonsense'" in refused(distill(*words, "--mode", "nonsense", "--teacher", "nosuchmodel"))


def test_the_scores_record_what_they_depend_on(tiny_student: Path, collection: Path, tmp_path: Path) -> None:
    data = write_tasks(tmp_path / "data")
    words: list[str | Path] = [tiny_student, "--data", data, "--tasks", "stsb,mrpc"]
    record = scores(*words, "--retrieval", collection, "-o", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text()) == record
    paths = [*data.iterdir(), *collection.iterdir()]
    assert record["files"] == {path.name: blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in paths}
    same = score(TeacherOptions(model=str(tiny_student)), data, ["stsb", "mrpc"], "fp32")
    assert {key: record[key] for key in ("dtype", "weights")} == {key: same[key] for key in ("dtype", "weights")}
    assert same["files"].items() <= record["files"].items()
    assert record["dtype"] == "float32"


@pytest.mark.parametrize(("dtype", "used"), [("auto", "bfloat16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_the_recorded_precision_is_the_one_that_was_used(
    tiny_student: Path, tmp_path: Path, dtype: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.config.resolve_precision", lambda precision: "bf16")
    result = distill(
        "eval", tiny_student, "--data", write_tasks(tmp_path / "data"), "--tasks", "stsb", "--dtype", dtype, "--json"
    )
    assert f"· {used}\n" in result.stderr
    assert json.loads(result.stdout)["dtype"] == used


def test_a_figure_that_is_not_a_number_is_null(
    tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.evaluation.sts import TextualSimilarity

    scored = TextualSimilarity.score
    monkeypatch.setattr(TextualSimilarity, "score", lambda task, vectors: {**scored(task, vectors), "odd": math.nan})
    words: list[str | Path] = ["eval", tiny_student, "--data", write_tasks(tmp_path / "data"), "--tasks", "stsb"]
    result = distill(*words, "--json", "-o", tmp_path / "scores.json")
    for text in (result.stdout, (tmp_path / "scores.json").read_text()):
        record = json.loads(text, parse_constant=lambda name: pytest.fail(name))
        assert record["tasks"]["stsb"]["figures"]["odd"] is None
