"""Arguments and options that several commands take, and the objects made from them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import Function

if TYPE_CHECKING:
    from teacher_cache.corpus.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions
    from teacher_cache.tokens.request import TokenRequest

PATH = click.Path(path_type=Path)
STORAGE = ("float16", "float16-raw", "int8", "float32")
TOKEN_STORAGE = ("float16", "float16-raw", "int8")
POOLINGS = ("mean", "cls", "last_token")
COLUMNS = ("vectors", "vectors,tokens", "vectors,tokens,attention")


class EncodingChoice(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """A choice of encodings that also accepts their older names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from teacher_cache.storage.codec import encoding_name

        return super().convert(encoding_name(value), param, ctx)


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """One decorator that applies several; `--help` lists the options in this order."""

    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


# The cache


def default_cache() -> Path:
    """The folder of the cache when no command line and no configuration names one."""
    return Path(os.environ.get("TCACHE_HOME") or Path.home() / ".cache" / "tcache")


def default_cache_if_any() -> str | None:
    """`default_cache`, if there is a cache."""
    from teacher_cache.table.layout import CACHE_JSON

    return str(default_cache()) if (default_cache() / CACHE_JSON).exists() else None


def is_given(parameter: str) -> bool:
    """Whether the running command was called with this parameter, rather than taking its default."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not click.core.ParameterSource.DEFAULT


def cache_flag(
    *flags: str, help: str = "Folder of the teacher cache.", **settings: Any
) -> Callable[[Function], Function]:
    """An option that is a cache, by default `default_cache`."""
    return click.option(
        *flags,
        type=PATH,
        default=default_cache,
        show_default=False,
        help=f"{help}  [default: $TCACHE_HOME or ~/.cache/tcache]",
        **settings,
    )


cache_option = cache_flag("--cache")


def cache_argument(function: Function) -> Function:
    """The cache, as an optional argument or as `--cache`; the default is that of `cache_option`."""

    def remember(ctx: click.Context, option: click.Parameter, value: Path) -> None:
        ctx.meta["cache"] = value

    def choose(ctx: click.Context, argument: click.Parameter, value: Path | None) -> Path:
        if value is not None and is_given("cache_flag"):
            raise click.UsageError("the cache is named twice, as CACHE and with --cache: leave one out")
        cache: Path = value or ctx.meta["cache"]
        return cache

    return options(
        click.argument("cache", type=PATH, required=False, callback=choose),
        cache_flag(
            "--cache",
            "cache_flag",
            help="The same as CACHE.",
            is_eager=True,  # `choose` needs it
            expose_value=False,
            callback=remember,
        ),
    )(function)


space_option = click.option(
    "--space", help="Embedding space: slug, fingerprint or teacher; needed if the cache has several."
)
corpus_option = click.option("--corpus", help="Name of a corpus; needed if the cache has several.")


# Teachers and students

trust_remote_code = click.option("--trust-remote-code", is_flag=True, help="Run Python code from the model's folder.")
max_length = click.option("--max-length", type=click.IntRange(1), help="Most tokens of a text, with special tokens.")

# How a model encodes. Without an option, the values in its files are used.
model_options = options(
    click.option("--revision", help="Commit or tag of a model on the Hugging Face hub."),
    click.option(
        "--pooling",
        type=click.Choice(POOLINGS),
        metavar=f"[{'|'.join(POOLINGS)}]",
        help="How token states become one vector.",
    ),
    click.option("--padding-side", type=click.Choice(["left", "right"]), help="Where shorter texts are padded."),
    click.option("--prompt", help="Text in front of every input."),
    click.option("--prompt-name", help="A prompt from the model's own list, such as 'query'."),
    max_length,
    click.option("--device", help="cpu, cuda, cuda:1, mps.  [default: a GPU if there is one]"),
    click.option("--attn-implementation", help="sdpa, eager, flash_attention_2."),
    trust_remote_code,
)


def teacher_options(function: Function, *, required: bool = True) -> Function:
    """Every option of a teacher; `teacher_from` makes the teacher."""
    return options(
        click.option(
            "--teacher",
            "--model-name-or-path",
            "--model-name",
            "model",
            required=required,
            metavar="T",
            help="Name from `distill list families`, hub id, local folder, or 'toy'.",
        ),
        model_options,
        click.option("--backend", help="Name from `distill list teachers`, or package.module:Class."),
        click.option("--normalize/--no-normalize", default=None, help="Scale vectors to unit length, or do not."),
        click.option("--dims", type=click.IntRange(1), help="Keep only the first N numbers of a vector."),
        click.option("--dtype", default="auto", help="Precision of the model: auto, bf16, fp16 or fp32."),
        click.option(
            "--batch-tokens", "--max-tokens-per-batch", default="auto", help="Padded tokens of one forward pass."
        ),
    )(function)


def optional_teacher(function: Function) -> Function:
    """`teacher_options` of a command that also works without a teacher."""
    return teacher_options(function, required=False)


def teacher_of(given: dict[str, Any]) -> "TeacherOptions":
    """The teacher from the values of `teacher_options`."""
    from teacher_cache.teachers.base import TeacherOptions

    tokens = given.pop("batch_tokens")
    if tokens != "auto" and not tokens.isdigit():
        raise click.BadParameter(f"{tokens!r} is neither a number nor 'auto'", param_hint="--batch-tokens")
    return TeacherOptions(batch_tokens=None if tokens == "auto" else int(tokens), **given)


# Corpora

text_key = click.option(
    "--text-key", default="text", help="Key or column of the text; two for pairs, such as 'question,answer'."
)
corpus_options = options(
    click.argument("paths", metavar="CORPUS...", nargs=-1, required=True),
    text_key,
    click.option("--domain-key", help="Key or column of a text's domain, for methods that use domains."),
)


def corpus_of(paths: tuple[str, ...], text_key: str, domain_key: str | None = None) -> "Corpus":
    """The corpus in these files."""
    from teacher_cache.corpus.corpus import Corpus

    return Corpus.open(paths, text_key, domain_key)


# Token columns

column_options = options(
    click.option(
        "--columns",
        type=click.Choice(COLUMNS),
        default="vectors",
        help="What to store of each text: also the last hidden state of each token, also attention maps.",
    ),
    click.option(
        "--attention-layers",
        metavar="L[,L...]",
        help="Layers whose attention maps are stored, from 1.  [default: those stored already, or the last]",
    ),
)


def tokens_of(columns: str, attention_layers: str | None) -> "TokenRequest | None":
    """The token columns from the values of `column_options`; None for vectors alone."""
    from teacher_cache.tokens.request import TokenRequest

    if attention_layers is not None and "attention" not in columns:
        raise click.UsageError(f"--attention-layers goes with --columns {COLUMNS[-1]}, not {columns}")
    if columns == "vectors":
        return None
    if "attention" not in columns:
        return TokenRequest()
    layers = attention_layers.split(",") if attention_layers is not None else []
    if not all(layer.strip().isdecimal() for layer in layers):
        raise click.BadParameter(
            f"{attention_layers!r} is not a list of layers such as 8,12", param_hint="--attention-layers"
        )
    return TokenRequest(attention=tuple(int(layer) for layer in layers))


# Runs, scores and settings


def split_commas(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """The parts of a comma list."""
    return None if value is None else tuple(part.strip() for part in value.split(","))


def _existing_folder(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    """Refuse a file in a folder that does not exist, before anything is computed."""
    for path in value if isinstance(value, tuple) else filter(None, [value]):
        if not path.parent.is_dir():
            raise click.BadParameter(f"the folder {path.parent} does not exist", param_hint="--output")
    return value


def output_option(help: str, **settings: Any) -> Callable[[Function], Function]:
    """`-o`, `--output`: a file in a folder that exists."""
    return click.option("-o", "--output", type=PATH, callback=_existing_folder, help=help, **settings)


run_arguments = click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
table_output = output_option("Also write the table to this file, in Markdown.")
data_option = click.option(
    "--data", type=PATH, help="Folder of the task files; runs without scores are scored on them."
)
tasks_option = click.option(
    "--tasks", callback=split_commas, metavar="NAME[,NAME...]", help="Names from `distill list tasks`.  [default: all]"
)
scoring_options = options(
    click.option("--data", type=PATH, help="Folder of the task files; runs without scores are scored on them."),
    tasks_option,
    click.option("--dtype", default="auto", help="Precision of the models that are scored: auto, fp32 or bf16."),
)


recipe_option = click.option(
    "--recipe", help="Name from `distill list recipes`, or a YAML file; all other settings override it."
)


def set_option(help: str) -> Callable[[Function], Function]:
    """`--set KEY=VALUE`, given any number of times."""
    return click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help=f"{help} Repeatable.")


def next_run(cache: Path, space: str, corpus: str) -> str:
    """The command that trains on this space and corpus."""
    return f"distill run --cache {cache} --space {space} --corpus {corpus} --student MODEL --output-dir RUN"
