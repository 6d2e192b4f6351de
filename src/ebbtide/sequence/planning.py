"""What is decided before a chain is run: where states may go, and by which schedule."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ebbtide.errors import SequenceError
from ebbtide.run.tiers.base import PART_BYTES
from ebbtide.run.tiers.disk import free_bytes
from ebbtide.sequence.choose import Choice, SlowMemory, best_multistage, choose, hidden_interval, predicted
from ebbtide.sequence.codec import codec_for, paying_share
from ebbtide.sequence.disk import StateDisk
from ebbtide.sequence.named import Identity, NamedDisk, resumed
from ebbtide.sequence.pace import Pace, Trial, time_copy, time_step, time_transfers
from ebbtide.sequence.schedules import DISK, Multistage, Online, OnlineInMemory, Record
from ebbtide.sequence.store import unnoted

DISK_SHARE = 0.9
"""Part of the free space in the spill directory that a schedule may plan with."""
MEASURING_SHARE = 0.02
"""Measuring the disk beside steps may take this part of what the chain will."""
QUICKEST_CODEC = 1.5e9
"""Bytes per second: nothing is packed or unpacked faster, so that a faster disk need not be tried."""
RECORDS_SECONDS = 10e-6
"""To follow a schedule takes about so long for each step of the chain."""
CODEC_GAIN = 0.97
"""States are compressed if the whole chain then takes less than this part of the time."""

Spill = str | Path | Sequence[str | Path] | None
Records = Callable[[Callable[[int], bool]], Iterator[Record]]
"""Makes the records, given whether the chain has a step of some number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """How a chain will be run.

    Attributes:
        records: makes the records.
        choice: what is expected; None where the length is not known.
        steps_took: to be told how many steps of the first sweep took how many seconds.
        was_late: to be told how long compute has waited for a copy out.
    """

    records: Records
    choice: Choice | None
    steps_took: Callable[[int, float], None] = unnoted
    was_late: Callable[[float], None] = unnoted


@contextlib.contextmanager
def open_spill(directories: Spill, *, checksum: bool, item_bytes: int) -> Iterator[tuple[StateDisk, ...]]:
    """A spill file in each directory while the context lasts; called ``disk``, ``disk2``, ...

    Raises:
        SpillError: if one cannot be used.
    """
    given = [directories] if isinstance(directories, (str, Path)) else list(directories or ())
    with contextlib.ExitStack() as stack:
        disks = []
        for number, directory in enumerate(given, start=1):
            name = DISK if number == 1 else f"{DISK}{number}"
            disk = StateDisk(directory, checksum=checksum, name=name, codec=codec_for(item_bytes))
            disks.append(stack.enter_context(contextlib.closing(disk)))
        yield tuple(disks)


@contextlib.contextmanager
def open_named(
    directories: Spill, run: str, identity: Identity, *, state_bytes: int, item_bytes: int
) -> Iterator[tuple[NamedDisk]]:
    """The spill file of a named run. It is deleted at the end of the context, unless that is an error.

    Raises:
        SequenceError: if there is not one directory, or the run cannot go on.
        SpillError: if the directory cannot be used.
    """
    if not isinstance(directories, (str, Path)):
        raise SequenceError(f"name={run!r} keeps states in the spill directory; give one directory as spill=...")
    disk = NamedDisk(directories, run, identity, state_bytes, codec_for(item_bytes))
    with contextlib.closing(disk):
        yield (disk,)
        disk.remove()


def quickest(
    n: int,
    disks: Sequence[StateDisk],
    trial: Trial,
    *,
    reverse_factor: float,
    reverse_seconds: float | None = None,
) -> Course:
    """The quickest course for ``n`` steps. If a disk has states of a run that was killed, it goes on from them.

    Args:
        n: number of steps.
        disks: where states may go, fastest first.
        trial: the chain's steps; they are tried only where that matters.
        reverse_factor: how much longer it takes to reverse a step, with what that runs forward itself.
        reverse_seconds: what it takes, where it is known.

    Raises:
        SpillError: if nothing can be written to a disk.
    """
    slots = trial.slots
    memory = (slots + 1) * max(trial.state_bytes, 1)
    there = list(disks[0].there) if disks and isinstance(disks[0], NamedDisk) else []
    if not disks or (slots >= n - 1 and not there):
        choice = choose(n, trial.state_bytes, 0.0, 0.0, memory)
        choice = dataclasses.replace(choice, seconds=math.nan)  # nothing was measured, as there is nothing to decide
        return Course(lambda _: choice.schedule.records(), choice)
    step_seconds = time_step(trial)
    copy_seconds = time_copy(trial)
    reverse_seconds = reverse_factor * step_seconds if reverse_seconds is None else reverse_seconds
    reverse_seconds += copy_seconds + RECORDS_SECONDS
    seconds = MEASURING_SHARE * n * (step_seconds + reverse_seconds)

    def chosen(tiers: Sequence[SlowMemory]) -> Choice:
        return choose(n, trial.state_bytes, step_seconds, reverse_seconds, memory, tiers)

    tiers = [_measured(disk, trial, step_seconds, copy_seconds, seconds, chosen) for disk in disks]
    choice = chosen(tiers)
    if there and slots >= 2:
        best = best_multistage(n, slots, trial.state_bytes, step_seconds, reverse_seconds, tiers[0])
        choice = choice if best is None else predicted(best[0], trial.state_bytes, best[1])
    schedule = choice.schedule
    if not isinstance(schedule, Multistage) or not (schedule.parts or there):  # nothing goes to a disk beside steps
        return Course(lambda _: schedule.records(), choice)
    tier = next(tier for tier in tiers if tier.name == schedule.tier)
    room = tier.slots(trial.state_bytes)
    write_seconds = tier.out.seconds(trial.state_bytes)
    loss_seconds = write_seconds * tier.out.compute_slowdown
    pace = Pace(
        schedule.interval,
        step_seconds + loss_seconds / schedule.interval,
        1 if room is None else -(-n // max(room, 1)),
        max(write_seconds - schedule.interval * step_seconds, 0.0),
    )

    def interval(step: int) -> int:
        place = bisect.bisect_right(there, step)
        return there[place] - step if place < len(there) else pace.interval(step)

    followed = Online(slots, interval, schedule.tier)

    def records(more: Callable[[int], bool]) -> Iterator[Record]:
        return resumed(followed.records(more, n), there, schedule.tier)

    return Course(records, choice, pace.steps_took, pace.was_late)


def online(disks: Sequence[StateDisk], trial: Trial) -> Course:
    """A course for a chain of unknown length. Raises `SpillError` if nothing can be written to the first disk."""
    slots = trial.slots
    if not disks or slots < 2:
        return Course(OnlineInMemory(slots).records, None)
    step_seconds = time_step(trial)
    link = time_transfers(disks[0], trial, step_seconds, 0.0, None, seconds=0.0).out
    pace = Pace(hidden_interval(step_seconds, link.seconds(trial.state_bytes)), step_seconds)
    return Course(Online(slots, pace.interval, disks[0].name).records, None, pace.steps_took, pace.was_late)


def _measured(
    disk: StateDisk,
    trial: Trial,
    step_seconds: float,
    copy_seconds: float,
    seconds: float,
    chosen: Callable[[Sequence[SlowMemory]], Choice],
) -> SlowMemory:
    """The disk as measured; from then on it compresses states if the chain takes less time so."""
    capacity_bytes = int(DISK_SHARE * free_bytes(disk.directory))
    plain = time_transfers(disk, trial, step_seconds, copy_seconds, capacity_bytes, seconds=seconds)
    ways = (plain.out, plain.back)
    if disk.codec is None or max(way.bandwidth_bytes_per_second for way in ways) > QUICKEST_CODEC:
        return plain
    sample = trial.sample(disk.congruence_bytes).memory()[:PART_BYTES]
    share = paying_share(disk.codec, sample, *(way.seconds(len(sample)) for way in ways))
    if share is None:
        return plain
    disk.share = share
    packed = time_transfers(disk, trial, step_seconds, copy_seconds, capacity_bytes, seconds=seconds)
    if chosen([packed]).seconds < CODEC_GAIN * chosen([plain]).seconds:
        return packed
    disk.share = 0.0
    return plain
