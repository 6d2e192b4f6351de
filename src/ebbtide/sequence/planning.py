"""What is decided before a chain is run: where states may go, and by which schedule."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ebbtide.machine import Link
from ebbtide.run.tiers.disk import free_bytes
from ebbtide.sequence.choose import (
    ChainCosts,
    Choice,
    SlowMemory,
    best_multistage,
    disk_costs,
    hidden_interval,
    list_choices,
    predicted,
)
from ebbtide.sequence.codec import paying_share
from ebbtide.sequence.disk import PART_BYTES, StateDisk
from ebbtide.sequence.interval_control import IntervalController
from ebbtide.sequence.schedules import DISK, MEMORY, Multistage, Online, OnlineInMemory, Record, Schedule
from ebbtide.sequence.schedules.continued import Continued, resumed
from ebbtide.sequence.schedules.disk_revolve import TABLE_STEPS
from ebbtide.sequence.spill import SpillFiles
from ebbtide.sequence.store import unnoted
from ebbtide.sequence.transfers import time_transfers
from ebbtide.sequence.trial import (
    FEW_BLOCKS,
    MANY_BLOCKS_BYTES,
    WARM_SECONDS,
    CopyCosts,
    StepCosts,
    Trial,
    time_copy,
    time_first_steps,
    time_steps,
)

DISK_SHARE = 0.9
"""The share of the free space in the spill directory that a schedule may plan with."""
QUICKEST_DISK_SECONDS = 50e-6
"""The latency in seconds of a disk that no real one surpasses."""
QUICKEST_DISK_RATE = 1e10
"""The bandwidth in bytes per second of a disk that no real one surpasses."""
WORTHWHILE_SECONDS = 0.01
"""A disk is opened only where the quickest one would save this many seconds: to do so and to try it takes half."""
MEASURING_SHARE = 0.02
"""The share of a chain's time that measuring steps may take, and as much again measuring the disk beside steps."""
QUICKEST_CODEC = 1.5e9
"""Bytes per second that no codec surpasses. Where packing at this speed would not help, none is tried."""
LEAST_CODEC_BYTES = 1 << 16
"""States of fewer bytes are not compressed: a disk takes about as long for them whatever their size."""
MANY_COPIES = 5
"""To time copies into all blocks takes about this many copies of each."""
RECORDS_SECONDS = 13e-6
"""Seconds for each step of the chain that it takes to follow a schedule, and to know where states are."""
CODEC_GAIN = 0.97
"""States are compressed if the whole chain then takes less than this share of its time without."""

Records = Callable[[Callable[[int], bool]], Iterator[Record]]
"""Makes the records, given whether the chain has a step of some number."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequencePlan:
    """How a chain will be run.

    Attributes:
        records: makes the records of the schedule.
        choice: the schedule and what is expected of it; None where the length is not known.
        spills: whether states go to a disk.
        steps_took: function to be told how many steps of the first sweep took how many seconds.
        was_late: function to be told how long compute has waited for a copy out, and of how many states.
    """

    records: Records
    choice: Choice | None
    spills: bool = False
    steps_took: Callable[[int, float], None] = unnoted
    was_late: Callable[[float, int], None] = unnoted


def quickest(
    n: int,
    spill: SpillFiles,
    trial: Trial,
    *,
    reverse_factor: float,
    reverse_seconds: float | None = None,
) -> SequencePlan:
    """The quickest plan for ``n`` steps. If a disk has states of a run that was killed, it goes on from them.

    Args:
        n: number of steps.
        spill: where states may go; opened only where that may pay.
        trial: the chain's steps; they are tried only where that matters.
        reverse_factor: how much longer it takes to reverse a step, with what that runs forward itself.
        reverse_seconds: time of a step reversed, where it is known.

    Raises:
        SpillError: if nothing can be written to a disk.
    """
    began = time.perf_counter()
    slots = trial.slots
    there = list(spill.there)
    if not spill.names or (slots >= n - 1 and not there):
        choice = _quickest_of(list_choices(ChainCosts(n, trial.state_bytes, 0.0, 0.0), slots, ()))
        choice = dataclasses.replace(choice, seconds=math.nan)  # nothing was measured, as there is nothing to decide
        return SequencePlan(lambda _: choice.schedule.records(), choice)
    copy = time_copy(trial, min(slots, FEW_BLOCKS))
    step = time_first_steps(trial)
    ways = _ways(trial, copy, step, 0.0)

    def chosen(tiers: Sequence[SlowMemory]) -> Choice:
        reverse = reverse_factor * step.seconds if reverse_seconds is None else reverse_seconds
        costs = ChainCosts(n, trial.state_bytes, step.seconds, reverse + RECORDS_SECONDS)
        return _best(costs, ways, tiers, there)

    def expected(choice: Choice) -> Choice:
        """``choice`` with the time that choosing has taken, and that of blocks used for the first time."""
        fresh = max(choice.schedule.slots.get(MEMORY, 0) - trial.blocks.made, 0)
        spent_seconds = time.perf_counter() - began + fresh * copy.first_seconds
        return dataclasses.replace(choice, seconds=choice.seconds + spent_seconds)

    choice, least_seconds = chosen(()), chosen((_quickest_disk(),)).seconds
    if spill.named is None and choice.seconds - least_seconds < WORTHWHILE_SECONDS:
        choice = expected(choice)
        return SequencePlan(lambda _: choice.schedule.records(), choice)
    seconds = MEASURING_SHARE * least_seconds
    step = time_steps(trial, max(seconds, WARM_SECONDS))
    ways = _ways(trial, copy, step, seconds)
    tiers = [_measure_disk(disk, trial, step, seconds, chosen) for disk in spill.open()]
    choice = expected(chosen(tiers))
    schedule = choice.schedule
    if not isinstance(schedule, Multistage) or not (schedule.parts or there):  # nothing goes to a disk beside steps
        spills = uses_disks(schedule)
        left = there if spills else []
        return SequencePlan(lambda _: resumed(schedule.records(), left, DISK), choice, spills)
    tier = next(tier for tier in tiers if tier.name == schedule.tier)
    return _controlled(schedule, choice, tier, trial, step.seconds, there)


def uses_disks(schedule: Schedule) -> bool:
    """Whether ``schedule`` stores states anywhere but in memory, be they without a byte."""
    return any(count for tier, count in schedule.slots.items() if tier != MEMORY)


class _Way(NamedTuple):
    """How many slots in memory may be taken, and the seconds that a copy of a state takes then."""

    slots: int
    copy_seconds: float


def _ways(trial: Trial, copy: CopyCosts, step: StepCosts, seconds: float) -> list[_Way]:
    """The numbers of slots that may be taken.

    Few of them stay in the processor's caches, so that it may be quicker to run more steps again and leave the others.

    Args:
        trial: the chain's states.
        copy: cost of copies with few slots, one after another.
        step: cost of steps, and of copies between them.
        seconds: time that timing copies with all slots may take.
    """
    few_seconds = max(copy.seconds, step.copy_seconds)
    many = min(trial.slots, MANY_BLOCKS_BYTES // max(trial.state_bytes, 1))
    if many <= FEW_BLOCKS or many * (copy.first_seconds + MANY_COPIES * copy.seconds) > seconds:
        return [_Way(trial.slots, few_seconds)]
    return [_Way(trial.slots, max(time_copy(trial, many).seconds, few_seconds)), _Way(FEW_BLOCKS, few_seconds)]


def _quickest_of(choices: Sequence[Choice]) -> Choice:
    return min(choices, key=lambda choice: choice.seconds)  # the first of equals: the simplest


def _best(costs: ChainCosts, ways: Sequence[_Way], tiers: Sequence[SlowMemory], there: Sequence[int]) -> Choice:
    """The quickest choice over ``ways``; of a run that goes on, one that uses the states that are ``there``.

    Time for copies comes on top of ``costs``.
    """
    choices = []
    for slots, copy_seconds in ways:
        with_copies = dataclasses.replace(costs, reverse_seconds=costs.reverse_seconds + copy_seconds)
        best = best_multistage(with_copies, slots, tiers[0]) if there and tiers and slots >= 2 else None
        if best is not None:
            choices.append(best)
        elif tiers and _can_continue(there):
            choices.append(_continued(with_copies, slots, tiers, there))
        else:
            choices += list_choices(with_copies, slots, tiers)
    return _quickest_of(choices)


def _can_continue(there: Sequence[int]) -> bool:
    """Whether what led to these states can be reversed from them alone: those of a given schedule may lie anywhere."""
    parts = (stop - start for start, stop in itertools.pairwise(there))
    return bool(there) and there[0] == 0 and max(parts, default=0) <= TABLE_STEPS


def _continued(costs: ChainCosts, slots: int, tiers: Sequence[SlowMemory], there: Sequence[int]) -> Choice:
    """What is quickest after the last state that is ``there``: no other schedule would have stored just these."""
    rest = dataclasses.replace(costs, n=costs.n - there[-1])
    tail = _quickest_of(list_choices(rest, slots, tiers))
    schedule = Continued(tuple(there), tail.schedule, slots, disk_costs(costs, tiers[0]), tiers[0].name)
    return predicted(schedule, costs.state_bytes, schedule.seconds(tail.seconds))


def _quickest_disk() -> SlowMemory:
    """A disk that no real one surpasses."""
    out, back = (
        Link(*way, QUICKEST_DISK_SECONDS, QUICKEST_DISK_RATE, QUICKEST_DISK_RATE)
        for way in ((MEMORY, DISK), (DISK, MEMORY))
    )
    return SlowMemory(DISK, out, back)


def _controlled(
    schedule: Multistage, choice: Choice, tier: SlowMemory, trial: Trial, step_seconds: float, there: Sequence[int]
) -> SequencePlan:
    """``schedule``, with intervals that follow what steps and the disk do, but for those of states that are there."""
    n = schedule.n
    room = tier.slots(trial.state_bytes)
    write_seconds = tier.out.seconds(trial.state_bytes)
    loss_seconds = tier.out.lost_seconds(trial.state_bytes)
    controller = IntervalController(
        schedule.interval,
        step_seconds + loss_seconds / schedule.interval,
        1 if room is None else -(-n // max(room, 1)),
        max(write_seconds - schedule.interval * step_seconds, 0.0),
    )

    def interval(step: int) -> int:
        place = bisect.bisect_right(there, step)
        return there[place] - step if place < len(there) else controller.interval(step)

    followed = Online(schedule.states, interval, schedule.tier)

    def records(more: Callable[[int], bool]) -> Iterator[Record]:
        return resumed(followed.records(more, n, max(there, default=-1)), there, schedule.tier)

    return SequencePlan(records, choice, True, controller.steps_took, controller.was_late)


def online(spill: SpillFiles, trial: Trial) -> SequencePlan:
    """A plan for a chain of unknown length. Raises `SpillError` if nothing can be written to the first disk."""
    slots = trial.slots
    if not spill.names or slots < 2:
        return SequencePlan(OnlineInMemory(slots).records, None)
    disks = spill.open()
    step_seconds = time_first_steps(trial).seconds
    link = time_transfers(disks[0], trial, step_seconds, 0.0, None, seconds=0.0).out
    controller = IntervalController(hidden_interval(step_seconds, link.seconds(trial.state_bytes)), step_seconds)
    schedule = Online(slots, controller.interval, disks[0].name)
    return SequencePlan(schedule.records, None, True, controller.steps_took, controller.was_late)


def _as_if_packed(way: Link) -> Link:
    """``way`` at the speed of the quickest codec, if that is quicker; compute loses no less beside it."""
    rate = max(way.bandwidth_bytes_per_second, QUICKEST_CODEC)
    slowdown = way.compute_slowdown * rate / way.bandwidth_bytes_per_second
    return dataclasses.replace(way, bandwidth_bytes_per_second=rate, compute_slowdown=slowdown)


def _measure_disk(
    disk: StateDisk,
    trial: Trial,
    step: StepCosts,
    seconds: float,
    chosen: Callable[[Sequence[SlowMemory]], Choice],
) -> SlowMemory:
    """The disk as measured; from then on it compresses states if the chain takes less time so."""
    capacity_bytes = int(DISK_SHARE * free_bytes(disk.directory))
    plain = time_transfers(disk, trial, step.seconds, step.copy_seconds, capacity_bytes, seconds=seconds)
    ways = (plain.out, plain.back)
    if disk.codec is None or trial.state_bytes < LEAST_CODEC_BYTES:
        return plain
    out, back = map(_as_if_packed, ways)
    if chosen([SlowMemory(disk.name, out, back, capacity_bytes)]).seconds >= CODEC_GAIN * chosen([plain]).seconds:
        return plain
    (block,) = trial.samples(1)
    sample = block.memory()[:PART_BYTES]
    share = paying_share(disk.codec, sample, *(way.seconds(len(sample)) for way in ways))
    trial.blocks.give_back(block)
    if share is None:
        return plain
    disk.share = share
    packed = time_transfers(disk, trial, step.seconds, step.copy_seconds, capacity_bytes, seconds=seconds)
    if chosen([packed]).seconds < CODEC_GAIN * chosen([plain]).seconds:
        return packed
    disk.share = 0.0
    return plain
