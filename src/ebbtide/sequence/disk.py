"""A spill file for states, which are compressed on their way where that is quicker.

NOTE [Two ways]
States that are neither packed nor checked, and not large, go by the C library's threads, which cost compute least: see
`ebbtide.sequence.aio`. All others go by the threads of `DiskTier`, as do those of systems without that.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ebbtide.errors import SpillError
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES, READERS, TOO_MANY_FILES, DiskPlace, DiskTier, memory_view
from ebbtide.run.tiers.transfers import Load, QueuedLoad, Slot
from ebbtide.sequence import aio
from ebbtide.sequence.codec import Codec
from ebbtide.units import round_up

PART_BYTES = 8 << 20
"""Bytes of a part that is packed at once: few, so that several threads pack a state, each with little memory."""
LOOK_AGAIN_PARTS = 32
"""After a part that does not shrink enough, this many are written as they are before another is tried."""


@dataclasses.dataclass(slots=True)
class StatePlace(DiskPlace):
    """A place in the file, large enough for the whole state; what is compressed leaves a hole in the file.

    Attributes:
        packed: bytes of each part that is compressed, by the offset at which it starts.
    """

    packed: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether the state lies in the file as it lay in memory, and nothing else is known of it."""
        return not (self.packed or self.checksums or self.head_bytes or self.tail)

    def is_right_before(self, other: StatePlace) -> bool:
        """Whether this place and ``other`` could be read as one."""
        return self.is_plain and other.is_plain and self.offset_bytes + self.size_bytes == other.offset_bytes

    def split(self, count: int) -> list[StatePlace]:
        """The same place as ``count`` places of one size."""
        if count == 1:
            return [self]
        size_bytes = self.size_bytes // count
        return [StatePlace(self.offset_bytes + number * size_bytes, size_bytes, 0) for number in range(count)]


def joined(places: Sequence[StatePlace]) -> StatePlace:
    """Places of which each is right before the one that precedes it here, as one."""
    if len(places) == 1:
        return places[0]
    return StatePlace(places[-1].offset_bytes, sum(place.size_bytes for place in places), 0)


class StateCopy(Protocol):
    """A copy of a state, maybe still under way.

    Attributes:
        place: where the copy is in the file, or will be.
    """

    place: StatePlace

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Wait until the copy is done; once. Raises `SpillError` if it failed."""
        ...


class StateDisk(DiskTier):
    """A spill file, as `DiskTier`, for states, which the threads that write and read may pack and unpack.

    Args:
        directory, checksum, name: see `DiskTier`.
        codec: the codec that packs states, if there is one.

    Attributes:
        share: parts are stored packed where that makes them smaller than this share of their size; 0: never.
    """

    part_bytes = PART_BYTES

    def __init__(
        self, directory: str | Path, *, checksum: bool = False, name: str = "disk", codec: Codec | None = None
    ) -> None:
        self.codec = codec
        self.share = 0.0
        self._left_alone = 0
        self._scratch = threading.local()
        self._file: aio.AsyncFile | None = None
        super().__init__(directory, checksum=checksum, name=name)

    def store(self, storage: torch.UntypedStorage) -> StateCopy:
        """Begin to copy a state out, to a place of its own. Raises `SpillError` if that cannot begin."""
        size_bytes = storage.nbytes()
        file = self._file_for(storage.data_ptr(), size_bytes)
        if file is None:
            slot = self.write(storage)
            return _QueuedCopy(self, slot, slot)
        with self._lock:
            self._check_usable()
            place_bytes = round_up(size_bytes, PLACE_ALIGNMENT_BYTES)
            place = StatePlace(self._places.take(place_bytes), place_bytes, 0)
        try:
            return file.write(storage, place.offset_bytes, place)
        except OSError as fault:
            raise SpillError(self.explain(fault, size_bytes, "writing")) from fault

    def bring(self, place: StatePlace, storage: torch.UntypedStorage) -> StateCopy:
        """Begin to copy what is at a place back, into memory like that from which it was written. Errors: `store`."""
        size_bytes = storage.nbytes()
        file = self._file_for(storage.data_ptr(), size_bytes) if place.is_plain else None
        if file is None:
            slot = self.recall(place, storage)
            return _QueuedCopy(self, slot, self.read(slot, storage))
        self._check_usable()
        try:
            return file.read(storage, place.offset_bytes, place)
        except OSError as fault:
            raise SpillError(self.explain(fault, size_bytes, "reading")) from fault

    def takes_runs(self, block_bytes: int) -> bool:
        """Whether states in blocks of this size, at multiples of it, may come and go several at a time.

        Raises:
            SpillError: for want of descriptors.
        """
        return self._file_for(0, block_bytes) is not None

    def _file_for(self, address: int, size_bytes: int) -> aio.AsyncFile | None:
        """See NOTE [Two ways]. None is for the threads of `DiskTier`. Raises `SpillError` for want of descriptors."""
        if (
            self.checksum
            or (self.codec is not None and self.share > 0)
            or not 0 < size_bytes <= PART_BYTES
            or size_bytes % self.block_bytes
            or address % self.block_bytes
        ):
            return None
        if self._file is None and aio.is_there():
            try:
                self._file = aio.AsyncFile(self._fd, READERS, _Amender(self))
            except OSError as fault:
                why = TOO_MANY_FILES.get(fault.errno or 0, fault.strerror)
                raise SpillError(
                    f"the spill file in {self.directory} cannot be opened once more for each transfer: {why}"
                ) from fault
        return self._file

    def drain(self) -> None:
        """See `SlowTier.drain`."""
        if self._file is not None:
            self._file.drain()
        super().drain()

    def close(self) -> None:
        """See `SlowTier.close`."""
        if self._file is not None:
            self._file.close()
        super().close()

    def _reserve(self, slot: Slot) -> None:
        super()._reserve(slot)
        place: DiskPlace = slot.place
        slot.place = StatePlace(place.offset_bytes, place.size_bytes, place.head_bytes)

    def park(self, slot: Slot) -> StatePlace | None:
        """Where the copy is, which stays there without the slot; None while the slot is still in use."""
        with self._lock:
            if not slot.written or slot.freed or not all(transfer.finished.is_open for transfer in slot.under_way):
                return None
            self._taken.pop(weakref.ref(slot), None)
            place: StatePlace = slot.place
            return place

    def recall(self, place: StatePlace, storage: torch.UntypedStorage) -> Slot:
        """A slot of what is at a place, with memory like that from which it was written."""
        slot = Slot(storage)
        slot.unwritten, slot.place = None, place
        slot.payload_bytes = (slot.size_bytes - place.head_bytes) // self.block_bytes * self.block_bytes
        slot.finished.open()
        with self._lock:
            self._own(slot)
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
        packed = self.codec.pack(memory_view(slot.pointer + place.head_bytes + start, stop - start))
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

    def _fetch(self, load: QueuedLoad, start: int, stop: int) -> None:
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
        self.codec.unpack(view[:size], memory_view(load.pointer + place.head_bytes + start, stop - start))

    def _blocks(self, size_bytes: int) -> memoryview:
        """This thread's memory for whole blocks of at least ``size_bytes``, as direct I/O wants it."""
        whole = round_up(size_bytes, self.congruence_bytes)
        if len(getattr(self._scratch, "memory", b"")) < whole:
            self._scratch.memory = mmap.mmap(-1, whole)
        return memoryview(self._scratch.memory)[:whole]


class _QueuedCopy:
    """A `StateCopy` made by the threads of `DiskTier`."""

    __slots__ = ("_disk", "_slot", "_transfer", "place")

    def __init__(self, disk: StateDisk, slot: Slot, transfer: Slot | Load) -> None:
        self.place: StatePlace = slot.place
        self._disk = disk
        self._slot = slot
        self._transfer = transfer

    @property
    def ready(self) -> bool:
        return self._transfer.finished.is_open

    def wait(self) -> None:
        self._transfer.wait()
        self._disk.park(self._slot)


class _Amender:
    """The disk's work on what the C library has left undone; does not keep the disk alive."""

    def __init__(self, disk: StateDisk) -> None:
        self._disk = weakref.ref(disk)

    def __call__(self, copy: aio.AioCopy, moved_bytes: int, fault: int) -> None:
        disk = self._disk()
        assert disk is not None
        assert copy.storage is not None
        call, doing = (disk._pwrite, "writing") if copy.is_write else (disk._preadv, "reading")
        size_bytes = copy.storage.nbytes()
        moved_bytes -= moved_bytes % disk.block_bytes
        try:
            if fault:
                raise OSError(fault, os.strerror(fault))
            view = memory_view(copy.storage.data_ptr() + moved_bytes, size_bytes - moved_bytes)
            disk._move(call, view, copy.place.offset_bytes + moved_bytes)
        except OSError as error:
            raise SpillError(disk.explain(error, size_bytes, doing)) from error
