"""`--help` of every command: an example, the defaults, and nothing cut off."""

import re
from dataclasses import asdict
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.common import CONTEXT
from cli.distill import main as distill
from cli.planning import KEYS
from cli.tcache import main as tcache
from distill.config import RunConfig

GROUPS: dict[str, click.Group] = {"tcache": tcache, "distill": distill}
COMMANDS = [(group, name) for group, commands in GROUPS.items() for name in commands.commands]


def help_of(*words: str) -> str:
    result = CliRunner().invoke(GROUPS[words[0]], [*words[1:], "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def parameters(group: str, name: str) -> tuple[click.Context, list[click.Option]]:
    command = GROUPS[group].commands[name]
    ctx = click.Context(command, info_name=name, parent=click.Context(GROUPS[group], info_name=group, **CONTEXT))
    return ctx, [option for option in command.get_params(ctx) if isinstance(option, click.Option)]


@pytest.mark.parametrize(("group", "name"), COMMANDS)
def test_the_help_has_an_example_whose_options_exist(group: str, name: str) -> None:
    example = re.search(r"^  Examples?:\n((?:    .*\n)+)", help_of(group, name), re.MULTILINE)
    assert example is not None
    known = {flag for option in parameters(group, name)[1] for flag in option.opts}
    for line in example[1].splitlines():
        assert line.startswith(f"    {group} {name}")
        assert {word for word in line.split() if word.startswith("-") and word != "-"} <= known


@pytest.mark.parametrize("group", GROUPS)
def test_the_list_of_commands_is_not_cut(group: str) -> None:
    lines = help_of(group).splitlines()
    assert len(lines) > len(GROUPS[group].commands)
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage")] == []


@pytest.mark.parametrize(("group", "name"), COMMANDS)
def test_every_default_is_in_the_help(group: str, name: str) -> None:
    ctx, options = parameters(group, name)
    for option in options:
        default = option.to_info_dict()["default"]
        if default in (None, False, (), "") or not isinstance(default, str | int | float):
            continue
        record = option.get_help_record(ctx)
        assert record is not None
        assert f"[default: {default}" in record[1]


@pytest.mark.parametrize(("group", "name"), [(g, n) for g, n in COMMANDS if "--cache" in help_of(g, n)])
def test_the_default_of_cache_is_in_the_help(group: str, name: str) -> None:
    ctx, options = parameters(group, name)
    (option,) = [option for option in options if "--cache" in option.opts]
    record = option.get_help_record(ctx)
    assert record is not None
    assert "[default: " in record[1]


@pytest.mark.parametrize("name", ["run", "plan"])
def test_defaults_of_settings_are_those_of_the_configuration(name: str) -> None:
    config = asdict(RunConfig())
    keys = {"objective": "objective.name", "sharpness": "sharpness.name"}
    keys |= {field: f"training.{field}" for field in config["training"] if field != "arguments"}
    keys |= KEYS if name == "plan" else {}
    ctx, options = parameters("distill", name)
    checked = 0
    for option in options:
        section, _, field = keys.get(str(option.name), "").partition(".")
        if not field or field == "model":
            continue
        default: Any = config[section][field]
        record = option.get_help_record(ctx)
        assert record is not None
        assert f"[default: {default}]".lower() in record[1].lower()
        checked += 1
    assert checked >= 8
