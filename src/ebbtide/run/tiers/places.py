"""Which parts of a file or of a mapping are taken."""

from __future__ import annotations

import bisect


class Places:
    """Places in a file or a mapping: the smallest gap that fits, else the end. Neighbouring gaps are merged.

    Args:
        size_bytes: how large the mapping is; without it, there is always more at the end.

    Attributes:
        end_bytes: how far the places have reached so far.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        self._grows = size_bytes is None
        self.end_bytes = 0
        self._gaps: list[tuple[int, int]] = []  # (offset, size), ascending, never touching
        if size_bytes is not None:
            self.end_bytes = size_bytes
            self.give_back(0, size_bytes)

    def take(self, size_bytes: int) -> int:
        """Offset of a place of ``size_bytes``, a multiple of what all sizes are multiples of.

        Raises:
            MemoryError: if no gap of a mapping is large enough.
        """
        if size_bytes == 0:
            return 0
        fitting = [(size, offset) for offset, size in self._gaps if size >= size_bytes]
        if fitting:
            size, offset = min(fitting)
            self._gaps.remove((offset, size))
            if size > size_bytes:
                bisect.insort(self._gaps, (offset + size_bytes, size - size_bytes))
            return offset
        if not self._grows:
            raise MemoryError(f"no gap of {size_bytes} bytes")
        offset = self.end_bytes
        if self._gaps and sum(self._gaps[-1]) == offset:
            offset = self._gaps.pop()[0]
        self.end_bytes = offset + size_bytes
        return offset

    def claim(self, offset_bytes: int, size_bytes: int) -> bool:
        """Take the place at ``offset_bytes``; whether it lay in a gap."""
        stop = offset_bytes + size_bytes
        index = bisect.bisect(self._gaps, (offset_bytes, self.end_bytes)) - 1
        if index < 0 or stop > sum(self._gaps[index]):
            return False
        start, size = self._gaps.pop(index)
        self.give_back(start, offset_bytes - start)
        self.give_back(stop, start + size - stop)
        return True

    def give_back(self, offset_bytes: int, size_bytes: int) -> None:
        """Make a place that was taken a gap again."""
        if size_bytes == 0:
            return
        index = bisect.bisect(self._gaps, (offset_bytes, 0))
        if index < len(self._gaps) and self._gaps[index][0] == offset_bytes + size_bytes:
            size_bytes += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == offset_bytes:
            index -= 1
            offset_bytes, before = self._gaps.pop(index)
            size_bytes += before
        self._gaps.insert(index, (offset_bytes, size_bytes))
