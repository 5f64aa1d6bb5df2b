"""Export of one embedding space with its texts, in a format of other tools."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.build import Progress
from teacher_cache.errors import CacheError, MissingDependency, MissingRows
from teacher_cache.storage.files import atomic_path
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.intake import CheckedReader, checked_texts
from teacher_cache.table.view import SpaceView
from teacher_cache.transfer import EXPORT_FORMATS
from teacher_cache.transfer.base import Block, Origin

BLOCK_RECORDS = 4096


@dataclass(frozen=True)
class ExportReport:
    """Result of an export. Scripts rely on the names of `to_json`.

    Attributes:
        rows: exported texts with their vectors, duplicates included.
        quarantined: records skipped because a vector is quarantined; without a corpus, texts.
        missing: texts of the table skipped because this space has no vector; 0 for a corpus.
        dtype: of the exported numbers, "float16" or "float32".
        corpus: None for the whole table.
        token_columns: of the space, which are not exported; "" if it has none.
    """

    rows: int
    dims: int
    dtype: str
    quarantined: int
    missing: int
    format: str
    output: str
    space: str
    corpus: str | None
    cache: str
    seconds: float
    token_columns: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    cache: str | Path,
    output: str | Path,
    form: str,
    *,
    space: str | None = None,
    corpus: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> ExportReport:
    """Write the texts and vectors of one space to `output`, atomically.

    Args:
        form: a name of `EXPORT_FORMATS`.
        corpus: exported in its order, with duplicates; the texts of a pair follow each other. None exports every
            distinct text that has a vector, in row order.

    Raises:
        CacheError: `output` exists, the format is unknown, or there is nothing to export.
        MissingRows: the corpus has texts that were never encoded.
        DamagedCache: stored values do not match their digest or key.
        MissingDependency: the format's library is not installed.
    """
    started = time.monotonic()
    output = Path(output)
    module = _format(form, output)
    with TeacherCache.open(cache) as table:
        view = table.space(space)
        if corpus is not None:
            corpus = table.corpus(corpus).record.name
        rows = _Rows(table, view, corpus)
        if not rows.exported:
            raise CacheError(f"space {view.slug} of {cache} has no vector for these texts: nothing to export")
        origin = Origin(view.space, view.record.storage, corpus, view.worst_error())
        with atomic_path(output) as target:
            module.write(target, _blocks(table, view, rows, origin.dtype, report), origin, rows.exported)
            if os.path.lexists(output):
                raise CacheError(f"{output} was created meanwhile; choose another name")
        return ExportReport(
            rows=rows.exported,
            dims=view.dims,
            dtype=np.dtype(origin.dtype).name,
            quarantined=rows.quarantined,
            missing=rows.missing,
            format=form,
            output=str(output),
            space=view.slug,
            corpus=corpus,
            cache=str(cache),
            seconds=round(time.monotonic() - started, 3),
            token_columns=view.record.columns.describe() if view.record.columns is not None else "",
        )


def _format(name: str, output: Path) -> Any:
    if name not in EXPORT_FORMATS:
        raise CacheError(f"unknown export format {name!r}; expected one of {', '.join(EXPORT_FORMATS)}")
    module = import_module(EXPORT_FORMATS[name])
    if module.LIBRARY and find_spec(module.LIBRARY) is None:
        raise MissingDependency.of(f"exporting as {name}", module.LIBRARY)
    if output.suffix.lower() != module.SUFFIX and module.SUFFIX:
        raise CacheError(f"{output}: the name of a {name} file must end with {module.SUFFIX}")
    if os.path.lexists(output):
        raise CacheError(f"{output} exists; choose another name, or remove it first")
    return module


class _Rows:
    """The rows to export in order, counted before anything is written."""

    def __init__(self, table: TeacherCache, view: SpaceView, corpus: str | None) -> None:
        self._view = view
        self._listed = None if corpus is None else table.corpus(corpus).rows
        self._count = table.rows if self._listed is None else len(self._listed)
        quarantined = np.fromiter(view.quarantined(), dtype=np.int64)
        self.exported = self.quarantined = self.missing = 0
        for records in self._records():
            present = view.present(records.reshape(-1)).reshape(records.shape)
            excluded = np.isin(records, quarantined) & ~present
            missing = records[~present & ~excluded]
            if len(missing) and corpus is not None:
                raise MissingRows(
                    f"corpus {corpus!r} has texts without a vector in space {view.slug}, the first is row "
                    f"{missing[0]}; `tcache build` with the same teacher adds them"
                )
            self.missing += len(missing)
            self.quarantined += int(excluded.any(axis=1).sum())
            self.exported += int(present.all(axis=1).sum()) * records.shape[1]

    def _records(self) -> Iterator[npt.NDArray[np.int64]]:
        for start in range(0, self._count, BLOCK_RECORDS):
            end = min(start + BLOCK_RECORDS, self._count)
            yield np.arange(start, end)[:, None] if self._listed is None else np.asarray(self._listed[start:end])

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """`(n,)` rows of the records that have all vectors."""
        for records in self._records():
            complete = self._view.present(records.reshape(-1)).reshape(records.shape).all(axis=1)
            if complete.any():
                yield records[complete].reshape(-1)


def _blocks(
    table: TeacherCache, view: SpaceView, rows: _Rows, dtype: str, report: Callable[[Progress], None]
) -> Iterator[Block]:
    progress = Progress(phase="writing", total=rows.exported, space=view.space.describe())
    reader = CheckedReader(view)
    for block in rows.blocks():
        texts, keys = checked_texts(table.texts_table, block)
        yield Block(texts, keys, reader.gather(block, dtype))
        progress.done += len(block)
        report(progress)
    if progress.done != rows.exported:
        raise CacheError(
            f"space {view.slug} changed while it was exported: it had {rows.exported} vectors, then {progress.done}; "
            "export it again"
        )
