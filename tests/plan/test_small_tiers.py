"""Slow tiers that hold less than a step could send there."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.decisions import Decision, Keep, Offload, Recompute
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine, Tier
from ebbtide.plan import NO_CAUTION, least_peak_bytes, plain_peak_bytes, simulate, solve
from ebbtide.plan.finals import final_absences
from ebbtide.plan.frontier import frontier
from ebbtide.plan.published.registry import POLICIES
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
