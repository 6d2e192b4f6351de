"""Doubles of what is asked of a CUDA device: a clock that lags behind, and an allocator that counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from ebbtide.run.gauges import Gauges
from ebbtide.run.native import arena_library, find_compiler
from ebbtide.units import round_up

LEAST_BYTES, GRAIN_BYTES = 64 << 10, 64
"""Of the blocks that the arena gives."""
UNIT = 1e-3


class LaggingClock:
    """A device that gets nowhere before `catch_up`, or before somebody waits for it.

    Between a mark and the next there is a millisecond, whatever happens.

    Attributes:
        inside: whether a step is under way, in which nobody may wait.
        waits: how often somebody waited.
    """

    def __init__(self) -> None:
        self.inside = False
        self.waits = 0
        self._marks = itertools.count()
        self._reached = -1

    def mark(self) -> int:
        return next(self._marks)

    def passed(self, mark: int) -> bool:
        return mark <= self._reached

    def seconds(self, earlier: int, later: int) -> float:
        if later > self._reached:
            assert not self.inside, "somebody waits for the device inside a step"
            self.waits += 1
            self._reached = later
        return (later - earlier) * UNIT

    def fall_behind(self) -> None: ...

    def is_behind(self, mark: int) -> bool:
        return not self.passed(mark)

    def catch_up(self) -> None:
        self._reached = self.mark()


class ArenaMemory:
    """The CPU's arena as the memory of a device. It counts tensors of 64 KiB and more.

    Attributes:
        free: what `free_bytes` says.
        caps: the caps that were asked for.
    """

    device = torch.device("cpu")

    def __init__(self, free: int = 1 << 30) -> None:
        library = arena_library()
        if find_compiler() is None:
            pytest.skip("there is no arena without a C++ compiler")
        assert library is not None
        self._mark: Callable[[], int] = library.ebbtide_arena_mark
        self._most: Callable[[], int] = library.ebbtide_arena_most
        self.free = free
        self.caps: list[int | None] = []

    def size_of(self, storage: torch.UntypedStorage) -> int:
        size = storage.nbytes()
        return round_up(size, GRAIN_BYTES) if size >= LEAST_BYTES else 0

    def allocated_bytes(self) -> int:
        return self._mark()  # it begins a new peak; nobody asks while one is counted

    def start_peak(self) -> None:
        self._mark()

    def peak_bytes(self) -> int:
        return self._most()

    def free_bytes(self) -> int:
        return self.free

    def cap(self, limit_bytes: int | None) -> None:
        self.caps.append(limit_bytes)


def install(monkeypatch: pytest.MonkeyPatch, *gauges: Gauges) -> None:
    """Steps are expected on the first of these devices, and run on one of them."""
    by_device = {one.device: one for one in gauges}
    monkeypatch.setattr("ebbtide.run.device.likely_device", lambda: gauges[0].device)
    monkeypatch.setattr("ebbtide.run.device.gauges_of", by_device.__getitem__)
