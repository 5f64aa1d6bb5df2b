"""A Parquet file with columns `text` and `label`, and the space in the schema's metadata."""

from collections.abc import Iterator
from pathlib import Path

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError
from teacher_cache.transfer.arrow import READ_ROWS, batch, check_column, matrices, schema
from teacher_cache.transfer.base import Block, Origin, ReadOptions, VectorSource, spool

SUFFIX = ".parquet"
LIBRARY = "pyarrow"

METADATA = b"teacher_cache"


def write(target: Path, blocks: Iterator[Block], origin: Origin, rows: int) -> None:
    """Write a new file, one row group per block."""
    import pyarrow.parquet

    columns = schema(origin).with_metadata({METADATA: origin.to_json().encode()})
    # Vectors do not repeat, so a dictionary would be useless.
    with pyarrow.parquet.ParquetWriter(target, columns, use_dictionary=False, write_page_checksum=True) as file:
        for block in blocks:
            file.write_batch(batch(block, columns))


def read(source: Path, options: ReadOptions) -> VectorSource:
    """Texts and vectors from two columns."""
    import pyarrow
    import pyarrow.parquet

    corpus = Corpus.open(source, options.text_key)
    try:
        # Buffered without read-ahead, so that large column chunks take little memory.
        with pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file:
            check_column(options.vector_key, file.schema_arrow.names, source)
            described = (file.schema_arrow.metadata or {}).get(METADATA)
            origin = None if described is None else Origin.from_json(described, f"the metadata of {source}")
            tables = file.iter_batches(batch_size=READ_ROWS, columns=[options.vector_key])
            vectors = spool(matrices(tables, options.vector_key, str(source)), options.file, str(source))
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{source}: cannot be read ({error}); check that the file is complete") from error
    return VectorSource(corpus, vectors, None, origin)
