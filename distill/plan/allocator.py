"""A model of torch's CUDA caching allocator: the memory that it reserves for a sequence of allocations.

Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, blocks under 10 MiB from segments
of 20 MiB; a larger block gets a segment of its own, rounded up to 2 MiB. The smallest free block that fits is used and
split if the remainder is worth keeping (512 bytes of a small segment, over 1 MiB of a large one). Adjacent free blocks
are merged. Segments are never returned: what they hold beyond the allocated bytes is fragmentation.

With `expandable_segments:True` all small blocks share one segment and all large blocks another. A segment grows at its
end by pages of 2 or 20 MiB if no free block fits, and any remainder of a block is split off.
"""

import bisect
from dataclasses import dataclass

ROUNDING = 512
MIB = 2**20
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_FROM = 10 * MIB
LARGE_ROUNDING = 2 * MIB


@dataclass(eq=False)
class _Block:
    size: int
    segment: int
    free: bool = False
    previous: "_Block | None" = None
    next: "_Block | None" = None


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self, expandable: bool = False) -> None:
        """Start without segments.

        Args:
            expandable: model `expandable_segments:True`.
        """
        self.reserved = 0
        self._expandable = expandable
        self._segments = 0
        # An expandable segment ends with an empty block that is never free; keys as in `_free`.
        self._ends = {small: _Block(0, int(small)) for small in (True, False)}
        # Free blocks of small (True) and large (False) segments, sorted by size and age.
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> _Block | None:
        """A block of at least `size` bytes; None for 0."""
        if size == 0:
            return None
        rounded = _round_up(size, ROUNDING)
        small = rounded <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, rounded, key=lambda entry: entry[0])
        if place < len(free):
            block = free.pop(place)[2]
        else:
            block = self._grow_segment(rounded, small) if self._expandable else self._new_segment(rounded, small)
        block.free = False
        rest = block.size - rounded
        if rest >= ROUNDING if small or self._expandable else rest > SMALL:
            remainder = _Block(rest, block.segment, True, block, block.next)
            if block.next is not None:
                block.next.previous = remainder
            block.size, block.next = rounded, remainder
            self._add_free(remainder, small)
        return block

    def release(self, block: _Block | None, size: int) -> None:
        """Free a block that `allocate` returned for `size` bytes."""
        if block is None:
            return
        small = _round_up(size, ROUNDING) <= SMALL
        for neighbor in (block.previous, block.next):
            if neighbor is not None and neighbor.free:
                self._remove_free(neighbor, small)
                block.size += neighbor.size
        if block.previous is not None and block.previous.free:
            block.previous = block.previous.previous
            if block.previous is not None:
                block.previous.next = block
        if block.next is not None and block.next.free:
            block.next = block.next.next
            if block.next is not None:
                block.next.previous = block
        block.free = True
        self._add_free(block, small)

    def _new_segment(self, size: int, small: bool) -> _Block:
        fixed = SMALL_SEGMENT if small else LARGE_SEGMENT
        reserved = fixed if size < LARGE_FROM else _round_up(size, LARGE_ROUNDING)
        self.reserved += reserved
        self._segments += 1
        return _Block(reserved, self._segments)

    def _grow_segment(self, size: int, small: bool) -> _Block:
        """The last block of the expandable segment, grown by whole pages to at least `size` bytes."""
        end, page = self._ends[small], SMALL_SEGMENT if small else LARGE_SEGMENT
        last = end.previous
        if last is not None and last.free:
            self._remove_free(last, small)
        else:
            last = end.previous = _Block(0, end.segment, previous=last, next=end)
            if last.previous is not None:
                last.previous.next = last
        more = _round_up(size - last.size, page)
        last.size += more
        self.reserved += more
        return last

    def _add_free(self, block: _Block, small: bool) -> None:
        bisect.insort(self._free[small], (block.size, block.segment, block), key=lambda entry: entry[:2])

    def _remove_free(self, block: _Block, small: bool) -> None:
        free = self._free[small]
        place = bisect.bisect_left(free, (block.size, block.segment), key=lambda entry: entry[:2])
        while free[place][2] is not block:
            place += 1
        del free[place]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
