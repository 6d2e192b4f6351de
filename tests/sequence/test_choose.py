"""The choice among schedules, against the judge."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import ArgumentError, SequenceError
from ebbtide.machine import Link
from ebbtide.sequence import SlowMemory, candidates, choose, run, scan, slow_memories
from ebbtide.sequence.choose import ALIKE_SHARE, hidden_interval
from ebbtide.sequence.schedules import (
    Costs,
    DiskCosts,
    HRevolve,
    Multistage,
    Online,
    PeriodicDiskRevolve,
    Revolve,
    StoreAll,
    interpret,
)
from tests.plan.random_steps import disk_machine

SIZE, ON_DISK = 1000, 4096


def disk(write: float, read: float, capacity: int | None = None, slowdown: float = 0.0) -> SlowMemory:
    """A disk that takes so long for a state, and holds so many."""
    out = Link("memory", "disk", 0.0, SIZE / write, SIZE / write, slowdown)
    back = Link("disk", "memory", 0.0, SIZE / read, SIZE / read, slowdown)
    return SlowMemory("disk", out, back, None if capacity is None else capacity * ON_DISK)


def test_everything_fits() -> None:
    choice = choose(50, SIZE, 1.0, 2.0, 50 * SIZE, [disk(1, 1)])
    assert choice.schedule == StoreAll(50)
    assert (choice.recompute_factor, choice.seconds) == (1.0, 49 + 100)
    assert (choice.memory_bytes, choice.slow_bytes) == (50 * SIZE, {})


def test_no_slow_memory() -> None:
    choice = choose(1000, SIZE, 1.0, 2.0, 11 * SIZE)
    assert choice.schedule == Revolve(1000, 10)
    assert choice.seconds == Revolve(1000, 10).forward_steps + 2000


def test_long_chain() -> None:
    choice = choose(10**6, SIZE, 1.0, 2.0, 11 * SIZE, [disk(20, 30)])
    assert isinstance(choice.schedule, Multistage)
    assert choice.schedule.interval == hidden_interval(1.0, 20.0) == 20
    assert choice.recompute_factor == pytest.approx(1 + (10 * 2 + 9 * 3 - 10 - 9 + 0) / 20, abs=0.5)
    assert choice.slow_bytes["disk"] == pytest.approx(10**6 / 20 * ON_DISK, rel=0.01)
    assert "Multistage" in str(choice)
    assert "disk" in str(choice)


@pytest.mark.parametrize("took", [5e-324, 1e-300])
def test_steps_that_take_next_to_nothing(took: float) -> None:
    """So many would hide a transfer that their number has no place in a float."""
    assert choose(10**6, SIZE, took, took, 11 * SIZE, [disk(1e9, 1e9)]).forward_steps > 0


@pytest.mark.parametrize("n", [0, -1])
def test_a_chain_without_steps_is_refused(n: int) -> None:
    with pytest.raises(SequenceError, match=f"a chain of {n} steps"):
        next(Online(3, lambda _: 2).records(lambda _: False, n))


def test_cost_per_step_does_not_depend_on_the_length() -> None:
    per_step = [choose(n, SIZE, 1.0, 2.0, 11 * SIZE, [disk(20, 30)]).seconds / n for n in (10**4, 10**5, 10**7)]
    assert max(per_step) < 1.01 * min(per_step)


@pytest.mark.parametrize("states", [2, 10, 300])
def test_is_quick(states: int) -> None:
    """Whatever is asked; the time is that of the processor, others may have it in between."""
    for n in (50, 1000, 20_000, 10**6):
        for transfer in (1e-3, 10, 1e4):
            start = time.process_time()
            choose(n, SIZE, 1e-4, 3e-4, states * SIZE, [disk(1e-4 * transfer, 3e-4 * transfer)])
            assert time.process_time() - start < 1.0


def test_disk_too_slow_to_hide() -> None:
    """A copy takes as long as the whole chain: a few of them pay, one after another, or none."""
    choice = choose(400, SIZE, 1.0, 1.0, 3 * SIZE, [disk(200, 200)])
    assert isinstance(choice.schedule, (HRevolve, Multistage))
    assert choice.seconds < 0.8 * (Revolve(400, 2).forward_steps + 400)


@pytest.mark.parametrize(
    ("n", "slots", "write", "read"), [(3000, 2, 300, 300), (1000, 2, 100, 50), (2703, 3, 2700, 1.2)]
)
def test_a_limit_that_does_not_bind_changes_nothing(n: int, slots: int, write: float, read: float) -> None:
    used = choose(n, SIZE, 1.0, 2.0, (slots + 1) * SIZE, [disk(write, read)]).slow_bytes["disk"] // ON_DISK
    unlimited, roomy, tight = (
        choose(n, SIZE, 1.0, 2.0, (slots + 1) * SIZE, [disk(write, read, capacity)]) for capacity in (None, 10**6, used)
    )
    assert unlimited.seconds == roomy.seconds == tight.seconds
    assert unlimited.slow_bytes == roomy.slow_bytes == tight.slow_bytes


def test_of_two_disks_only_the_limit_that_binds_counts() -> None:
    """That of the other one would make tables too large, with a row for each of its 900 states."""
    fast, slow = disk(10, 10, 3), dataclasses.replace(disk(100, 100, 900), name="slow")
    choice = choose(1000, SIZE, 1.0, 2.0, 3 * SIZE, [fast, slow])
    assert isinstance(choice.schedule, HRevolve)
    assert [level.slots for level in choice.schedule.levels] == [2, 3, None]
    alone = choose(1000, SIZE, 1.0, 2.0, 3 * SIZE, [dataclasses.replace(slow, capacity_bytes=None)])
    assert choice.seconds < alone.seconds


@pytest.mark.parametrize(("n", "slots", "transfer"), [(100_000, 2, 1000), (20_000, 3, 1000), (20_000, 2, 300)])
def test_chains_too_long_for_tables_and_transfers_too_slow_to_hide(n: int, slots: int, transfer: int) -> None:
    """Never slower than Periodic-Disk-Revolve, which makes compute wait for few transfers."""
    choice = choose(n, SIZE, 1.0, 2.0, (slots + 1) * SIZE, [disk(transfer, transfer)])
    assert choice.seconds <= PeriodicDiskRevolve(n, slots, DiskCosts(1.0, 2.0, transfer, transfer)).seconds


@given(
    st.integers(1, 400),
    st.integers(2, 14),
    st.floats(0.1, 4),
    st.floats(0.01, 300),
    st.floats(0.01, 300),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_never_worse_than_revolve_and_true(
    n: int, states: int, reverse: float, write: float, read: float, capacity: int | None
) -> None:
    tier = disk(write, read, capacity)
    choice = choose(n, SIZE, 1.0, reverse, states * SIZE, [tier])
    assert choice.seconds <= Revolve(n, states - 1).forward_steps + n * reverse + 1e-9
    slots = {**choice.schedule.slots, "memory": states - 1}
    if capacity is not None:
        assert slots.get("disk", 0) <= capacity
    overlaps = frozenset() if isinstance(choice.schedule, HRevolve) else frozenset({"disk"})
    found = interpret(
        choice.schedule.records(), n, slots, Costs(1.0, reverse, {"disk": write}, {"disk": read}, overlaps)
    )
    # A transfer at either end of the sweeps may be waited for besides.
    assert found.seconds <= choice.seconds + write + read + 1e-6
    assert found.forward_steps == choice.forward_steps


@given(st.integers(30, 300), st.integers(3, 8), st.floats(0.1, 40), st.floats(0.1, 40))
def test_no_other_interval_is_much_better(n: int, states: int, write: float, read: float) -> None:
    choice = choose(n, SIZE, 1.0, 2.0, (states + 1) * SIZE, [disk(write, read)])
    costs = Costs(1.0, 2.0, {"disk": write}, {"disk": read}, frozenset({"disk"}))
    slots = {"memory": states, "disk": None}
    best = min(
        interpret(Multistage(n, states, interval).records(), n, slots, costs).seconds for interval in range(1, 45, 2)
    )
    assert choice.seconds <= 1.1 * best + write + read


def test_slowdown_counts() -> None:
    fast, slow = (choose(5000, SIZE, 1.0, 2.0, 8 * SIZE, [disk(9, 9, slowdown=share)]).seconds for share in (0.0, 0.3))
    assert fast < slow


def test_what_compute_loses_makes_intervals_longer() -> None:
    """Transfers that are hidden at every step, but each costs compute 20 of them."""
    light, heavy = (choose(10**5, SIZE, 1.0, 2.0, 10 * SIZE, [disk(1, 1, slowdown=loss)]) for loss in (0.0, 10.0))
    assert isinstance(light.schedule, Multistage)
    assert isinstance(heavy.schedule, Multistage)
    assert light.schedule.interval == 1
    assert heavy.schedule.interval >= 9
    stores = heavy.slow_bytes["disk"] / ON_DISK
    assert heavy.seconds == pytest.approx(heavy.forward_steps + 2e5 + 20 * stores, rel=1e-3)


@pytest.mark.parametrize(("size", "on_disk"), [(64, 4096), (4096, 4096), (4097, 8192)])
def test_states_take_whole_blocks_of_a_disk(size: int, on_disk: int) -> None:
    """Small ones had several times as many slots there as there was room for."""
    tier = dataclasses.replace(disk(20, 30), capacity_bytes=7 * on_disk + 4095)
    assert tier.slots(size) == 7
    choice = choose(10**4, size, 1.0, 2.0, 11 * size, [tier])
    assert isinstance(choice.schedule, Multistage)
    assert choice.slow_bytes == {"disk": choice.schedule.slots["disk"] * on_disk}


def test_of_intervals_about_as_good_the_longest_is_taken() -> None:
    """What transfers take from compute in short parts, steps that run again take in long ones."""
    n, states, lost = 10**5, 49, 0.9
    tier = disk(0.5, 0.5, slowdown=lost)
    choice = choose(n, SIZE, 1.0, 2.0, (states + 1) * SIZE, [tier])
    assert isinstance(choice.schedule, Multistage)
    assert 20 < choice.schedule.interval < states
    shortest = Multistage(n, states, 1)
    least_seconds = shortest.seconds(1.0, 2.0, 0.5, 0.5) + shortest.slots["disk"] * lost
    assert least_seconds < choice.seconds < (1 + ALIKE_SHARE) * least_seconds


def test_least_memory_and_a_long_chain() -> None:
    """With two states in memory nothing can come back beside compute: transfers are waited for."""
    choice = choose(10**5, SIZE, 1.0, 2.0, 2 * SIZE, [disk(5, 5)])
    assert isinstance(choice.schedule, PeriodicDiskRevolve)
    assert choice.recompute_factor < 5


def test_all_candidates() -> None:
    found = candidates(200, SIZE, 1.0, 2.0, 8 * SIZE, [disk(9, 9)])
    assert [type(choice.schedule) for choice in found] == [Revolve, Multistage, HRevolve]


def test_tiers_of_a_machine() -> None:
    (tier,) = slow_memories(disk_machine(1e9, 5e8, latency=0.001))
    assert (tier.name, tier.capacity_bytes) == ("disk", None)
    assert tier.back.seconds(5 * 10**8) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((100, SIZE, 1.0, 1.0, 2 * SIZE - 1), "give at least 1.95 KiB"),
        ((0, SIZE, 1.0, 1.0, 9 * SIZE), "at least 1"),
    ],
)
def test_impossible_chains(arguments: tuple[int, int, float, float, int], complaint: str) -> None:
    for tiers in ((), (disk(9, 9),)):
        with pytest.raises(SequenceError, match=complaint):
            choose(*arguments, tiers=tiers)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((10, SIZE, -1.0, 1.0, 9 * SIZE), "step_seconds=-1.0: it must be a number of seconds, 0 or more"),
        ((10, SIZE, math.nan, 1.0, 9 * SIZE), "step_seconds=nan: it must be"),
        ((1000, SIZE, math.inf, 1.0, 9 * SIZE), "step_seconds=inf: it must be"),
        ((1e3, SIZE, 1.0, 1.0, 9 * SIZE), "n=1000.0: it must be a whole number"),
    ],
)
def test_arguments_that_cannot_be(arguments: tuple[Any, Any, Any, Any, Any], complaint: str) -> None:
    """The disk matters: with one, more was made of them."""
    for tiers in ((), (disk(9, 9),)):
        with pytest.raises(ArgumentError, match=complaint):
            choose(*arguments, tiers=tiers)


@pytest.mark.parametrize(
    "costs",
    [(0.0, 0.0), (0.0, -1.0), (0.0, math.nan), (0.0, 5e-324), (-1.0, 1e9), (math.inf, 1e9), (0.0, 1e9, -1.0)],
)
def test_links_that_no_state_can_take(costs: tuple[float, ...]) -> None:
    """The predicted time was less than nothing, or the error one from inside."""
    latency, rate, *slowdown = costs
    out = Link("memory", "disk", latency, rate, rate, *slowdown)
    back = Link("disk", "memory", 0.0, 1e9, 1e9)
    for ways in ((out, back), (back, out)):
        with pytest.raises(SequenceError, match="no state can take a link such as Link"):
            choose(200, SIZE, 1.0, 2.0, 11 * SIZE, [SlowMemory("disk", *ways)])


def test_a_link_that_takes_no_time() -> None:
    link = Link("memory", "disk", 0.0, math.inf, math.inf)
    assert choose(200, SIZE, 1.0, 2.0, 11 * SIZE, [SlowMemory("disk", link, link)]).seconds == 599.0


def test_numbers_of_numpy() -> None:
    n: Any = np.int64(50)
    size: Any = np.int32(SIZE)
    choice = choose(n, size, 1.0, 2.0, 11 * SIZE)
    assert choice.schedule == Revolve(50, 10)
    assert type(choice.schedule.n) is int


@pytest.mark.parametrize("memory", [0, -1, "much", None])
def test_memory_that_is_no_size(memory: Any) -> None:
    chain = (lambda u, step: u, lambda u, adjoint, step: adjoint, 30, np.zeros(77))
    with pytest.raises(ValueError, match="size"):
        choose(100, SIZE, 1.0, 1.0, memory)
    with pytest.raises(ValueError, match="size"):
        run(*chain, turn=np.copy, memory=memory)
    with pytest.raises(ValueError, match="size"):
        scan(lambda state, x: (state + x, None), torch.zeros(3), torch.zeros(4, 3), memory=memory)


def test_memory_that_an_error_asks_for_is_enough() -> None:
    """It was rounded, so that who gave "1.95 KiB" was told to give at least 1.95 KiB."""
    with pytest.raises(SequenceError, match="2000 bytes") as refused:
        choose(100, SIZE, 1.0, 1.0, "1.95KiB")
    assert choose(100, SIZE, 1.0, 1.0, bytes_named(refused.value)).memory_bytes == 2 * SIZE
    schedule = Revolve(30, 9)
    chain = (lambda u, step: u, lambda u, adjoint, step: adjoint, 30, np.zeros(77))
    with pytest.raises(SequenceError, match="holds 10 states in memory") as refused:
        run(*chain, turn=np.copy, memory=5000, schedule=schedule)
    run(*chain, turn=np.copy, memory=bytes_named(refused.value), schedule=schedule)


def bytes_named(error: Exception) -> int:
    """How many an error asks for."""
    (number,) = re.findall(r"\((\d+) bytes\)", str(error))
    return int(number)


def test_a_choice_says_what_it_knows() -> None:
    known = choose(1, 8, 1.0, 2.0, "1MiB")
    assert str(known) == "StoreAll: 1 step, 2.00 s, each step forward 1.00 times, 8 B in memory"
    assert str(dataclasses.replace(known, seconds=math.nan)).startswith("StoreAll: 1 step, each step forward")


@pytest.mark.parametrize("n", [True, False])
def test_a_truth_is_no_number_of_steps(n: bool) -> None:
    with pytest.raises(ArgumentError, match=rf"^n={n}: it must be a whole number$"):
        choose(n, 8, 1.0, 1.0, "1MiB")
