"""Measure what a plan must know of a device with streams: the link to each of its slower memories.

Everything goes through the tiers that runs will use. Times are those of the host clock from an idle device to an idle
device, so they hold the few microseconds of starting a copy, which a plan has to count, too. What compute loses while a
copy runs is not measured: on a device with copy engines it is the share of memory bandwidth that the link takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from ebbtide.machine import Link, Machine, Tier
from ebbtide.run.backends.base import Backend
from ebbtide.run.calibrate import slope
from ebbtide.run.tiers.transfers import SlowTier

SIZES_BYTES = tuple(mib << 20 for mib in (1, 4, 16, 64))
LATENCY_BYTES = 4096
REPEATS = 5


def measure_links(
    backend: Backend, tiers: Mapping[str, SlowTier], capacities_bytes: Mapping[str, int | None], *, name: str
) -> Machine:
    """A machine whose fast tier is the device of ``backend``, with the links to ``tiers`` as they are now.

    Raises:
        SpillError: if a tier cannot be used.
    """
    fast = str(backend.device)
    links = [link for tier in tiers for link in _links(backend, fast, tier, tiers[tier])]
    slow = [Tier(tier, tiers[tier].kind, capacities_bytes.get(tier)) for tier in tiers]
    return Machine(name, fast, (Tier(fast, "device"), *slow), tuple(links))


def _links(backend: Backend, fast: str, name: str, tier: SlowTier) -> tuple[Link, Link]:
    _trip(backend, tier, SIZES_BYTES[-1])  # memory is taken, threads are started
    small = [_trip(backend, tier, LATENCY_BYTES) for _ in range(4 * REPEATS)]
    large = {size: [_trip(backend, tier, size) for _ in range(REPEATS)] for size in SIZES_BYTES}
    both = statistics.median(_both_ways(backend, tier, SIZES_BYTES[-1]) for _ in range(REPEATS))
    made = []
    for way, (source, target) in enumerate(((fast, name), (name, fast))):
        latency = statistics.median(trip[way] for trip in small)
        rate = slope({size: statistics.median(trip[way] for trip in trips) for size, trips in large.items()}, latency)
        made.append(Link(source, target, latency, rate, min(rate, SIZES_BYTES[-1] / both)))
    return made[0], made[1]


def _trip(backend: Backend, tier: SlowTier, size_bytes: int) -> tuple[float, float]:
    """Seconds out and back."""
    storage = backend.allocate(size_bytes, 0)
    slots = []

    def write() -> None:
        slots.append(tier.write(storage))
        slots[0].wait()

    out = _timed(backend, write)
    back = _timed(backend, lambda: tier.read(slots[0]).wait())
    tier.free(slots[0])
    return out, back


def _both_ways(backend: Backend, tier: SlowTier, size_bytes: int) -> float:
    """Seconds of one transfer in each direction at once."""
    storage = backend.allocate(size_bytes, 0)
    there = tier.write(storage)
    _timed(backend, there.wait)

    def run() -> None:
        slot, load = tier.write(storage), tier.read(there)
        slot.wait()
        load.wait()
        tier.free(slot)

    seconds = _timed(backend, run)
    tier.free(there)
    return seconds


def _timed(backend: Backend, run: Callable[[], object]) -> float:
    backend.finish(backend.compute())
    began = time.perf_counter()
    run()
    backend.finish(backend.compute())
    return time.perf_counter() - began
