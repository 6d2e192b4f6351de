"""A device of threads, a tier over it, and kernels that fill memory and look at it; any wait can be left out."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from ebbtide.run.tiers import Arena, SlowTier, StreamTier
from tests.run.backends.threads import PIECES, QueuedBackend, Temper, ThreadStream

SIZE = 16 << 10
"""Bytes of every value."""
HELPERS = {"ComputeStreams.wait", "ComputeStreams.record", "ComputeStreams.lead", "_follow"}
"""Functions that wait on behalf of others: a wait is known by who called them."""


def site(frame: FrameType | None) -> str:
    """Which wait of the package this is: the function, and how many lines below its first one."""
    while frame is not None and frame.f_code.co_qualname in HELPERS:
        frame = frame.f_back
    assert frame is not None
    return f"{frame.f_code.co_qualname}+{frame.f_lineno - frame.f_code.co_firstlineno}"


class _Deaf(ThreadStream):
    """A stream that ignores one of the waits."""

    device: Device

    def wait_event(self, event: Any) -> None:
        if self.device.heeds(site(sys._getframe(1))):
            super().wait_event(event)


class Device(QueuedBackend):
    """A device that ignores the wait called ``ignored`` and remembers all.

    Attributes:
        sites: the waits that there were.
        faults: what kernels have found wrong.
    """

    def __init__(self, seed: int, *, ignored: str = "", temper: Temper | None = None, values: int = 64) -> None:
        self.seed = seed
        self.ignored = ignored
        self.sites: set[str] = set()
        self.faults: list[str] = []
        super().__init__(seed, memory_bytes=values * SIZE, temper=temper)

    def heeds(self, where: str) -> bool:
        self.sites.add(where)
        return where != self.ignored

    def new_stream(self, name: str) -> ThreadStream:
        stream = super().new_stream(name)
        stream.__class__ = _Deaf
        stream.device = self  # type: ignore[attr-defined]
        return stream

    def finish(self, stream: Any) -> None:
        if self.heeds(site(sys._getframe(1))):
            super().finish(stream)

    # Kernels. They know memory by its address alone.

    def new(self, number: int) -> torch.UntypedStorage:
        """A value: memory, and a kernel that fills it with what ``number`` says."""
        storage = self.allocate(SIZE, 0)
        self.fill(storage, number)
        return storage

    def fill(self, storage: torch.UntypedStorage, number: int) -> None:
        """A kernel that writes value ``number``."""
        content = content_of(number)
        self.compute().launch(
            *(
                functools.partial(ctypes.memmove, at, content[start:stop], stop - start)
                for at, start, stop in _parts(storage)
            )
        )

    def look(self, storage: torch.UntypedStorage, number: int, where: str) -> None:
        """A kernel that reads value ``number``, and says so if it is not there."""
        content = content_of(number)

        def read(at: int, start: int, stop: int) -> None:
            if ctypes.string_at(at, stop - start) != content[start:stop]:
                self.faults.append(f"{where}: value {number} is not there")

        self.compute().launch(*(functools.partial(read, *part) for part in _parts(storage)))


def _parts(storage: torch.UntypedStorage) -> Iterable[tuple[int, int, int]]:
    step = SIZE // PIECES
    for start in range(0, SIZE, step):
        yield storage.data_ptr() + start, start, start + step


@functools.lru_cache(maxsize=256)
def content_of(number: int) -> bytes:
    """The bytes of a value."""
    return random.Random(number).randbytes(SIZE)


def host_tier(device: Device, places: int = 64) -> StreamTier:
    """A tier over ``device`` with room for so many values, in memory that is RAM as well."""
    return StreamTier(device, Arena(torch.UntypedStorage, places * SIZE, places * SIZE))


def close(device: Device, tier: SlowTier) -> list[str]:
    """Finish everything; what was found wrong."""
    device.ignored = ""
    for stream in tuple(
        device._streams
    ):  # what nobody has waited for still copies, from and to what the tier lets go of
        stream.record_event().synchronize()
    tier.close()
    device.close()
    return device.faults
