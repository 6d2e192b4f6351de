"""Choice of the schedule that reverses a chain soonest: each is predicted from measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from ebbtide.arguments import as_duration, as_seconds, as_size, as_whole, check_instance
from ebbtide.errors import SequenceError
from ebbtide.machine import Link, Machine
from ebbtide.sequence.blocks import bytes_on_disk
from ebbtide.sequence.schedules import (
    MEMORY,
    DiskCosts,
    HRevolve,
    Level,
    Multistage,
    PeriodicDiskRevolve,
    Revolve,
    Schedule,
    StoreAll,
)
from ebbtide.sequence.schedules.disk_revolve import longest_first
from ebbtide.sequence.schedules.h_revolve import table_work
from ebbtide.units import format_bytes, format_seconds

MOST_TABLE_TERMS = 50_000_000
"""Tables of H-Revolve are made while choosing only up to this many terms, which take about a tenth of a second."""
TABLE_SECONDS_PER_ROW = 60e-6
"""Seconds that tables of H-Revolve take at least, for each step and level."""
LONGEST_PERIOD = 14_000
"""The period of Periodic-Disk-Revolve is looked for only if it begins with periods of up to so many steps."""
PERIOD_SECONDS = 1.0
"""Seconds that looking for the period takes where it begins with periods of up to `LONGEST_PERIOD`."""
TABLE_TIME_SHARE = 0.02
"""The share of a chain's predicted time without synchronous disks that looking for what they allow may take."""
INTERVALS = 16
"""All intervals up to this many steps are tried, and of longer ones this many to each power of e."""
SMALL_SHARE = 0.01
"""No interval is tried only because transfers take from compute a smaller share of its time than this."""
MOST_STEPS = 2.0**63
"""The longest interval, in steps."""
ALIKE_SHARE = 0.03
"""Intervals whose predicted times differ by a smaller share than this count as equal: times are not known better."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlowMemory:
    """A slow tier, as a chain of states sees it. These take whole blocks there: all that chains use are disks.

    Attributes:
        name: what schedules call this tier.
        out, back: the links to this tier and from it.
        capacity_bytes: bytes that fit there, or None for any amount.
    """

    name: str
    out: Link
    back: Link
    capacity_bytes: int | None = None

    def slots(self, state_bytes: int) -> int | None:
        """How many states of ``state_bytes`` bytes fit there; None for any number."""
        return None if self.capacity_bytes is None else self.capacity_bytes // bytes_on_disk(state_bytes)


def slow_memories(machine: Machine) -> tuple[SlowMemory, ...]:
    """The slow tiers of a machine, as `choose` takes them.

    Args:
        machine: as `ebbtide.run.calibrate.machine_for` measures it, or one from a file.

    Returns:
        One for each slow tier, that from which states come back fastest first.

    Raises:
        ArgumentError: if ``machine`` is not a `Machine`; it is a `ValueError`.
    """
    check_instance("machine", machine, Machine)
    return tuple(
        SlowMemory(
            tier.name, machine.link(machine.fast, tier.name), machine.link(tier.name, machine.fast), tier.capacity_bytes
        )
        for tier in machine.slow_tiers()
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A schedule, and what is expected of it.

    Attributes:
        schedule: what to run.
        seconds: predicted time; NaN where nothing was measured, as for a schedule that was given.
        forward_steps: steps that will run forward, besides those that the reverse of each step runs itself.
        recompute_factor: forward steps per step of the chain; 1 if none runs twice.
        memory_bytes: bytes of the states held in memory, the working state included.
        slow_bytes: by tier, the most bytes held there at once, in whole blocks of a disk.
    """

    schedule: Schedule
    seconds: float
    forward_steps: int
    recompute_factor: float
    memory_bytes: int
    slow_bytes: dict[str, int]

    def __str__(self) -> str:
        slow = "".join(f", {format_bytes(size)} in {tier}" for tier, size in self.slow_bytes.items() if size)
        steps = f"{self.schedule.n} step{'' if self.schedule.n == 1 else 's'}"
        took = "" if math.isnan(self.seconds) else f", {format_seconds(self.seconds)}"
        return (
            f"{type(self.schedule).__name__}: {steps}{took}, each step forward {self.recompute_factor:.2f} times, "
            f"{format_bytes(self.memory_bytes)} in memory{slow}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ChainCosts:
    """What a chain's steps and states take.

    Attributes:
        n: number of steps.
        state_bytes: bytes of a state.
        step_seconds: time of one step forward.
        reverse_seconds: time of one step reversed, with what it runs forward itself.
    """

    n: int
    state_bytes: int
    step_seconds: float
    reverse_seconds: float


def choose(
    n: int,
    state_bytes: int,
    step_seconds: float,
    reverse_seconds: float,
    memory: int | str,
    tiers: Sequence[SlowMemory] = (),
) -> Choice:
    """The quickest schedule for a chain of ``n`` steps; never slower than Revolve in the same memory.

    Predicted are Revolve (Griewank and Walther 2000), a slow tier every so many steps with transfers beside compute
    (Kukreja, Hueckelheim and Gorman 2018), and H-Revolve, whose transfers compute waits for (Herrmann and Pallez 2020),
    or, where its tables are too large, Periodic-Disk-Revolve (Aupy and Herrmann 2017).

    Args:
        n: number of steps, at least 1.
        state_bytes: bytes of a state.
        step_seconds: seconds of one step forward.
        reverse_seconds: seconds of one step reversed, with what it runs forward itself.
        memory: for the states held at once, the working state included; bytes or such as ``"256MiB"``.
        tiers: slow memories for states, fastest first, as `slow_memories` gives them.

    Returns:
        The schedule with the least predicted time, and the simplest of equals.

    Raises:
        SequenceError: if ``n < 1``, a link cannot move a state in a finite time, or ``memory`` holds fewer than two
            states.
        ArgumentError: if an argument has the wrong type, ``memory`` is not a size, or a time is negative or not finite;
            it is a `ValueError`.
    """
    choices = candidates(n, state_bytes, step_seconds, reverse_seconds, memory, tiers)
    return min(choices, key=lambda choice: choice.seconds)  # the first of equals: the simplest


def candidates(
    n: int,
    state_bytes: int,
    step_seconds: float,
    reverse_seconds: float,
    memory: int | str,
    tiers: Sequence[SlowMemory] = (),
) -> list[Choice]:
    """Every schedule that `choose` considers, each with what it is expected to take.

    Arguments and errors are those of `choose`.

    Returns:
        The choices, simplest first; of `Multistage` one for each tier, with the best interval.
    """
    costs = ChainCosts(
        as_whole("n", n),
        as_whole("state_bytes", state_bytes, 0),
        as_duration("step_seconds", step_seconds),
        as_duration("reverse_seconds", reverse_seconds),
    )
    tiers = tuple(tiers) if isinstance(tiers, Iterable) else (tiers,)
    for tier in tiers:
        check_instance("tiers", tier, SlowMemory)
        for link in (tier.out, tier.back):
            _check_link(link, costs.state_bytes)
    return list_choices(costs, memory_slots(costs.state_bytes, memory), tiers)


def list_choices(costs: ChainCosts, slots: int, tiers: Sequence[SlowMemory]) -> list[Choice]:
    """Every schedule that is possible with ``slots`` slots in memory besides the working state, simplest first."""
    n = costs.n
    compute = [StoreAll(n)] if slots >= n - 1 else []
    choices = [
        predicted(schedule, costs.state_bytes, schedule.forward_steps * costs.step_seconds + n * costs.reverse_seconds)
        for schedule in (*compute, Revolve(n, slots))
    ]
    if slots >= n - 1:
        return choices
    more: list[Choice | None] = []
    if slots >= 2:
        more += [best_multistage(costs, slots, tier) for tier in tiers]
    least_seconds = min(choice.seconds for choice in (*choices, *more) if choice is not None)
    quick = TABLE_SECONDS_PER_ROW * n * len(tiers) <= TABLE_TIME_SHARE * least_seconds
    optimal = _h_revolve(costs, slots, tiers) if quick else None
    if optimal is not None:
        more.append(optimal)
    elif slots == 1 or TABLE_TIME_SHARE * least_seconds >= PERIOD_SECONDS:
        more += [_periodic(costs, slots, tier) for tier in tiers if slots == 1 or _is_hardly_hidden(costs, slots, tier)]
    return choices + [choice for choice in more if choice is not None]


def _check_link(link: Link, state_bytes: int) -> None:
    """Raise `SequenceError` unless a state can be moved over ``link`` in a finite time that is not negative."""
    costs = (link.latency_seconds, link.compute_slowdown, link.compute_seconds)
    moves = link.bandwidth_bytes_per_second > 0 and all(
        as_seconds(cost) is not None for cost in (*costs, link.seconds(state_bytes))
    )
    if not moves:
        raise SequenceError(f"no state can take a link such as {link}")


def memory_slots(state_bytes: int, memory: int | str, carried_bytes: int = 0) -> int:
    """Slots in ``memory`` besides the working state.

    Args:
        state_bytes: bytes of a state and of what is stored with it.
        memory: bytes, or a text.
        carried_bytes: bytes among these of tensors that are no part of a state, but written to.

    Raises:
        SequenceError: if it takes less than two states.
        ArgumentError: if it is no size.
    """
    size = as_size("memory", memory)
    states = size // max(state_bytes, 1)
    if states < 2:
        carried = f" ({format_bytes(carried_bytes)} of that are tensors outside that the cell reads and writes to)"
        raise SequenceError(
            f"memory of {format_bytes(size)} is too little for states of {format_bytes(state_bytes)}"
            f"{carried if carried_bytes else ''}: one to work on and one stored must fit; give at least "
            f"{format_bytes(2 * state_bytes)} ({2 * state_bytes} bytes)"
        )
    return states - 1


def hidden_interval(step_seconds: float, transfer_seconds: float) -> int:
    """The interval of Kukreja et al. 2018: fewest steps beside which a transfer ends before the next one is due."""
    if step_seconds <= 0:
        return 1
    # As a number, steps may take so little that the quotient is infinite; no chain has so many.
    return max(math.ceil(min(transfer_seconds / step_seconds, MOST_STEPS)), 1)


def best_multistage(costs: ChainCosts, slots: int, tier: SlowMemory) -> Choice | None:
    """The multistage schedule with the best interval; None if the tier is too small.

    Of intervals that are about as good, the longest: it moves least.
    """
    state_bytes, step_seconds, reverse_seconds = costs.state_bytes, costs.step_seconds, costs.reverse_seconds
    write, read = tier.out.seconds(state_bytes), tier.back.seconds(state_bytes)
    slowdown = tier.out.lost_seconds(state_bytes) + tier.back.lost_seconds(state_bytes)
    room = tier.slots(state_bytes)
    # Above the first, copies out are hidden; above the second, those back; above the third, what compute loses beside
    # them is a small part of it. Longer parts only run more steps again.
    exact = [hidden_interval(step_seconds, write), hidden_interval(step_seconds + reverse_seconds, read)]
    exact.append(hidden_interval(SMALL_SHARE * (step_seconds + reverse_seconds), slowdown))
    if room is not None:
        exact.append(-(-costs.n // max(room, 1)))  # so many that they fit there
    exact = [min(interval, costs.n) for interval in exact]
    found: list[tuple[Multistage, float]] = []
    for interval in sorted({*_spread(max(exact)), *exact}):
        schedule = Multistage(costs.n, slots, interval, tier.name)
        moved = schedule.slots[tier.name]
        if room is None or moved <= room:
            seconds = schedule.seconds(step_seconds, reverse_seconds, write, read) + moved * slowdown
            found.append((schedule, seconds))
    most = (1 + ALIKE_SHARE) * min((seconds for _, seconds in found), default=0.0)
    return next(
        (predicted(schedule, state_bytes, seconds) for schedule, seconds in reversed(found) if seconds <= most), None
    )


def _spread(longest: int) -> Iterator[int]:
    """Numbers from 1 to ``longest``: all of the small ones, then ever sparser."""
    number = 1
    while number <= longest:
        yield number
        number += max(number // INTERVALS, 1)


def _h_revolve(costs: ChainCosts, slots: int, tiers: Sequence[SlowMemory]) -> Choice | None:
    """H-Revolve, which is good where transfers are too slow to be hidden, as it makes few.

    None without a tier, and where its tables would be too large. They have a row for each slot of a tier with a limit,
    and one for any number of slots: where the best schedule for that keeps to the limit, the limit is left out.
    """
    if not tiers:
        return None
    size = costs.state_bytes
    slow = [Level(tier.name, None, tier.out.seconds(size), tier.back.seconds(size)) for tier in tiers]
    while table_work(costs.n, levels := (Level(MEMORY, slots), *slow)) <= MOST_TABLE_TERMS:
        schedule = HRevolve(costs.n, levels, costs.step_seconds, costs.reverse_seconds)
        over = [
            place
            for place, tier in enumerate(tiers)
            if (limit := tier.slots(size)) is not None and schedule.slots[tier.name] > limit
        ]
        if not over:
            return predicted(schedule, size, schedule.seconds)
        for place in over:
            slow[place] = dataclasses.replace(slow[place], slots=tiers[place].slots(size))
    return None


def _is_hardly_hidden(costs: ChainCosts, slots: int, tier: SlowMemory) -> bool:
    """Whether more steps are run beside a copy to ``tier`` than memory has slots for, and a period is soon found."""
    interval = hidden_interval(costs.step_seconds, tier.out.seconds(costs.state_bytes))
    return interval > slots and longest_first(slots, disk_costs(costs, tier)) <= LONGEST_PERIOD


def _periodic(costs: ChainCosts, slots: int, tier: SlowMemory) -> Choice | None:
    """Periodic Disk-Revolve, for when H-Revolve's tables are too large. None if the tier is too small."""
    schedule = PeriodicDiskRevolve(costs.n, slots, disk_costs(costs, tier), tier=tier.name)
    room = tier.slots(costs.state_bytes)
    if room is not None and schedule.parts > room:
        return None
    return predicted(schedule, costs.state_bytes, schedule.seconds)


def disk_costs(costs: ChainCosts, tier: SlowMemory) -> DiskCosts:
    """What steps and states take with ``tier`` as a disk that compute waits for, in seconds."""
    write, read = tier.out.seconds(costs.state_bytes), tier.back.seconds(costs.state_bytes)
    return DiskCosts(costs.step_seconds, costs.reverse_seconds, write, read)


def predicted(schedule: Schedule, state_bytes: int, seconds: float) -> Choice:
    """What ``schedule`` does, with its time."""
    slots = schedule.slots
    forward_steps = schedule.forward_steps
    return Choice(
        schedule=schedule,
        seconds=seconds,
        forward_steps=forward_steps,
        recompute_factor=(forward_steps + 1) / schedule.n,  # the last step runs once more: rule 4 of the records
        memory_bytes=(slots.get(MEMORY, 0) + 1) * state_bytes,
        slow_bytes={tier: count * bytes_on_disk(state_bytes) for tier, count in slots.items() if tier != MEMORY},
    )
