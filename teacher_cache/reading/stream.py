"""Batches of a corpus in windowed-shuffle order, in flat memory.

While one window is used, a thread reads the next one: rows in ascending order, so that every chunk is read and
decoded once, into one of two reused buffers. Texts and vectors come from the cache; no corpus file is opened.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import MissingRows
from teacher_cache.reading.shuffle import Numbers, WindowedShuffle
from teacher_cache.storage.codec import Stored
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView


@dataclass(frozen=True)
class Batch:
    """B records.

    Attributes:
        texts: B texts; for pairs 2B, all first texts and then all second texts; empty if no texts were requested.
        rows: `(B,)` row of each record's first text.
        vectors: `(B, d)` vectors of the first texts.
        records: `(B,)` record numbers in the corpus.
        tokens: token columns of the first texts, in storage encoding; None if they were not requested.
    """

    texts: list[str]
    rows: Numbers
    vectors: npt.NDArray[np.floating]
    records: Numbers
    tokens: list[Any] | None = None


@dataclass
class _Window:
    """Data of one window, by ascending record number; `places` maps positions of the window to it."""

    epoch: int
    start: int
    places: Numbers
    records: Numbers
    rows: Numbers
    stored: Stored
    texts: list[list[str]]
    tokens: list[Any] | None
    buffer: int


@dataclass(eq=False, repr=False)
class WindowedReader:
    """Reads batches of a shuffled corpus, one window ahead.

    Sequential batches take one pass over the data; any other order is correct but slower. Do not share a reader
    between threads or across a fork.

    Args:
        rows_of: returns the `(n, k)` rows of n record numbers, such as `Manifest.rows_of`.
        texts: number of texts of each record to read; 0 for vectors only.
        grouped: number of batches whose records are sorted by length together, so that texts of a batch have similar
            lengths; the batches of a window are then shuffled. 0 disables grouping.
        tokens: "states" for token states, "attention" for states and attention maps; None for vectors only.

    Raises:
        MissingRows: while reading, a row has no vector in the space.
    """

    cache: TeacherCache
    space: SpaceView | JointSpace
    order: WindowedShuffle
    rows_of: Callable[[Numbers], Numbers]
    _: KW_ONLY
    texts: int = 1
    grouped: int = 0
    dtype: npt.DTypeLike = np.float32
    tokens: str | None = None
    _buffers: dict[int, Stored] = field(default_factory=dict, init=False)
    _current: _Window | None = field(default=None, init=False)
    _next: tuple[tuple[int, int], Future[_Window]] | None = field(default=None, init=False)
    _thread: ThreadPoolExecutor | None = field(default=None, init=False)

    def epoch(self, epoch: int = 0, *, start: int = 0, drop_last: bool = False) -> Iterator[Batch]:
        """Batches of one epoch of this rank, from batch number `start` on."""
        size, records = self.order.batch, len(self.order)
        for position in range(start * size, records - (size - 1 if drop_last else 0), size):
            yield self.read(epoch, np.arange(position, min(position + size, records)))

    def read(self, epoch: int, positions: Numbers) -> Batch:
        """Records at positions of an epoch, all of one window, in new arrays."""
        window = self._window(epoch, int(positions[0]))
        within = positions - window.start
        if int(within.min()) < 0 or int(within.max()) >= len(window.places):
            raise IndexError(
                f"positions {positions.min()} to {positions.max()} of an epoch are in more than one window; the first "
                f"one's window starts at {window.start} and has {len(window.places)} records"
            )
        places = window.places[within]
        vectors = np.empty((len(places), self.space.dims), dtype=self.dtype)
        if vectors.dtype == window.stored.dtype and vectors.shape[1] == window.stored.shape[1]:
            np.take(window.stored, places, axis=0, out=vectors, mode="clip")  # other modes buffer the result
        else:
            self.space.encoding.restore(window.stored[places], vectors)
        indices = places.tolist()
        return Batch(
            [column[place] for column in window.texts for place in indices],
            window.rows[places],
            vectors,
            window.records[places],
            None if window.tokens is None else [window.tokens[place] for place in indices],
        )

    def close(self) -> None:
        """Wait for the running read and free the buffers."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._next = self._current = None
        self._buffers.clear()

    def _window(self, epoch: int, position: int) -> _Window:
        """The window that holds a position; starts reading the window after it."""
        current = self._current
        if current is not None and current.epoch == epoch and 0 <= position - current.start < len(current.places):
            return current
        number = self.order.window_of(position)
        pending, self._next = self._next, None
        if pending is not None and pending[0] == (epoch, number):
            window = pending[1].result()
        else:
            if pending is not None:
                wait([pending[1]])  # it writes to its buffer until then; its result is not used
            self._current = None  # its buffer may be overwritten, and the read may fail
            window = self._load(epoch, number, 0)
        self._current = window
        following = (epoch, number + 1) if number + 1 < self.order.windows else (epoch + 1, 0)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="window")
        self._next = following, self._thread.submit(self._load, *following, 1 - window.buffer)
        return window

    def _load(self, epoch: int, number: int, buffer: int) -> _Window:
        order = self.order
        start, _ = order.bounds(number)
        records = order.records_of(epoch, number)
        rows = self.rows_of(records)
        first = np.ascontiguousarray(rows[:, 0])
        stored = self.space.gather_stored(first, self._buffer(buffer, len(first)))
        texts = [self.cache.texts(np.ascontiguousarray(rows[:, column])) for column in range(self.texts)]
        tokens = None
        if self.tokens is not None:
            if self.space.tokens is None:
                raise MissingRows(
                    f"space {self.space.slug} has no token columns; `tcache build --columns vectors,tokens` adds them"
                )
            tokens = self.space.tokens.gather_stored(first, attention=self.tokens == "attention")
        places = order.permutation(epoch, number)
        if self.grouped and texts:
            lengths = np.fromiter(map(len, texts[0]), dtype=np.int64, count=len(first))
            places = self._group_by_length(
                places, lengths, np.random.default_rng((order.seed, epoch, order.rank, number, 1))
            )
        return _Window(epoch, start, places, records, first, stored, texts, tokens, buffer)

    def _buffer(self, which: int, rows: int) -> Stored:
        if which not in self._buffers:
            # The last window of an epoch can also hold the remainder, smaller than a batch.
            largest = min(len(self.order), self.order.window + self.order.batch)
            encoding, dims = self.space.encoding, self.space.dims
            self._buffers[which] = np.empty((largest, encoding.width(dims)), dtype=encoding.dtype)
            self._buffers[which].fill(0)  # allocates all pages now, so that memory does not grow later
        return self._buffers[which][:rows]

    def _group_by_length(self, places: Numbers, lengths: Numbers, random: np.random.Generator) -> Numbers:
        """Reorder shuffled places into batches of similar lengths; a smaller last batch stays last."""
        batch = self.order.batch
        group = batch * self.grouped
        # The remainder is not sorted: it would always hold the longest texts.
        full = len(places) // batch * batch
        for start in range(0, full, group):
            part = places[start : min(start + group, full)]
            part[:] = part[np.argsort(lengths[part], kind="stable")]
        batches = places[:full].reshape(-1, batch)
        return np.concatenate([batches[random.permutation(len(batches))].ravel(), places[full:]])
