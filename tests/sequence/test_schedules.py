"""Schedules against the published numbers, the true optimum of short chains, and the rules of the records."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import ArgumentError, SequenceError
from ebbtide.sequence import schedules
from ebbtide.sequence.schedules import (
    DISK,
    MEMORY,
    Advance,
    Costs,
    Count,
    DiskCosts,
    DiskRevolve,
    Drop,
    HRevolve,
    Level,
    Load,
    Mixed,
    Multistage,
    Online,
    OnlineInMemory,
    PeriodicDiskRevolve,
    Record,
    Reverse,
    Revolve,
    Schedule,
    Store,
    StoreAll,
    interpret,
)
from ebbtide.sequence.schedules.binomial import forward_steps, forward_steps_table
from ebbtide.sequence.schedules.disk_revolve import once_times
from tests.sequence.brute_force import least_time

# papers.md F3: least time for l steps forward and l + 1 reversed, all steps costing 1, by slots.
LENGTHS = (1, 2, 5, 10, 20, 40, 60)
OPT0 = {
    1: (3, 6, 21, 66, 231, 861, 1891),
    2: (3, 5, 14, 35, 91, 249, 451),
    3: (3, 5, 13, 29, 70, 176, 301),
    8: (3, 5, 11, 23, 53, 113, 189),
}
TWO_LEVELS = dict(zip((1, 2, 5, 10, 20, 40), (3, 5, 14, 35, 85, 185), strict=True))


def judged(schedule: Schedule, costs: Costs | None = None) -> Count:
    """What the judge counts, within the slots that the schedule promises."""
    count = interpret(schedule.records(), schedule.n, schedule.slots, costs)
    assert count.reversed_steps == schedule.n
    assert count.forward_steps == schedule.forward_steps
    return count


class TestRevolve:
    @pytest.mark.parametrize(("states", "times"), OPT0.items())
    def test_published_times(self, states: int, times: tuple[int, ...]) -> None:
        for l, time in zip(LENGTHS, times, strict=True):  # noqa: E741
            assert judged(Revolve(l + 1, states)).seconds == time

    def test_published_steps_per_step(self) -> None:
        """papers.md S2.2, Revolve. The sweep from the start is among its steps."""
        published = {10: (2.22, 3.64, 5.76, 8.32, 11.65), 50: (1.48, 1.95, 2.86, 3.75, 4.66)}
        for states, factors in published.items():
            for power, factor in enumerate(factors, 2):
                assert Revolve(10**power, states).forward_steps / 10**power == pytest.approx(factor, abs=0.0051)

    @pytest.mark.parametrize("states", [1, 2, 3, 5])
    @pytest.mark.parametrize(("forward", "reverse"), [(1, 1), (1, 3), (5, 2)])
    def test_is_the_optimum(self, states: int, forward: int, reverse: int) -> None:
        for n in range(1, 11):
            time = judged(Revolve(n, states), Costs(forward, reverse)).seconds
            assert time == least_time(n, [(states, 0, 0)], forward, reverse)

    @given(st.integers(1, 300), st.integers(1, 40))
    def test_count_is_the_closed_form(self, n: int, states: int) -> None:
        judged(Revolve(n, states))

    @given(st.integers(1, 10**9), st.integers(1, 10**6))
    def test_closed_form_is_that_of_the_paper(self, n: int, states: int) -> None:
        steps = forward_steps(n, states)
        if n > 1:
            # r by definition: the smallest with C(states + r, states) >= n.
            r = 1
            while states > 1 and math.comb(states + r, states) < n:
                r += 1
            r = r if states > 1 else n - 1
            assert steps == r * n - math.comb(states + r, states + 1)
        else:
            assert steps == 0

    def test_table_equals_closed_form(self) -> None:
        for states in (1, 2, 3, 17):
            assert forward_steps_table(200, states).tolist() == [0, *(forward_steps(n, states) for n in range(1, 201))]


class TestHRevolve:
    @pytest.mark.parametrize(("l", "time"), TWO_LEVELS.items())
    def test_published_times(self, l: int, time: int) -> None:  # noqa: E741
        levels = (Level(MEMORY, 2), Level(DISK, 4, 5, 5))
        schedule = HRevolve(l + 1, levels)
        assert schedule.seconds == time == judged(schedule, costs_of(levels)).seconds

    def test_published_times_with_a_costlier_reverse(self) -> None:
        """papers.md F3: a peer that confuses the costs gets 270 and 776. These count the steps that reverses run."""
        assert HRevolve(41, (Level(MEMORY, 2), Level(DISK, 4, 5, 5)), 1, 2).seconds + 41 == 267
        assert HRevolve(101, (Level(MEMORY, 3), Level(DISK, 8, 4, 4)), 1, 3).seconds + 101 == 717

    @pytest.mark.parametrize(("forward", "reverse"), [(1, 1), (2, 1), (1, 3)])
    @pytest.mark.parametrize(
        "levels",
        [
            (Level(MEMORY, 1), Level(DISK, 1, 2, 1)),
            (Level(MEMORY, 1), Level(DISK, 2, 1, 3)),
            (Level(MEMORY, 2), Level(DISK, 1, 0, 2)),
            (Level(MEMORY, 1), Level("ssd", 1, 1, 1), Level(DISK, 1, 2, 2)),
        ],
    )
    def test_is_the_optimum(self, levels: tuple[Level, ...], forward: int, reverse: int) -> None:
        for n in range(1, 9):
            schedule = HRevolve(n, levels, forward, reverse)
            tiers = [(level.slots or 0, level.write, level.read) for level in levels]
            assert schedule.seconds == least_time(n, tiers, forward, reverse)

    def test_one_level_is_revolve(self) -> None:
        for n, states in itertools.product((1, 2, 7, 40), (1, 3, 50)):
            assert HRevolve(n, (Level(MEMORY, states),)).seconds == Revolve(n, states).forward_steps + n

    def test_too_large_a_table_is_refused(self) -> None:
        with pytest.raises(SequenceError, match="comparisons"):
            HRevolve(10**6, (Level(MEMORY, 10),))

    @given(st.integers(1, 60), st.data())
    def test_takes_what_it_says(self, n: int, data: st.DataObject) -> None:
        prices = st.integers(0, 6)
        levels = tuple(
            Level(name, data.draw(slots), data.draw(prices), data.draw(prices))
            for name, slots in ((MEMORY, st.integers(1, 4)), ("ssd", st.integers(0, 3)), (DISK, st.none()))
        )
        schedule = HRevolve(n, levels, 1, 2)
        assert judged(schedule, costs_of(levels, reverse=2)).seconds == schedule.seconds


class TestDiskRevolve:
    @pytest.mark.parametrize(("l", "time"), TWO_LEVELS.items())
    def test_published_times(self, l: int, time: int) -> None:  # noqa: E741
        assert DiskRevolve(l + 1, 2, DiskCosts(write=5, read=5)).seconds == time

    def test_published_period(self) -> None:
        """papers.md F3. Periods 6 to 10 are equally good there, and 10 needs the least disk."""
        assert PeriodicDiskRevolve(1000, 2, DiskCosts(write=5, read=5)).period == 10

    @given(st.integers(1, 80), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
    def test_takes_what_it_says(self, n: int, states: int, write: int, read: int, reverse: int) -> None:
        costs = DiskCosts(1, reverse, write, read)
        judge = Costs(1, reverse, {DISK: write}, {DISK: read})
        best = DiskRevolve(n, states, costs)
        assert judged(best, judge).seconds == best.seconds
        periodic = PeriodicDiskRevolve(n, states, costs)
        assert best.seconds <= periodic.seconds == judged(periodic, judge).seconds
        assert best.seconds <= Revolve(n, states).forward_steps + n * reverse
        levels = (Level(MEMORY, states), Level(DISK, None, write, read))
        assert HRevolve(n, levels, 1, reverse).seconds <= best.seconds

    @pytest.mark.parametrize(
        ("states", "write", "read"), [(1, 1e4, 0.0), (1, 1e4, 40.0), (2, 300.0, 0.0), (2, 10.0, 5.0)]
    )
    def test_the_best_period_of_all(self, states: int, write: float, read: float) -> None:
        """Where states are cheap to read again, it is many times longer than if each were read once."""
        costs = DiskCosts(1.0, 1.0, write, read)
        each = (write + read + once_times(2999, states, costs)[0]) / np.arange(1, 3001)
        period = PeriodicDiskRevolve(10**6, states, costs).period
        assert each[period - 1] == pytest.approx(each.min())
        assert 2 * period < 3000

    @pytest.mark.parametrize(("states", "write", "read"), [(5, 20, 20), (1, 10_000, 0)])
    def test_periodic_is_nearly_as_good(self, states: int, write: int, read: int) -> None:
        """Also where the last part is a long one, and there is little memory for it."""
        costs = DiskCosts(write=write, read=read)
        judge = Costs(1, 1, {DISK: write}, {DISK: read})
        periodic = PeriodicDiskRevolve(3000, states, costs)
        assert judged(periodic, judge).seconds == periodic.seconds
        assert periodic.seconds < 1.01 * DiskRevolve(3000, states, costs).seconds

    def test_too_long_a_chain_is_refused(self) -> None:
        with pytest.raises(SequenceError, match="take PeriodicDiskRevolve"):
            DiskRevolve(10**6, 3, DiskCosts())


class TestMixed:
    @given(st.integers(1, 60), st.integers(1, 12))
    def test_count_is_the_optimum_of_the_table(self, n: int, states: int) -> None:
        schedule = Mixed(n, states)
        count = judged(schedule)
        assert count.forward_steps + count.replayed_steps == schedule.total_steps
        assert schedule.total_steps <= Revolve(n, states).forward_steps + n

    @pytest.mark.parametrize("states", [1, 2, 3])
    def test_is_the_optimum(self, states: int) -> None:
        for n in range(1, 8):
            assert Mixed(n, states).total_steps == least_time(n, [(states, 0, 0)], 1.0, 0.0, tapes=True)

    def test_closed_forms(self) -> None:
        """Maddison 2024: with one slot ``n (n + 1) / 2 - 1``, and with ``n - 1`` no step twice."""
        assert [Mixed(n, 1).total_steps for n in range(2, 20)] == [n * (n + 1) // 2 - 1 for n in range(2, 20)]
        assert [Mixed(n, n - 1).total_steps for n in range(2, 20)] == list(range(2, 20))


class TestMultistage:
    def test_published_steps_per_step(self) -> None:
        """papers.md S2.2: it does not depend on the length; n is large, so that the turn does not count."""
        published = {10: (1.90, 2.76, 3.22, 4.27), 50: (1.90, 1.98, 2.48, 2.90)}
        for states, factors in published.items():
            for interval, factor in zip((10, 50, 100, 500), factors, strict=True):
                schedule = Multistage(10**8, states + 1, interval)
                assert schedule.forward_steps / 10**8 == pytest.approx(factor, abs=0.0051)

    @given(st.integers(1, 200), st.integers(2, 12), st.integers(1, 30))
    def test_count_is_the_closed_form(self, n: int, states: int, interval: int) -> None:
        schedule = Multistage(n, states, interval)
        count = judged(schedule)
        assert count.most.get(DISK, 0) == schedule.slots[DISK]
        if not schedule.parts:
            assert count.most.get(MEMORY, 0) == schedule.slots[MEMORY]
        assert schedule.forward_steps <= Revolve(n, states).forward_steps

    @given(st.integers(100, 800), st.integers(2, 20), st.integers(1, 40), st.integers(0, 60), st.integers(0, 60))
    def test_predicted_time(self, n: int, states: int, interval: int, write: int, read: int) -> None:
        """Never less than what the judge finds; exact where no transfer is late."""
        schedule = Multistage(n, states, interval)
        costs = Costs(1, 2, {DISK: write}, {DISK: read}, frozenset({DISK}))
        predicted = schedule.seconds(1, 2, write, read)
        found = judged(schedule, costs).seconds
        if max(write - interval, read - schedule.part_steps - 2 * interval) <= 0:
            assert found == predicted == schedule.forward_steps + 2 * n
        assert found <= predicted + write + read

    def test_never_waits_at_the_published_interval(self) -> None:
        schedule = Multistage(5000, 11, 30)
        assert judged(schedule, Costs(1, 2, {DISK: 30}, {DISK: 30}, frozenset({DISK}))).seconds == (
            schedule.forward_steps + 2 * 5000
        )


class TestOnline:
    @given(st.integers(1, 400), st.integers(1, 12))
    def test_in_memory_no_step_runs_more_often_than_in_revolve(self, n: int, states: int) -> None:
        runs = [0] * n

        def watched() -> Iterator[Record]:
            for record in OnlineInMemory(states).records(lambda step: step < n):
                if isinstance(record, Advance):
                    for step in range(record.start, record.stop):
                        runs[step] += 1
                yield record

        count = interpret(watched(), n, {MEMORY: states})
        if n > 1:
            r = next(r for r in itertools.count() if math.comb(states + r, states) >= n)
            assert max(runs) <= r
        assert count.forward_steps <= 1.6 * forward_steps(n, states)

    @given(st.integers(1, 200), st.integers(2, 8), st.lists(st.integers(1, 20), min_size=1), st.booleans())
    def test_any_intervals(self, n: int, states: int, intervals: list[int], known: bool) -> None:
        schedule = Online(states, lambda step: intervals[step % len(intervals)])
        records = schedule.records(lambda step: step < n, n if known else None)
        assert interpret(records, n, {MEMORY: states, DISK: None}).reversed_steps == n

    def test_is_as_good_as_multistage_but_for_the_turn(self) -> None:
        n, states, interval = 1000, 6, 20
        online = Online(states, lambda step: interval).records(lambda step: step < n)
        known = Online(states, lambda step: interval).records(lambda step: step < n, n)
        best = Multistage(n, states, interval).forward_steps
        slots = {MEMORY: states, DISK: None}
        assert interpret(known, n, slots).forward_steps == best
        assert interpret(online, n, slots).forward_steps <= best + 2 * interval

    @pytest.mark.parametrize("states", [2, 3, 6, 10, 13])
    def test_does_as_multistage_where_the_length_is_known(self, states: int) -> None:
        """So that what is predicted for that is what is run, whatever the interval."""
        compared = 0
        for n in (*range(1, 40), 100, 173, 300):
            for interval in range(1, 30):
                schedule = Multistage(n, states, interval)
                if schedule.parts:
                    known = Online(states, lambda _, interval=interval: interval).records(lambda _: False, n)  # type: ignore[misc]
                    assert list(known) == list(schedule.records()), (n, interval)
                    compared += 1
        assert compared > 50


class TestJudge:
    @pytest.mark.parametrize(
        ("records", "complaint"),
        [
            ([], "step 1 not yet reversed"),
            ([Reverse(0)], "next step to reverse is 1"),
            ([Advance(0, 2)], "next step to reverse is 1"),
            ([Advance(1, 2)], "working state is 0"),
            ([Reverse(1)], "working state is 0"),
            ([Load(0, MEMORY)], "not there"),
            ([Drop(0, MEMORY)], "not there"),
            ([Store(1, MEMORY)], "working state is 0"),
            ([Store(0, DISK)], "no tier"),
            ([Store(0, MEMORY), Store(0, MEMORY)], "there already"),
            ([Store(0, MEMORY), Advance(0, 1), Store(1, MEMORY)], "1 slots"),
            ([Store(0, MEMORY), Advance(0, 1), Reverse(1), Advance(0, 1)], "working state is None"),
            ([Store(0, MEMORY), Advance(0, 1), Reverse(1), Load(0, MEMORY), Reverse(0)], "not dropped"),
            ([Store(0, MEMORY, tape=True)], "tape that of None"),
        ],
    )
    def test_broken_schedules_are_refused(self, records: list[Record], complaint: str) -> None:
        with pytest.raises(SequenceError, match=complaint):
            interpret(records, 2, {MEMORY: 1})

    def test_late_transfers_make_compute_wait(self) -> None:
        """Two copies out of 10 each beside steps of 1, one slot: the second waits for the first."""
        records: list[Record] = [Store(0, DISK), Advance(0, 1), Store(1, DISK), Advance(1, 2), Reverse(2)]
        records += [Load(1, DISK), Drop(1, DISK), Reverse(1), Load(0, DISK), Drop(0, DISK), Reverse(0)]
        costs = Costs(1, 1, {DISK: 10}, {DISK: 3}, frozenset({DISK}))
        # 10: the first is out. 11: step 1 done. 12: reversed. 20: the second is out; 23: back; 24; 27: back; 28.
        assert interpret(records, 3, {MEMORY: 1, DISK: None}, costs).seconds == 28

    def test_compute_waits_for_all_transfers_of_a_synchronous_tier(self) -> None:
        """Those into memory, too."""
        schedule = Multistage(60, 4, 5)
        count = judged(schedule, Costs(1, 1, {DISK: 7}, {DISK: 11}))
        assert count.loads[DISK] > 5
        assert count.seconds == schedule.forward_steps + 60 + 7 * count.stores[DISK] + 11 * count.loads[DISK]

    def test_the_earliest_copy_out_frees_a_slot(self) -> None:
        """Which is not that which began first, where one of two tiers is slow."""
        records: list[Record] = [Store(0, DISK), Advance(0, 1), Store(1, "ssd"), Advance(1, 2), Store(2, "ssd")]
        records += [Advance(2, 3), Reverse(3)]
        for step, tier in ((2, "ssd"), (1, "ssd"), (0, DISK)):
            records += [Load(step, tier), Drop(step, tier), Reverse(step)]
        costs = Costs(1, 1, {DISK: 100, "ssd": 5}, {DISK: 1, "ssd": 1}, frozenset({DISK, "ssd"}))
        # 6: state 1 is out. 7; 8. 11: state 2 is out; 12: back; 13; 14; 15. 100: state 0 is out; 101: back; 102.
        assert interpret(records, 4, {MEMORY: 2, DISK: None, "ssd": None}, costs).seconds == 102

    def test_a_copy_back_begins_once_there_is_a_slot_for_it(self) -> None:
        records: list[Record] = [Store(0, "ssd"), Advance(0, 1), Store(1, DISK), Advance(1, 2), Reverse(2)]
        records += [Load(0, "ssd", into=MEMORY), Load(1, DISK), Drop(1, DISK), Reverse(1), Load(0, MEMORY)]
        records += [Drop(0, MEMORY), Drop(0, "ssd"), Reverse(0)]
        costs = Costs(1, 1, {DISK: 10, "ssd": 1}, {"ssd": 5}, frozenset({DISK, "ssd"}))
        # 11: state 1 is out, and state 0 begins to come back; 12: step 1 is reversed. 16: state 0 is there; 17.
        assert interpret(records, 3, {MEMORY: 1, DISK: None, "ssd": None}, costs).seconds == 17

    def test_a_copy_out_needs_a_slot(self) -> None:
        """`run` has no other memory for it."""
        records: list[Record] = [Store(0, MEMORY), Advance(0, 1), Store(1, DISK), Advance(1, 2), Reverse(2)]
        records += [Load(1, DISK), Drop(1, DISK), Reverse(1), Load(0, MEMORY), Drop(0, MEMORY), Reverse(0)]
        costs = Costs(overlaps=frozenset({DISK}))
        assert interpret(records, 3, {MEMORY: 2, DISK: 1}, costs).reversed_steps == 3
        with pytest.raises(SequenceError, match=r"record 2, .*: memory has 1 slots"):
            interpret(records, 3, {MEMORY: 1, DISK: 1}, costs)

    def test_compute_waits_for_copies_out_where_memory_has_no_slot(self) -> None:
        """As in schedules for a synchronous disk that name none; loads overlap nothing, either."""
        schedule = PeriodicDiskRevolve(5, 1, DiskCosts(1, 1, 3, 2), 1)
        assert schedule.slots[MEMORY] == 0
        waiting = Costs(1, 1, {DISK: 3}, {DISK: 2})
        overlapping = dataclasses.replace(waiting, overlaps=frozenset({DISK}))
        counts = [interpret(schedule.records(), 5, schedule.slots, costs) for costs in (waiting, overlapping)]
        assert counts[0] == counts[1]
        with pytest.raises(SequenceError, match="memory has 0 slots"):
            interpret([Store(0, MEMORY)], 2, {MEMORY: 0, DISK: 1}, overlapping)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_shortest_chains(n: int) -> None:
    for schedule in (
        StoreAll(n),
        Revolve(n, 1),
        DiskRevolve(n, 1, DiskCosts()),
        PeriodicDiskRevolve(n, 1, DiskCosts()),
        HRevolve(n, (Level(MEMORY, 1),)),
        Mixed(n, 1),
        Multistage(n, 2, 1),
    ):
        judged(schedule)


def test_a_single_step_needs_no_slot() -> None:
    """Nor a period: one was looked for without end."""
    costs = (DiskCosts(), DiskCosts(1, 1, 5, 5), DiskCosts(forward=0.0))
    disks = [kind(1, 0, cost) for kind in (DiskRevolve, PeriodicDiskRevolve) for cost in costs]
    for schedule in (Revolve(1, 0), HRevolve(1, (Level(MEMORY, 0),)), *disks):
        assert list(schedule.records()) == [Reverse(0)]


@pytest.mark.parametrize("n", [0, -1])
def test_no_chain(n: int) -> None:
    for make in (StoreAll, lambda n: Revolve(n, 1), lambda n: Mixed(n, 1), lambda n: Multistage(n, 2, 1)):
        with pytest.raises(SequenceError, match="at least 1"):
            make(n)


@pytest.mark.parametrize(("n", "states", "interval"), [(100, 3, 7), (120, 10, 60)])
def test_whole_numbers_of_numpy(n: int, states: int, interval: int) -> None:
    def made(of: Callable[[int], Any]) -> list[Any]:
        levels = (Level(MEMORY, of(states)), Level(DISK, None, 2.0, 2.0))
        several = [StoreAll(of(n)), Revolve(of(n), of(states)), Mixed(of(n), of(states)), HRevolve(of(n), levels)]
        several += [Multistage(of(n), of(states), of(interval)), DiskRevolve(of(n), of(states), DiskCosts())]
        several += [PeriodicDiskRevolve(of(n), of(states), DiskCosts(), of(interval))]
        chains = Online(of(states), lambda _: of(interval)).records
        online = list(chains(lambda step: step < n)), list(chains(lambda _: True, of(n)))
        return [*((each, each.slots, each.forward_steps, list(each.records())) for each in several), online]

    assert made(np.uint8) == made(np.int8) == made(int)


@pytest.mark.parametrize("number", [2.5, 20.0, math.nan, None, "3", True])
def test_numbers_that_are_not_whole(number: Any) -> None:
    """They ended with an error from inside, some only once the chain was run; an interval of NaN never ended."""
    made: list[tuple[str, Callable[[], Schedule | Level | OnlineInMemory | Online]]] = [
        ("n", lambda: StoreAll(number)),
        ("n", lambda: Revolve(number, 4)),
        ("states", lambda: Revolve(20, number)),
        ("states", lambda: Mixed(20, number)),
        ("states", lambda: Multistage(20, number, 3)),
        ("interval", lambda: Multistage(20, 4, number)),
        ("states", lambda: DiskRevolve(20, number, DiskCosts())),
        ("period", lambda: PeriodicDiskRevolve(20, 4, DiskCosts(), number)),
        ("n", lambda: HRevolve(number, (Level(MEMORY, 4),))),
        ("states", lambda: OnlineInMemory(number)),
        ("states", lambda: Online(number, lambda _: 3)),
    ]
    if number is not None:
        made.append(("slots", lambda: Level(MEMORY, number)))
    for name, make in made:
        with pytest.raises(ArgumentError, match=rf"^{name}={number!r}: it must be a whole number"):
            make()


@pytest.mark.parametrize("time", [-1.0, math.nan, math.inf, None, "long"])
def test_times_that_are_none(time: Any) -> None:
    made: list[tuple[str, Callable[[], DiskCosts | Level | HRevolve]]] = [
        ("forward", lambda: DiskCosts(forward=time)),
        ("read", lambda: DiskCosts(read=time)),
        ("write", lambda: Level(DISK, None, time)),
        ("reverse", lambda: HRevolve(20, (Level(MEMORY, 4),), 1.0, time)),
    ]
    for name, make in made:
        with pytest.raises(ArgumentError, match=f"^{name}={time!r}: it must be a time, 0 or more"):
            make()


def test_too_few_slots() -> None:
    with pytest.raises(SequenceError, match="at least 1 slot"):
        Revolve(2, 0)
    with pytest.raises(SequenceError, match="at least 1 slot"):
        HRevolve(2, (Level(MEMORY, 0),))
    for n in (1, 2):
        with pytest.raises(SequenceError, match="needs a level"):
            HRevolve(n, ())
    with pytest.raises(SequenceError, match="2 slots"):
        Multistage(2, 1, 1)


def test_schedules_are_lazy() -> None:
    for schedule in (Revolve(10**12, 40), Multistage(10**12, 40, 100), PeriodicDiskRevolve(10**12, 40, DiskCosts())):
        assert len(list(itertools.islice(schedule.records(), 1000))) == 1000


def test_schedules_know_no_torch() -> None:
    for path in Path(schedules.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from) (torch|ebbtide\.run)", path.read_text(), re.MULTILINE), path


def costs_of(levels: tuple[Level, ...], reverse: float = 1) -> Costs:
    return Costs(1, reverse, {lv.name: lv.write for lv in levels}, {lv.name: lv.read for lv in levels})
