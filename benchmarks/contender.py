"""The process of one contender, with separate memory, threads and caches.

It answers requests, one JSON line each, until standard input ends; whatever a library prints goes to the log.
"""

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import CONTENDERS, REPEATED
from benchmarks.peers.base import BATCH, Contender, ShardWriter
from benchmarks.resources import Memory, PeakMemory, bytes_below
from benchmarks.vectors import RowFinder, expected_pairs, same_source_pairs, source_of


@dataclass(frozen=True)
class Streamed:
    """The progress and cost of an epoch.

    Attributes:
        first_rows, first_seconds: of the first batch, with all that an epoch does before it.
        rows, seconds: of everything, first batch included.
    """

    first_rows: int
    first_seconds: float
    rows: int
    seconds: float

    def rate(self, total: int) -> float:
        """Rows per second of a complete epoch; a partial epoch is extrapolated."""
        if self.rows >= total or self.rows == self.first_rows:
            return self.rows / self.seconds
        rest = (total - self.first_rows) * (self.seconds - self.first_seconds) / (self.rows - self.first_rows)
        return total / (self.first_seconds + rest)


class Answers:
    """One method per request.

    Args:
        vectors: the .npy file that every contender's data are made from.
    """

    def __init__(self, contender: Contender, vectors: Path) -> None:
        self.contender = contender
        self.vectors = vectors
        self._loaded = Memory.now()

    def load(self) -> dict[str, Any]:
        """Import the library; memory is counted from here on."""
        self.contender.load()
        self._loaded = Memory.now()
        return {"torch": "torch" in sys.modules}

    def write(self) -> dict[str, Any]:
        self.contender.write(self.vectors)
        return {"bytes": bytes_below(self.contender.folder)}

    def open(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.contender.open()
        return {"milliseconds": (time.perf_counter() - started) * 1000}

    def stream(self, epoch: int, limit: float) -> dict[str, Any]:
        """Read an epoch, or as much of it as `limit` seconds after its first batch allow."""
        rows = first_rows = 0
        first_seconds = seconds = 0.0
        with PeakMemory() as memory:
            started = time.perf_counter()
            for batch in self.contender.stream(epoch):
                rows += len(self._checked(batch))
                seconds = time.perf_counter() - started
                if not first_rows:
                    first_rows, first_seconds = rows, seconds
                if seconds - first_seconds > limit:
                    break
            else:
                if rows != self.contender.rows:
                    raise ValueError(f"an epoch of {rows} rows instead of {self.contender.rows}")
        return {
            "streamed": asdict(Streamed(first_rows, first_seconds, rows, seconds)),
            "peak": memory.peak,
            "peak_growth": memory.peak - self._loaded.resident,
            "anonymous_growth": memory.anonymous - self._loaded.anonymous,
            "file_growth": memory.file - self._loaded.file,
            "torch": "torch" in sys.modules,
        }

    def touch(self) -> dict[str, Any]:
        """Gather the first rows, so that imports and opening files are not measured."""
        self.contender.gather(np.arange(min(BATCH, self.contender.rows)))
        return {}

    def gather(self, seed: int, times: int, limit: float) -> dict[str, Any]:
        """Milliseconds of each of `count` gathers of 256 different random rows; fewer, if they take too long."""
        random = np.random.default_rng(seed)
        taken: list[float] = []
        while len(taken) < times and sum(taken) < limit * 1000:
            rows = random.choice(self.contender.rows, BATCH, replace=False)
            started = time.perf_counter()
            found = self.contender.gather(rows)
            taken.append((time.perf_counter() - started) * 1000)
            if len(self._checked(found)) != BATCH:
                raise ValueError(f"gathered {len(found)} rows instead of {BATCH}")
        return {"milliseconds": taken}

    def shuffle(self, epoch: int, limit: float) -> dict[str, Any]:
        """Same-source pairs in the batches of an epoch, relative to what a true permutation would have."""
        finder = RowFinder(self.vectors)
        total = self.contender.rows
        seen = np.zeros(total, dtype=np.int64)
        found = 0
        expected = 0.0
        started: float | None = None
        for batch in self.contender.stream(epoch):
            started = started or time.perf_counter()
            rows = finder.find(batch)
            np.add.at(seen, rows, 1)
            found += same_source_pairs(source_of(rows, total))
            expected += expected_pairs(len(batch), total)
            if time.perf_counter() - started > limit:
                break
        return {"ratio": found / expected, "rows": int(seen.sum()), "twice": int((seen > 1).sum())}

    def write_shards(self, rows: int) -> dict[str, Any]:
        """Rows a second and bytes of writing the first rows of the .npy file as shards."""
        if not isinstance(self.contender, ShardWriter):
            raise TypeError("writes no shards")
        vectors = np.array(np.load(self.vectors, mmap_mode="r")[:rows])
        folder = Path(tempfile.mkdtemp(dir=self.contender.folder.parent))
        try:
            started = time.perf_counter()
            self.contender.write_shards(vectors, folder)
            seconds = time.perf_counter() - started
            return {"rows": len(vectors), "seconds": seconds, "bytes": bytes_below(folder)}
        finally:
            shutil.rmtree(folder)

    def _checked(self, batch: Any) -> Any:
        if batch.dtype != np.float16 or batch.shape[1:] != (self.contender.dims,):
            raise ValueError(f"vectors of {batch.dtype} {batch.shape} instead of float16 (n, {self.contender.dims})")
        return batch


def main() -> None:
    """Arguments: the contender's name, the folder of all data, the .npy file, rows, dims."""
    name, (root, vectors), (rows, dims) = sys.argv[1], map(Path, sys.argv[2:4]), map(int, sys.argv[4:])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers = Answers({**CONTENDERS, **REPEATED}[name].make(root, rows, dims), vectors)
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("request")
        try:
            answer = getattr(answers, kind)(**request)
        except Exception as error:
            if kind == "load" and isinstance(error, ImportError):
                answer = {"absent": str(error)}
            else:
                traceback.print_exc()
                answer = {"failed": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
