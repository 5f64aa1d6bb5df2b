"""A folder for `datasets.load_from_disk` with columns `text` and `label`, and a `space.json`."""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError
from teacher_cache.table.layout import SPACE_JSON
from teacher_cache.transfer.arrow import READ_ROWS, batch, check_column, matrices, schema
from teacher_cache.transfer.base import Block, Origin, ReadOptions, VectorSource, read_origin, spool

SUFFIX = ""
LIBRARY = "datasets"

_DATA = "data-00000-of-00001.arrow"


def write(target: Path, blocks: Iterator[Block], origin: Origin, rows: int) -> None:
    """Write a new folder.

    `Dataset.save_to_disk` would need a second copy on disk. So the files are written here, and loaded by the library
    as a check.
    """
    import datasets
    import pyarrow

    target.mkdir()
    (target / SPACE_JSON).write_text(origin.to_json(), encoding="utf-8")
    features = datasets.Features.from_arrow_schema(schema(origin))
    # The library names its caches of `map` after the fingerprint, so it must differ between exports.
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


def read(source: Path, options: ReadOptions) -> VectorSource:
    """Texts and vectors from two columns."""
    corpus = Corpus.open(source, options.text_key)
    import datasets

    dataset = datasets.load_from_disk(str(source), keep_in_memory=False)
    check_column(options.vector_key, dataset.column_names, source)
    tables = dataset.select_columns([options.vector_key]).with_format("arrow").iter(batch_size=READ_ROWS)
    vectors = spool(matrices(tables, options.vector_key, str(source)), options.file, str(source))
    return VectorSource(corpus, vectors, None, read_origin(source / SPACE_JSON))
