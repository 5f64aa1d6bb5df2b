"""Options that several commands of `tcache` take, and what becomes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.common import asking_options

if TYPE_CHECKING:
    from teacher_cache.corpus.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions
    from teacher_cache.tokens.request import TokenRequest

Body = TypeVar("Body", bound=Callable[..., Any])
STORAGE = ("float16", "float16-raw", "int8", "float32")
TOKEN_STORAGE = ("float16", "float16-raw", "int8")
COLUMNS = ("vectors", "vectors,tokens", "vectors,tokens,attention")


class EncodingChoice(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """A choice of encodings that also accepts their older names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from teacher_cache.storage.codec import encoding_name

        return super().convert(encoding_name(value), param, ctx)


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
        "--domain-key",
        help="Key or column that says which part of the corpus a text is from; kept for methods that use it.",
    )(body)
    body = click.option(
        "--text-key",
        default="text",
        show_default=True,
        help="Key or column of the text; two for pairs: 'a,b'.",
    )(body)
    return click.argument("paths", metavar="CORPUS...", nargs=-1, required=True)(body)


def column_options(body: Body) -> Body:
    body = click.option(
        "--attention-layers",
        metavar="L[,L...]",
        help="Layers whose attention is kept, counted from 1; by default those that are kept already, or the last.",
    )(body)
    return click.option(
        "--columns",
        type=click.Choice(COLUMNS),
        default="vectors",
        show_default=True,
        help="What to keep of each text: also last hidden states and tokens, also attention maps.",
    )(body)


def tokens_of(columns: str, attention_layers: str | None) -> "TokenRequest | None":
    """What `column_options` ask for besides vectors."""
    from teacher_cache.tokens.request import TokenRequest

    if attention_layers is not None and "attention" not in columns:
        raise click.UsageError(f"--attention-layers goes with --columns {COLUMNS[-1]}, not {columns}")
    if columns == "vectors":
        return None
    if "attention" not in columns:
        return TokenRequest()
    layers = (attention_layers or "").split(",") if attention_layers is not None else []
    if not all(layer.strip().isdecimal() for layer in layers):
        raise click.BadParameter(
            f"{attention_layers!r} is no list of layers such as 8,12", param_hint="--attention-layers"
        )
    return TokenRequest(attention=tuple(int(layer) for layer in layers))


space_option = click.option("--space", help="Slug, fingerprint or teacher; needed when the cache has several spaces.")


def teacher_of(given: dict[str, Any]) -> "TeacherOptions":
    """The teacher that `teacher_options` were given."""
    from teacher_cache.teachers.base import TeacherOptions

    tokens = given.pop("batch_tokens")
    if tokens != "auto" and not tokens.isdigit():
        raise click.BadParameter(f"{tokens!r} is neither a number nor 'auto'", param_hint="--batch-tokens")
    return TeacherOptions(batch_tokens=None if tokens == "auto" else int(tokens), **given)


def corpus_of(paths: tuple[str, ...], text_key: str, domain_key: str | None = None) -> "Corpus":
    from teacher_cache.corpus.corpus import Corpus

    return Corpus.open(paths, text_key, domain_key)


def trains_on(cache: Path, space: str, corpus: str) -> str:
    """What to type next, whatever else the cache holds."""
    return f"distill run --cache {cache} --space {space} --corpus {corpus} --student MODEL --output-dir RUN"
