"""What transfers cost those who compute beside them.

NOTE [Two costs]
1. For each byte, because transfers take bandwidth of the memory and time of the processor. A loop of products and
   element-wise ops runs while one direction of a link is kept busy and, right before and after that, without transfers.
   Streams beside compute are slower than transfers alone, so the loss is told for each byte that was moved meanwhile.
   (Six calibrations in a row said 18 to 53 ms a GiB. In transfers of 32 MiB it is 7 to 15, which is what an LSTM loses;
   but ResNet-50 loses some 50, and its plans made with less were the slower ones.)
2. For each transfer, whatever its size, because somebody has to ask for it, another thread wakes up and a core is
   interrupted. A loop of small ops runs in a thread that also asks for transfers of few bytes, as planned steps do, and
   then without these. (Sixteen measurements said 118 to 200 us. Transfers by the C library's threads, which do not need
   Python's lock, cost as much.)
Both are medians over turns, and the same for both directions. In each turn speeds are compared with those right before
and after it, because a shared machine changes its own. Beside other work, the speed of compute tells little of what a
byte costs: once it seemed to cost nothing, and plans moved whatever they could for as long as that was remembered. So
the result is a mean of what was measured and what is usual, each weighed by how sure it is (`likely`).
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from ebbtide.errors import SpillError
from ebbtide.run.tiers.disk import DiskTier
from ebbtide.run.tiers.transfers import Slot, Transfer

Direction = Literal["out", "back"]

STREAM_TURNS = 8
"""Turns with a stream of transfers."""
STREAM_SECONDS = 1.0
"""Seconds after which half of `STREAM_TURNS` are enough: on a busy machine each takes up to three times as long, and
whoever makes a first `Budget` there waits."""
SMALL_TURNS = 12
"""Turns with small transfers."""
SMALL_SECONDS = 0.5
"""Seconds after which half of `SMALL_TURNS` are enough."""
TRIPS = 8
"""Round trips in a turn with small transfers."""
STREAM_RATE_SECONDS = 0.03
"""How long the speed of compute is measured at a time where streams run beside it."""
SMALL_RATE_SECONDS = 0.01
"""How long the speed of compute is measured at a time where small transfers run beside it."""

USUAL_LOST = 2.1e-11
"""Seconds of compute that a byte cost as a rule, on the machines that this was written on."""
USUAL_SPREAD = 0.8e-11
"""The standard deviation of that from machine to machine, in seconds."""
DEVIATIONS = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of the median of normal samples, times the root of their number, in median distances from it."""


def lost_per_byte(tier: DiskTier, source: torch.UntypedStorage) -> float:
    """Seconds of compute lost for each byte of large transfers. Raises `SpillError` if bytes cannot be moved."""
    compute = _Compute(768, 8 << 20, STREAM_RATE_SECONDS)
    ways: tuple[Direction, ...] = ("out", "back")
    lost = []
    before = compute.rate()
    for _ in _turns(STREAM_TURNS, STREAM_SECONDS):
        for way in ways:
            with BusyLink(tier, source, way) as stream:
                rate = compute.rate()
            after = compute.rate()
            lost.append((1 - 2 * rate / (before + after)) / stream.bytes_per_second)
            before = after
    return likely(lost, USUAL_LOST, USUAL_SPREAD)


def likely(samples: Sequence[float], usual: float, spread: float) -> float:
    """What is likely, given what was measured and what is usual: their mean, each weighed by how sure it is; 0 or more.

    Args:
        samples: what was measured, one or more times.
        usual, spread: mean and standard deviation of what it is elsewhere.
    """
    median = statistics.median(samples)
    error = DEVIATIONS * statistics.median(abs(sample - median) for sample in samples) / math.sqrt(len(samples))
    return max(0.0, usual + (median - usual) * spread**2 / (spread**2 + error**2))


def lost_per_transfer(tier: DiskTier, source: torch.UntypedStorage) -> float:
    """Seconds of compute lost for each transfer of a small storage. Raises `SpillError` if bytes cannot be moved."""
    compute = _Compute(256, 128 << 10, SMALL_RATE_SECONDS)
    lost = []
    before = compute.rate()
    for _ in _turns(SMALL_TURNS, SMALL_SECONDS):
        start = time.perf_counter()
        loops = sum(_beside_trip(tier, source, compute) for _ in range(TRIPS))
        seconds = time.perf_counter() - start
        after = compute.rate()
        lost.append((seconds - loops * 2 / (before + after)) / (2 * TRIPS))
        before = after
    return max(statistics.median(lost), 0.0)


def _turns(most: int, seconds: float) -> Iterator[int]:
    """The numbers of so many turns, or of at least half of them once the time is up."""
    end = time.perf_counter() + seconds
    for turn in range(most):
        if 2 * turn >= most and time.perf_counter() > end:
            return
        yield turn


def _beside_trip(tier: DiskTier, source: torch.UntypedStorage, compute: _Compute) -> int:
    """Move ``source`` there and back, and compute meanwhile: how many loops."""
    slot = tier.write(source)
    try:
        loops = compute.until_end_of(slot)
        load = tier.read(slot)
        loops += compute.until_end_of(load)
    finally:
        tier.free(slot)
    return loops


class _Compute:
    """A loop like a step's: a product that fills the cores, and an element-wise op that fills the memory bus.

    Args:
        order: rows and columns of each matrix.
        length: elements of the vector.
        rate_seconds: how long its speed is measured at a time.
    """

    def __init__(self, order: int, length: int, rate_seconds: float) -> None:
        self._matrix = torch.ones(order, order, device="cpu")
        self._product = torch.empty(order, order, device="cpu")
        self._vector = torch.ones(length, device="cpu")
        self._rate_seconds = rate_seconds
        self._run()

    def _run(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
        self._vector.mul_(1.0)

    def rate(self) -> float:
        """Loops per second."""
        start = time.perf_counter()
        for count in itertools.count(1):
            self._run()
            taken = time.perf_counter() - start
            if taken > self._rate_seconds:
                return count / taken
        raise AssertionError

    def until_end_of(self, transfer: Transfer) -> int:
        """Go round at least once, and until a transfer has ended: how often. Raises `SpillError` if it failed."""
        loops = 0
        while not loops or not transfer.finished.is_open:
            self._run()
            loops += 1
        transfer.join()
        return loops


class BusyLink:
    """Keeps one direction busy from a thread of its own, two transfers at a time, until it is stopped."""

    def __init__(self, tier: DiskTier, source: torch.UntypedStorage, way: Direction) -> None:
        self._tier = tier
        self._source = source
        self._way = way
        self._stopped = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name="ebbtide-calibrate", daemon=True)
        self.bytes_per_second = 0.0

    def __enter__(self) -> BusyLink:
        self._slot = self._tier.write(self._source)
        self._slot.wait()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._tier.free(self._slot)
        if self._fault is not None:
            raise self._fault

    def _guarded(self) -> None:
        try:
            self._run()
        except SpillError as fault:
            self._fault = fault

    def _run(self) -> None:
        start = time.perf_counter()
        transfer = self._transfers()
        next(transfer)
        for count in itertools.count(1):
            next(transfer)
            self.bytes_per_second = count * self._source.nbytes() / (time.perf_counter() - start)
            if self._stopped.is_set():
                return

    def _transfers(self) -> Iterator[None]:
        """Yields each time that another transfer has ended; before the first, once both are queued."""
        if self._way == "back":
            load = self._tier.read(self._slot)
            while True:
                following = self._tier.read(self._slot)
                yield
                load.wait()
                load = following
        slots: list[Slot] = [self._tier.write(self._source)]
        try:
            while True:
                slots.append(self._tier.write(self._source))
                yield
                slots[0].wait()
                self._tier.free(slots.pop(0))
        finally:
            for slot in slots:
                self._tier.free(slot)
