"""RAM as slower memory: the way from a GPU to the disk, and a stand-in for a disk in tests."""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from ebbtide.errors import SpillError
from ebbtide.machine import TierKind
from ebbtide.run.tiers.base import Load, QueuedTier, Slot
from ebbtide.run.tiers.memory import take_memory
from ebbtide.units import format_bytes


class HostTier(QueuedTier):
    """Buffers in RAM, page-aligned; pinned where CUDA is there, so that a GPU can reach them without a detour.

    Args:
        name: how machines and plans name this tier.
    """

    kind: TierKind = "host"

    def __init__(self, *, name: str = "host") -> None:
        self.pinned = torch.cuda.is_available()
        self._buffers: dict[int, torch.UntypedStorage] = {}
        release_all = functools.partial(_release_all, self._buffers, self.pinned, os.getpid())
        super().__init__(name, readers=1, release_all=release_all)

    def _reserve(self, slot: Slot) -> None:
        try:
            buffer = take_memory(slot.size_bytes)
        except OSError as fault:
            size = format_bytes(slot.size_bytes)
            raise SpillError(
                f"no RAM for {size} in the {self.name} tier ({fault.strerror}); raise the budget"
            ) from fault
        slot.place = buffer.data_ptr()
        if slot.size_bytes:
            if self.pinned:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slot.place, slot.size_bytes, 0))
            self._buffers[slot.place] = buffer

    def _release(self, place: int) -> None:
        buffer = self._buffers.pop(place, None)
        if buffer is not None and self.pinned:
            _unpin(buffer)

    def _store(self, slot: Slot, start: int, stop: int) -> None:
        ctypes.memmove(slot.place + start, slot.pointer + start, stop - start)

    def _fetch(self, load: Load, start: int, stop: int) -> None:
        ctypes.memmove(load.pointer + start, load.slot.place + start, stop - start)


def _unpin(buffer: torch.UntypedStorage) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))


def _release_all(buffers: dict[int, torch.UntypedStorage], pinned: bool, process: int) -> None:
    # CUDA must not be touched in a forked child, and what is pinned there is the parent's.
    if pinned and os.getpid() == process:
        for buffer in buffers.values():
            _unpin(buffer)
    buffers.clear()
