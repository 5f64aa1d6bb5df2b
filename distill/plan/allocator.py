"""What torch's CUDA caching allocator takes of a device for a sequence of allocations; the rules, without a device.

Sizes are rounded up to 512 bytes. Up to 1 MiB they come out of segments of 2 MiB; up to 10 MiB out of segments of
20 MiB; what is larger gets a segment of its own, rounded up to 2 MiB. The smallest free block that fits is taken, and
split where the rest is worth keeping (512 bytes of a small segment, over 1 MiB of a large one). Freed neighbours are
joined. Segments are kept: what they hold beyond what is allocated is fragmentation, which a device must have too.

With `expandable_segments:True` all small pieces share one segment and all large ones another; where no free piece fits
they grow at their end, by 2 and by 20 MiB, and whatever is left of a piece is split off.
"""

import bisect
from dataclasses import dataclass

BLOCK = 512
MIB = 2**20
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_FROM = 10 * MIB
LARGE_ROUND = 2 * MIB


@dataclass(eq=False)
class _Piece:
    size: int
    segment: int
    free: bool = False
    before: "_Piece | None" = None
    behind: "_Piece | None" = None


class CachingAllocator:
    """One device's memory.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self, expandable: bool = False) -> None:
        """Nothing is taken yet.

        Args:
            expandable: segments grow.
        """
        self.reserved = 0
        self._expandable = expandable
        self._segments = 0
        # Behind the last piece of a growing segment stands one that is never free, by kind as below.
        self._ends = {small: _Piece(0, int(small)) for small in (True, False)}
        # Free pieces of small and of large segments, by size and age: the smallest that fits is taken.
        self._free: dict[bool, list[tuple[int, int, _Piece]]] = {True: [], False: []}

    def allocate(self, size: int) -> _Piece | None:
        """A piece of at least `size` bytes; None for 0."""
        if size == 0:
            return None
        rounded = -(-size // BLOCK) * BLOCK
        small = rounded <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, rounded, key=lambda entry: entry[0])
        if place < len(free):
            piece = free.pop(place)[2]
        else:
            piece = self._grown(rounded, small) if self._expandable else self._segment(rounded, small)
        piece.free = False
        rest = piece.size - rounded
        if rest >= BLOCK if small or self._expandable else rest > SMALL:
            behind = _Piece(rest, piece.segment, True, piece, piece.behind)
            if piece.behind is not None:
                piece.behind.before = behind
            piece.size, piece.behind = rounded, behind
            self._put(behind, small)
        return piece

    def release(self, piece: _Piece | None, size: int) -> None:
        """Give back what `allocate` gave for `size` bytes."""
        if piece is None:
            return
        small = -(-size // BLOCK) * BLOCK <= SMALL
        before, behind = piece.before, piece.behind
        if before is not None and before.free:
            self._take(before, small)
            piece.size += before.size
            piece.before = before.before
            if before.before is not None:
                before.before.behind = piece
        if behind is not None and behind.free:
            self._take(behind, small)
            piece.size += behind.size
            piece.behind = behind.behind
            if behind.behind is not None:
                behind.behind.before = piece
        piece.free = True
        self._put(piece, small)

    def _segment(self, size: int, small: bool) -> _Piece:
        if small:
            taken = SMALL_SEGMENT
        elif size < LARGE_FROM:
            taken = LARGE_SEGMENT
        else:
            taken = -(-size // LARGE_ROUND) * LARGE_ROUND
        self.reserved += taken
        self._segments += 1
        return _Piece(taken, self._segments)

    def _grown(self, size: int, small: bool) -> _Piece:
        """The last piece of the segment, with as many pages behind it as it takes."""
        end, page = self._ends[small], SMALL_SEGMENT if small else LARGE_SEGMENT
        last = end.before
        if last is not None and last.free:
            self._take(last, small)
        else:
            last = end.before = _Piece(0, end.segment, before=last, behind=end)
            if last.before is not None:
                last.before.behind = last
        more = -(-(size - last.size) // page) * page
        last.size += more
        self.reserved += more
        return last

    def _put(self, piece: _Piece, small: bool) -> None:
        bisect.insort(self._free[small], (piece.size, piece.segment, piece), key=lambda entry: entry[:2])

    def _take(self, piece: _Piece, small: bool) -> None:
        free = self._free[small]
        place = bisect.bisect_left(free, (piece.size, piece.segment), key=lambda entry: entry[:2])
        while free[place][2] is not piece:
            place += 1
        del free[place]
