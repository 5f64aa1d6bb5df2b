"""`distill static`: a static student from a model's vocabulary."""

from pathlib import Path
from typing import Any

import click

from cli.common import common_options, emit, progress_bar, size
from cli.options import PATH, POOLINGS, corpus_of, corpus_option, text_key, trust_remote_code


@click.command()
@click.argument("model")
@click.option("-o", "--output-dir", type=PATH, required=True, help="Folder of the student.")
@click.option("--dims", type=click.IntRange(1), help="Width after PCA.  [default: 256, or the model's if smaller]")
@click.option("--words", multiple=True, metavar="CORPUS", help="Count tokens in this corpus. Repeatable.")
@text_key
@click.option("--cache", type=PATH, help="Count tokens in a corpus of this cache.  [default: none]")
@corpus_option
@click.option(
    "--sif",
    type=click.FloatRange(0, 1, max_open=True),
    help="a of the token weights a / (a + frequency), 0 for none.  [default: 0.003; 0.0001 without a corpus]",
)
@click.option("--pooling", type=click.Choice(POOLINGS), default="mean", help="Of a token and the special tokens.")
@click.option("--max-length", type=click.IntRange(1), default=512, help="Tokens to which texts are truncated.")
@click.option("--device", help="cpu, cuda, cuda:1, mps.  [default: a GPU if there is one]")
@trust_remote_code
@common_options
def static(model: str, output_dir: Path, words: tuple[str, ...], text_key: str, **options: Any) -> None:
    """Make a static student: a table of token vectors.

    The mean of its tokens' vectors is the vector of a text. MODEL, a teacher or a student, encodes every token of its
    vocabulary alone; PCA narrows these vectors, and frequent tokens get a small weight. The folder can be trained with
    `distill run --student`, and sentence-transformers and model2vec load it. Without --words and --cache, token ids
    stand for frequencies.

    \b
    Example:
      distill static MODEL --cache my-cache --output-dir my-static
    """
    with progress_bar() as update:
        update("loading the model", 0, 0, "")
        from distill.runs.static import build_static

        source = corpus_of(words, text_key) if words else None
        result = build_static(model, output_dir, words=source, report=update, **options)
    frequencies = {
        "corpus": f"SIF {result.sif:g} from {result.counted_tokens:,} tokens of the corpus",
        "token ids": f"SIF {result.sif:g} from token ids (Zipf's law)",
        "none": "no weights",
    }
    speed = result.texts_per_second
    emit(
        result.to_json(),
        lambda: [
            f"{result.vocabulary:,} token vectors of width {result.dims} ({result.explained_variance:.1%} of the "
            f"variance), {frequencies[result.weights]}, {size(result.bytes)}",
            *([] if speed is None else [f"{speed:,.0f} texts of the corpus a second"]),
            f"student: {result.output_dir}",
        ],
        f"distill run --cache CACHE --student {result.output_dir} --output-dir RUN",
    )
