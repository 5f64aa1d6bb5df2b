"""A folder for `datasets.load_from_disk`: columns `text` and `label`, and `space.json` beside the data."""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError
from teacher_cache.table.cache import SPACE_JSON
from teacher_cache.transfer.arrow import READ_ROWS, batch, matrices, schema
from teacher_cache.transfer.base import Asked, Block, Given, Origin, read_origin, spooled

SUFFIX = ""
LIBRARY = "datasets"

_DATA = "data-00000-of-00001.arrow"


def write(target: Path, blocks: Iterator[Block], origin: Origin, rows: int) -> None:
    """Fill a new folder.

    `Dataset.save_to_disk` saves what is on disk already; written here, a dataset takes its size once. The
    library has to find all its rows before the folder counts as written.
    """
    import datasets
    import pyarrow

    target.mkdir()
    (target / SPACE_JSON).write_text(origin.to_json(), encoding="utf-8")
    features = datasets.Features.from_arrow_schema(schema(origin))
    # The library names what `map` keeps after this: it has to differ between any two exports.
    identity = blake2b(origin.to_json().encode(), digest_size=8)
    with (
        pyarrow.OSFile(str(target / _DATA), "wb") as file,
        pyarrow.ipc.new_stream(file, features.arrow_schema) as stream,
    ):
        for block in blocks:
            identity.update(block.keys.data)
            stream.write_batch(batch(block, features.arrow_schema))
    datasets.DatasetInfo(description=origin.space.describe(), features=features).write_to_directory(str(target))
    state: dict[str, Any] = {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": identity.hexdigest(),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (target / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    found = len(datasets.load_from_disk(str(target), keep_in_memory=False))
    if found != rows:
        raise CorpusError(f"datasets {datasets.__version__} finds {found} of the {rows} rows written to {target}")


def read(source: Path, asked: Asked) -> Given:
    """The texts of one column and the vectors of another."""
    corpus = Corpus.open(source, asked.text_key)
    import datasets

    dataset = datasets.load_from_disk(str(source), keep_in_memory=False)
    if asked.vector_key not in dataset.column_names:
        raise CorpusError(
            f"{source}: no column {asked.vector_key!r}, found {', '.join(dataset.column_names)}; name that of the "
            "vectors with --vector-key"
        )
    tables = dataset.select_columns([asked.vector_key]).with_format("arrow").iter(batch_size=READ_ROWS)
    vectors = spooled(matrices(tables, asked.vector_key, str(source)), asked.file, str(source))
    return Given(corpus, vectors, None, read_origin(source / SPACE_JSON))
