"""`distill cut`: a smaller model out of a larger one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import common_options, emit, print_status, progress_bar, size
from cli.options import (
    PATH,
    POOLINGS,
    corpus_of,
    corpus_option,
    max_length,
    space_option,
    text_key,
    trust_remote_code,
)

if TYPE_CHECKING:
    from distill.runs.cut import CutResult, Size


def numbers(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """The numbers of a comma list."""
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of layers such as 0,2,5", param_hint="--layers")
    return tuple(map(int, parts))


def number_or_all(ctx: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """A number of tokens, or "all"."""
    if value is None or value == "all":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number of tokens nor 'all'", param_hint="--keep")
    return int(value)


@click.command()
@click.argument("model")
@click.option("-o", "--output-dir", type=PATH, required=True, help="Folder of the smaller model, which must not exist.")
@click.option("--layers", metavar="N[,N...]", callback=numbers, help="Layers to keep, from 0.")
@click.option("--depth", type=click.IntRange(1), help="Number of layers to keep; with --cache the best ones.")
@click.option(
    "--words",
    multiple=True,
    metavar="CORPUS",
    help="Corpus file whose tokens are kept; all others are dropped. Repeatable.",
)
@text_key
@click.option(
    "--keep",
    metavar="N|all",
    callback=number_or_all,
    help="Keep the N most frequent tokens of --words, or without it of the corpus in --cache; all keeps every token "
    "seen.  [default: all with --words]",
)
@click.option("--cache", type=PATH, help="Teacher cache to choose layers with, and to score with.  [default: none]")
@space_option
@corpus_option
@click.option(
    "--pooling",
    type=click.Choice(POOLINGS),
    metavar=f"[{'|'.join(POOLINGS)}]",
    help="How token states become one vector.  [default: that of the model's files]",
)
@click.option("--prompt", default="", show_default=False, help="Text in front of every text, part of the new model.")
@max_length
@trust_remote_code
@common_options
def cut(
    model: str,
    output_dir: Path,
    words: tuple[str, ...],
    text_key: str,
    pooling: str | None,
    prompt: str,
    max_length: int | None,
    trust_remote_code: bool,
    **options: Any,
) -> None:
    """Cut a model to some of its layers and tokens.

    MODEL is a folder or a hub id of a transformers encoder. The result is a sentence-transformers folder: a student to
    train, or a model to use. The tokens are those of a corpus. With a teacher cache, layers are chosen without labels
    and without training, and the agreement with the teacher before training is printed.

    \b
    Example:
      distill cut all-MiniLM-L6-v2 -o small --depth 3 --keep 20000 --cache my-cache
    """
    with progress_bar() as update:
        update("cutting the model", 0, 0, "")
        from distill.config import StudentConfig
        from distill.runs.cut import cut as cut_model

        config = StudentConfig(model, pooling, max_length, prompt, trust_remote_code)
        corpus = corpus_of(words, text_key) if words else None
        result = cut_model(config, output_dir, words=corpus, announce=print_status, **options)
    emit(result.to_json(), lambda: lines(result), f"distill run --student {output_dir} --cache C --output-dir RUN")


def lines(result: "CutResult") -> list[str]:
    """A cut as lines of text."""
    chosen = ",".join(map(str, result.layers))
    by = f" ({result.candidates[0].name}, of {len(result.candidates)} sets)" if len(result.candidates) > 1 else ""
    printed = [f"layers: {chosen} of {result.before.layers}{by}"]
    if (found := result.vocabulary) is not None:
        printed.append(
            f"vocabulary: {found.kept:,} of {result.before.vocabulary:,} tokens, {found.obligatory:,} of them "
            f"obligatory; {found.seen:,} occur in the {found.texts:,} texts"
        )
        printed.append(
            f"  {found.same_tokens:,} texts have the same tokens as before (checked), {found.resegmented:,} are split "
            f"into others; vectors differ by at most {found.largest_difference:.1e}"
        )
    printed += [f"{'':<8}{'layers':>8}{'tokens':>10}{'parameters':>13}{'on disk':>10}{'texts/s':>10}"]
    printed += [row("before", result.before), row("after", result.after)]
    if result.score is not None and result.score_before is not None:
        before, after = result.score_before, result.score
        printed.append(
            f"agreement with the teacher before training, after a linear head, on {after.texts} texts: mean cosine "
            f"{before.cosine:.3f} -> {after.cosine:.3f}, Spearman {before.spearman:.3f} -> {after.spearman:.3f}"
        )
    return [*printed, f"model: {result.output_dir} (in {result.seconds:.0f} s)"]


def row(name: str, found: "Size") -> str:
    """A line of the table of sizes."""
    return (
        f"{name:<8}{found.layers:>8}{found.vocabulary:>10,}{found.parameters / 1e6:>11.1f} M{size(found.bytes):>10}"
        f"{found.texts_per_second:>10,.0f}"
    )
