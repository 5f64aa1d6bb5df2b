"""What a build gave to its workers, and builds killed at any moment."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from teacher_cache.building.workers import EncodedBatches, LocalWorkers, Workers
from teacher_cache.teachers import TeacherSpec
from teacher_cache.teachers.base import Encoded


class Recorded(Workers):
    """Local workers that record their batches, and can return them in another order.

    Args:
        arrange: reorders the results.
    """

    def __init__(self, arrange: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self.batches: list[list[str]] = []
        self.arrange = arrange

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        def recorded() -> Iterable[list[str]]:
            for batch in batches:
                self.batches.append(batch)
                yield batch

        results: Iterable[tuple[int, Encoded]] = LocalWorkers().encode(spec, recorded())
        yield from results if self.arrange is None else self.arrange(list(results))

    @property
    def texts(self) -> list[str]:
        """All encoded texts."""
        return [text for batch in self.batches for text in batch]


class EncodedLog:
    """The log of the `Logged` teacher, read piece by piece.

    Attributes:
        size: bytes read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0

    def new_texts(self) -> list[str]:
        """Texts encoded since the last call."""
        data = self.path.read_bytes() if self.path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]  # a kill can truncate the last line
        new, self.size = complete[self.size :], len(data)
        return [json.loads(line) for line in new.splitlines()]

    def has_grown(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > self.size
