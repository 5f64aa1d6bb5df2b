"""This project's cache as a contender."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import BATCH, Contender, ShardWriter
from benchmarks.vectors import Float16, blocks_of
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.reading.stream import WindowedReader
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import cosine_errors, find_encoding
from teacher_cache.storage.index import Change, row_value, shard_key
from teacher_cache.storage.manifest import CorpusRecord, SourceRecord, writing_manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import SHARD_ROWS
from teacher_cache.table.view import SpaceView, create_vectors

CORPUS = "made-up"


def space_of(dims: int, name: str = "made-up") -> EmbeddingSpace:
    """A space of random vectors."""
    return EmbeddingSpace(
        teacher=name,
        revision="",
        backend="made-up",
        weights="",
        tokenizer="",
        pooling="mean",
        padding_side="right",
        prompt="",
        max_length=1,
        truncation_side="right",
        normalize=True,
        dims=dims,
        dtype="float32",
    )


class Own(Contender, ShardWriter):
    """`WindowedReader` over vectors, with a window of `window` rows, and `SpaceView.gather`; both in float16."""

    def __init__(self, folder: Path, rows: int, dims: int, storage: str = "float16", window: int = 16_384) -> None:
        super().__init__(folder, rows, dims)
        self.storage = storage
        self.window = window

    def load(self) -> None:
        import numcodecs  # noqa: F401  imported by the first read of a compressed shard

    def write(self, vectors: Path) -> None:
        with TeacherCache.open(self.folder / "cache", "a") as cache:
            write_rows(cache, space_of(self.dims), self.storage, blocks_of(vectors))
            publish_rows(cache, self.rows)

    def open(self) -> None:
        self.cache = TeacherCache.open(self.folder / "cache")
        self.view = self.cache.space()
        manifest = self.cache.corpus()
        order = WindowedShuffle(len(manifest), BATCH, window=self.window)
        self.reader = WindowedReader(self.cache, self.view, order, manifest.rows_of, texts=0, dtype=np.float16)

    def stream(self, epoch: int) -> Iterator[Float16]:
        # Of consecutive epochs, the reader would have prefetched the first window before the measurement.
        for batch in self.reader.epoch(2 * epoch):
            yield batch.vectors

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return self.view.gather(rows, dtype=np.float16)

    def write_shards(self, vectors: Float16, folder: Path) -> None:
        """Write whole shards, each durable when its call returns."""
        array = create_vectors(folder / "vectors.zarr", find_encoding(self.storage), self.dims, SHARD_ROWS)
        for number, start in enumerate(range(0, len(vectors), SHARD_ROWS)):
            block = vectors[start : start + SHARD_ROWS]
            array.write_shard(number, block, np.ones(len(block), dtype=bool))
        array.grow(len(vectors))


class RepeatedShard(Own):
    """Every shard is a hard link to the first one: ten million rows on the disk space of 8,192."""

    def write(self, vectors: Path) -> None:
        with TeacherCache.open(self.folder / "cache", "a") as cache:
            rows = cache.shard_rows
            view = cache.ensure_space(space_of(self.dims), self.storage)
            view.write(0, np.arange(rows), next(blocks_of(vectors)).astype(np.float32))
            record = view.column.record(0)
            if record is None or self.rows % rows or not record.present.all():
                raise ValueError(f"{self.rows} rows are not whole shards of {rows}, or the first is incomplete")
            shards = self.rows // rows
            for number in range(1, shards):
                path = view.vectors.shard_path(number)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(view.vectors.shard_path(0), path)
            view.vectors.grow(self.rows)
            published = [Change("shards", shard_key(view.array_name, n), record.pack()) for n in range(shards)]
            cache.index.commit([*published, Change("meta", b"rows", row_value(self.rows))])
            publish_rows(cache, self.rows)


def write_rows(cache: TeacherCache, space: EmbeddingSpace, storage: str, blocks: Iterator[Float16]) -> SpaceView:
    """Store vectors and placeholder texts, one shard per block."""
    view = cache.ensure_space(space, storage)
    start = 0
    for number, block in enumerate(blocks):
        rows = np.arange(start, start + len(block))
        with cache.appending() as appender:
            appender.add([f"text {row}" for row in rows.tolist()])
        view.write(number, rows, block.astype(np.float32))
        start += len(block)
    return view


def publish_rows(cache: TeacherCache, rows: int) -> None:
    """Publish a corpus of all rows in table order."""
    with writing_manifest(cache.path, CORPUS, 1) as (writer, written):
        for start in range(0, rows, 2**20):
            writer.append(np.arange(start, min(start + 2**20, rows)).reshape(-1, 1))
    record = CorpusRecord(
        name=CORPUS,
        fingerprint=blake2b(str(rows).encode(), digest_size=16).hexdigest(),
        columns=("text",),
        records=rows,
        distinct=rows,
        sources=(SourceRecord("made-up", 0, rows),),
    )
    cache.publish_corpus(record, written)


def format_size(vectors: npt.NDArray[np.floating], storage: str, folder: Path) -> dict[str, float]:
    """Store real vectors in one encoding in an empty folder, and compare them with the stored values.

    Returns:
        `stored`: number of stored rows; `bytes`: of the shard files; `worst`, `mean`: 1 - cos between a vector and
        its stored values.
    """
    space = space_of(vectors.shape[1])
    errors: list[npt.NDArray[np.float64]] = []
    with TeacherCache.open(folder / "cache", "a") as cache:
        view = cache.ensure_space(space, storage)
        for number, start in enumerate(range(0, len(vectors), cache.shard_rows)):
            block = np.asarray(vectors[start : start + cache.shard_rows], dtype=np.float32)
            rows = np.arange(start, start + len(block))
            _, quarantined = view.write(number, rows, block)
            kept = np.setdiff1d(rows, np.fromiter(quarantined, dtype=np.int64))
            errors.append(cosine_errors(block[kept - start].astype(np.float64), view.gather(kept, dtype=np.float64)))
        size = sum(record.size for _, record in cache.index.iter_shards(view.array_name))
    found = np.concatenate(errors)
    return {"stored": len(found), "bytes": size, "worst": float(found.max()), "mean": float(found.mean())}
