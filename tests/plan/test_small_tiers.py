"""Slow tiers that hold less than a step could send there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.arrays import Mask
from ebbtide.compiled import compiled
from ebbtide.decisions import Decision, Keep, Offload, Recompute
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine, Tier
from ebbtide.plan import NO_CAUTION, find_recipes, least_peak_bytes, plain_peak_bytes, simulate, solve
from ebbtide.plan.capacity import take_where_room
from ebbtide.plan.finals import final_absences
from ebbtide.plan.frontier import frontier
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.published.registry import POLICIES
from ebbtide.run.tiers.layouts import planned_places
from ebbtide.step import Step
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, lone_machine, network_step

SMALL = Machine("small", "ram", (Tier("ram", "device"), Tier("disk", "disk", 6 * MIB)), disk_machine().links)


def _op(tape: Tape, inputs: list[int], size: int, **more: Any) -> int:
    return tape.op(inputs, [size], seconds=1e-2, replay="opaque", **more)[0]


def kept_graph() -> Step:
    """A pass with a peak, and after it a graph that no pass goes through, which holds 6 MiB."""
    tape = Tape()
    a = _op(tape, [tape.external(KIB)], 4 * MIB)
    saved = tape.pack(a)
    b = _op(tape, [a], KIB)
    tape.pack(b)
    g = _op(tape, [_op(tape, [b], 8 * MIB)], KIB)
    tape.unpack(saved)
    f = _op(tape, [_op(tape, [g, a], KIB, phase="backward")], 6 * MIB)
    tape.retain(tape.pack(f))
    h = _op(tape, [f], KIB)
    tape.pack(h)
    _op(tape, [h], KIB)
    return tape.step()


def test_the_least_peak_is_that_of_the_better_attempt() -> None:
    """With final values a tier is given to these, and without them to those that make the peak."""
    step = kept_graph()
    assert len(final_absences(step)) == 1
    limit = plain_peak_bytes(step) - 4 * MIB
    assert solve(step, SMALL, limit, seconds=0.05).peak_bytes == limit
    assert least_peak_bytes(step, SMALL) == limit
    with pytest.raises(BudgetError) as raised:
        solve(step, SMALL, limit - 1, seconds=0.05)
    assert raised.value.reachable_bytes == limit
    assert len(frontier(step, SMALL, points=4, seconds=0.02).solver.points) == 4


def test_a_tier_is_for_those_at_the_peak_first() -> None:
    """A larger value, which is over before that, would take all of it."""
    tape = Tape()
    x = tape.external(KIB)
    a = _op(tape, [x], 6 * MIB)
    saved = tape.pack(a)
    u = _op(tape, [a], KIB)
    tape.pack(u)
    v = _op(tape, [u], KIB)
    tape.unpack(saved)
    _op(tape, [v, a], KIB, phase="backward")
    b = _op(tape, [x], 4 * MIB)
    out = len(tape.ops)
    saved = tape.pack(b)
    w = _op(tape, [b], KIB)
    release = len(tape.ops)
    tape.pack(w)
    g = _op(tape, [_op(tape, [w], 8 * MIB)], KIB)
    load = len(tape.ops)
    tape.unpack(saved)
    _op(tape, [g, b], KIB, phase="backward")
    step = tape.step()
    decisions: list[Decision] = [
        Offload("disk", out, release, load) if absence.value == b else Keep() for absence in step.absences
    ]
    peak = simulate(step, SMALL, decisions).peak_bytes
    assert peak == plain_peak_bytes(step) - 4 * MIB
    assert least_peak_bytes(step, SMALL) == peak
    assert solve(step, SMALL, peak, seconds=0.05).peak_bytes == peak


def test_a_tier_is_left_to_what_can_only_be_moved() -> None:
    """A larger value, which can be computed again, would take all of it."""
    tape = Tape()
    (a,) = tape.op([tape.external(KIB)], [6 * MIB], seconds=1e-2)
    saved = [tape.pack(a)]
    (b,) = tape.op([a], [4 * MIB], seconds=1e-2, replay="random")
    saved.append(tape.pack(b))
    u = _op(tape, [b], KIB)
    tape.pack(u)
    g = _op(tape, [_op(tape, [u], 16 * MIB)], KIB)
    for number, value in zip(reversed(saved), (b, a), strict=True):
        tape.unpack(number)
        g = _op(tape, [g, value], KIB, phase="backward")
    step = tape.step()
    limit = plain_peak_bytes(step) - 10 * MIB
    plan = solve(step, SMALL, limit, seconds=0.05)
    assert [type(decision) for decision in plan.decisions] == [Recompute, Offload]
    assert least_peak_bytes(step, SMALL) == limit == plan.peak_bytes
    with pytest.raises(BudgetError) as raised:
        solve(step, SMALL, limit - 1, seconds=0.05)
    assert raised.value.reachable_bytes == limit


def accumulated(passes: int) -> Step:
    """Gradient accumulation: passes of eight values of 1 MiB each, of which none can be computed again."""
    tape = Tape()
    for _ in range(passes):
        value, saved = tape.external(MIB), []
        for _ in range(8):
            value = _op(tape, [value], MIB)
            saved.append(tape.pack(value))
        gradient = _op(tape, [value], KIB, phase="backward")
        for number in reversed(saved):
            tape.unpack(number)
            gradient = _op(tape, [gradient, tape.saved[number][0]], MIB, phase="backward")
    return tape.step()


def test_room_is_there_again_once_a_value_is_back() -> None:
    """A tier that is large enough for what is away at any one moment suffices, whatever goes there all in all."""
    step = accumulated(4)
    small = Machine("small", "ram", (Tier("ram", "device"), Tier("disk", "disk", 8 * MIB)), disk_machine().links)
    least = least_peak_bytes(step, disk_machine())
    assert least < plain_peak_bytes(step) - 5 * MIB
    plan = solve(step, small, least, seconds=0.05)
    assert sum(isinstance(decision, Offload) for decision in plan.decisions) > 8
    assert planned_places(step, plan.decisions, "disk").footprint_bytes <= 8 * MIB


def test_a_tier_is_for_what_takes_longest_to_compute_again() -> None:
    """The others are a little larger."""
    tape, dear = Tape(), list[int]()
    value, saved = tape.external(MIB), []
    for _ in range(6):
        dear += tape.op([value], [MIB], seconds=1e-2)
        (value,) = tape.op(dear[-1:], [MIB + 64 * KIB], seconds=1e-4)
        saved += [tape.pack(dear[-1]), tape.pack(value)]
    gradient = _op(tape, [value], KIB, phase="backward")
    for number in reversed(saved):
        tape.unpack(number)
        gradient = _op(tape, [gradient, tape.saved[number][0]], MIB, phase="backward")
    step = tape.step()
    assert set(dear) == {step.absences[number].value for number in np.flatnonzero(allowed(step, 6 * MIB))}
    plan = solve(step, SMALL, plain_peak_bytes(step) - 8 * MIB, seconds=0.2, caution=NO_CAUTION)
    assert plan.seconds < 1.02 * plan.plain_seconds


def allowed(step: Step, capacity_bytes: int) -> Mask:
    """Which absences may go to a disk of so many bytes; all of the step are candidates."""
    tiers = Tier("ram", "device"), Tier("disk", "disk", capacity_bytes)
    problem = Problem.of(step, Machine("limited", "ram", tiers, disk_machine().links))
    candidates = Candidates.of(problem, "disk", find_recipes(step))
    assert len(candidates.absence) == len(step.absences)
    return candidates.can_offload


@pytest.mark.parametrize("seed", range(20))
def test_room_by_moments(seed: int) -> None:
    """What `take_where_room` finds in a tree, looked up moment by moment."""
    dice, moments, count = np.random.default_rng(seed), 1 + seed * seed, 30
    first = dice.integers(moments, size=count)
    last = dice.integers(first, moments)
    sizes, order = dice.integers(1, 10, size=count), dice.permutation(count)[:25]
    held, expected = np.zeros(moments, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    for place in order:
        expected[place] = (held[first[place] : last[place] + 1] + sizes[place] <= 40).all()
        held[first[place] : last[place] + 1] += expected[place] * sizes[place]
    assert (compiled(take_where_room)(order, first, last, sizes, 40, moments) == expected).all()


def test_final_values_that_are_banned_are_not_made_on_the_way() -> None:
    tape = Tape()
    (h,) = tape.op([tape.external(KIB)], [MIB], seconds=1e-2)
    (y,) = tape.op([h], [MIB], seconds=1e-2)
    saved = tape.pack(y)  # before h: a recipe of y makes that
    tape.retain(tape.pack(h))
    z = _op(tape, [y], MIB)
    g = _op(tape, [_op(tape, [z], 2 * MIB)], KIB)
    tape.unpack(saved)
    _op(tape, [g, y], KIB, phase="backward")
    step = tape.step()
    limit = plain_peak_bytes(step) - MIB
    plan = solve(step, lone_machine(), limit, seconds=0.01, caution=NO_CAUTION)
    assert any(isinstance(decision, Recompute) for decision in plan.decisions)
    with pytest.raises(BudgetError):
        solve(step, lone_machine(), limit, seconds=0.01, banned=frozenset(final_absences(step)), caution=NO_CAUTION)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_take_limits_of_any_size(name: str) -> None:
    step = network_step(4)
    assert POLICIES[name](step, disk_machine(), 10**30).peak_bytes <= 10**30


@pytest.mark.parametrize("sizes", [(6, 5, 5), (7, 6, 4, 1), (9, 4, 3, 3, 2)])
def test_a_tier_is_filled_as_well_as_can_be(sizes: tuple[int, ...]) -> None:
    """The largest value leaves no room for two that hold more together: a tier of 10 MiB takes 10 MiB of these."""
    machine = Machine("small", "ram", (Tier("ram", "device"), Tier("disk", "disk", 10 * MIB)), disk_machine().links)
    tape = Tape()
    value, saved = tape.external(KIB), []
    for size in sizes:
        value = _op(tape, [value], size * MIB)
        saved.append(tape.pack(value))
    head = _op(tape, [value], KIB)
    tape.pack(head)
    scores = _op(tape, [head], 16 * MIB)
    tape.pack(scores)
    gradient = _op(tape, [scores], KIB, phase="backward")
    tape.pack(gradient)
    for number in reversed(saved):
        tape.unpack(number)
        gradient = _op(tape, [gradient, tape.saved[number][0]], KIB, phase="backward")
        tape.pack(gradient)
    step = tape.step()
    limit = plain_peak_bytes(step) - 10 * MIB
    plan = solve(step, machine, limit, seconds=0.05)
    assert plan.peak_bytes <= limit
    assert planned_places(step, plan.decisions, "disk").footprint_bytes <= 10 * MIB
