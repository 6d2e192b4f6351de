"""Measure what a plan must know of this machine: the links between RAM and the spill directory.

NOTE [What is measured]
Everything goes through the tier that runs will use, and between it and the arena where planned steps have their
tensors: threads, alignment and the size of pages all count. (From and to pages of 4 KiB the same disk did 3.0 GiB/s out
and 1.5 back, from huge ones 5.7 and 2.5.)
1. Latency is the median of single transfers of 4 KiB. Bandwidth is the slope, by least squares of relative errors, of
   the medians of single transfers of 1 to 64 MiB above that latency. A slow disk has no time for the larger sizes.
2. Duplex bandwidth: both directions are kept busy, and each one's bytes are counted.
3. What transfers cost compute, for each byte and for each transfer: see `ebbtide.run.beside`.
4. What an op that runs again costs besides its own time: see `ebbtide.run.replay_cost`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ebbtide.arguments import as_directory
from ebbtide.errors import RecordError, SpillError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.run import allocator, beside
from ebbtide.run.beside import BusyLink, Direction
from ebbtide.run.cache import cache_path
from ebbtide.run.fits import LATENCY_BYTES, REPEATS, SIZES_BYTES, rates
from ebbtide.run.replay_cost import lost_per_replay
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES, DiskTier, check_directory, free_bytes
from ebbtide.run.tiers.memory import bytes_of, take_memory
from ebbtide.run.tiers.queued import QueuedTier
from ebbtide.units import format_bytes

Progress = Callable[[float, str], None]
"""Called with the fraction that is done, 0 to 1, and what is being measured."""

METHOD = 9
"""Part of the cache's key: higher when the measurement, or the disk tier's way of transfer, changes."""
LATENCY_REPEATS = 25
"""Round trips of `LATENCY_BYTES` that are timed, as far as there is time."""
STREAM_BYTES = 16 << 20
"""Bytes of the largest transfer that streams are made of."""
STREAM_TRANSFER_SECONDS = 0.05
"""Seconds of the longest transfer that streams are made of, so that they stop soon on a slow disk, too."""
SIZE_SECONDS = 0.3
"""Seconds for one size, and the longest that a pair of transfers of the next size may be expected to take."""
STREAM_SECONDS = 0.35
"""Seconds for which both directions are kept busy at once."""
SMALL_BYTES = 64 << 10
"""Bytes of transfers so small that what they cost compute is the same for all of them."""
FREE_BYTES = 4 * SIZES_BYTES[-1]
"""Bytes wanted on the disk: the largest transfer and what two streams have under way, with room to spare."""

_log = logging.getLogger(__name__)


def machine_for(spill: str | Path) -> Machine:
    """This machine with ``spill`` as its disk: from the cache, or calibrated now, which takes 2 to 3 s.

    Raises:
        SpillError: if the directory cannot be used.
        ArgumentError: if ``spill`` is no path; it is a `ValueError`.
    """
    directory = as_directory("spill", spill)
    path = _cache_path(directory)
    if path is not None and os.path.exists(path):
        try:
            return Machine.load(path)
        except RecordError as fault:
            _log.warning("%s; calibrating again", fault)
    return calibrate(directory)


def calibrate(spill: str | Path, *, progress: Progress | None = None) -> Machine:
    """Measure this machine with ``spill`` as its disk, and remember the answer for `machine_for`.

    Raises:
        SpillError: if the directory cannot be used, or has less than `FREE_BYTES` free.
        ArgumentError: if ``spill`` is no path; it is a `ValueError`.
    """
    directory = as_directory("spill", spill)
    report = progress or _report_nothing
    with contextlib.closing(DiskTier(directory)) as tier:
        free = free_bytes(tier.directory)
        if free < FREE_BYTES:
            raise SpillError(
                f"spill directory {tier.directory} has {format_bytes(free)} free, and calibrating needs "
                f"{format_bytes(FREE_BYTES)}; free some space there, or choose another with spill=..."
            )
        allocator.reserve_arena()
        links = _measure(tier, report)
    report(0.95, "ops that run again")
    replay_seconds = lost_per_replay()
    allocator.trim()  # what was measured with is in nobody's budget
    machine = Machine(
        name=f"{platform.machine()}, {os.cpu_count()} CPUs",
        fast="ram",
        tiers=(Tier("ram", "device"), Tier(tier.name, tier.kind)),
        links=links,
        replay_seconds=replay_seconds,
    )
    _remember(machine, _cache_path(directory))
    report(1.0, "done")
    return machine


def _measure(tier: DiskTier, report: Progress) -> tuple[Link, Link]:
    source = _random_storage(SIZES_BYTES[-1])
    report(0.0, "latency")
    small = _timed(tier, source, LATENCY_BYTES, LATENCY_REPEATS)
    large: dict[Direction, dict[int, list[float]]] = {"out": {}, "back": {}}
    short_bytes = SIZES_BYTES[0]
    expected_seconds = 0.0
    for size_bytes in SIZES_BYTES:
        if expected_seconds > SIZE_SECONDS:
            break
        report(0.1 + 0.1 * len(large["out"]), f"transfers of {format_bytes(size_bytes)}")
        times = _timed(tier, source, size_bytes, REPEATS)
        for way in large:
            large[way][size_bytes] = times[way]
        medians = [statistics.median(seconds) for seconds in times.values()]
        expected_seconds = 4 * sum(medians)  # each size is four times the one before
        if max(medians) <= STREAM_TRANSFER_SECONDS:
            short_bytes = size_bytes
    streamed = _part(source, min(STREAM_BYTES, short_bytes))
    report(0.5, "both directions at once")
    duplex = _duplex(tier, streamed)
    report(0.7, "compute beside transfers")
    lost_per_byte = beside.lost_per_byte(tier, streamed)
    report(0.9, "compute beside many transfers")
    lost_per_transfer = beside.lost_per_transfer(tier, _part(source, SMALL_BYTES))

    def link(way: Direction, origin: str, target: str) -> Link:
        latency, bandwidth = rates(small[way], large[way])
        slowdown, both_ways = min(lost_per_byte * bandwidth, 1.0), min(duplex[way], bandwidth)
        return Link(origin, target, latency, bandwidth, both_ways, slowdown, lost_per_transfer)

    return link("out", "ram", tier.name), link("back", tier.name, "ram")


def _timed(tier: DiskTier, source: torch.UntypedStorage, size_bytes: int, repeats: int) -> dict[Direction, list[float]]:
    """Seconds of single transfers in each direction."""
    part = _part(source, size_bytes)
    seconds: dict[Direction, list[float]] = {"out": [], "back": []}
    end = time.perf_counter() + SIZE_SECONDS
    for _ in range(repeats):
        out, back = time_trip(tier, part)
        seconds["out"].append(out)
        seconds["back"].append(back)
        if time.perf_counter() > end:
            break
    return seconds


def time_trip(tier: QueuedTier, storage: torch.UntypedStorage) -> tuple[float, float]:
    """Seconds to ``tier`` and of the way back. Raises `SpillError` if the bytes cannot be moved."""
    start = time.perf_counter()
    slot = tier.write(storage)
    slot.wait()
    written = time.perf_counter()
    tier.read(slot).wait()
    end = time.perf_counter()
    tier.free(slot)
    return written - start, end - written


def _duplex(tier: DiskTier, source: torch.UntypedStorage) -> dict[Direction, float]:
    with BusyLink(tier, source, "out") as out, BusyLink(tier, source, "back") as back:
        time.sleep(STREAM_SECONDS)
    return {"out": out.bytes_per_second, "back": back.bytes_per_second}


def _random_storage(size_bytes: int) -> torch.UntypedStorage:
    """Bytes that no disk can compress, made without touching torch's generators."""
    storage = take_memory(size_bytes)
    piece = torch.frombuffer(bytearray(os.urandom(1 << 20)), dtype=torch.uint8)
    bytes_of(storage).view(-1, 1 << 20).copy_(piece)
    return storage


def _part(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
    """A storage of the first ``size_bytes`` of another, from where a block of any disk may begin."""
    part = take_memory(size_bytes, 0, PLACE_ALIGNMENT_BYTES)
    part.copy_(storage[:size_bytes])
    return part


def _cache_path(spill: Path) -> Path | None:
    """Where the answer for this machine and this directory is kept; None if nowhere."""
    check_directory(spill)
    real = spill.resolve()
    device = real.stat().st_dev
    mount = next(path for path in (real, *real.parents) if path.is_mount() or path == path.parent)
    key = json.dumps([METHOD, platform.node(), os.cpu_count(), device, str(mount), str(real)])
    return cache_path(f"machine-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")


def _remember(machine: Machine, path: Path | None) -> None:
    """Write the cache file at once, so that nobody reads half of it."""
    if path is None:
        _log.warning("the calibration is not remembered: there is no home directory, and no temporary one of one's own")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except OSError as fault:
        _log.warning("the calibration is not remembered: %s cannot be written (%s)", path, fault.strerror)


def _report_nothing(done: float, doing: str) -> None:
    """Nobody wants to know."""
