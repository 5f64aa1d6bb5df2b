"""Options that several commands of `tcache` take, and what becomes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.common import asking_options

if TYPE_CHECKING:
    from teacher_cache.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions

Body = TypeVar("Body", bound=Callable[..., Any])
STORAGE = ("float16", "raw", "compact", "float32")

cache_argument = click.argument("cache", type=click.Path(path_type=Path))


def teacher_options(body: Body, *, required: bool = True) -> Body:
    """Every flag that says which teacher and how it is asked; None means as its own files say."""
    switches = (
        click.option(
            "--teacher",
            "--model-name-or-path",
            "--model-name",
            "model",
            required=required,
            metavar="T",
            help="Known short name, hub id, local folder, or 'toy'.",
        ),
        asking_options,
        click.option("--backend", help="Force a back end (see `distill list teachers`)."),
        click.option("--normalize/--no-normalize", default=None, help="Store vectors of unit length or not."),
        click.option("--dims", type=click.IntRange(1), help="Keep the first numbers of a vector only."),
        click.option("--dtype", default="auto", show_default=True, help="auto, bf16, fp16 or fp32."),
        click.option(
            "--batch-tokens",
            "--max-tokens-per-batch",
            default="auto",
            show_default=True,
            help="Padded tokens in one forward pass.",
        ),
    )
    for switch in reversed(switches):
        body = switch(body)
    return body


def optional_teacher(body: Body) -> Body:
    """`teacher_options` of a command that can do without a teacher."""
    return teacher_options(body, required=False)


def corpus_options(body: Body) -> Body:
    body = click.option(
        "--text-key",
        default="text",
        show_default=True,
        help="Key or column of the text; two for pairs: 'a,b'.",
    )(body)
    return click.argument("paths", metavar="CORPUS...", nargs=-1, required=True)(body)


space_option = click.option("--space", help="Slug, fingerprint or teacher; needed when the cache has several spaces.")


def teacher_of(given: dict[str, Any]) -> "TeacherOptions":
    """The teacher that `teacher_options` were given."""
    from teacher_cache.teachers.base import TeacherOptions

    tokens = given.pop("batch_tokens")
    if tokens != "auto" and not tokens.isdigit():
        raise click.BadParameter(f"{tokens!r} is neither a number nor 'auto'", param_hint="--batch-tokens")
    return TeacherOptions(batch_tokens=None if tokens == "auto" else int(tokens), **given)


def corpus_of(paths: tuple[str, ...], text_key: str) -> "Corpus":
    from teacher_cache.corpus import Corpus

    return Corpus.open(paths, text_key)


def trains_on(cache: Path, space: str, corpus: str) -> str:
    """What to type next, whatever else the cache holds."""
    return f"distill run --cache {cache} --space {space} --corpus {corpus} --student MODEL --output-dir RUN"
