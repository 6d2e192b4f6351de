"""A slower memory that copies reach by streams: pinned host RAM, or the memory of a peer device.

NOTE [Guards]
Copies out run on one stream, copies back on another, and the host waits for neither. What keeps them right is who waits
for whom, and each of these waits has a test that fails without it:
1. A copy out waits for compute up to the moment at which it is queued: for what makes the value.
2. Before the storage may be let go of, compute waits for the copy out. So nothing overwrites it that comes later.
3. A copy back waits for compute up to the moment at which its memory is taken: an earlier owner may still be read.
4. It also waits for its copy out.
5. Whoever uses what came back waits for the copy back.
6. What is given up before anybody waited for it is kept until the next transfer; then compute waits.
A place is free for another copy out when its slot was freed: by 5 and 6, compute then waits for all that read it, and
by 1 the next copy out waits for compute.
"Compute" in 1, 2 and 6 is every one of `ComputeStreams`; in 3 it is the one whose memory is taken; in 5 see `seen_on`.
"""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ebbtide.errors import SpillError
from ebbtide.machine import TierKind
from ebbtide.run.backends.base import Backend, ComputeStreams, Stream, seen_on
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES
from ebbtide.run.tiers.pinned import Arena, Place, PlannedPlaces
from ebbtide.run.tiers.transfers import Load, Slot, SlowTier, check_device, check_memory
from ebbtide.units import format_bytes


class StreamSlot(Slot):
    """A copy in slower memory that a stream makes: see `Slot`. Its `wait` makes compute wait, not the host."""

    def __init__(self, tier: StreamTier, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)
        self.tier = tier
        self.place: Place | None = None
        self.copied: Any = None
        self.unwaited: list[StreamLoad] = []

    @property
    def written(self) -> bool:
        """See `Slot.written`."""
        return self.copied is not None and bool(self.copied.query())

    def wait(self) -> None:
        """Make compute wait for the copy; then the storage may be let go of."""
        if self.unwritten is not None:
            self.tier.compute.wait(self.copied)
            self.unwritten = None

    def __del__(self) -> None:
        # Its holding has died, or an interrupt struck before there was one. One that was half made has no place.
        if hasattr(self, "unwaited") and not self.freed:
            self.tier.free(self)


class StreamLoad(Load):
    """A copy back that a stream makes: see `Load`. Its `wait` makes compute wait, not the host.

    The slot keeps it until somebody has waited, and so it does not keep the slot: the two would wait for the garbage
    collector, and with them the memory of the device.

    Attributes:
        home: the stream that the memory belongs to; None if it is the caller's business.
        arrived: the end of the copy.
    """

    def __init__(self, slot: StreamSlot, storage: torch.UntypedStorage, home: Stream | None) -> None:
        super().__init__(slot, storage)
        self._backend = slot.tier.backend
        self._left_at = slot.pointer
        self._unwaited = slot.unwaited
        self.home = home
        self.arrived: Any = None

    @property
    def ready(self) -> bool:
        """See `Load.ready`."""
        return True

    def wait(self) -> torch.UntypedStorage:
        """The storage, for what is queued on the compute stream from now on."""
        backend = self._backend
        backend.compute().wait_event(self.arrived)
        storage = self.storage
        if self.home is not None:
            storage = seen_on(backend, self.home, storage, self._left_at)
        if self in self._unwaited:
            self._unwaited.remove(self)
        self._storage = None
        return storage


class StreamTier:
    """A slower memory that streams copy to and from: see NOTE [Guards]. Any number of threads may use it at once.

    Args:
        backend: the device that storages come from.
        arena: the slower memory.
        name, kind: how machines and plans name this tier, and what it is.
        overflow: takes what has no place in the arena.

    Attributes:
        compute: the streams that take and use what is moved.
        written_bytes, read_bytes: bytes of the storages whose copies out and back were queued so far.
    """

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        *,
        name: str = "host",
        kind: TierKind = "host",
        overflow: SlowTier | None = None,
    ) -> None:
        self.backend = backend
        self.name = name
        self.kind = kind
        self.written_bytes = 0
        self.read_bytes = 0
        self.compute = backend.streams
        self._arena = arena
        self._overflow = overflow
        self._out = backend.new_stream(f"{name}-out")
        self._back = backend.new_stream(f"{name}-back")
        self._lock = threading.Lock()
        # `free` may run in the garbage collector, in a thread that holds the lock: it only notes the slot.
        self._freed: collections.deque[StreamSlot] = collections.deque()
        self._places_in_use = 0
        self._closed = False
        self._process = os.getpid()
        self._unclosed = weakref.finalize(self, self._finish, backend, (self._out, self._back), self._process)
        self._unclosed.atexit = False

    # --- the contract ----------------------------------------------------------------------------------------------

    def expect(self, _device: torch.device) -> ComputeStreams:
        """See `SlowTier.expect`."""
        self.compute.note()
        return self.compute

    def write(self, storage: torch.UntypedStorage) -> Slot:
        """See `SlowTier.write`. Raises `SpillError` if the tier is closed, or full and without an overflow."""
        check_device(self.name, self.backend.device, storage)
        self._check_usable()
        slot = StreamSlot(self, storage)
        with self._lock:
            self._begin()
            slot.place = self._arena.reserve(slot.size_bytes)
            if slot.place is not None:
                self._places_in_use += 1
                for event in self.compute.record():
                    self._out.wait_event(event)
                self.backend.copy(self._out, slot.place.storage, storage)
                slot.copied = self._out.record_event()
                self.written_bytes += slot.size_bytes
                return slot
        slot.freed = True
        if self._overflow is None:
            raise SpillError(
                f"the {self.name} tier has no place for {format_bytes(slot.size_bytes)} (it has "
                f"{format_bytes(self._arena.size_bytes)}, and {format_bytes(self._arena.limit_bytes)} at the most); "
                "give it more memory, or a disk behind it"
            )
        return self._overflow.write(storage)

    def read(self, slot: Slot, into: torch.UntypedStorage | None = None) -> Load:
        """See `SlowTier.read`.

        Raises:
            SpillError: if the tier is closed, the slot freed, or ``into`` of another size.
        """
        if not isinstance(slot, StreamSlot) or slot.tier is not self:  # the overflow of a peer is one like this
            assert self._overflow is not None
            return self._overflow.read(slot, into)
        if into is not None:
            check_memory(slot, into, CONGRUENCE_BYTES)
        self._check_usable()
        with self._lock:
            home = self._begin()
            if slot.place is None:
                raise SpillError(f"a slot of the {self.name} tier was read after it was freed")
            storage = into if into is not None else self.backend.allocate(slot.size_bytes, slot.pointer)
            load = StreamLoad(slot, storage, home if into is None else None)
            slot.unwaited.append(load)
            self._back.wait_event(home.record_event())
            self._back.wait_event(slot.copied)
            self.backend.copy(self._back, storage, slot.place.storage)
            load.arrived = self._back.record_event()
            self.read_bytes += slot.size_bytes
        return load

    def free(self, slot: Slot) -> None:
        """See `SlowTier.free`. Freeing twice does nothing. Never blocks."""
        if isinstance(slot, StreamSlot) and slot.tier is self:
            if not self._closed:
                self._freed.append(slot)
            elif slot.place is not None:  # nobody looks at those that are noted; no copy is under way
                slot.freed, slot.place = True, None
                self._places_in_use -= 1
        elif self._overflow is not None:
            self._overflow.free(slot)

    def drain(self) -> None:
        """See `SlowTier.drain`. In another process there is nothing to wait for."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._collect()
            self._wait_for_copies()
        if self._overflow is not None:
            self._overflow.drain()

    def close(self) -> None:
        """See `SlowTier.close`. Closing twice, or in another process, does nothing."""
        if not self._closed and self._process == os.getpid():
            self.drain()
            self._closed = True
            with self._lock:
                self._collect()  # what was freed in between
            self._arena.release()
            self._unclosed.detach()
        if self._overflow is not None:
            self._overflow.close()

    # --- for the runtime -------------------------------------------------------------------------------------------

    def settle(self, planned: PlannedPlaces | None = None, *, grows: bool = True) -> None:
        """Between two steps: let the arena grow, and follow a plan in the step that comes. See `Arena.settle`."""
        self._check_usable()
        with self._lock:
            self._collect()  # no more: the stream that is current between steps may do nothing within them
            self._arena.settle(planned, self._wait_for_copies, grows=grows)

    @property
    def capacity_bytes(self) -> int:
        """The most that the arena may grow to."""
        return self._arena.limit_bytes

    @property
    def places_in_use(self) -> int:
        """Slots whose place has not been given back."""
        with self._lock:
            self._collect()
            return self._places_in_use

    def _wait_for_copies(self) -> None:
        self._finish(self.backend, (self._out, self._back), self._process)

    @staticmethod
    def _finish(backend: Backend, streams: Sequence[Stream], process: int) -> None:
        """Wait until no copy is under way: then memory of a tier may go back, closed or not."""
        if process == os.getpid():
            for stream in streams:
                backend.finish(stream)

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise SpillError(f"the {self.name} tier was made in another process; make a Budget in this one")
        if self._closed:
            raise SpillError(f"the {self.name} tier is closed; make a new Budget")

    def _begin(self) -> Stream:
        """A transfer is asked for, on the stream that this returns. Under the lock, like all that follows."""
        home = self.compute.note()
        self._collect()
        return home

    def _collect(self) -> None:
        """Look at the slots that were freed."""
        while self._freed:
            slot = self._freed.popleft()
            if slot.freed:
                continue
            slot.freed = True
            if slot.place is None:
                continue
            if slot.copied is None:  # an interrupt struck while it was queued
                slot.copied = self._out.record_event()
            slot.wait()
            while slot.unwaited:
                load = slot.unwaited.pop()
                self.compute.wait(load.arrived if load.arrived is not None else self._back.record_event())
            self._arena.give_back(slot.place)
            self._places_in_use -= 1
            slot.place = None
