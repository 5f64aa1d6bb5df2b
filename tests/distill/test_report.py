"""The report: its data equal the records, in one self-contained file."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from cli.analyses import report as report_command
from distill.errors import ConfigError, RunFolderError
from distill.report.data import ReportData, report_data
from distill.report.drawing import COLORS, INK, needs_log_scale
from distill.report.formats import number
from distill.report.html import html as report_page
from distill.report.html import write_report
from distill.report.plots import plots
from distill.runs.run import run
from teacher_cache.errors import MissingDependency
from teacher_cache.teachers import TeacherOptions, resolve
from tests.distill.test_compare import edit
from tests.distill.tiny_runs import tiny_config
from tests.distill.tiny_tasks import TASKS, write_tasks

BROWSERS = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome")]
BROWSER = next((path for path in BROWSERS if path), None)
SCORES = {"stsb": ("spearman", 80.0), "mrpc": ("average_precision", 60.0)}
ANSWERS: dict[str, dict[str, Any]] = {
    "compression": {
        "tasks": [
            {
                "task": "stsb",
                "metric": "spearman",
                "curves": {
                    side: {
                        precision: [
                            {"dims": dims, "bytes": dims * bits // 8, "score": 50.0 + dims, "relative": 1.0}
                            for dims in (8, 16)
                        ]
                        for precision, bits in (("float32", 32), ("int8", 8), ("binary", 1))
                    }
                    for side in ("student", "teacher", "asymmetric")
                },
            }
        ]
    },
    "curvature": {
        "points": [
            {
                "step": step,
                "epoch": 1.0,
                "value": 0.5,
                "student": {"lanczos": {"value": 12.5}, "power": {"value": 12.4}},
                "with_heads": None,
                "adaptive_sharpness": {"rho": 0.5, "rise": 0.01},
            }
            for step in (1, 2)
        ]
    },
    "layers": {
        "layers": ["embeddings", "1", "2"],
        "before": {"between": [[1.0, 0.5, 0.2], [0.5, 1.0, 0.4], [0.2, 0.4, 1.0]], "to_teacher": [0.1, 0.2, 0.3]},
        "after": {"between": [[1.0, 0.4, 0.1], [0.4, 1.0, 0.3], [0.1, 0.3, 1.0]], "to_teacher": [0.1, 0.3, 0.6]},
        "drift": [0.0, 0.1, 0.2],
    },
    "map": {
        "method": "pca",
        "points": [
            {"x": float(text), "y": float(side == "student"), "of": side, "text": text}
            for side in ("teacher", "student")
            for text in range(4)
        ],
        "texts": ["a", "b", "c", "d"],
    },
    "margin": {
        "metric": "spearman",
        "task": "stsb",
        "points": [
            {"step": 1, "epoch": 1, "error": 0.9, "score": 50.0, "fitted": False},
            {"step": 2, "epoch": 2, "error": 0.8, "score": 60.0, "fitted": True},
        ],
        "fit": {"slope": -100.0, "intercept": 140.0, "r2": 1.0},
        "teacher_score": 70.0,
        "margin": 0.7,
    },
}


@pytest.fixture(scope="module")
def trained(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("runs") / "talas"
    run(tiny_config(toy_cache, tiny_student, folder, "corpus=sentences", "training.max_steps=3", "training.seed=1"))
    return folder


def copied(trained: Path, folder: Path, *, seed: int = 1, scores: float | None = 0.0, answers: bool = False) -> Path:
    """The run under another name and seed; `scores` is added to those of `SCORES`, None is not scored."""
    shutil.copytree(trained, folder)
    edit(folder / "config.yaml", {"training": {"seed": seed}})
    if scores is not None:
        (folder / "eval.json").write_text(json.dumps(scored(scores)))
    for name, result in ANSWERS.items() if answers else ():
        kept = folder / "analyses" / f"{name}.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps({"analysis": name, "conclusion": f"What {name} says, 12.5.", "result": result}))
    return folder


def scored(more: float, model: str = "model") -> dict[str, Any]:
    tasks = {name: {"metric": metric, "score": score + more} for name, (metric, score) in SCORES.items()}
    average = {"in_domain": 80.0 + more, "out_of_domain": 60.0 + more, "all": 70.0 + more}
    return {"model": model, "tasks": tasks, "average": average}


def kept(path: Path, more: float, model: str) -> str:
    path.write_text(json.dumps(scored(more, model)))
    return str(path)


def page(data: ReportData) -> str:
    return report_page(data, plots(data))


class Reported(NamedTuple):
    """A run with results of every analysis, and the files of its report."""

    folder: Path
    out: Path

    @property
    def text(self) -> str:
        return (self.out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """Read-only: drawing about twenty plots takes seconds."""
    root = tmp_path_factory.mktemp("reported")
    folder = copied(trained, root / "talas", answers=True)
    write_report(report_data([folder]), root / "report.html")
    return Reported(folder, root)


class Words(HTMLParser):
    """The visible words of a page, and its tables as lists of rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag == "style"
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "style"

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.words.append(data.strip())
            if self.rows and self.rows[-1]:
                self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_its_data_equal_the_records(reported: Reported) -> None:
    folder = reported.folder
    said = json.loads((reported.out / "report.json").read_text(encoding="utf-8"))
    (one,) = said["runs"]
    assert one["record"] == json.loads((folder / "run.json").read_text())
    assert one["scores"] == json.loads((folder / "eval.json").read_text())
    assert one["metrics"] == [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {name: answer["result"] for name, answer in one["analyses"].items()} == ANSWERS
    assert one["settings"]["training.learning_rate"] == 1e-3
    assert not [key for key in one["settings"] if key.startswith(("objective", "sharpness", "cache", "student.model"))]
    assert said["comparison"]["runs"][0]["figures"]["tasks.stsb"] == 80.0
    cache = Path(one["record"]["cache"])
    assert one["disk"]["cache"] == sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert 0 < one["disk"]["space"] < one["disk"]["cache"]
    assert set(said["units"]) >= {"tasks.", "cost.step_seconds", "student.bytes"}


def test_the_command_writes_the_page_and_its_data(trained: Path, tmp_path: Path) -> None:
    folder, out = copied(trained, tmp_path / "talas"), tmp_path / "page.html"
    result = CliRunner().invoke(report_command, [str(folder), "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "page.json").read_text(encoding="utf-8"))
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    names = {path.name for path in (tmp_path / "page_files").iterdir()}
    assert names == {"page-scores.png", "page-losses.png", "page-optimization.png"}


def test_the_page_has_the_figures_with_their_units(reported: Reported) -> None:
    record = json.loads((reported.folder / "run.json").read_text())
    words = Words(reported.text)
    rows = {row[0]: row[1:] for row in words.rows if row}
    assert rows["stsb * spearman"] == ["80.00"]
    assert rows["mrpc average precision"] == ["60.00"]
    assert rows["average in-domain 1 task"] == ["80.00"]
    assert "Points of 100" in words.text
    assert f"{record['cost']['step_seconds_p50']:.3g} s" in words.text
    assert f"{record['agreement']['after']['spearman']:.3f}" in words.text
    assert record["space"]["description"] in words.text
    assert f"torch {record['versions']['torch']}" in words.text
    assert "optimizer steps 3" in words.text
    for name in ANSWERS:
        assert f"What {name} says, 12.5." in words.text


def test_every_term_has_a_panel_with_a_description(reported: Reported) -> None:
    lines = [json.loads(line) for line in (reported.folder / "metrics.jsonl").read_text().splitlines()]
    text = reported.text
    captions = re.findall(r"<figcaption>([^<]*)</figcaption>", text)
    for term in ("loss", "tamd", "lasd", "simcse"):
        assert term in captions
        said = f"talas {number(lines[0][term])} at step 1, {number(lines[-1][term])} at step 3"
        assert html.escape(said) in text
    pictures = re.findall(r"<svg viewBox[^>]*aria-labelledby=\"(\S+) (\S+)\"", text)
    assert len(pictures) == len(captions)
    for title, described in pictures:
        assert f'<title id="{title}">' in text
        assert f'<desc id="{described}">' in text
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', text)) | set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_plots_use_the_colors_of_the_page_and_text_elements(reported: Reported) -> None:
    body = reported.text[reported.text.index("<body>") :]
    assert not [color for color in (*COLORS, INK) if color in body]
    assert "var(--mark-0)" in body
    assert ">optimizer step</text>" in body
    assert "prefers-color-scheme: dark" in reported.text
    pngs = {path.name: path.read_bytes() for path in (reported.out / "report_files").iterdir()}
    assert {"report-losses.png", "report-layers.png", "report-margin.png"} <= set(pngs)
    assert all(png.startswith(b"\x89PNG") for png in pngs.values())


def test_the_page_loads_nothing_else(reported: Reported) -> None:
    text = reported.text
    named = re.findall(r"""(?:src|href|srcset|data)\s*=\s*["']([^"']*)""", text) + re.findall(r"url\(([^)]*)", text)
    assert [target for target in named if not target.startswith("#")] == ["data:,"]
    assert not re.search(r"https?:|@import|<script|<link (?!rel=\"icon\")|<iframe|<img", text)


def test_names_and_texts_are_escaped(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "<script>alert(1)")
    texts = {"worst": [{"text": "a <b>bold</b> & $x$ text", "value": 1.5}]}
    edit(folder / "eval.json", {"tasks": {"my <i>": {"metric": "cosine", "score": 1.0, "examples": texts}}})
    text = page(report_data([folder]))
    assert not re.search("<script|<b>|<i>", text)
    assert "<script>alert(1)" in Words(text).text
    assert "a <b>bold</b> & $x$ text" in Words(text).text


def test_the_same_records_give_the_same_bytes(reported: Reported, tmp_path: Path) -> None:
    first = [reported.out / "report.html", reported.out / "report.json", *(reported.out / "report_files").iterdir()]
    again = write_report(report_data([reported.folder]), tmp_path / "report.html")
    assert sorted(path.name for path in first) == sorted(path.name for path in again)
    assert {path.name: path.read_bytes() for path in first} == {path.name: path.read_bytes() for path in again}


def test_seeds_share_a_column_and_a_color(trained: Path, tmp_path: Path) -> None:
    for seed, more in ((1, 0.0), (2, 2.0), (3, 4.0)):
        copied(trained, tmp_path / "runs" / f"talas-seed={seed}", seed=seed, scores=more)
    data = report_data([tmp_path / "runs"])
    text = page(data)
    words = Words(text)
    assert [run.group for run in data.runs] == ["talas"] * 3
    rows = {row[0]: row[1:] for row in words.rows if row}
    assert rows["task"] == ["talas"]
    assert rows["stsb * spearman"] == ["82.00 ± 2.00"]
    assert {f"talas-seed={seed}" for seed in (1, 2, 3)} <= set(rows)
    assert rows["talas"][1:4] == ["82.00 ± 2.00", "62.00 ± 2.00", "72.00 ± 2.00"]
    losses = text[text.index("Loss and its terms") :]
    assert losses[: losses.index("</ul>")].count("<li>") == 1


def test_the_score_table_of_many_models_has_a_row_per_model(trained: Path, tmp_path: Path) -> None:
    runs: list[str | Path] = [
        copied(trained, tmp_path / "run"),
        *(kept(tmp_path / f"{n}.json", float(n), f"m{n}") for n in range(1, 7)),
    ]
    rows = {row[0]: row[1:] for row in reversed(Words(page(report_data(runs))).rows) if row}  # the first table wins
    assert rows["model"][:2] == ["mrpc (average precision)", "stsb * (spearman)"]
    assert rows["model: m3"][:2] == ["63.00", "83.00"]


def test_scores_of_references_are_in_the_table(trained: Path, tmp_path: Path) -> None:
    data = report_data(
        [copied(trained, tmp_path / "talas"), kept(tmp_path / "other.json", 1.0, "models/other")],
        baseline=kept(tmp_path / "start.json", -20.0, "models/start"),
        teacher=kept(tmp_path / "teacher.json", 20.0, "models/big"),
    )
    rows = {row[0]: row[1:] for row in Words(page(data)).rows if row}
    assert rows["task"] == ["before training: start", "teacher: big", "model: other", "talas"]
    assert rows["stsb * spearman"] == ["60.00 60.0 %", "100.00", "81.00 81.0 %", "80.00 80.0 %"]
    assert data.shares["talas"] == pytest.approx(
        {"tasks.stsb": 80.0, "tasks.mrpc": 75.0, "average.in_domain": 80.0, "average.out_of_domain": 75.0}
        | {"average.all": 100 * 70 / 90}
    )
    assert data.references == {
        "before training: start": "before training",
        "teacher: big": "teacher",
        "model: other": "model",
    }


def test_a_model_that_is_not_a_run_is_scored(trained: Path, tiny_student: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run", scores=None)
    data = report_data(
        [folder, tiny_student],
        data=write_tasks(tmp_path / "data"),
        tasks=TASKS,
        dtype="fp32",
        baseline=str(tiny_student),
    )
    model, before, student = data.comparison.rows
    assert [model.name, before.name, student.name] == ["model: tiny-bert", "before training: tiny-bert", "run"]
    assert model.figures["tasks.stsb"] == pytest.approx(before.figures["tasks.stsb"])
    assert model.figures["student.bytes"] == (tiny_student / "model.safetensors").stat().st_size
    assert student.figures["tasks.stsb"] == json.loads((folder / "eval.json").read_text())["tasks"]["stsb"]["score"]


def test_unfinished_runs_are_marked(trained: Path, tmp_path: Path) -> None:
    done = copied(trained, tmp_path / "done", scores=None)
    begun = copied(trained, tmp_path / "begun", seed=2)
    edit(begun / "run.json", {"status": "running"})
    with (begun / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(done / "config.yaml", bare)
    data = report_data([done, begun, bare])
    text = page(data)
    assert "begun is unfinished" in text
    assert "bare is unfinished" in text
    assert [len(run.metrics) for run in data.runs] == [3, 3, 0]
    assert "<h2>Scores</h2>" not in text
    words = Words(text)
    assert {"done", "begun", "bare"} <= {row[0] for row in words.rows if row}


def test_validation_has_its_curve(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas")
    with (folder / "metrics.jsonl").open("a") as file:
        for step, average in ((1, 41.5), (3, 43.25)):
            point = {"step": step, "epoch": 1.0, "validation": {"average": average, "stsb": average}, "seconds": 0.5}
            file.write(json.dumps(point) + "\n")
    data = report_data([folder])
    text = page(data)
    assert len(data.runs[0].metrics) == 3
    assert "talas 41.5 at step 1, 43.25 at step 3" in text
    assert "seconds" not in re.findall(r"<figcaption>([^<]*)</figcaption>", text)


def test_further_scores_of_a_run_have_a_table(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "leaf")
    figures = {"recall_at_100": 70.5, "mrr_at_10": 50.25, "queries": 225.0}
    modes = {"cran": 30.0, "cran (asymmetric)": 35.0, "cran (teacher)": 40.0}
    tasks = {name: {"metric": "ndcg_at_10", "score": score, "figures": figures} for name, score in modes.items()}
    (folder / "eval-cran.json").write_text(json.dumps({"model": "x", "tasks": tasks, "average": {}}))
    rows = {row[0]: row[1:] for row in Words(page(report_data([folder]))).rows if row}
    assert rows["task"] in (["leaf"], ["ndcg at 10", "recall at 100", "mrr at 10", "queries"])
    assert rows["cran (asymmetric) leaf"] == ["35", "70.5", "50.25", "225"]


def test_averages_have_a_share_only_over_the_teachers_tasks(trained: Path, tmp_path: Path) -> None:
    wide = scored(20.0, "models/big")
    wide["tasks"] |= {
        "sick": {"metric": "spearman", "score": 90.0, "domain": "out"},
        "cran": {"metric": "ndcg_at_10", "score": 40.0, "domain": "apart"},
    }
    wide["average"] = {"in_domain": 100.0, "out_of_domain": 85.0, "all": 90.0}
    (tmp_path / "teacher.json").write_text(json.dumps(wide))
    data = report_data([copied(trained, tmp_path / "talas")], teacher=str(tmp_path / "teacher.json"))
    assert data.shares["talas"] == {"tasks.stsb": 80.0, "tasks.mrpc": 75.0, "average.in_domain": 80.0}
    assert data.tasks["cran"] == {"metric": "ndcg_at_10", "domain": "apart"}
    rows = {row[0]: row[1:] for row in Words(page(data)).rows if row}
    assert rows["cran ndcg at 10"] == ["40.00", "-"]
    assert rows["average in-domain 1 task"] == ["100.00", "80.00 80.0 %"]
    assert rows["average out-of-domain"] == ["85.00 2 tasks", "60.00 1 task"]
    teacher, student = rows["average all"]  # the last row has the words below the table too
    assert teacher == "90.00 3 tasks"
    assert student.startswith("70.00 2 tasks ")


def test_a_reference_scored_in_another_way_than_the_runs_is_a_warning(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas")
    edit(folder / "eval.json", {"dtype": "bfloat16", "files": {"stsb_test.csv": "aa"}})
    teacher = kept(tmp_path / "teacher.json", 20.0, "models/big")
    assert report_data([folder], teacher=teacher).comparison.warnings == (
        "the scores of teacher: big have no precision; score it again with `distill eval -o`",
    )
    edit(Path(teacher), {"dtype": "float32", "files": {"stsb_test.csv": "bb", "sick_test.csv": "cc"}})
    precision, files = report_data([folder], teacher=teacher).comparison.warnings
    assert precision == "the runs were scored in different precisions: float32: teacher: big; bfloat16: talas"
    assert files == "the runs were scored on different files: teacher: big; talas"
    # Files of tasks that only the teacher has do not matter.
    edit(Path(teacher), {"dtype": "bfloat16", "files": {"stsb_test.csv": "aa", "sick_test.csv": "cc"}})
    assert report_data([folder], teacher=teacher).comparison.warnings == ()


def test_references_with_equal_names_have_longer_ones(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas")
    models = [kept(tmp_path / f"{n}.json", float(n), f"{n}/final") for n in (1, 2)]
    models += [kept(tmp_path / f"{n}.json", float(n), "models/same") for n in (3, 4)]
    data = report_data([folder, *models])
    names = ["1/final", "2/final", tmp_path / "3.json", tmp_path / "4.json"]
    assert list(data.references) == [f"model: {name}" for name in names]
    assert set(data.references.values()) == {"model"}


def test_analyses_and_scores_of_another_student_are_a_warning(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas", answers=True)
    weights = resolve(TeacherOptions(model=str(folder / "final"))).space.weights
    edit(folder / "analyses" / "map.json", {"step": 3})
    edit(folder / "eval.json", {"weights": weights})
    edit(folder / "eval-new.json", {"weights": weights, "tasks": {}})
    assert report_data([folder]).comparison.warnings == ()
    edit(folder / "analyses" / "map.json", {"step": 2})
    edit(folder / "eval-old.json", {"weights": "0123", "tasks": {}})
    data = report_data([folder])
    assert data.comparison.warnings == (
        "talas: analyses/map.json is of step 2, but the student of step 3; run `distill analyze` again",
        "talas: eval-old.json is of other weights than the student's; run `distill eval` again",
    )
    assert all(f"warning: {line}" in Words(page(data)).text for line in data.comparison.warnings)


def test_a_report_does_not_replace_other_records(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas", answers=True)
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    data = report_data([folder])
    for name in ("run.html", "eval.html", "analyses/map.html", "eval-new.html"):
        with pytest.raises(ConfigError, match=r"which is not a report's: choose another name"):
            write_report(data, folder / name)
        assert not (folder / name).exists()
    (folder / "mine.json").write_text("[1, 2")
    result = CliRunner().invoke(report_command, [str(folder / "absent"), "-o", str(folder / "mine.html")])
    assert isinstance(result.exception, ConfigError)  # and not that a run is absent: it is refused first
    assert before == {path: path.read_bytes() for path in before}


def test_a_second_report_replaces_the_first_and_its_plots(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas")
    page, beside, *first = write_report(report_data([folder]), folder / "report.html")
    other = first[0].with_name("own.png")
    other.write_bytes(b"somebody's")
    (folder / "metrics.jsonl").unlink()
    again = write_report(report_data([folder]), page)
    assert again[:2] == [page, beside]
    assert {path.name for path in first} == {"report-scores.png", "report-losses.png", "report-optimization.png"}
    assert {path.name for path in other.parent.iterdir()} == {"report-scores.png", "own.png"}


def test_nan_is_null_in_the_json(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "talas")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "grad_norm": NaN, "loss": 1.0}\n')
    task = {"metric": "ndcg_at_10", "score": 30.0, "figures": {"mrr_at_10": None, "recall_at_100": math.inf}}
    edit(folder / "eval-cran.json", {"tasks": {"cran": task}})
    _, beside, *_ = write_report(report_data([folder]), tmp_path / "report.html")
    run = json.loads(beside.read_text(), parse_constant=lambda name: pytest.fail(name))["runs"][0]
    assert run["metrics"][-1] == {"step": 4, "grad_norm": None, "loss": 1.0}
    assert run["further"]["eval-cran"]["tasks"]["cran"]["figures"] == {"mrr_at_10": None, "recall_at_100": None}
    rows = {row[0]: row[1:] for row in Words((tmp_path / "report.html").read_text()).rows if row}
    assert [cell.split()[0] for cell in rows["cran talas"]] == ["30", "-", "-"]


def test_each_figure_of_sharpness_has_its_own_title(trained: Path, tmp_path: Path) -> None:
    titles = {
        "perturbation_norm": "norm of the perturbation",
        "share of embeddings": "share of embeddings of the perturbation (0 to 1)",
        "share of heads": "share of heads of the perturbation (0 to 1)",
        "perturbation_rise": "rise of the loss to w + eps",
    }
    for known in ({"perturbation_norm", "share of embeddings", "share of heads"}, set(titles)):
        folder = copied(trained, tmp_path / str(len(known)))
        line = {"step": 1} | {name: 0.5 for name in titles if name in known}
        (folder / "metrics.jsonl").write_text(json.dumps(line))
        (drawn,) = plots(report_data([folder]))["curves"]
        assert [panel.title for panel in drawn.panels] == [title for name, title in titles.items() if name in known]


def test_what_cannot_be_reported_is_an_error(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    with pytest.raises(ConfigError, match="name the folder of the tasks"):
        report_data([folder, tmp_path / "absent"])
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(RunFolderError, match="holds no scores"):
        report_data([folder], teacher=str(tmp_path / "empty.json"))
    with pytest.raises(ConfigError, match=r"ends in \.html"):
        write_report(report_data([folder]), tmp_path / "report.json")
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_an_error_with_its_extra(
    trained: Path, tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = report_data([copied(trained, tmp_path / "run")])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=r"teacher-cache\[eval\]"):
        write_report(data, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (12345.6, "12,346"), (0.000123, "1.23e-4"), (0.3, "0.3"), (1.23456, "1.235"), (float("inf"), "-")],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert number(value) == expected


def test_an_axis_is_logarithmic_if_values_differ_by_a_large_factor() -> None:
    assert needs_log_scale([1.0, 0.01])
    assert not needs_log_scale([1.0, 0.5])
    assert not needs_log_scale([1.0, 0.0])
    assert not needs_log_scale([])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_errors_and_horizontal_scrolling(trained: Path, tmp_path: Path, width: int) -> None:
    runs = [copied(trained, tmp_path / name, seed=seed, answers=True) for seed, name in enumerate(("talas", "a" * 80))]
    text = page(report_data(runs))
    # A headless window is never narrower than 500, a frame is.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!doctype html><iframe id="page" style="border:0;width:{width}px;height:2000px" srcdoc="{html.escape(text)}">'
        "</iframe><script>onload = () => { const inside = document.getElementById('page').contentDocument;"
        "const texts = [...inside.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height);"
        "document.title = JSON.stringify([inside.documentElement.scrollWidth, Math.min(...texts), texts.length]); }"
        "</script>",
        encoding="utf-8",
    )
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1400,2100", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>([^<]*)</title>", done.stdout)
    assert title is not None
    across, smallest, texts = json.loads(html.unescape(title[1]))
    assert across <= width
    assert texts > 50
    assert smallest >= 9.0  # pixels
