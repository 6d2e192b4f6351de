"""Host memory that a device copies from and to directly, and the arena that cuts it into places.

NOTE [Arena]
1. Memory is taken in one piece, pinned once, between steps: faulting pages in and pinning them takes long. What does
   not fit has no place here, and is asked for at the next `settle`. If the system refuses, the arena stays as it was;
   if by then it has no more even for that, the arena is empty, and asks again at the next `settle`.
   In steps that no plan knows, smaller pieces may be added instead, as to pin one takes less time than a disk would.
   They stay until there is a plan.
2. Where the plan is known, so are the sizes, the order and the lifetimes of what comes: each has its place beforehand
   (`ebbtide.place`), and the arena need not be larger than the most that lies there at once. Whatever comes otherwise
   takes the smallest gap that fits.
3. A place that is given back may still be read by a copy under way. Whoever gets it next writes later, in the order of
   streams; but memory as a whole goes back only when all copies are done.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import SpillError
from ebbtide.place.layout import ALIGNMENT_BYTES
from ebbtide.run.available import available_bytes
from ebbtide.run.backends.base import Backend
from ebbtide.run.tiers.memory import storage_over
from ebbtide.run.tiers.places import Places
from ebbtide.units import format_bytes, round_up

GROWTH_BYTES = 2 << 20
"""The arena's size is a multiple of this: one huge page."""

_log = logging.getLogger(__name__)

TakeMemory = Callable[[int], torch.UntypedStorage]


def _rounded(size_bytes: int) -> int:
    # Planned places are laid out for blocks of so many bytes, and taken here by `Arena._planned_offset`.
    return round_up(size_bytes, ALIGNMENT_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A part of an arena; ``storage`` shows it, and keeps the memory that it lies in."""

    storage: torch.UntypedStorage
    offset_bytes: int
    places: Places


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPlaces:
    """Where what comes in a step lies: sizes and offsets in the order in which it comes. See NOTE [Arena], rule 2."""

    sizes_bytes: tuple[int, ...]
    offsets_bytes: tuple[int, ...]
    footprint_bytes: int


class Arena:
    """Places in one piece of slower memory. See NOTE [Arena]. Not for several threads at once.

    Args:
        take: makes the memory; it goes back when it dies.
        limit_bytes: the most to take.
        start_bytes: how much to take for the first step.
        piece_bytes: how much to add at least in the middle of a step, where something has no place; 0 to add nothing.
    """

    def __init__(self, take: TakeMemory, limit_bytes: int, start_bytes: int = 0, piece_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._take = take
        self._piece_bytes = piece_bytes
        self._pieces: dict[Places, torch.UntypedStorage] = {}
        self._memory: torch.UntypedStorage | None = None
        self._places = Places(0)
        self._missed_bytes = start_bytes
        self._outdated: list[Place] = []
        self._planned: PlannedPlaces | None = None
        self._next = 0
        self.settle(None, lambda: None)

    @property
    def size_bytes(self) -> int:
        """How much memory there is in one piece."""
        return self._places.end_bytes

    def stop_growing(self) -> None:
        """Make what there is now the limit."""
        self.limit_bytes = self.size_bytes + self._added_bytes

    def settle(self, planned: PlannedPlaces | None, quiet: Callable[[], None], *, grows: bool = True) -> None:
        """Between two steps: grow by what had no place, or to what a plan needs, and follow it in the step that comes.

        Args:
            planned: the plan's places; None if there is no plan.
            quiet: called before memory goes back: it waits until no copy is under way.
            grows: whether what had no place in the last step may come again.
        """
        self._planned, self._next = planned, 0
        if not grows:
            self._missed_bytes = 0
        drops = planned is not None and bool(self._pieces)
        beside = 0 if drops else self._added_bytes
        wanted = max(self.size_bytes + self._missed_bytes, planned.footprint_bytes if planned is not None else 0)
        most = (self.limit_bytes - beside) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        wanted = min(round_up(wanted, GROWTH_BYTES), most)
        self._missed_bytes = 0
        if self._outdated or wanted > self.size_bytes or drops:
            quiet()
            self._outdated.clear()
        if drops:
            self._pieces.clear()
        if wanted > self.size_bytes:
            former = self.size_bytes
            if not self._replace(wanted, f"it stays at {format_bytes(former)}"):
                self.limit_bytes = former + beside
                self._replace(former, "there is none")

    def reserve(self, size_bytes: int) -> Place | None:
        """A place, or None if there is none."""
        rounded = _rounded(size_bytes)
        offset = self._planned_offset(rounded)
        if offset is None:
            try:
                offset = self._places.take(rounded)
            except MemoryError:
                return self._reserve_beside(size_bytes, rounded)
        memory = self._memory
        storage = memory[offset : offset + size_bytes] if memory is not None else torch.UntypedStorage(0)
        return Place(storage, offset, self._places)

    def _reserve_beside(self, size_bytes: int, rounded: int) -> Place | None:
        """A place in a piece that was added, or is."""
        for places, memory in self._pieces.items():
            with contextlib.suppress(MemoryError):
                offset = places.take(rounded)
                return Place(memory[offset : offset + size_bytes], offset, places)
        if self._add_piece(rounded):
            return self._reserve_beside(size_bytes, rounded)
        self._missed_bytes += rounded
        return None

    def _add_piece(self, rounded: int) -> bool:
        """Take one more piece, of ``rounded`` bytes at least, if there may be one."""
        left = (self.limit_bytes - self.size_bytes - self._added_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        wanted = min(max(round_up(rounded, GROWTH_BYTES), self._piece_bytes), left)
        if not self._piece_bytes or self._planned is not None or wanted < rounded:
            return False
        try:
            self._pieces[Places(wanted)] = self._take(wanted)
        except SpillError as fault:
            _log.warning("%s; what has no place goes elsewhere", fault)
            self._piece_bytes = 0
            return False
        return True

    @property
    def _added_bytes(self) -> int:
        return sum(places.end_bytes for places in self._pieces)

    def give_back(self, place: Place) -> None:
        """Make a place free. Copies from and to it may still be under way: see rule 3."""
        place.places.give_back(place.offset_bytes, _rounded(place.storage.nbytes()))
        if place.places is not self._places and place.places not in self._pieces:
            self._outdated.append(place)

    def release(self) -> None:
        """Give the memory back, as soon as nothing lies in it. Call when no copy is under way."""
        self._memory, self._places = None, Places(0)
        self._pieces.clear()
        self._outdated.clear()

    def _replace(self, size_bytes: int, otherwise: str) -> bool:
        """Take other memory, of ``size_bytes``, instead. Returns whether the system gave it; where it did not,
        ``otherwise`` is logged."""
        # What still lies in the old memory keeps it; otherwise it goes first, to make room.
        self._memory, self._places = None, Places(0)
        if size_bytes:
            try:
                self._memory = self._take(size_bytes)
            except SpillError as fault:
                _log.warning("%s; %s", fault, otherwise)
                return False
            self._places = Places(size_bytes)
        return True

    def _planned_offset(self, rounded: int) -> int | None:
        planned, number = self._planned, self._next
        self._next += 1
        if planned is None or number >= len(planned.sizes_bytes) or _rounded(planned.sizes_bytes[number]) != rounded:
            return None
        offset = planned.offsets_bytes[number]
        return offset if self._places.claim(offset, rounded) else None


def pinned_memory(backend: Backend) -> TakeMemory:
    """What makes pinned memory near ``backend``'s device."""

    def take(size_bytes: int) -> torch.UntypedStorage:
        try:
            pages = mmap.mmap(-1, size_bytes)
        except OSError as fault:
            raise SpillError(
                f"no RAM for {format_bytes(size_bytes)} of pinned memory ({fault.strerror}); allow it less"
            ) from fault
        with contextlib.suppress(OSError):  # a kernel may have no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        # Children, such as workers that load data, would keep it for as long as they live.
        pages.madvise(mmap.MADV_DONTFORK)
        exported = ctypes.c_char.from_buffer(pages)
        address = ctypes.addressof(exported)
        touch(address, size_bytes, backend.near_cpus())
        try:
            backend.pin(address, size_bytes)
        except RuntimeError as fault:
            raise SpillError(
                f"the system refuses to pin {format_bytes(size_bytes)} of RAM ({fault}); allow it less"
            ) from fault
        process = os.getpid()

        def give_back(held: Any) -> None:
            if os.getpid() != process:
                # A forked child has not got these pages, and maybe others there, which must not be unmapped for them.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
                return
            if not sys.is_finalizing():  # at the end of the process all of it goes anyway
                backend.unpin(address)
            held.clear()

        return storage_over(address, size_bytes, [exported, pages], give_back)

    return take


def peer_memory(peer: Backend) -> TakeMemory:
    """What takes memory of another device."""

    def take(size_bytes: int) -> torch.UntypedStorage:
        try:
            memory = peer.allocate(size_bytes, 0)
        except (MemoryError, torch.OutOfMemoryError) as fault:
            raise SpillError(f"{peer.device} has no room for {format_bytes(size_bytes)} of another's") from fault
        peer.finish(
            peer.compute()
        )  # work of its former owner may still be under way there, and nobody here waits for it
        return memory

    return take


def touch(address: int, size_bytes: int, cpus: frozenset[int]) -> None:
    """Write every page first from one of ``cpus``: then the system takes it from their NUMA node."""

    def run() -> None:
        allowed = cpus & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)  # of this thread alone
        ctypes.memset(address, 0, size_bytes)

    thread = threading.Thread(target=run, name="ebbtide-touch")
    thread.start()
    thread.join()


def spare_bytes(devices: int = 1) -> int:
    """Half of the RAM that is available to this machine or container, shared with the other processes of `torchrun`.

    Args:
        devices: how many there are: without `torchrun`, each may have a process of its own.
    """
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")  # processes here, this one included
    return available_bytes() // 2 // (int(beside) if beside.isdecimal() and int(beside) else devices)
