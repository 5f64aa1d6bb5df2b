"""`tcache` from the command line: output, streams and exit codes."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cli.options import STORAGE
from cli.tcache import main
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table.cache import TeacherCache
from tests.teacher_cache.small_caches import built
from tests.teacher_cache.toy_variants import BadVectors


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=stdin)


def refused(result: Result, code: int = 1) -> str:
    """The line that a known error prints."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.output
    return line


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text}) for text in ("one", "two", "one", "NA", "007")]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def cache(corpus: Path, tmp_path: Path) -> Path:
    assert run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "cache").exit_code == 0
    return tmp_path / "cache"


def test_build_prints_json_with_the_documented_names_and_nothing_else_on_stdout(corpus: Path, tmp_path: Path) -> None:
    result = run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "c", "--json")
    record = json.loads(result.stdout)
    documented = "rows distinct cached encoded truncated repaired quarantined tokens seconds space corpus cache"
    assert set(documented.split()) <= set(record)
    assert (record["rows"], record["distinct"], record["encoded"], record["corpus"]) == (5, 4, 4, "corpus")


def test_building_again_encodes_nothing_and_says_so(corpus: Path, cache: Path) -> None:
    result = run("build", corpus, "--teacher", "toy", "--cache", cache)
    assert "4 cached, 0 encoded" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next: distill run")


def test_a_build_prints_the_space_and_the_number_of_texts_to_encode(corpus: Path, tmp_path: Path) -> None:
    result = run("build", corpus, "--teacher", "toy", "--prompt", "query: ", "--cache", tmp_path / "c")
    assert "prompt 'query: '" in result.stderr
    assert "4 distinct texts, 0 cached (0%), 4 to encode" in result.stderr


def test_quiet_prints_only_the_result(corpus: Path, tmp_path: Path) -> None:
    result = run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "c", "-q")
    assert result.stderr == ""
    assert "next:" not in result.stdout


def test_flags_take_underscores_and_the_trainers_names(corpus: Path, tmp_path: Path) -> None:
    result = run("build", corpus, "--model_name_or_path", "toy", "--max_length", "8", "--cache", tmp_path / "c")
    assert result.exit_code == 0, result.output


def test_domains_of_a_column_are_stored_and_printed(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("text,source\nx,web\ny,news\nz,web\n")
    words = (tmp_path / "c.csv", "--teacher", "toy", "--domain-key", "source", "--cache", tmp_path / "c")
    assert json.loads(run("plan", *words, "--json").stdout)["rows"] == 3
    assert run("build", *words).exit_code == 0
    assert json.loads(run("info", tmp_path / "c", "--json").stdout)["corpora"]["c"]["domains"] == {"web": 2, "news": 1}
    assert "  domain web: 2 rows\n  domain news: 1 row\n" in run("info", tmp_path / "c").stdout


def test_standard_input_is_a_corpus(tmp_path: Path) -> None:
    result = run("build", "-", "--teacher", "toy", "--cache", tmp_path / "c", "--json", stdin="one\ntwo\n")
    assert json.loads(result.stdout)["corpus"] == "stdin"
    assert json.loads(result.stdout)["encoded"] == 2


def test_the_default_cache_is_the_folder_in_tcache_home(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCACHE_HOME", str(tmp_path / "home"))
    assert run("build", corpus, "--teacher", "toy").exit_code == 0
    assert (tmp_path / "home" / "cache.json").exists()


def test_info_prints_corpora_and_spaces(cache: Path) -> None:
    record = json.loads(run("info", cache, "--json").stdout)
    assert record["rows"] == 4
    assert record["corpora"]["corpus"]["rows"] == 5
    (space,) = record["spaces"].values()
    assert {"dim", "storage", "present", "bytes", "teacher", "fingerprint"} <= set(space)
    assert (space["dim"], space["storage"], space["present"], space["teacher"]) == (32, "float16", 4, "toy")


def test_info_lists_quarantined_texts_with_the_reason(tmp_path: Path) -> None:
    texts = [f"nan {number} {'long ' * 30}" for number in range(120)]
    report = built(tmp_path, ["zero", "fine", *texts], teacher=BadVectors.options())
    (space,) = json.loads(run("info", tmp_path / "cache", "--json").stdout)["spaces"].values()
    assert space["quarantined"] == report.quarantined == 121
    assert len(space["quarantined_rows"]) == 100
    assert space["quarantined_rows"][:2] == [
        {"row": 0, "text": "zero", "reason": "zero vector"},
        {"row": 2, "text": texts[0], "reason": "NaN in the teacher output"},
    ]
    lines = [line for line in run("info", tmp_path / "cache").stdout.splitlines() if "quarantined row" in line]
    assert len(lines) == 5
    assert lines[0] == "  quarantined row 0, 'zero': zero vector"
    assert lines[1] == f"  quarantined row 2, {texts[0][:60]!r}: NaN in the teacher output"


def test_a_corpus_is_named_after_its_first_file(tmp_path: Path) -> None:
    for name in ("my file.txt", "b.txt"):
        (tmp_path / name).write_text("one\n")
    for given, name in ((tmp_path / "m*.txt", "my-file"), (tmp_path / "b.txt", "b")):
        result = run("build", given, "--teacher", "toy", "--cache", tmp_path / "c", "--json")
        assert json.loads(result.stdout)["corpus"] == name


def test_an_invalid_corpus_name_is_refused_with_the_flag(corpus: Path, tmp_path: Path) -> None:
    line = refused(run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "c", "--name", "a b"))
    assert "'a b' is not a corpus name: --name takes" in line


def test_get_prints_vectors_and_exits_with_1_on_an_unknown_text(cache: Path) -> None:
    found = json.loads(run("get", cache, "007", "NA", "--json").stdout)
    with TeacherCache.open(cache) as opened:
        expected = opened.space().gather(opened.lookup(["007", "NA"]))
    assert np.array_equal(np.array([entry["vector"] for entry in found], dtype=np.float32), expected)
    unknown = run("get", cache, "never seen")
    assert unknown.exit_code == 1
    assert "not in this cache" in unknown.stdout


def test_verify_exits_with_3_on_damage_and_names_it(cache: Path) -> None:
    assert run("verify", cache, "--deep").exit_code == 0
    (shard,) = cache.glob("spaces/*/vectors.zarr/c/0/0")
    shard.unlink()
    result = run("verify", cache, "--json")
    assert result.exit_code == 3
    record = json.loads(result.stdout)
    assert record["ok"] is False
    assert [(damage["kind"], damage["rows"]) for damage in record["damage"]] == [("missing_shard", 4)]


def test_plan_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    record = json.loads(run("plan", corpus, "--teacher", "toy", "--cache", tmp_path / "c", "--json").stdout)
    assert (record["rows"], record["distinct"], record["cached"], record["missing"]) == (5, 4, 0, 4)
    assert record["bytes"]["float16"] == 4 * 32 * 2
    assert record["hours"] is None
    assert not (tmp_path / "c").exists()


def test_plan_counts_cached_texts(corpus: Path, cache: Path) -> None:
    corpus.write_text(corpus.read_text(encoding="utf-8") + '\n{"text": "three"}', encoding="utf-8")
    record = json.loads(run("plan", corpus, "--teacher", "toy", "--cache", cache, "--json").stdout)
    assert (record["cached"], record["missing"]) == (4, 1)


def test_doctor_builds_a_small_cache() -> None:
    findings = {entry["what"]: entry for entry in json.loads(run("doctor", "--json").stdout)}
    assert findings["self-test"]["ok"]


def test_an_unknown_teacher_is_one_line_and_leaves_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(run("build", corpus, "--teacher", "Qwen3-Embeding-4B", "--cache", tmp_path / "c"))
    assert "qwen3-embedding-4b" in line
    assert not (tmp_path / "c").exists()


def test_a_missing_corpus_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    line = refused(run("build", tmp_path / "none.jsonl", "--teacher", "toy", "--cache", tmp_path / "c"))
    assert "none.jsonl" in line
    assert not (tmp_path / "c").exists()


def test_an_invalid_line_is_named_and_no_corpus_is_published(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text(encoding="utf-8") + '\n{"text": "cut of', encoding="utf-8")
    line = refused(run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "c"))
    assert f"{corpus}:6" in line
    with TeacherCache.open(tmp_path / "c") as opened:
        assert opened.corpora() == {}
    assert run("verify", tmp_path / "c", "--deep").exit_code == 0


def test_a_cache_of_another_format_is_refused(cache: Path) -> None:
    (cache / "cache.json").write_text('{"format": 99, "shard_rows": 8192}', encoding="utf-8")
    assert "format 99" in refused(run("info", cache))


def test_a_folder_that_is_not_a_cache_is_refused_and_unchanged(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    assert "not a teacher cache" in refused(run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "photos"))
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_a_full_disk_is_one_line_and_committed_vectors_stay(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write_text(corpus.read_text(encoding="utf-8") + '\n{"text": "three"}', encoding="utf-8")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "no space left" in refused(run("build", corpus, "--teacher", "toy", "--cache", cache))
    assert run("verify", cache, "--deep").exit_code == 0
    assert "4 cached, 1 encoded" in run("build", corpus, "--teacher", "toy", "--cache", cache).stdout


def test_an_error_of_the_operating_system_is_one_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("build", corpus, "--teacher", "toy", "--cache", corpus / "cache")
    assert refused(run(*words)) == f"error: File exists: {corpus}"
    assert isinstance(run(*words, "--traceback").exception, FileExistsError)

    def forbidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", forbidden)
        assert refused(run(*words[:-1], tmp_path / "c")) == f"error: Permission denied: {tmp_path / 'c'}"


def test_a_plan_refuses_what_a_build_would(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    assert "no texts, 2 records were skipped" in refused(run("plan", tmp_path / "empty.txt", "--teacher", "toy"))


def test_a_lost_index_is_damage(cache: Path) -> None:
    (cache / "index.lmdb" / "data.mdb").unlink()
    result = run("verify", cache, "--json")
    assert result.exit_code == 3
    assert [damage["kind"] for damage in json.loads(result.stdout)["damage"]] == ["damaged_cache"]


def test_traceback_shows_the_traceback(tmp_path: Path) -> None:
    result = run("info", tmp_path, "--traceback")
    assert result.exception is not None
    assert type(result.exception).__name__ == "CacheNotFound"


def test_storage_choices_are_the_encodings() -> None:
    assert tuple(ENCODINGS) == STORAGE


def test_convert_prints_the_encodings_before_and_after(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    run("build", corpus, "--teacher", "toy", "--cache", path, "--storage", "float32")
    result = run("convert", path, "--storage", "int8")
    assert "4 vectors of toy@" in result.stdout
    assert "float32 -> int8" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next: tcache gc")
    record = json.loads(run("convert", path, "--storage", "int8", "--json").stdout)
    assert (record["storage_before"], record["storage"], record["rows"]) == ("int8", "int8", 0)
    assert json.loads(run("info", path, "--json").stdout)["spaces"][record["space"]]["storage"] == "int8"
    assert f"space {record['space']} is stored as int8 already" in run("convert", path, "--storage", "compact").stdout
    assert "no embedding space 'other'" in refused(run("convert", path, "--storage", "float16-raw", "--space", "other"))


def test_an_export_can_be_imported_and_prints_what_was_skipped(cache: Path, tmp_path: Path) -> None:
    result = run("export", cache, "--format", "npy", "-o", tmp_path / "out", "--corpus", "corpus")
    assert "5 vectors of 32 float16 numbers" in result.stdout
    assert result.stdout.splitlines()[-1] == f"{tmp_path / 'out'}; skipped: 0 quarantined"
    record = json.loads(run("import", tmp_path / "out", "--cache", tmp_path / "other", "--json").stdout)
    assert (record["rows"], record["stored"], record["corpus"]) == (5, 4, "corpus")
    result = run(
        "build", tmp_path / "corpus.jsonl", "--teacher", "toy", "--cache", tmp_path / "other", "--name", "again"
    )
    assert "4 cached, 0 encoded" in result.stdout
    assert "exists; choose another name" in refused(run("export", cache, "--format", "npy", "-o", tmp_path / "out"))


def test_vectors_of_a_corpus_file_are_imported_with_teacher_and_fields(corpus: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", np.eye(5, 8)[[0, 1, 0, 3, 4]])
    words = ("import", tmp_path / "mine.npy", "--cache", tmp_path / "c", "--corpus", corpus)
    assert "name it with --teacher" in refused(run(*words))
    assert run(*words, "--teacher", "lab/mine", "--field", "prompt=query: ", "--field", "max_length=64").exit_code == 0
    (space,) = json.loads(run("info", tmp_path / "c", "--json").stdout)["spaces"].values()
    assert (space["space"]["teacher"], space["space"]["prompt"], space["space"]["max_length"]) == (
        "lab/mine",
        "query: ",
        64,
    )
    assert "unknown field 'colour' in --field" in refused(run(*words, "--teacher", "lab/mine", "--field", "colour=red"))


def test_caches_are_merged_and_the_result_verifies(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("one\nthree\n")
    run("build", tmp_path / "more.txt", "--teacher", "toy", "--cache", tmp_path / "b")
    record = json.loads(run("merge", cache, tmp_path / "b", "--into", tmp_path / "c", "--json").stdout)
    assert (record["rows"], record["vectors"], record["held"], record["corpora"]) == (5, 5, 1, ["corpus", "more"])
    assert run("verify", tmp_path / "c", "--deep").exit_code == 0
    assert "it is the cache that is merged into" in refused(run("merge", cache, "--into", cache))


def test_verify_with_a_teacher_encodes_some_rows_again(cache: Path) -> None:
    record = json.loads(run("verify", cache, "--teacher", "toy", "--every", "2", "--json").stdout)
    assert (record["ok"], record["deep"], record["reencoded"]) == (True, True, 2)
    assert "2 rows encoded again, 1 - cos at most" in run("verify", cache, "--teacher", "toy", "--every", "2").stdout


def test_verify_refuses_another_teacher_and_names_the_field(cache: Path) -> None:
    line = refused(run("verify", cache, "--teacher", "toy", "--prompt", "query: "))
    assert "differs in prompt: wanted 'query: ', cached ''" in line


def test_every_without_a_teacher_is_a_usage_error(cache: Path) -> None:
    assert run("verify", cache, "--every", "2").exit_code == 2


def test_repair_prints_what_it_did_and_the_next_build_encodes_the_missing_rows(corpus: Path, cache: Path) -> None:
    (shard,) = cache.glob("spaces/*/vectors.zarr/c/0/0")
    shard.unlink()
    assert run("verify", cache).stdout.splitlines()[-1] == f"next: tcache repair {cache}"
    result = run("repair", cache)
    assert result.exit_code == 0
    assert "its 4 rows are missing now" in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "1 repaired, 0 not; 4 rows to encode",
        "next: tcache build with the same corpus, teacher and --columns",
    ]
    assert "0 cached, 4 encoded" in run("build", corpus, "--teacher", "toy", "--cache", cache).stdout
    assert json.loads(run("repair", cache, "--json").stdout) == {
        "ok": True,
        "repaired": [],
        "unrepaired": [],
        "missing": 0,
    }


def test_repair_without_the_texts_exits_with_3_and_reads_them_from_a_file(corpus: Path, cache: Path) -> None:
    (cache / "texts/text/c/0").unlink()
    moved = corpus.rename(corpus.with_name("moved.jsonl"))
    result = run("repair", cache)
    assert result.exit_code == 3
    assert f"4 texts are lost and nothing was changed: `tcache repair {cache} --corpus FILE`" in result.stdout
    assert run("repair", cache, "--corpus", moved).exit_code == 0
    assert run("verify", cache, "--deep").exit_code == 0


def test_reindex_rebuilds_a_lost_index(corpus: Path, cache: Path) -> None:
    shutil.rmtree(cache / "index.lmdb")
    assert f"`tcache reindex {cache}`" in refused(run("info", cache))
    record = json.loads(run("reindex", cache, "--json").stdout)
    assert (record["ok"], record["rows"], record["corpora"], record["left_out"]) == (True, 4, ["corpus"], [])
    assert "4 cached, 0 encoded" in run("build", corpus, "--teacher", "toy", "--cache", cache).stdout


def test_reindex_names_what_it_skips_and_exits_with_3(cache: Path) -> None:
    shutil.rmtree(cache / "index.lmdb")
    (cache / "corpora/corpus/corpus.json").unlink()
    result = run("reindex", cache)
    assert result.exit_code == 3
    assert "LEFT OUT: corpora/corpus" in result.stdout


def test_gc_prints_what_it_frees(cache: Path) -> None:
    (cache / "damaged").mkdir()
    (cache / "damaged/file").write_bytes(bytes(1500))
    assert run("gc", cache, "--dry-run").stdout.splitlines() == ["damaged damaged: 1.5 kB", "1.5 kB would be freed"]
    assert (cache / "damaged").exists()
    record = json.loads(run("gc", cache, "--space", "toy", "--corpus", "corpus", "--json").stdout)
    assert [freed["what"] for freed in record["freed"]] == ["damaged", "space", "corpus"]
    assert record["bytes"] == sum(freed["bytes"] for freed in record["freed"])
    info = json.loads(run("info", cache, "--json").stdout)
    assert (info["rows"], info["spaces"], info["corpora"]) == (4, {}, {})


def test_gc_of_an_unknown_space_or_corpus_is_one_line(cache: Path) -> None:
    assert "no embedding space 'other'" in refused(run("gc", cache, "--space", "other"))
    assert "no corpus 'other'" in refused(run("gc", cache, "--corpus", "other"))


def test_seal_prints_the_file_of_the_sealed_index(cache: Path) -> None:
    record = json.loads(run("seal", cache, "--json").stdout)
    assert record["rows"] == 4
    assert record["path"] == str(cache / "index.sealed" / "data.mdb")
    assert record["bytes"] == (cache / "index.sealed" / "data.mdb").stat().st_size
    assert "4 rows sealed at 20" in run("seal", cache).stdout


def test_sealing_a_folder_that_is_not_a_cache_is_refused(tmp_path: Path) -> None:
    assert "no teacher cache at" in refused(run("seal", tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "C", "--max-length", "10"), "need --teacher"),
        (("import", "v.npy", "--corpus", "c.txt", "--teacher", "x", "--field", "pooling"), "KEY=VALUE"),
        (("import", "v.npy", "--corpus", "c.txt", "--field", "prompt=a", "--field", "prompt=b"), "each KEY once"),
        (("import", "v.npy", "--corpus", "-", "--teacher", "x"), "save standard input to a file"),
    ],
)
def test_an_option_without_effect_is_a_usage_error(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_ctrl_c_prints_how_to_resume(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("teacher_cache.building.build.ingest", stopped)
    result = run("build", corpus, "--teacher", "toy", "--cache", tmp_path / "c")
    assert result.exit_code == 130
    assert (
        result.stderr.splitlines()[-1]
        == "interrupted; what was committed is kept: run the same command again to resume"
    )
