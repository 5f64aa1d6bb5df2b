"""What both commands share: errors in one line, `--json`, one progress bar, underscores in flags."""

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

Body = TypeVar("Body", bound=Callable[..., Any])
SECONDS_BETWEEN_LINES = 30.0

# Users of TrainingArguments type underscores.
CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class Commands(click.Group):
    """A group that turns known errors, and what the system refuses, into one line and an exit code.

    Nothing else catches them.
    """

    def invoke(self, ctx: click.Context) -> Any:
        from teacher_cache.errors import KnownError

        try:
            return super().invoke(ctx)
        except KnownError as error:
            if ctx.meta.get("traceback"):
                raise
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped; what was committed is kept, and the same command goes on", err=True)
            ctx.exit(130)
        except OSError as error:
            # A reader that closed the pipe is click's: it ends without a word.
            if ctx.meta.get("traceback") or error.errno == errno.EPIPE:
                raise
            click.echo(f"error: {_what_the_system_said(error)}", err=True)
            ctx.exit(1)


def _what_the_system_said(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return f"no space left on disk{where}; free some and run the same command again"
    said = " ".join((error.strerror or str(error) or type(error).__name__).split())
    return f"{said}: {error.filename}" if error.filename else said


def common_options(body: Body) -> Body:
    """`--json`, `-q`, `-v` and `--traceback`; the command finds them in `ctx.meta`."""

    def remember(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
        if value:
            ctx.meta[str(option.name)] = value
        if option.name == "verbose":
            level = logging.INFO if value else logging.WARNING
            logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
            logging.getLogger("teacher_cache").setLevel(level)
        return value

    for flags, text in (
        (("--traceback",), "Show where an error came from."),
        (("-v", "--verbose"), "Say more on the way."),
        (("-q", "--quiet"), "Print the result alone."),
        (("--json",), "Print the result as JSON, and nothing else on stdout."),
    ):
        body = click.option(*flags, is_flag=True, expose_value=False, callback=remember, help=text)(body)
    return body


def cache_option(body: Body) -> Body:
    """`--cache`, by default `TCACHE_HOME` or ~/.cache/tcache."""
    return click.option(
        "--cache",
        type=click.Path(path_type=Path),
        default=default_cache_folder,
        show_default="$TCACHE_HOME or ~/.cache/tcache",
        help="Folder of the teacher cache.",
    )(body)


def asking_options(body: Body) -> Body:
    """How any model is asked, teacher or student; None means as its own files say."""
    switches = (
        click.option("--revision", help="Commit or tag of a hub model."),
        click.option("--pooling", type=click.Choice(["mean", "cls", "last_token"])),
        click.option("--padding-side", type=click.Choice(["left", "right"])),
        click.option("--prompt", help="Text put in front of every input."),
        click.option("--prompt-name", help="A prompt the model names itself, such as 'query'."),
        click.option("--max-length", type=click.IntRange(1), help="Tokens, specials included."),
        click.option("--device", help="cpu, cuda, cuda:1, mps."),
        click.option("--attn-implementation", help="sdpa, eager, flash_attention_2."),
        click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    )
    for switch in reversed(switches):
        body = switch(body)
    return body


def check_output(output: Path | None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if output is not None and not output.parent.is_dir():
        raise click.BadParameter(f"the folder {output.parent} is not there", param_hint="--output")


def default_cache_folder() -> Path:
    return Path(os.environ.get("TCACHE_HOME") or Path.home() / ".cache" / "tcache")


def meta(name: str) -> bool:
    return bool(click.get_current_context().meta.get(name))


def emit(record: dict[str, Any] | list[Any], lines: Callable[[], list[str]], after: str = "") -> None:
    """The result: JSON alone with `--json`, otherwise lines for a person and what to type next."""
    if meta("json"):
        click.echo(json.dumps(record, ensure_ascii=False, indent=2))
        return
    for line in lines():
        click.echo(line)
    if after and not meta("quiet"):
        click.echo(f"next: {after}")


def say(text: str) -> None:
    """A line on the way, on stderr; silent with `-q`."""
    if not meta("quiet"):
        click.echo(text, err=True)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int, str], None]]:
    """One bar on a terminal, a plain line every 30 s elsewhere, nothing with `-q`.

    Yields `update(what, done, total, detail)`; a total of 0 means unknown.
    """
    if meta("quiet"):
        yield lambda what, done, total, detail: None
        return
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int, detail: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None, detail=detail)
            bar.update(tasks[what], completed=done, total=total or None, detail=detail)

        yield update


def _plain_lines() -> Callable[[str, int, int, str], None]:
    started = last = time.monotonic()

    def update(what: str, done: int, total: int, detail: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = f", about {(now - started) / done * (total - done) / 60:.0f} min left" if total and done else ""
        share = f"{done:,}/{total:,} ({done / total:.0%})" if total else f"{done:,}"
        click.echo(f"{what}: {share}{left}; {detail}", err=True)

    return update


def size(count: float) -> str:
    """`format_bytes`, imported when it is first used."""
    from teacher_cache.storage.files import format_bytes

    return format_bytes(count)
