"""A Parquet file: `text`, `label`, and the space in the schema's metadata."""

from collections.abc import Iterator
from pathlib import Path

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError
from teacher_cache.transfer.arrow import READ_ROWS, batch, matrices, schema
from teacher_cache.transfer.base import Asked, Block, Given, Origin, spooled

SUFFIX = ".parquet"
LIBRARY = "pyarrow"

METADATA = b"teacher_cache"


def write(target: Path, blocks: Iterator[Block], origin: Origin, rows: int) -> None:
    """Write a new file, one row group a block."""
    import pyarrow.parquet

    columns = schema(origin).with_metadata({METADATA: origin.to_json().encode()})
    # Vectors do not repeat: a dictionary would be built only to be thrown away.
    options = {"use_dictionary": False, "write_page_checksum": True}
    with pyarrow.parquet.ParquetWriter(target, columns, **options) as file:
        for block in blocks:
            file.write_batch(batch(block, columns))


def read(source: Path, asked: Asked) -> Given:
    """The texts of one column and the vectors of another."""
    import pyarrow
    import pyarrow.parquet

    corpus = Corpus.open(source, asked.text_key)
    try:
        # Buffered and not read ahead, so that a column chunk of any size takes little memory.
        with pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file:
            if asked.vector_key not in file.schema_arrow.names:
                raise CorpusError(
                    f"{source}: no column {asked.vector_key!r}, found {', '.join(file.schema_arrow.names)}; name "
                    "that of the vectors with --vector-key"
                )
            described = (file.schema_arrow.metadata or {}).get(METADATA)
            origin = None if described is None else Origin.from_json(described, f"the metadata of {source}")
            tables = file.iter_batches(batch_size=READ_ROWS, columns=[asked.vector_key])
            vectors = spooled(matrices(tables, asked.vector_key, str(source)), asked.file, str(source))
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{source}: cannot be read ({error}); check that the file is whole") from error
    return Given(corpus, vectors, None, origin)
