"""Tasks from a YAML file: their files, columns and formats."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cli.distill import main
from distill.errors import ConfigError, EvaluationError
from distill.evaluation import TASKS, load_task
from distill.evaluation.classification import Classification
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.pairs import PairClassification
from distill.evaluation.retrieval import Retrieval
from distill.evaluation.sts import TextualSimilarity
from distill.evaluation.task_file import read_task_file
from tests.contracts.task_contract import CountingEncoder, text_vectors

ROWS = [("a cat", "the cat", 4.5), ("a cat", "a train", 0.5), ("a dog", "the dog", 4)]


def write_rows(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix in (".jsonl", ".ndjson"):
            file.writelines(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
        else:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([header, *rows])
    return path


def task_file(folder: Path, tasks: Mapping[str, Any]) -> Path:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump(dict(tasks), sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def three(tmp_path: Path) -> Path:
    write_rows(tmp_path / "mail" / "train.csv", ("body", "queue"), [(f"mail {i}", "ab"[i % 2]) for i in range(12)])
    write_rows(tmp_path / "mail" / "test.tsv", ("body", "queue"), [(f"later {i}", "ab"[i % 2]) for i in range(8)])
    write_rows(tmp_path / "twins.jsonl", ("q1", "q2", "same"), [(f"l {i}", f"r {i}", i % 2) for i in range(6)])
    write_rows(tmp_path / "faq_test.csv", ("sentence1", "sentence2", "score"), ROWS)
    write_rows(tmp_path / "help" / "corpus.jsonl", ("_id", "text"), [("d1", "how to cook"), ("d2", "how to read")])
    write_rows(tmp_path / "help" / "queries.jsonl", ("_id", "text"), [("q1", "cooking")])
    write_rows(tmp_path / "help" / "qrels" / "test.tsv", ("query-id", "corpus-id", "score"), [("q1", "d1", 1)])
    columns = {"sentence1": "q1", "sentence2": "q2", "label": "same"}
    return task_file(
        tmp_path,
        {
            "mail": {
                "kind": "classification",
                "train": "mail/train.csv",
                "test": "mail/test.tsv",
                "columns": {"text": "body", "label": "queue"},
                "domain": "in",
            },
            "twins": {"kind": "pairs", "file": "twins.jsonl", "columns": columns, "domain": "apart"},
            "faq": {"kind": "sts", "folder": "."},
            "help": {"kind": "retrieval", "folder": "help"},
        },
    )


def test_tasks_have_their_kind_domain_and_files_relative_to_the_yaml_file(three: Path) -> None:
    mail, twins, faq, help_ = read_task_file(three)
    kinds = [type(task) for task in (mail, twins, faq, help_)]
    assert kinds == [Classification, PairClassification, TextualSimilarity, Retrieval]
    assert [task.name for task in (mail, twins, faq, help_)] == ["mail", "twins", "faq", "help"]
    assert mail.files() == [three.parent / "mail" / "train.csv", three.parent / "mail" / "test.tsv"]
    assert faq.files() == [three.parent / "faq_test.csv"]
    assert [task.domain for task in (mail, twins, faq, help_)] == ["in", "apart", "other", "apart"]


def test_only_tasks_with_a_domain_count_in_its_average(three: Path) -> None:
    report = Evaluator(read_task_file(three))(CountingEncoder())
    assert report.averages["in_domain"].score == report.tasks["mail"].score
    assert report.averages["all"].tasks == 2


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "ndjson"])
def test_every_file_format_has_the_same_score(tmp_path: Path, ending: str) -> None:
    write_rows(tmp_path / "faq_test.csv", ("sentence1", "sentence2", "score"), ROWS)
    usual = TextualSimilarity("faq", tmp_path)
    rows = [(score, i, first, second) for i, (first, second, score) in enumerate(ROWS)]
    path = write_rows(tmp_path / f"same.{ending}", ("score", "id", "sentence1", "sentence2"), rows)
    (task,) = read_task_file(task_file(tmp_path, {"faq": {"kind": "sts", "file": path.name}}))
    assert task.texts() == usual.texts()
    assert task.score(text_vectors) == usual.score(text_vectors)


def test_class_names_score_like_numbers(tmp_path: Path) -> None:
    for part, count in (("train", 30), ("test", 20)):
        rows = [(f"{part} {i}", i % 3) for i in range(count)]
        write_rows(tmp_path / f"numbers_{part}.csv", ("text", "label"), rows)
        write_rows(tmp_path / f"names_{part}.csv", ("text", "label"), [(text, "abc"[label]) for text, label in rows])
    numbers, names = (Classification(name, tmp_path).score(text_vectors) for name in ("numbers", "names"))
    assert names == pytest.approx(numbers)


def test_an_empty_class_name_is_an_error_with_its_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "x_train.csv", ("text", "label"), [("a", "joy"), ("b", " "), ("c", "fear")])
    with pytest.raises(EvaluationError, match=r"x_train\.csv:3: label is ' ', expected the name of a class"):
        Classification("x", tmp_path).texts()


GOOD = {"kind": "sts", "file": "faq_test.csv"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**GOOD, "flie": "x"}, r"tasks\.yaml: task 'faq': unknown key 'flie': did you mean 'file'\?"),
        ({**GOOD, "train": "x"}, "unknown key 'train': Known: kind, domain, folder, columns, file"),
        ({**GOOD, "kind": "sst"}, "did you mean 'sts'"),
        ({**GOOD, "domain": "inn"}, r"tasks\.yaml: task 'faq': domain is 'inn', expected one of"),
        ({**GOOD, "columns": {"scores": "a"}}, r"unknown column 'scores': did you mean 'score'\?"),
        ({**GOOD, "columns": ["score"]}, "columns is .*, expected"),
        ({**GOOD, "columns": {"sentence1": "score"}}, "expected a column for each"),
        ({**GOOD, "file": 3}, "file is 3, expected a text"),
        ({"kind": "sts"}, "add file, or the folder"),
        ({"kind": "classification", "test": "x"}, "add train, or the folder"),
        ({"file": "x"}, "expected a mapping with a kind"),
        ("sts", "expected a mapping with a kind"),
    ],
)
def test_an_invalid_task_is_an_error_with_the_known_values(tmp_path: Path, entry: Any, message: str) -> None:
    write_rows(tmp_path / "faq_test.csv", ("sentence1", "sentence2", "score"), ROWS)
    with pytest.raises(EvaluationError, match=message):
        read_task_file(task_file(tmp_path, {"faq": entry}))


def test_the_error_lists_all_missing_files(three: Path) -> None:
    (three.parent / "mail" / "train.csv").unlink()
    (three.parent / "twins.jsonl").unlink()
    with pytest.raises(EvaluationError, match=r"tasks\.yaml: missing .*train\.csv, .*twins\.jsonl;"):
        read_task_file(three)


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "- kind: sts"])
def test_a_file_that_is_not_a_mapping_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tasks.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"tasks\.yaml"):
        read_task_file(tmp_path / "tasks.yaml")


def test_a_file_without_tasks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text("")
    with pytest.raises(EvaluationError, match="no task in it"):
        read_task_file(tmp_path / "tasks.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sentence1": "a", "sentence2": "b"}', r"x\.jsonl:2: no column 'score'; found: sentence1, sentence2"),
        ('{"sentence1": "a", "sentence2": null, "score": 1}', r":2: sentence2 is null, expected a text or a number"),
        ('{"sentence1": "a", "sentence2": "b", "score": true}', r":2: score is true, expected a text or a number"),
        ('{"sentence1": "a", "sentence2": "b", "score": NaN}', r":2: score is NaN"),
        ("[1, 2, 3]", r":2: a JSON list, expected an object"),
        ("{", r"x\.jsonl:2 is not JSON"),
    ],
)
def test_a_malformed_json_line_is_an_error_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"sentence1": "a", "sentence2": "b", "score": 1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(EvaluationError, match=message):
        TextualSimilarity("x", tmp_path, files={"file": path}).texts()


def test_a_file_of_blank_lines_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"x\.jsonl: no rows$"):
        TextualSimilarity("x", tmp_path, files={"file": path}).texts()


def test_unicode_line_separators_belong_to_the_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [("a\u2028b", "c", 1), ("d", "e\x85f", 2)]
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            record = dict(zip(("sentence1", "sentence2", "score"), row, strict=True))
            file.write(json.dumps(record, ensure_ascii=False) + "\r\n")
    assert TextualSimilarity("x", tmp_path, files={"file": path}).pairs == rows


@pytest.mark.parametrize("kind", TASKS)
def test_an_unknown_file_or_column_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="unknown file 'elsewhere'"):
        load_task(kind)("x", tmp_path, files={"elsewhere": tmp_path})
    with pytest.raises(EvaluationError, match="unknown column 'other'"):
        load_task(kind)("x", tmp_path, columns={"other": "y"})


def test_errors_have_the_files_own_column_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", ("sentence1", "sentence2", "grade"), [("a", "b", 1), ("c", "d", "high")])
    task = TextualSimilarity("x", tmp_path, files={"file": path}, columns={"score": "grade"})
    with pytest.raises(EvaluationError, match=r"x\.csv:3: grade is 'high', expected a number"):
        task.texts()
    write_rows(path, ("sentence1", "sentence2", "grade"), [("a", "b", 1), ("c", "d", 1)])
    with pytest.raises(EvaluationError, match="every grade is 1"):
        task.texts()


def test_the_command_runs_a_file_of_tasks(three: Path) -> None:
    done = CliRunner().invoke(main, ["eval", "toy", "--dtype", "fp32", "--tasks-file", str(three), "--json", "-q"])
    assert done.exit_code == 0, done.output
    tasks = json.loads(done.stdout)["tasks"]
    assert {name: task["metric"] for name, task in tasks.items()} == {
        "mail": "macro_f1",
        "twins": "average_precision",
        "faq": "spearman",
        "help": "ndcg_at_10",
    }
