"""What all commands share: errors as one line, `--json`, output for people, and progress."""

import errno
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

Function = TypeVar("Function", bound=Callable[..., Any])
# Called with (phase, done, total, detail); a total of 0 is unknown.
Update = Callable[[str, int, int, str], None]
SECONDS_BETWEEN_LINES = 30.0

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    # Flags may be typed with underscores, as those of transformers' TrainingArguments are.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
    "show_default": True,
}


class Commands(click.Group):
    """A group that prints known errors and errors of the operating system as one line and sets the exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted; what was committed is kept: run the same command again to resume", err=True)
            ctx.exit(130)
        except Exception as error:
            message = None if ctx.meta.get("traceback") else self._message(ctx, error)
            if message is None:
                raise
            click.echo(f"error: {' '.join(message.split())}", err=True)
            ctx.exit(getattr(error, "exit_code", 1))

    def _message(self, ctx: click.Context, error: Exception) -> str | None:
        """The line for a user, or None for a defect, whose traceback is needed."""
        from teacher_cache.errors import EXTRAS, KnownError, MissingDependency

        name = ctx.invoked_subcommand or ""
        if isinstance(error, KnownError):
            command = self.get_command(ctx, name)
            return str(error) if command is None else with_flags(str(error), command, ctx)
        if isinstance(error, ModuleNotFoundError):
            library = (error.name or "").partition(".")[0]
            return str(MissingDependency.of(f"`{self.name} {name}`", library)) if library in EXTRAS else None
        # On a closed pipe, click ends without a message.
        if isinstance(error, OSError) and error.errno != errno.EPIPE:
            return _system_message(error)
        return None


def with_flags(text: str, command: click.Command, ctx: click.Context) -> str:
    """`text` with every backticked parameter of the command, such as `text_key`, as its flag, such as --text-key."""
    names: dict[str, str] = {}
    flags: dict[str, str] = {}
    for parameter in command.get_params(ctx):
        long = [flag for flag in parameter.opts if flag.startswith("--")]
        flags |= {flag[2:].replace("-", "_"): flag for flag in long}
        if long:
            names[str(parameter.name)] = long[0]
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1], names.get(found[1], found[0])), text)


def _system_message(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return f"no space left on disk{where}; free some and run the same command again"
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}: {error.filename}" if error.filename else reason


def common_options(function: Function) -> Function:
    """`--json`, `-q`, `-v` and `--traceback`, which are read with `is_set`."""

    def remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        ctx.meta[str(option.name)] = value
        if option.name == "verbose":
            logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
            logging.getLogger("teacher_cache").setLevel(logging.INFO if value else logging.WARNING)

    for flags, text in (
        (("--traceback",), "Show the traceback of an error."),
        (("-v", "--verbose"), "Print more about the progress."),
        (("-q", "--quiet"), "Print only the result."),
        (("--json",), "Print the result as JSON, and nothing else on stdout."),
    ):
        function = click.option(*flags, is_flag=True, expose_value=False, callback=remember, help=text)(function)
    return function


def is_set(name: str) -> bool:
    """Whether one of `common_options` was given."""
    return bool(click.get_current_context().meta.get(name))


def emit(record: dict[str, Any] | list[Any], lines: Callable[[], list[str]], after: str = "") -> None:
    """Print the result: JSON with `--json`, otherwise lines, and the command to run next."""
    if is_set("json"):
        click.echo(json.dumps(record, ensure_ascii=False, indent=2))
        return
    for line in lines():
        click.echo(line)
    if after and not is_set("quiet"):
        click.echo(f"next: {after}")


def print_status(text: str) -> None:
    """Print a line on stderr, unless `-q` is given."""
    if not is_set("quiet"):
        ctx = click.get_current_context()
        click.echo(with_flags(text, ctx.command, ctx), err=True)


@contextmanager
def progress_bar() -> Iterator[Update]:
    """A function that shows the progress: as one bar on a terminal, otherwise as a line every 30 s.

    The bar is that of the latest phase. Nothing is shown with `-q`.
    """
    if is_set("quiet"):
        yield lambda phase, done, total, detail: None
    elif not sys.stderr.isatty():
        yield _plain_lines()
    else:
        from rich.console import Console

        with _live_bar(Console(stderr=True)) as update:
            yield update


@contextmanager
def _live_bar(console: "Console") -> Iterator[Update]:
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    time = Column(no_wrap=True, min_width=7)  # on a narrow terminal the detail is cut instead
    phase_columns = (SpinnerColumn(), TextColumn("{task.description}"))
    number, detail = TextColumn("{task.fields[count]}"), TextColumn("{task.fields[detail]}")
    uncounted = (*phase_columns, number, TimeElapsedColumn(table_column=time), detail)
    counted = (*phase_columns, BarColumn(20), number, TimeRemainingColumn(table_column=time), detail)
    with Progress(*uncounted, console=console, transient=True) as bar:
        task: TaskID | None = None

        def update(phase: str, done: int, total: int, detail: str) -> None:
            nonlocal task
            if task is None or bar.tasks[0].description != phase:
                if task is not None:
                    bar.remove_task(task)
                task = bar.add_task(phase, count="", detail="")
            bar.columns = counted if total else uncounted
            count = f"{done:,}/{total:,}" if total else f"{done:,}" if done else ""
            bar.update(task, completed=done, total=total or None, count=count, detail=detail)

        yield update


def _plain_lines() -> Update:
    last = time.monotonic()
    # Of the phase: its name, when it began, and how much was done by then.
    current, started, before = "", last, 0

    def update(phase: str, done: int, total: int, detail: str) -> None:
        nonlocal last, current, started, before
        now = time.monotonic()
        if phase != current:
            current, started, before = phase, now, done
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        line = phase
        if total:
            line += f": {done:,}/{total:,} ({done / total:.0%})"
        elif done:
            line += f": {done:,}"
        if total and done > before:
            line += f", about {(now - started) / (done - before) * (total - done) / 60:.0f} min left"
        click.echo(f"{line}; {detail}" if detail else line, err=True)

    return update


# Imported when they are first used, so that `--help` loads nothing else.


def count(number: float, noun: str, plural: str = "") -> str:
    """See `format_count`."""
    from teacher_cache.storage.units import format_count

    return format_count(number, noun, plural)


def duration(seconds: float) -> str:
    """See `format_duration`."""
    from teacher_cache.storage.units import format_duration

    return format_duration(seconds)


def size(bytes: float) -> str:
    """See `format_bytes`."""
    from teacher_cache.storage.units import format_bytes

    return format_bytes(bytes)
