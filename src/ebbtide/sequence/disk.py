"""A spill file for states, which are compressed on their way where that is quicker."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import threading
import weakref
import zlib
from pathlib import Path

import torch

from ebbtide.errors import SpillError
from ebbtide.run.tiers.base import Load, Slot
from ebbtide.run.tiers.disk import DiskPlace, DiskTier
from ebbtide.sequence.codec import Codec

LOOK_AGAIN_PARTS = 32
"""After a part that does not shrink enough, so many are written as they are before another is tried."""


@dataclasses.dataclass(slots=True)
class StatePlace(DiskPlace):
    """A place in the file, large enough for the whole state; what is compressed leaves a hole in the file.

    Attributes:
        packed: of each part that is compressed, by where it starts, its size.
    """

    packed: dict[int, int] = dataclasses.field(default_factory=dict)


class StateDisk(DiskTier):
    """See `DiskTier`; the threads that write and read may pack and unpack what they move.

    Args:
        directory, checksum, name: see `DiskTier`.
        codec: what packs, if anything.

    Attributes:
        share: parts are stored packed where that makes them smaller than this share of their size; 0: never.
    """

    def __init__(
        self, directory: str | Path, *, checksum: bool = False, name: str = "disk", codec: Codec | None = None
    ) -> None:
        self.codec = codec
        self.share = 0.0
        self._left_alone = 0
        self._scratch = threading.local()
        super().__init__(directory, checksum=checksum, name=name)

    def _reserve(self, slot: Slot) -> None:
        super()._reserve(slot)
        place: DiskPlace = slot.place
        slot.place = StatePlace(place.offset_bytes, place.size_bytes, place.head_bytes)

    def park(self, slot: Slot) -> StatePlace | None:
        """Where the copy is, which stays there without the slot; None while the slot is still in use."""
        with self._lock:
            if not slot.written or slot.freed or not all(transfer.finished.is_set() for transfer in slot.under_way):
                return None
            del self._taken[id(slot)]
            place: StatePlace = slot.place
            return place

    def recall(self, place: StatePlace, storage: torch.UntypedStorage) -> Slot:
        """A slot of what is at a place, with memory like that from which it was written."""
        slot = Slot(storage)
        slot.unwritten, slot.place = None, place
        slot.payload_bytes = (slot.size_bytes - place.head_bytes) // self.block_bytes * self.block_bytes
        slot.finished.set()
        with self._lock:
            self._taken[id(slot)] = (weakref.ref(slot), place)
        return slot

    def forget(self, place: StatePlace) -> None:
        """Give back a place without a slot."""
        with self._lock:
            self._release(place)

    def _store(self, slot: Slot, start: int, stop: int) -> None:
        if self.codec is None or self.share <= 0 or self._left_alone > 0:
            self._left_alone -= 1
            super()._store(slot, start, stop)
            return
        place: StatePlace = slot.place
        packed = self.codec.pack(_bytes_at(slot.pointer + place.head_bytes + start, stop - start))
        if len(packed) >= self.share * (stop - start):
            self._left_alone = LOOK_AGAIN_PARTS
            super()._store(slot, start, stop)
            return
        view = self._blocks(len(packed))
        view[: len(packed)] = packed
        if self.checksum:
            place.checksums[start] = zlib.crc32(packed)
        place.packed[start] = len(packed)
        self._move(self._pwrite, view, place.offset_bytes + start)

    def _fetch(self, load: Load, start: int, stop: int) -> None:
        place: StatePlace = load.slot.place
        if start not in place.packed:
            super()._fetch(load, start, stop)
            return
        size = place.packed[start]
        view = self._blocks(size)
        self._move(self._preadv, view, place.offset_bytes + start)
        if self.checksum and zlib.crc32(view[:size]) != place.checksums[start]:
            raise SpillError(
                f"a compressed state came back from {self.directory} other than it was written; check that disk, and "
                "choose another directory with spill=..."
            )
        assert self.codec is not None
        self.codec.unpack(view[:size], _bytes_at(load.pointer + place.head_bytes + start, stop - start))

    def _blocks(self, size_bytes: int) -> memoryview:
        """This thread's memory for whole blocks of at least ``size_bytes``, as direct I/O wants it."""
        whole = -(-size_bytes // self.congruence_bytes) * self.congruence_bytes
        if len(getattr(self._scratch, "memory", b"")) < whole:
            self._scratch.memory = mmap.mmap(-1, whole)
        return memoryview(self._scratch.memory)[:whole]


def _bytes_at(pointer: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(pointer)).cast("B")
