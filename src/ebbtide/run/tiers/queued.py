"""What slower memories with worker threads have in common: the order of transfers, and how they fail.

NOTE [Who holds what]
1. While a copy out is under way, `Slot.unwritten` is the only reference to the storage. Workers see its address alone,
   so the storage is free as soon as the copy is done and its owner lets go. If the copy fails, it stays there.
2. A slot's place is given back when it is freed *and* no transfer of it is under way, or else when the slot dies: a
   transfer under way keeps it alive.
3. Slots are freed, and die, at any point of any thread, also of one that holds the tier's lock. So that is only noted.
   Whoever takes the lock next looks at the notes: nobody needs the place earlier. A death is noted by code in C: Ctrl-C
   is raised in the next Python code that runs, and when it comes during an op of a backward pass, that would be a
   finalizer's, which cannot raise anything.
4. Faults are kept without their tracebacks: the frames in them would keep storages alive.
5. Ctrl-C may interrupt `write` and `read` anywhere. So a transfer counts as under way only after all of it is queued:
   one that was interrupted is known to nobody, and nobody waits for it.
6. A storage may get other memory while it is copied out: `share_memory_` moves it, and so does sending a tensor to
   another process. What the workers have read may be anything then, and the copy is made again.
7. Who asks for transfers waits on no `threading.Condition` or `Event`: Ctrl-C in one ends in "release unlocked lock".
   See `Gate`.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ebbtide.errors import SpillError
from ebbtide.machine import TierKind
from ebbtide.run.backends.base import ComputeStreams
from ebbtide.run.tiers.gate import Gate
from ebbtide.run.tiers.lanes import Lane
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES, take_memory
from ebbtide.run.tiers.transfers import Load, QueuedLoad, Slot, Traffic, Transfer, check_device, check_memory
from ebbtide.units import format_bytes

_tiers: weakref.WeakSet[QueuedTier] = weakref.WeakSet()


class QueuedTier(abc.ABC):
    """A slower memory whose copies worker threads make: ``writers`` for those out, ``readers`` for those back.

    Subclasses say where the bytes go. See NOTE [Who holds what].

    Attributes:
        part_bytes: transfers are cut into parts of this size, so that workers share one and a fork is not kept long.
        congruence_bytes: memory that comes back begins at the same address as before, modulo this.
        device: where the storages are that it takes.
        written, read_back: what was copied out and back so far.
    """

    kind: TierKind
    part_bytes: int
    congruence_bytes = CONGRUENCE_BYTES
    device = torch.device("cpu")

    def __init__(self, name: str, *, readers: int, release_all: Callable[[], None], writers: int = 1) -> None:
        self.name = name
        self.written, self.read_back = Traffic(), Traffic()
        self._writer = Lane(f"ebbtide-{name}-write", writers)
        self._reader = Lane(f"ebbtide-{name}-read", readers)
        self._taken: dict[weakref.ref[Slot], Any] = {}
        self._under_way: set[Transfer] = set()
        self._freed: collections.deque[Slot] = collections.deque()
        self._died: collections.deque[weakref.ref[Slot]] = collections.deque()
        self._refusal: str | None = None
        self._make_locks()
        self._release_all = release_all
        # Also runs when the interpreter exits, so that no read is under way while memory is taken down.
        self._shut = weakref.finalize(self, _shut, (self._writer, self._reader), release_all)
        _tiers.add(self)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._idle = Gate()

    # What a subclass says. `_reserve` and `_release` run under the lock.

    @abc.abstractmethod
    def _reserve(self, slot: Slot) -> None:
        """Set ``slot.place``, and ``slot.payload_bytes`` unless all of the storage is to be copied in parts."""

    @abc.abstractmethod
    def _release(self, place: Any) -> None:
        """Give the place of a slot back."""

    @abc.abstractmethod
    def _store(self, slot: Slot, start: int, stop: int) -> None:
        """Copy a part out."""

    @abc.abstractmethod
    def _fetch(self, load: QueuedLoad, start: int, stop: int) -> None:
        """Copy a part back."""

    def _announce(self, transfer: Slot | QueuedLoad) -> None:  # noqa: B027
        """Called in the thread that asks for a transfer, before any of it is under way."""

    def _take_memory(self, slot: Slot) -> torch.UntypedStorage:
        """Memory for a copy to come back to."""
        try:
            return take_memory(slot.size_bytes, slot.pointer % self.congruence_bytes, self.congruence_bytes)
        except (OSError, MemoryError) as fault:
            size = format_bytes(slot.size_bytes)
            raise SpillError(f"no RAM to bring {size} back from the {self.name} tier ({fault})") from fault

    def _make_load(self, slot: Slot, storage: torch.UntypedStorage) -> QueuedLoad:
        return QueuedLoad(slot, storage)

    def _after_store(self, slot: Slot) -> None:  # noqa: B027
        """Called when all parts are out."""

    def _after_fetch(self, load: QueuedLoad) -> None:  # noqa: B027
        """Called when all parts are back."""

    def _explain(self, fault: BaseException, transfer: Slot | QueuedLoad) -> str:
        """Say what happened to a transfer and what to do about it."""
        return f"moving {format_bytes(transfer.size_bytes)} in the {self.name} tier failed: {fault!r}"

    # The contract.

    def expect(self, _device: torch.device) -> ComputeStreams | None:
        """See `SlowTier.expect`. Nothing is to be done for what is in RAM."""
        return None

    def write(self, storage: torch.UntypedStorage) -> Slot:
        """See `SlowTier.write`. Raises `SpillError` if the tier is closed or the storage is on another device."""
        check_device(self.name, self.device, storage)
        slot = Slot(storage)
        self._announce(slot)
        with self._lock:
            self._check_usable()
            self._collect()
            self._reserve(slot)
            self._own(slot)
            if slot.payload_bytes:
                self._queue(slot, self._writer)
                self._count(slot, slot)
        if not slot.payload_bytes:
            self._end_write(slot)
        return slot

    def read(self, slot: Slot, into: torch.UntypedStorage | None = None) -> Load:
        """See `SlowTier.read`.

        Raises:
            SpillError: if the tier is closed, the slot freed, RAM exhausted, or ``into`` of another size or alignment.
        """
        self._check_usable()
        if into is None:
            into = self._take_memory(slot)
        else:
            check_memory(slot, into, self.congruence_bytes)
        load = self._make_load(slot, into)
        self._announce(load)
        with self._lock:
            self._check_usable()
            self._collect()
            if slot.freed:
                raise SpillError(f"a slot of the {self.name} tier was read after it was freed")
            load.fault = slot.fault
            at_once = slot.finished.is_open and (load.fault is not None or not load.payload_bytes)
            if not at_once:
                if slot.finished.is_open:
                    self._queue(load, self._reader)
                else:
                    slot.waiting.append(load)
                self._count(load, slot)
        if at_once:
            self._end_read(load)
        return load

    def free(self, slot: Slot) -> None:
        """See `SlowTier.free`. Freeing twice, or in another process, does nothing. Never blocks."""
        self._freed.append(slot)

    def drain(self) -> None:
        """See `SlowTier.drain`."""
        while not self._is_at_work:
            with self._lock:
                if not self._under_way or self._refusal is not None:
                    self._collect()
                    return
                if self._idle.is_open:
                    self._idle = Gate()
                idle = self._idle
            idle.wait()

    def close(self) -> None:
        """See `SlowTier.close`. Closing twice does nothing."""
        refusal = self._refusal or f"the {self.name} tier is closed; make a new Budget"
        if self._is_at_work:
            self._refusal = refusal  # the rest follows when it dies
            return
        with self._lock:
            self._refusal = refusal
            self._idle.open()
        self._shut()

    @property
    def _is_at_work(self) -> bool:
        """Whether the garbage collector runs this amid a transfer, which nobody can wait for then."""
        return self._writer.is_here or self._reader.is_here

    @property
    def written_bytes(self) -> int:
        """Bytes of the storages copied out so far."""
        return self.written.size_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the storages copied back so far."""
        return self.read_back.size_bytes

    @property
    def places_in_use(self) -> int:
        """Slots whose place has not been given back."""
        with self._lock:
            self._collect()
            return len(self._taken)

    # How transfers go on. What says so runs under the lock.

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise SpillError(self._refusal)

    def _queue(self, transfer: Slot | QueuedLoad, lane: Lane) -> None:
        """Queue the parts of a transfer."""
        transfer.queued_seconds = time.perf_counter()
        starts = range(0, transfer.payload_bytes, self.part_bytes)
        transfer.parts_left = len(starts)
        for start in starts:
            stop = min(start + self.part_bytes, transfer.payload_bytes)
            lane.submit(functools.partial(self._run_part, transfer, start, stop))

    def _count(self, transfer: Slot | QueuedLoad, slot: Slot) -> None:
        """A transfer of ``slot`` is under way. Under the lock, after `_queue`: see rule 5."""
        slot.under_way.add(transfer)
        self._under_way.add(transfer)

    def _run_part(self, transfer: Slot | QueuedLoad, start: int, stop: int, closing: bool) -> None:
        pointless = isinstance(transfer, Slot) and (transfer.moved or _is_dropped(transfer))
        if transfer.fault is None and not pointless:
            with self._faults_of(transfer):
                if closing:
                    raise SpillError(f"the {self.name} tier was closed before a transfer ended")
                if isinstance(transfer, Slot):
                    self._store(transfer, start, stop)
                else:
                    self._fetch(transfer, start, stop)
        with self._lock:
            transfer.parts_left -= 1
            if transfer.parts_left:
                return
        if isinstance(transfer, Slot):
            self._end_write(transfer)
        else:
            self._end_read(transfer)

    def _write_again(self, slot: Slot) -> None:
        """Write a slot whose storage got other memory meanwhile: see rule 6. Loads that wait for the copy lie like the
        former one."""
        assert slot.unwritten is not None
        slot.fault = None
        with self._faults_of(slot):
            storage = self._take_memory(slot)
            storage.copy_(slot.unwritten)
            slot.unwritten, slot.pointer = storage, storage.data_ptr()
            with self._lock:
                self._queue(slot, self._writer)

    @contextlib.contextmanager
    def _faults_of(self, transfer: Slot | QueuedLoad) -> Iterator[None]:
        try:
            yield
        except BaseException as fault:  # whatever it is, it belongs to whoever waits for the transfer
            error = fault if isinstance(fault, SpillError) else SpillError(self._describe(fault, transfer))
            if error is not fault:
                error.__cause__ = fault.with_traceback(None)
            transfer.fault = error.with_traceback(None)

    def _describe(self, fault: BaseException, transfer: Slot | QueuedLoad) -> str:
        try:
            return self._explain(fault, transfer)
        except Exception:  # the transfer has to end
            return QueuedTier._explain(self, fault, transfer)

    def _end_write(self, slot: Slot) -> None:
        if slot.fault is None and not slot.moved:
            with self._faults_of(slot):
                self._after_store(slot)
        if slot.moved and not _is_dropped(slot):
            self._write_again(slot)
            if slot.fault is None:
                return
        if slot.fault is None:
            slot.unwritten = None
        with self._lock:
            slot.finished.open()
            loads, slot.waiting = slot.waiting, []
            if slot.fault is None:
                self.written.count(slot)
        for load in loads:
            self._resume(load, slot.fault)
        self._settle(slot, slot)

    def _resume(self, load: QueuedLoad, fault: SpillError | None) -> None:
        """What ``load`` waited for is written, or cannot be."""
        load.fault = fault
        if fault is None and load.payload_bytes:
            with self._lock, self._faults_of(load):
                self._queue(load, self._reader)
        if load.fault is not None or not load.payload_bytes:
            self._end_read(load)

    def _end_read(self, load: QueuedLoad) -> None:
        if load.fault is None:
            with self._faults_of(load):
                self._after_fetch(load)
        load.finished.open()
        with self._lock:
            if load.fault is None:
                self.read_back.count(load)
        self._settle(load, load.slot)

    def _settle(self, transfer: Slot | QueuedLoad, slot: Slot) -> None:
        """A transfer of ``slot`` has ended."""
        with self._lock:
            slot.under_way.discard(transfer)
            self._give_back(slot)
            self._collect()
            self._under_way.discard(transfer)
            if not self._under_way:
                self._idle.open()

    def _own(self, slot: Slot) -> None:
        """The place of ``slot`` is taken for as long as it lives, or until it is freed. Under the lock."""
        self._taken[weakref.ref(slot, self._died.append)] = slot.place

    def _disown(self, slot: weakref.ref[Slot]) -> None:
        place = self._taken.pop(slot, None)
        if place is not None:  # an interrupt before this line may lose a place, but none is given back twice
            self._release(place)

    def _collect(self) -> None:
        """Look at the slots that were freed or died. Under the lock; see rule 3."""
        while self._freed:
            slot = self._freed.popleft()
            slot.freed = True
            self._give_back(slot)
        while self._died:
            self._disown(self._died.popleft())

    def _give_back(self, slot: Slot) -> None:
        if slot.freed and not slot.under_way:
            self._disown(weakref.ref(slot))

    def abandon(self) -> None:
        """In a child process: close what was inherited and refuse to be used. See NOTE [Fork] in `lanes.py`."""
        self._make_locks()
        self._freed = collections.deque(maxlen=0)  # what is freed here is the parent's, and so is what dies
        self._taken.clear()
        self._refusal = f"the {self.name} tier was made in another process; make a Budget in this one"
        if self._shut.detach() is not None:
            self._release_all()


def _is_dropped(slot: Slot) -> bool:
    """Whether nobody asks for what it would hold, and nobody will."""
    return slot.unwanted and not slot.waiting


def _shut(lanes: tuple[Lane, ...], release_all: Callable[[], None]) -> None:
    interrupts: list[BaseException] = []
    for lane in lanes * 2:  # Ctrl-C while a thread is waited for: it is waited for all the same, but once more only
        try:
            lane.close()
        except BaseException as fault:
            interrupts.append(fault)
    if all(lane.has_ended for lane in lanes):  # what a worker still uses is never given back under it
        release_all()
    if interrupts:
        raise interrupts[0]


def _after_fork_in_child() -> None:
    for tier in list(_tiers):
        tier.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
