"""Memory for states: as many blocks as there are slots, in mappings of their own.

NOTE [Mappings]
Blocks that come and go between the operators' own arrays leave holes in the heap, into which the next ones may or may
not fit: what is resident would then be a matter of chance, up to twice what is in use. So they are parts of mappings
whose pages are there once they are written to, which all go back together. What a chain is tried with before it is run
lies in the same blocks.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from ebbtide.errors import SequenceError
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES
from ebbtide.run.tiers.memory import storage_over
from ebbtide.units import format_bytes

MAPPING_BYTES = 16 << 20
"""A mapping has at most so many bytes, or one block."""
CACHE_LINE_BYTES = 64
"""Blocks begin at multiples of this at least."""


class Block:
    """Memory for one state.

    Attributes:
        storage: its bytes.
        views: what the layout of the states has made of it, so that it is made once.
    """

    __slots__ = ("storage", "views")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.views: Any = None

    def memory(self) -> memoryview:
        """All bytes."""
        return torch.empty(0, dtype=torch.uint8).set_(self.storage).numpy().data


class Blocks:
    """All blocks of a chain.

    Args:
        state_bytes: size of a state.
        count: how many there are.
        for_disk: whether to take whole blocks of a disk, so that nothing of a state must stay in RAM.

    Attributes:
        state_bytes, count: see above.
        made: how many have been in use so far.
    """

    def __init__(self, state_bytes: int, count: int, *, for_disk: bool) -> None:
        self.state_bytes = state_bytes
        self.count = count
        self.made = 0
        self._block_bytes = whole_bytes(state_bytes, PLACE_ALIGNMENT_BYTES if for_disk else CACHE_LINE_BYTES)
        self._mapping: mmap.mmap | None = None
        self._end_bytes = 0  # of the blocks in it
        self._free: list[Block] = []

    @property
    def are_taken(self) -> bool:
        """Whether one must be given back before another can be taken."""
        return not self._free and self.made >= self.count

    def take(self) -> Block:
        """A block: the one given back last, or a new one. Raises `SequenceError` if there is no RAM for it."""
        if self._free:
            return self._free.pop()
        if self._mapping is None or self._end_bytes == len(self._mapping):
            self._mapping = self._map(max(min(MAPPING_BYTES // self._block_bytes, self.count - self.made), 1))
            self._end_bytes = 0
        block = self._block(self._mapping, self._end_bytes)
        self._end_bytes += self._block_bytes
        self.made += 1
        return block

    def extra(self) -> Block:
        """A block that is none of them, and is never given back."""
        return self._block(self._map(1), 0)

    def give_back(self, *blocks: Block) -> None:
        """They may be taken again."""
        self._free += blocks

    def _map(self, count: int) -> mmap.mmap:
        """A mapping for so many blocks. It goes when the last of them does."""
        try:
            return mmap.mmap(-1, count * self._block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as fault:
            size = format_bytes(self._block_bytes)
            raise SequenceError(f"no RAM for a state of {size} ({fault.strerror}); give less memory=...") from fault

    def _block(self, mapping: mmap.mmap, start: int) -> Block:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, start))
        return Block(storage_over(address, self._block_bytes, mapping, lambda _: None))


def whole_bytes(size_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of ``alignment_bytes``, at least one."""
    return max(-(-size_bytes // alignment_bytes), 1) * alignment_bytes
