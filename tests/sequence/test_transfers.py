"""What transfers cost is found as a run would meet it, and trying leaves nothing behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from ebbtide.sequence.blocks import Block, Blocks
from ebbtide.sequence.choose import SlowMemory
from ebbtide.sequence.disk import StateCopy, StateDisk, StatePlace
from ebbtide.sequence.layout import ArrayLayout
from ebbtide.sequence.transfers import TRIAL_PLACES, TRIPS, UNTRIED_SECONDS, time_transfers
from ebbtide.sequence.trial import Trial

STATE_BYTES = 1 << 16
STEP, PACK, ASK = 10e-6, 0.1e-6, 3e-6
QUICK, LATE = 1e-6, 500e-6
"""Seconds by a clock that only these move."""


Disk = TypeVar("Disk", bound=StateDisk)


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LateCopy:
    """A copy that is there at some time of the clock."""

    def __init__(self, copy: StateCopy, clock: Clock, there: float) -> None:
        self.place: StatePlace = copy.place
        self._clock, self._there = clock, there
        copy.wait()

    @property
    def ready(self) -> bool:
        return self._clock.now >= self._there

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._there)


class LateDisk(StateDisk):
    """A disk to ask which takes `ASK`, and that takes ``seconds`` for what it is asked for, one after another."""

    def __init__(self, directory: Path, clock: Clock, seconds: float) -> None:
        super().__init__(directory)
        self._clock, self._seconds, self._free = clock, seconds, 0.0
        self.stores = self.brings = 0

    def _late(self, copy: StateCopy) -> LateCopy:
        self._clock.now += ASK
        self._free = max(self._free, self._clock.now) + self._seconds
        return LateCopy(copy, self._clock, self._free)

    def store(self, storage: torch.UntypedStorage) -> StateCopy:
        self.stores += 1
        return self._late(super().store(storage))

    def bring(self, place: StatePlace, storage: torch.UntypedStorage) -> StateCopy:
        self.brings += 1
        return self._late(super().bring(place, storage))

    def drain(self) -> None:
        super().drain()
        self._clock.now = max(self._clock.now, self._free)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def trial(clock: Clock | None, slots: int) -> Trial:
    """A chain whose state is an array; with a clock, its steps and copies take their time by that."""
    layout = ArrayLayout(np.zeros(STATE_BYTES, np.uint8))

    def step(state: Any) -> Any:
        if clock is not None:
            clock.now += STEP
        return state + 1

    def pack(state: Any, block: Block) -> None:
        if clock is not None:
            clock.now += PACK
        layout.pack(state, block)

    blocks = Blocks(STATE_BYTES, slots, for_disk=True)
    return Trial(lambda: np.zeros(STATE_BYTES, np.uint8), step, pack, blocks)


@contextlib.contextmanager
def opened(disk: Disk) -> Iterator[Disk]:
    with contextlib.closing(disk):
        yield disk


def costs(found: SlowMemory) -> tuple[float, float, float, float]:
    """Seconds of a state out and back, and of compute for each."""
    out, back = found.out.seconds(STATE_BYTES), found.back.seconds(STATE_BYTES)
    return out, back, out * found.out.compute_slowdown, back * found.back.compute_slowdown


@pytest.mark.parametrize("slots", [3, 12, 60])
def test_asking_is_what_a_quick_disk_costs(tmp_path: Path, clock: Clock, slots: int) -> None:
    tried = trial(clock, slots)
    length = tried.blocks.run_length
    with opened(LateDisk(tmp_path, clock, QUICK)) as disk:
        found = time_transfers(disk, tried, STEP, PACK, None, seconds=0.1)
    out, back, out_loss, back_loss = costs(found)
    assert (out, back) == pytest.approx(2 * ((ASK + QUICK) / length,))
    assert out_loss == pytest.approx(ASK / length)
    # Of those back fewer go together, as schedules ask for them some ahead of their turn. Reading takes no time here.
    states = (disk.stores - TRIPS) * length
    assert back_loss == pytest.approx(ASK * (disk.brings - TRIPS) / states - PACK)
    assert ASK / length - PACK <= back_loss * (1 + 1e-9) <= ASK


def test_a_late_disk_is_known_by_what_compute_waits(tmp_path: Path, clock: Clock) -> None:
    tried = trial(clock, 12)
    length = tried.blocks.run_length
    with opened(LateDisk(tmp_path, clock, LATE)) as disk:
        found = time_transfers(disk, tried, STEP, PACK, None, seconds=0.1)
    out, back, out_loss, _ = costs(found)
    assert out == pytest.approx(LATE / length, rel=0.2)
    assert back >= LATE / length
    assert out_loss == pytest.approx(ASK / length)  # waiting is not what a transfer costs: intervals may hide it
    assert found.back.compute_slowdown < 0.05


def test_short_of_time_each_way_is_timed_alone(tmp_path: Path, clock: Clock) -> None:
    tried = trial(clock, 12)
    with opened(LateDisk(tmp_path, clock, QUICK)) as disk:
        found = time_transfers(disk, tried, STEP, PACK, None, seconds=STEP)
    out, back, *losses = costs(found)
    assert (out, back) == pytest.approx(2 * ((ASK + QUICK) / tried.blocks.run_length,))
    assert losses == pytest.approx([UNTRIED_SECONDS, UNTRIED_SECONDS])


@pytest.mark.parametrize("room", [None, 40, 4])
@pytest.mark.parametrize("slots", [2, 3, 50])
def test_nothing_is_left_behind(tmp_path: Path, slots: int, room: int | None) -> None:
    tried = trial(None, slots)
    with opened(StateDisk(tmp_path)) as disk:
        found = time_transfers(
            disk, tried, 1e-6, 0.0, None if room is None else room * tried.blocks.block_bytes, seconds=0.05
        )
        assert disk.file_bytes <= (TRIAL_PLACES if room is None else max(room, tried.blocks.run_length)) * STATE_BYTES
        assert disk.places_in_use == 0
        assert disk.store(tried.blocks.extra().storage).place.offset_bytes == 0  # the whole file is free again
        disk.drain()
    assert len({tried.blocks.take().address for _ in range(slots)}) == slots
    assert tried.blocks.are_taken
    assert min(costs(found)) >= 0
