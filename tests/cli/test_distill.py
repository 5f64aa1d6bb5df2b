"""`distill` from the command line."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from cli.distill import main


def distill(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture
def short_run(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run of 6 steps."""
    words = ["run", "--cache", toy_cache, "--corpus", "sentences", "--student", tiny_student]
    words += ["--output-dir", tmp_path / "run", "--max-steps", "6"]
    return [str(word) for word in words] + ["--set", "training.precision=fp32", "--set", "data.window=256"]


def test_a_run_leaves_a_student_and_prints_the_next_command(short_run: list[str], tmp_path: Path) -> None:
    result = distill(*short_run)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "final" / "modules.json").exists()
    assert result.stdout.splitlines()[-1] == f"next: distill eval {tmp_path / 'run' / 'final'} --data DIR"
    assert "held-out texts, before -> after" in result.stdout


def test_the_same_command_again_has_nothing_to_do(short_run: list[str]) -> None:
    first = json.loads(distill(*short_run, "--json").stdout)
    again = json.loads(distill(*short_run, "--json").stdout)
    assert again.pop("finished_before") is True
    assert first.pop("finished_before") is False
    assert again == first


def test_training_settings_are_flags_with_the_names_of_training_arguments(short_run: list[str]) -> None:
    result = distill(
        *short_run,
        "--learning-rate",
        "3e-4",
        "--per_device_train_batch_size=16",
        "--precision",
        "bf16",
        "--print-config",
    )
    training = yaml.safe_load(result.stdout)["training"]
    assert (training["learning_rate"], training["per_device_train_batch_size"]) == (3e-4, 16)
    assert (training["max_steps"], training["precision"]) == (6, "fp32")  # --set wins


def test_flags_override_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("cache: here\nobjective: {name: simcse}\ntraining: {seed: 7}\n")
    result = distill("run", tmp_path / "run.yaml", "--seed", "8", "--print-config")
    config = yaml.safe_load(result.stdout)
    assert (config["cache"], config["objective"]["name"], config["training"]["seed"]) == ("here", "simcse", 8)


def test_a_mistyped_flag_names_the_nearest(short_run: list[str]) -> None:
    result = distill(*short_run, "--learning-rat", "1")
    assert result.exit_code == 2
    assert "--learning-rate" in result.stderr


def test_a_mistyped_setting_names_the_nearest(short_run: list[str]) -> None:
    assert "training.learning_rate" in refused(distill(*short_run, "--set", "training.learning_rat=1"))


def test_an_unknown_space_is_refused(short_run: list[str], tmp_path: Path) -> None:
    line = refused(distill(*short_run, "--space", "bge-m3"))
    assert "bge-m3" in line
    assert "toy@" in line
    assert not (tmp_path / "run").exists()


def test_a_space_with_different_fields_is_refused_with_both_values(short_run: list[str], tmp_path: Path) -> None:
    line = refused(distill(*short_run, "--set", "space.prompt='query: '"))
    assert "prompt: wanted 'query: ', cached ''" in line
    assert not (tmp_path / "run").exists()


def test_a_corpus_with_missing_rows_is_refused(short_run: list[str], toy_cache: Path, tmp_path: Path) -> None:
    import shutil

    from teacher_cache.building.build import build
    from teacher_cache.corpus.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions

    copy = tmp_path / "cache"
    shutil.copytree(toy_cache, copy)
    (tmp_path / "new.txt").write_text("a text that only another space has\n")
    build(Corpus.open(tmp_path / "new.txt"), TeacherOptions(model="toy", prompt="p: "), copy, name="new")
    slug = next(path.name for path in (toy_cache / "spaces").iterdir())
    line = refused(distill(*short_run, "--cache", copy, "--corpus", "new", "--space", slug))
    assert "1 of 1" in line
    assert "tcache build" in line
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_a_model_is_refused(short_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(distill(*short_run, "--student", tmp_path / "empty"))
    assert not (tmp_path / "run").exists()


def test_a_missing_cache_is_refused(short_run: list[str], tmp_path: Path) -> None:
    assert "tcache build" in refused(distill(*short_run, "--cache", tmp_path / "none"))


def test_a_folder_with_other_files_is_refused_with_the_flag(short_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert "choose another --output-dir" in refused(distill(*short_run))


def test_nothing_to_resume_is_refused(short_run: list[str]) -> None:
    assert "nothing to resume" in refused(distill(*short_run, "--resume"))


def test_evaluation_without_its_files_lists_them(tiny_student: Path, tmp_path: Path) -> None:
    line = refused(distill("eval", tiny_student, "--data", tmp_path, "--tasks", "stsb"))
    assert "stsb_test.csv" in line


def test_evaluation_has_the_documented_json(tiny_student: Path, tmp_path: Path) -> None:
    rows = ["sentence1,sentence2,score", "the cat,a cat,4", "the sea,dogs ran,1", "a river,the river,5"]
    (tmp_path / "stsb_test.csv").write_text("\n".join(rows))
    result = distill("eval", tiny_student, "--data", tmp_path, "--tasks", "stsb", "--json")
    assert "not normalized" in result.stderr  # as the published protocol: what the pooling gives
    record = json.loads(result.stdout)
    assert record["tasks"]["stsb"].keys() >= {"metric", "score"}
    assert set(record["average"]) == {"in_domain", "out_of_domain", "all"}
    assert record["average"]["in_domain"] == record["tasks"]["stsb"]["score"]
    assert record["average"]["out_of_domain"] is None


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("objectives", "talas"),
        ("sharpness", "asam"),
        ("teachers", "sentence_transformer"),
        ("families", "bge-m3"),
        ("tasks", "stsb"),
        ("exports", "sentence_transformer"),
        ("analyses", "layers"),
        ("presets", "talas:paper"),
        ("shapes", "bert-base"),
        ("encodings", "float16"),
    ],
)
def test_list_prints_names(kind: str, some: str) -> None:
    assert some in json.loads(distill("list", kind, "--json").stdout)


def test_list_prints_a_description_of_each_name() -> None:
    names = json.loads(distill("list", "objectives", "--json").stdout)
    lines = distill("list", "objectives").stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 3 for line in lines)
    tasks = dict(line.split(maxsplit=1) for line in distill("list", "tasks").stdout.splitlines())
    assert tasks["stsb"] == "sts, spearman, in-domain"


def test_a_run_prints_teacher_corpus_student_and_method_before_training(short_run: list[str]) -> None:
    printed = distill(*short_run).stderr.splitlines()
    assert printed[0].startswith("teacher: toy · mean pooling · no prompt")
    assert printed[1] == "corpus: sentences, 349 of 400 records to train on, 45 texts held out"
    assert printed[2].startswith("student: tiny-bert · 2 layers of 16 · mean pooling")
    assert printed[3] == "method: cosine, sharpness none, fp32"
