"""A copy of a storage in a slower memory, copies on their way, and what every such memory offers."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import weakref
from typing import Any, Protocol

import torch

from ebbtide.errors import SpillError
from ebbtide.machine import TierKind
from ebbtide.run.backends.base import ComputeStreams
from ebbtide.run.tiers.gate import Gate
from ebbtide.units import format_bytes


class Transfer:
    """A copy that can be waited on.

    Attributes:
        size_bytes: bytes of the storage.
        queued_seconds: when it was queued, by `time.perf_counter`; infinite before.
        after: for memory of a device that works asynchronously, the events that the copy must follow.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fault: SpillError | None = None
        self.payload_bytes = size_bytes
        self.parts_left = 0
        self.queued_seconds = math.inf
        self.after: tuple[Any, ...] = ()
        self.finished = Gate()
        self._process = os.getpid()

    def join(self) -> None:
        """Wait until the copy is done.

        Raises:
            SpillError: if it failed, or if it belongs to another process and cannot end in this one.
        """
        if not self.finished.is_open:
            if self._process != os.getpid():
                raise SpillError("a transfer of a spill that was made in another process; make a Budget in this one")
            self.finished.wait()
        if self.fault is not None:
            # A new exception each time: one that is raised twice keeps the frames of both.
            raise SpillError(str(self.fault)) from self.fault.__cause__


@dataclasses.dataclass(slots=True)
class Traffic:
    """What went one way, and how long that kept the way busy.

    Attributes:
        transfers, size_bytes: how many ended well, and the bytes of their storages.
        seconds: how long at least one of them was under way and not behind another.
    """

    transfers: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    _ended: float = 0.0

    def count(self, transfer: Transfer) -> None:
        """A transfer ended well. Under a lock."""
        now = time.perf_counter()
        self.transfers += 1
        self.size_bytes += transfer.size_bytes
        self.seconds += max(0.0, now - max(transfer.queued_seconds, self._ended))
        self._ended = now


class Slot(Transfer):
    """A copy of a storage in a slower memory, possibly still being written.

    Attributes:
        size_bytes: bytes of the storage.
        device: where the storage is.
        unwritten: the storage, until its copy is there; for good if the copy failed, so that its bytes are not lost.
        owner: when it dies without having freed the slot, nobody wants what is not written yet.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage.nbytes())
        self.unwritten: torch.UntypedStorage | None = storage
        self.device = storage.device
        self.pointer = storage.data_ptr()
        self.place: Any = None
        self.under_way: set[Transfer] = set()
        self.freed = False
        self.owner: weakref.ref[Any] | None = None
        self.waiting: list[QueuedLoad] = []

    @property
    def written(self) -> bool:
        """Whether the whole copy is there."""
        return self.finished.is_open and self.fault is None

    @property
    def unwanted(self) -> bool:
        """Whether nobody will ask for the copy, unless somebody has."""
        return self.freed or (self.owner is not None and self.owner() is None)

    @property
    def moved(self) -> bool:
        """Whether the storage has got other memory before its copy was there, as `share_memory_` gives it."""
        return self.unwritten is not None and self.unwritten.data_ptr() != self.pointer

    def wait(self) -> None:
        """Wait until the copy is there. Raises `SpillError` if it could not be made; `unwritten` is then still set."""
        self.join()


class Load(Transfer):
    """A copy on its way back, into memory of its own.

    Whoever waits for it is handed that memory, and can let go of it at once: a worker may hold the load a while longer.
    """

    def __init__(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        super().__init__(slot.size_bytes)
        self.payload_bytes = slot.payload_bytes
        self.pointer = storage.data_ptr()
        self._storage: torch.UntypedStorage | None = storage

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.finished.is_open

    @property
    def storage(self) -> torch.UntypedStorage:
        """The memory taken, whatever of its bytes are there yet. Not to be asked for once `wait` has returned it."""
        assert self._storage is not None
        return self._storage

    def wait(self) -> torch.UntypedStorage:
        """The storage, once its bytes are there; to be called once. Raises `SpillError` if they could not be read."""
        self.join()
        storage, self._storage = self.storage, None
        return storage


class QueuedLoad(Load):
    """A load that workers make, for whom its slot lives as long as it does."""

    def __init__(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        super().__init__(slot, storage)
        self.slot = slot


class SlowTier(Protocol):
    """A slower memory. Transfers of one direction run in the order in which they are queued."""

    name: str
    kind: TierKind

    def expect(self, device: torch.device, /) -> ComputeStreams | None:
        """A value on ``device`` that may be written later was made by what the calling thread has queued so far.

        Returns:
            The compute streams of ``device``; None where the host computes.
        """
        ...

    def write(self, storage: torch.UntypedStorage) -> Slot:
        """Reserve a place and queue the copy; once the slot's `wait` has returned, ``storage`` is not held here."""
        ...

    def read(self, slot: Slot, into: torch.UntypedStorage | None = None) -> Load:
        """Take new memory of exactly ``slot.size_bytes`` at once and queue the copy back, after that out.

        ``into`` is memory to be used instead, of the same size and like aligned as what was written.
        """
        ...

    def free(self, slot: Slot) -> None:
        """Give the place back; if transfers of it are under way, when they end."""
        ...

    def drain(self) -> None:
        """Wait for everything under way. Faults are left to those who wait for the transfers."""
        ...

    def close(self) -> None:
        """Give everything back. Transfers that have not started fail."""
        ...


def check_device(name: str, device: torch.device, storage: torch.UntypedStorage) -> None:
    """Raise `SpillError` if ``storage`` is not on the device from which tier ``name`` takes storages."""
    if storage.device != device:
        where = "in RAM" if device.type == "cpu" else f"on {device}"
        raise SpillError(f"the {name} tier takes storages {where}, not on {storage.device}")


def check_memory(slot: Slot, into: torch.UntypedStorage, congruence_bytes: int) -> None:
    """Raise `SpillError` if ``into`` has another size than what ``slot`` holds, or lies otherwise than that did."""
    if into.nbytes() != slot.size_bytes or (into.data_ptr() - slot.pointer) % congruence_bytes:
        raise SpillError(f"memory of {format_bytes(into.nbytes())} cannot take back what was written from elsewhere")
