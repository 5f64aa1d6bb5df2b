"""The documentation says what is there: links, names, defaults, and examples that run."""

import gc
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cli.distill import main as distill
from cli.tcache import main as tcache
from distill.config import RunConfig
from distill.objectives import OBJECTIVES
from distill.runs.demo import demo_teacher
from teacher_cache.space import LABELS, EmbeddingSpace
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.index import DATABASES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_README = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md") if (ROOT / name).exists())]
GROUPS: dict[str, click.Group] = {"tcache": tcache, "distill": distill}
COMMANDS = [(group, name) for group, commands in GROUPS.items() for name in commands.commands]

_FENCE = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str]]:
    """`(info string, body)` of every fenced block."""
    return [(found[2].strip(), found[3]) for found in _FENCE.finditer(text_of(page))]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def sections(page: Path) -> dict[str, str]:
    """Anchor -> text under that heading, up to the next heading of the same or a higher level."""
    text = _FENCE.sub(lambda found: re.sub(r"^#", " #", found[0], flags=re.MULTILINE), text_of(page))
    headings = list(re.finditer(r"^(#+) (.*)$", text, re.MULTILINE))
    found = {}
    for number, heading in enumerate(headings):
        later = (other for other in headings[number + 1 :] if len(other[1]) <= len(heading[1]))
        end = next((other.start() for other in later), len(text))
        found[slug(heading[2])] = text[heading.end() : end]
    return found


def table(section: str) -> dict[str, list[str]]:
    """First cell, without its backticks, -> the other cells, of every table row that starts with code."""
    rows = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            first, *rest = [cell.strip().strip("`") for cell in line.strip()[1:-1].split("|")]
            rows[first] = rest
    return rows


def code(page: Path) -> Iterator[str]:
    """Inline code, and the lines of blocks that are not Python."""
    prose = _FENCE.sub("", text_of(page))
    yield from re.findall(r"`([^`\n]+)`", prose)
    for info, body in blocks(page):
        if not info.startswith("python"):
            yield from body.splitlines()


def as_yaml(value: Any) -> Any:
    return yaml.safe_load(yaml.safe_dump(value))


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; an empty group is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", as_yaml(value)


# Links


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in sections(linked), target


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_every_file_of_the_repository_that_is_named_exists(page: Path) -> None:
    for words in code(page):
        for path in re.findall(r"(?<![\w./-])(?:tests|docs|benchmarks|\.ci)/[\w./-]*\w", words):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_every_object_that_is_named_by_its_module_exists(page: Path) -> None:
    for words in re.findall(r"`((?:teacher_cache|distill|cli)(?:\.\w+)+)`", text_of(page)):
        module, _, name = words.rpartition(".")
        try:
            importlib.import_module(words)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), words


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", text_of(page))
            waiting += [(page.parent / link).resolve() for link in links]
    assert [page_id(page) for page in PAGES if page not in reached] == []


# Commands


def options(command: click.Command) -> list[str]:
    return [
        flag
        for option in command.get_params(click.Context(command))
        if isinstance(option, click.Option)
        for flag in [*option.opts, *option.secondary_opts]
    ]


@pytest.mark.parametrize(("group", "name"), COMMANDS)
def test_every_command_has_a_section_with_all_its_options(group: str, name: str) -> None:
    page = sections(DOCS / "cli.md")
    section = page[f"{group}-{name}"]
    linked = [page[anchor] for anchor in re.findall(r"\]\(#([\w-]+)\)", section)]
    listed = re.findall(r"`(--?[\w-]+)`", "\n".join([section, *linked, page["options-of-every-command"]]))
    assert [flag for flag in options(GROUPS[group].commands[name]) if flag not in listed] == []


@pytest.mark.parametrize(("group", "name"), COMMANDS)
def test_a_command_s_section_names_no_option_that_it_lacks(group: str, name: str) -> None:
    section = sections(DOCS / "cli.md")[f"{group}-{name}"]
    assert set(re.findall(r"`(--?[a-z][\w-]*)", section)) <= set(options(GROUPS[group].commands[name]))


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_no_page_names_a_command_that_does_not_exist(page: Path) -> None:
    for words in code(page):
        for group, name in re.findall(r"(?<![\w./-])(tcache|distill) ([a-z][\w-]*)", words):
            assert name in GROUPS[group].commands, f"{group} {name}"


@pytest.mark.parametrize("page", WITH_README, ids=page_id)
def test_no_page_types_an_option_that_does_not_exist(page: Path) -> None:
    for words in code(page):
        for command in re.finditer(r"(?<![\w./-])(tcache|distill) ([a-z][\w-]*)( [^|;&]*)?", words):
            known = {flag.lstrip("-") for flag in options(GROUPS[command[1]].commands[command[2]])}
            for flag in re.findall(r"(?<!\S)--([\w-]+)", command[3] or ""):
                assert flag.replace("_", "-") in known, command[0]


@pytest.mark.parametrize(
    ("command", "report"),
    [
        ("tcache-build", "teacher_cache.building.build:BuildReport"),
        ("tcache-plan", "teacher_cache.building.plan:Plan"),
        ("tcache-verify", "teacher_cache.maintenance.check:CheckReport"),
        ("tcache-export", "teacher_cache.transfer.exporter:ExportReport"),
        ("tcache-import", "teacher_cache.transfer.importer:ImportReport"),
        ("tcache-merge", "teacher_cache.transfer.merge:MergeReport"),
        ("tcache-repair", "teacher_cache.maintenance.repair:RepairReport"),
        ("tcache-reindex", "teacher_cache.maintenance.rebuild:ReindexReport"),
        ("tcache-gc", "teacher_cache.maintenance.gc:ReclaimReport"),
        ("tcache-seal", "teacher_cache.maintenance.seal:SealedIndex"),
        ("tcache-convert", "teacher_cache.transfer.convert:Conversion"),
        ("tcache-doctor", "teacher_cache.maintenance.doctor:Finding"),
        ("distill-run", "distill.runs.run:RunResult"),
        ("distill-demo", "distill.runs.demo:DemoResult"),
        ("distill-cut", "distill.runs.cut:CutResult"),
        ("distill-cut", "distill.runs.cut:Size"),
        ("distill-cut", "distill.runs.cut_layers:Candidate"),
        ("distill-cut", "distill.runs.cut_vocabulary:VocabularyCut"),
        ("distill-cut", "distill.evaluation.agreement:FittedAgreement"),
        ("tcache-align", "teacher_cache.building.align:AlignReport"),
    ],
)
def test_the_names_of_a_command_s_json_are_documented(command: str, report: str) -> None:
    module, _, name = report.partition(":")
    listed = re.findall(r"`(\w+)`", sections(DOCS / "cli.md")[command].partition("JSON:")[2])
    assert [field.name for field in fields(getattr(importlib.import_module(module), name))] != []
    assert {field.name for field in fields(getattr(importlib.import_module(module), name))} <= set(listed)


# Tables


def test_settings_and_their_defaults_are_those_of_the_dataclasses() -> None:
    listed = {key: yaml.safe_load(cells[0]) for key, cells in table(sections(DOCS / "training.md")["settings"]).items()}
    assert listed == dict(flat(asdict(RunConfig())))


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_options_of_an_objective_and_their_defaults_are_those_of_its_class(objective: str) -> None:
    from distill.objectives import load_objective

    signature = inspect.signature(load_objective(objective).__init__)
    expected = {
        name: as_yaml(option.default)
        for name, option in signature.parameters.items()
        if option.kind is inspect.Parameter.KEYWORD_ONLY
    }
    options = sections(DOCS / "methods.md")[objective].partition("| option")[2].partition("\n\n")[0]
    assert {key: yaml.safe_load(cells[0]) for key, cells in table("| option" + options).items()} == expected


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_every_preset_of_an_objective_is_documented(objective: str) -> None:
    from distill.objectives import load_objective

    section = sections(DOCS / "methods.md")[objective]
    assert all(f"`{preset}`" in section for preset in load_objective(objective).presets)


def test_sharpness_methods_and_their_options_are_those_of_the_table() -> None:
    from distill.sharpness import PRESETS

    page = sections(DOCS / "training.md")["sharpness"].partition("Little of the perturbation")[0]
    listed = {name: cells[-1] for name, cells in table(page).items()}
    assert listed.pop("none") == ""
    assert {
        name: {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+)=([^`]+)`", f"`{options}`")}
        for name, options in listed.items()
    } == {name: dict(preset.options) for name, preset in PRESETS.items()}


def test_fields_of_a_space_are_documented_with_their_part_in_the_fingerprint() -> None:
    listed = {field: cells[0] for field, cells in table(sections(DOCS / "cache-format.md")["embedding-space"]).items()}
    assert listed == {field.name: "no" if field.name in LABELS else "yes" for field in fields(EmbeddingSpace)}


def test_encodings_and_their_bounds_are_documented() -> None:
    listed = table(sections(DOCS / "cache-format.md")["encodings"])
    assert {name: (float(cells[1].strip("`")), float(cells[2].strip("`"))) for name, cells in listed.items()} == {
        name: (encoding.max_cosine_error, encoding.max_norm_error) for name, encoding in ENCODINGS.items()
    }


def test_databases_of_the_index_are_documented() -> None:
    assert set(table(sections(DOCS / "cache-format.md")["indexlmdb"])) == set(DATABASES)


def test_the_nine_tasks_and_their_domains_are_documented() -> None:
    from distill.evaluation.evaluator import NINE

    listed = {name: (cells[0], cells[1]) for name, cells in table(sections(DOCS / "evaluation.md")["tasks"]).items()}
    assert listed == NINE


@pytest.mark.parametrize("package", ["teacher_cache", "distill"])
def test_every_public_name_is_on_the_page_of_its_package(package: str) -> None:
    page = text_of(DOCS / "api" / f"{package}.md")
    public = set(importlib.import_module(package).__all__) - {"__version__"}
    assert {name for name in public if not re.search(rf"`{name}\b|^#+ {name}$", page, re.MULTILINE)} == set()


# Examples


@pytest.mark.parametrize(
    "page", [page for page in WITH_README if any(info == "python run" for info, _ in blocks(page))], ids=page_id
)
def test_examples_marked_run_do_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks `python file=NAME` are written to a folder, blocks `python run` run there, one after the other.

    Each has a namespace and a folder of its own, as a program would; a process of its own would import torch again.
    """
    program = []
    for info, body in blocks(page):
        if info.startswith("python file="):
            (tmp_path / info.removeprefix("python file=")).write_text(body, encoding="utf-8")
        elif info == "python run":
            program.append(body)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the commands that examples start
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for number, body in enumerate(program):
        folder = tmp_path / f"example-{number}"
        folder.mkdir()
        if "distill-demo/" in body:  # written for a reader who has run `distill demo`
            (folder / "distill-demo").mkdir()
            demo_teacher(folder / "distill-demo")
        monkeypatch.chdir(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries: errors only in our own tests
            exec(compile(body, f"{page.name}, example {number}", "exec"), {"__name__": "__main__"})
            gc.collect()
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_keys_of_a_sweep_and_their_defaults_are_those_of_its_classes() -> None:
    from distill.runs.sweep import SearchConfig, SweepConfig

    for name, empty in (("sweeps", SweepConfig()), ("search", SearchConfig())):
        section = sections(DOCS / "training.md")[name]
        listed = {key: yaml.safe_load(cells[0]) for key, cells in table(section).items()}
        expected = {field.name: getattr(empty, field.name) for field in fields(empty)}
        assert listed == {key: list(value) if isinstance(value, tuple) else value for key, value in expected.items()}
