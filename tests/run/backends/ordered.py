"""Stream-ordered memory on a CPU: a stand-in for a device's caching allocator that makes mistakes show."""

from __future__ import annotations

import collections
import ctypes
import mmap
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ebbtide.run.tiers.memory import storage_over
from ebbtide.units import round_up

ALIGNMENT_BYTES = 512


class OrderedMemory:
    """Gives a block that dies to the very next who asks on the same stream, whatever work still uses it.

    Args:
        size_bytes: how much there is.
        order: makes the second stream go on behind the first.
    """

    def __init__(self, size_bytes: int, order: Callable[[Any, Any], None]) -> None:
        self._pages = mmap.mmap(-1, size_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._size_bytes = size_bytes
        self._end_bytes = 0
        self._order = order
        self._users: dict[int, set[Hashable]] = {}
        self._free: dict[Hashable, list[tuple[int, int]]] = {}
        # Blocks may die in the garbage collector, in the middle of `take`.
        self._returned: collections.deque[tuple[Hashable, int, int]] = collections.deque()

    def take(self, stream: Hashable, size_bytes: int) -> torch.UntypedStorage:
        """A block of ``stream``: of those that died there the latest that is large enough, else new memory.

        Raises:
            MemoryError: if there is no more.
        """
        if size_bytes == 0:
            return torch.UntypedStorage(0)
        while self._returned:
            owner, offset, size = self._returned.popleft()
            self._free.setdefault(owner, []).append((offset, size))
        rounded = round_up(size_bytes, ALIGNMENT_BYTES)
        free = self._free.setdefault(stream, [])
        for index in range(len(free) - 1, -1, -1):
            offset, size = free[index]
            if size >= rounded:
                del free[index]
                if size > rounded:
                    free.insert(0, (offset + rounded, size - rounded))
                break
        else:
            offset = self._end_bytes
            if offset + rounded > self._size_bytes:
                raise MemoryError(f"{size_bytes} bytes more than the {self._size_bytes} of this device")
            self._end_bytes += rounded
        return storage_over(self._base + offset, size_bytes, (stream, offset, rounded), self._give_back)

    def used_on(self, storage: torch.UntypedStorage, stream: Hashable) -> None:
        """When a block dies, its own stream goes on behind ``stream``, too."""
        if storage.nbytes():
            self._users.setdefault(storage.data_ptr() - self._base, set()).add(stream)

    def _give_back(self, block: tuple[Hashable, int, int]) -> None:
        owner, offset, _ = block
        for stream in self._users.pop(offset, ()):
            if stream != owner:
                self._order(stream, owner)
        self._returned.append(block)
