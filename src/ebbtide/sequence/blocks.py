"""Memory for states: as many blocks as there are slots, in mappings of their own.

NOTE [Mappings]
Blocks that come and go between the operators' own arrays leave holes in the heap, into which the next ones may or may
not fit: what is resident would then be a matter of chance, up to twice what is in use. So they are parts of mappings
whose pages are there once they are written to, which all go back together. What a chain is tried with before it is run
lies in the same blocks.

NOTE [Huge pages]
Direct I/O pins every page that it moves. From and to pages of 2 MiB a disk was twice as quick as with those of 4 KiB,
for a sixth of the processor's time. They make what is resident a multiple of their size, so only large states get them.

NOTE [Runs]
To ask a disk for a transfer takes compute about as long as to copy a state, and what the disk's side does of the other
core for each request slows compute down, too. So small states go several at a time: from blocks that lie one after
another, a run, to places that do.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ebbtide.errors import SequenceError
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES
from ebbtide.run.tiers.memory import bytes_of, storage_over
from ebbtide.units import format_bytes, round_up

MAPPING_BYTES = 16 << 20
"""A mapping has at most this many bytes, or one block."""
HUGE_STATE_BYTES = 2 << 20
"""States of at least this many bytes lie in huge pages. Waves with states of 4 and 16 MiB took 0.91 and 0.96 times as
long so; one with 256 KiB, where asking and copying cost more, as long as before."""
CACHE_LINE_BYTES = 64
"""Blocks begin at multiples of this many bytes at least."""
RUN_BYTES = 1 << 20
"""A run has at most this many bytes: a disk is not faster with more at a time."""
LOOKED_AT = 4
"""To find a run, free blocks of this many times its length are looked at."""
SPARE_BYTES = 4 << 20
"""All slots may take this many bytes more than is given for states, with what pads blocks and with Python's objects."""
RUNS_IN_MEMORY = 3
"""At least this many runs fit into memory: one that is being filled, and two on their way."""


class Block:
    """Memory for one state.

    Attributes:
        storage: its bytes.
        address: where these bytes begin in memory.
        views: the arrays or tensors that the layout of the states has made in this block, so that they are made once.
    """

    __slots__ = ("address", "storage", "views")

    def __init__(self, storage: torch.UntypedStorage, address: int) -> None:
        self.storage = storage
        self.address = address
        self.views: Any = None

    def memory(self) -> memoryview:
        """All bytes of the block."""
        return bytes_of(self.storage).numpy().data


def storage_of(run: Sequence[Block]) -> torch.UntypedStorage:
    """The bytes of blocks that lie one after another."""
    if len(run) == 1:
        return run[0].storage
    size_bytes = sum(block.storage.nbytes() for block in run)
    return storage_over(run[0].address, size_bytes, [block.storage for block in run], lambda _: None)


class Blocks:
    """All blocks of a chain.

    Args:
        state_bytes: size of a state.
        count: number of blocks.
        for_disk: whether to take whole blocks of a disk, so that nothing of a state must stay in RAM.

    Attributes:
        state_bytes, count: see above.
        block_bytes: size of a block.
        run_length: number of blocks in a run, at most: see NOTE [Runs].
        made: number of blocks that have been in use so far.
    """

    def __init__(self, state_bytes: int, count: int, *, for_disk: bool) -> None:
        self.state_bytes = state_bytes
        self.count = count
        self.made = 0
        self.block_bytes = size_of_block(state_bytes, for_disk=for_disk)
        self.run_length = max(min(RUN_BYTES // self.block_bytes, count // RUNS_IN_MEMORY), 1)
        self._mapping: mmap.mmap | None = None
        self._end_bytes = 0  # of the blocks in it
        self._free: dict[int, Block] = {}  # by address; the one given back last comes last

    @property
    def are_taken(self) -> bool:
        """Whether a block must be given back before another can be taken."""
        return not self._free and self.made >= self.count

    def take(self) -> Block:
        """A block: the one given back last, or a new one. Raises `SequenceError` if there is no RAM for it."""
        return self._free.popitem()[1] if self._free else self._new()

    def take_run(self, length: int) -> list[Block]:
        """Up to ``length`` blocks, at least one, that lie one after another. Errors: `take`."""
        if not self._free:
            length = min(length, self.count - self.made)
            run = [self._new()]
            while len(run) < length and self._mapping is not None and self._end_bytes < len(self._mapping):
                run.append(self._new())
            return run
        # Of the blocks that have been free for longest, most still lie together.
        addresses = sorted(itertools.islice(self._free, LOOKED_AT * length))
        best, start = (0, 1), 0
        for stop in range(1, len(addresses) + 1):
            if stop == len(addresses) or addresses[stop] != addresses[stop - 1] + self.block_bytes:
                if stop - start > best[1] - best[0]:
                    best = start, stop
                start = stop
        return [self._free.pop(address) for address in addresses[slice(*best)][:length]]

    def _new(self) -> Block:
        if self._mapping is None or self._end_bytes == len(self._mapping):
            self._mapping = self._map(max(min(MAPPING_BYTES // self.block_bytes, self.count - self.made), 1))
            self._end_bytes = 0
        block = self._block(self._mapping, self._end_bytes)
        self._end_bytes += self.block_bytes
        self.made += 1
        return block

    def extra(self) -> Block:
        """A further block, which counts as none of them and is never given back."""
        return self._block(self._map(1), 0)

    def give_back(self, *blocks: Block) -> None:
        """Give blocks back, so that they may be taken again."""
        for block in blocks:
            self._free[block.address] = block

    def forgo(self) -> None:
        """Note that a block which is taken is never given back; another may be made in its place."""
        self.made -= 1

    def _map(self, count: int) -> mmap.mmap:
        """A mapping for so many blocks. It goes when the last of them does."""
        try:
            mapping = mmap.mmap(-1, count * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as fault:
            size = format_bytes(self.block_bytes)
            raise SequenceError(f"no RAM for a state of {size} ({fault.strerror}); give less memory=...") from fault
        if self.block_bytes >= HUGE_STATE_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # a system may have none
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def _block(self, mapping: mmap.mmap, start: int) -> Block:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, start))
        return Block(storage_over(address, self.block_bytes, mapping, lambda _: None), address)


def size_of_block(state_bytes: int, *, for_disk: bool) -> int:
    """Bytes of a block for a state; with ``for_disk`` it takes whole blocks of a disk."""
    return bytes_on_disk(state_bytes) if for_disk else whole_bytes(state_bytes, CACHE_LINE_BYTES)


def bytes_on_disk(state_bytes: int) -> int:
    """Bytes that a state takes on a disk: whole blocks of that."""
    return whole_bytes(state_bytes, PLACE_ALIGNMENT_BYTES)


class States(Protocol):
    """How states lie in blocks.

    Attributes:
        size_bytes: bytes of a block for one state.
        objects_bytes: bytes that Python's objects for a state take besides.
    """

    size_bytes: int
    objects_bytes: int


def blocks_within(memory_bytes: int, count: int, states: States, most: int | None, *, spills: bool) -> Blocks:
    """As many of ``count`` blocks as may be taken beside the working state.

    Args:
        memory_bytes: bytes that the blocks may take, but for `SPARE_BYTES`, with their padding and their objects.
        count: number of states whose bytes fit there; at least one.
        states: how states lie in blocks.
        most: number of states that a chain stores at most; None if that is not known.
        spills: whether states that do not fit go to a disk.
    """
    counts = {}
    for for_disk in (False, True):
        slot_bytes = size_of_block(states.size_bytes, for_disk=for_disk) + states.objects_bytes
        counts[for_disk] = min(count, max((memory_bytes + SPARE_BYTES) // slot_bytes - 1, 1))
    for_disk = spills and (most is None or counts[False] < most)
    return Blocks(states.size_bytes, counts[for_disk], for_disk=for_disk)


def whole_bytes(size_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of ``alignment_bytes``, at least one."""
    return max(round_up(size_bytes, alignment_bytes), alignment_bytes)
