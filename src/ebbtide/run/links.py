"""Measure what a plan must know of a device with streams: the link to each of its slower memories.

Everything goes through the tiers that runs will use. Times are those of the compute stream, which waits for transfers
as in a step, by the device's clock: the host queues a transfer long before, and what that takes it costs no step. What
compute loses while a copy runs is not measured: on a device with copy engines it is the share of memory bandwidth that
the link takes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from ebbtide.machine import Link, Machine, Tier
from ebbtide.observe.clock import Clock
from ebbtide.run import fits
from ebbtide.run.backends.base import Backend
from ebbtide.run.backends.cuda import CudaBackend, CudaClock, CudaMemory
from ebbtide.run.tiers import DeviceTiers, SlowTier, StreamTier

SHARE = 4
"""The largest transfer is at most this part of the memory on either side: two of them are there at once."""


def machine_on(device: torch.device, tiers: Mapping[str, SlowTier]) -> Machine:
    """What plans for ``device`` must know: its links to host memory and to the disk, measured now.

    Raises:
        SpillError: if one of them cannot be used.
    """
    shared = {name: tier for name, tier in tiers.items() if isinstance(tier, DeviceTiers) and tier.kind != "device"}
    slow = {name: tier.of(device) for name, tier in shared.items()}
    capacities = {name: tier.capacity_bytes for name, tier in slow.items() if isinstance(tier, StreamTier)}
    backend, clock, free = CudaBackend(device.index), CudaClock(device), CudaMemory(device).free_bytes()
    name = torch.cuda.get_device_name(device)
    return measure_links(backend, clock, slow, capacities, name=name, free_bytes=free)


def measure_links(
    backend: Backend,
    clock: Clock,
    tiers: Mapping[str, SlowTier],
    capacities_bytes: Mapping[str, int | None],
    *,
    name: str,
    free_bytes: int = sys.maxsize,
) -> Machine:
    """A machine whose fast tier is the device of ``backend``, with the links to ``tiers`` as they are now.

    Args:
        backend: the device.
        clock: the clock of its compute stream.
        tiers: by name.
        capacities_bytes: of each tier that has one.
        name: the machine's name.
        free_bytes: what may be taken of the device's memory.

    Raises:
        SpillError: if a tier cannot be used.
    """
    fast, watch, links = str(backend.device), _Stopwatch(backend, clock), list[Link]()
    for tier_name, tier in tiers.items():
        capacity_bytes = capacities_bytes.get(tier_name)
        most_bytes = (free_bytes if capacity_bytes is None else min(free_bytes, capacity_bytes)) // SHARE
        sizes_bytes = [size for size in fits.SIZES_BYTES if size <= most_bytes] or [fits.SIZES_BYTES[0]]
        links += _links(watch, fast, tier_name, tier, sizes_bytes)
    slow = [Tier(tier, tiers[tier].kind, capacities_bytes.get(tier)) for tier in tiers]
    return Machine(name, fast, (Tier(fast, "device"), *slow), tuple(links))


class _Stopwatch:
    """Times what the compute stream does, from an idle device to an idle device."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self.backend = backend
        self._clock = clock

    def seconds(self, run: Callable[[], object]) -> float:
        """What ``run`` takes the device."""
        self.backend.finish(self.backend.compute())
        self._clock.fall_behind()
        began = self._clock.mark()
        run()
        ended = self._clock.mark()
        self.backend.finish(self.backend.compute())
        return self._clock.seconds(began, ended)


def _links(watch: _Stopwatch, fast: str, name: str, tier: SlowTier, sizes_bytes: Sequence[int]) -> tuple[Link, Link]:
    largest = sizes_bytes[-1]
    _trip(watch, tier, largest)  # memory is taken, threads are started
    small = [_trip(watch, tier, fits.LATENCY_BYTES) for _ in range(4 * fits.REPEATS)]
    large = {size: [_trip(watch, tier, size) for _ in range(fits.REPEATS)] for size in sizes_bytes}
    both = statistics.median(_both_ways(watch, tier, largest) for _ in range(fits.REPEATS))
    made = []
    for way, (source, target) in enumerate(((fast, name), (name, fast))):
        by_size = {size: [trip[way] for trip in trips] for size, trips in large.items()}
        latency, rate = fits.rates([trip[way] for trip in small], by_size)
        made.append(Link(source, target, latency, rate, min(rate, largest / both)))
    return made[0], made[1]


def _trip(watch: _Stopwatch, tier: SlowTier, size_bytes: int) -> tuple[float, float]:
    """Seconds out and back."""
    storage = watch.backend.allocate(size_bytes, 0)
    slots = []

    def write() -> None:
        slots.append(tier.write(storage))
        slots[0].wait()

    out = watch.seconds(write)
    back = watch.seconds(lambda: tier.read(slots[0]).wait())
    tier.free(slots[0])
    return out, back


def _both_ways(watch: _Stopwatch, tier: SlowTier, size_bytes: int) -> float:
    """Seconds of one transfer in each direction at once."""
    storage = watch.backend.allocate(size_bytes, 0)
    there = tier.write(storage)
    watch.seconds(there.wait)

    def run() -> None:
        slot, load = tier.write(storage), tier.read(there)
        slot.wait()
        load.wait()
        tier.free(slot)

    seconds = watch.seconds(run)
    tier.free(there)
    return seconds
