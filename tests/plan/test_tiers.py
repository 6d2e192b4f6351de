"""A plan may use every slow tier of the machine, each within its capacity."""

from __future__ import annotations

import contextlib

import pytest

from ebbtide.decisions import Offload, Plan
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import least_peak_bytes, lower_bound, plain_peak_bytes, simulate, solve
from ebbtide.plan.problem import Problem
from ebbtide.plan.published.mapping import slow_links
from ebbtide.plan.published.registry import POLICIES
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, Tape, network_step

BOTH_WAYS = (("ram", "host", 3e7), ("host", "ram", 3e7), ("ram", "disk", 2.5e7), ("disk", "ram", 2.5e7))


def machine_with(*names: str, host_bytes: int | None = None) -> Machine:
    """A machine with some of two slow tiers."""
    tiers = (Tier("ram", "device"), Tier("host", "host", host_bytes), Tier("disk", "disk"))
    links = tuple(Link(a, b, 0.0, rate, rate) for a, b, rate in BOTH_WAYS if {a, b} & set(names))
    return Machine("tiers", "ram", tiers, links)


def moved_bytes(step: Step, plan: Plan) -> dict[str, int]:
    """Bytes of the values that go to each tier."""
    moved: dict[str, int] = {}
    for absence, decision in zip(step.absences, plan.decisions, strict=True):
        if isinstance(decision, Offload):
            moved[decision.tier] = moved.get(decision.tier, 0) + step.values[absence.value].size_bytes
    return moved


def test_two_tiers_are_faster_than_either() -> None:
    step = network_step(12, size_bytes=MIB, seed=1)
    banned = frozenset(range(len(step.absences)))
    plans = {
        names: solve(step, machine_with(*names), limit_at(step, 0.4), seconds=0.3, banned=banned)
        for names in (("host",), ("disk",), ("host", "disk"))
    }
    both = plans["host", "disk"]
    assert set(moved_bytes(step, both)) == {"host", "disk"}
    assert both.seconds < 0.99 * min(plans["host",].seconds, plans["disk",].seconds)
    outcome = simulate(step, machine_with("host", "disk"), both.decisions)
    assert outcome.peak_bytes == both.peak_bytes
    assert outcome.seconds == pytest.approx(both.seconds)
    assert lower_bound(step, machine_with("host", "disk"), limit_at(step, 0.4), banned=banned).seconds <= both.seconds


def test_no_tier_takes_more_than_it_can() -> None:
    step = network_step(12, size_bytes=MIB, seed=1)
    for host_bytes in (3 * MIB, 0):
        machine = machine_with("host", "disk", host_bytes=host_bytes)
        moved = moved_bytes(step, solve(step, machine, limit_at(step, 0.4), seconds=0.2))
        assert moved.get("host", 0) <= host_bytes
        assert moved["disk"] > 0


def saved_values(*sizes: int) -> Step:
    """Values of ``sizes``, each made from the one before and saved; nothing can be computed again."""
    tape = Tape()
    value, saved = tape.external(KIB), []
    for size in sizes:
        value = tape.op([value], [size], seconds=1.0, replay="opaque")[0]
        saved.append(tape.pack(value))
    gradient = tape.op([value], [KIB], seconds=1.0, replay="opaque")[0]
    for number in reversed(saved):
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        gradient = tape.op(inputs, [KIB], seconds=1.0, phase="backward", replay="opaque")[0]
    return tape.step()


def test_a_tier_takes_what_fits_where_the_largest_value_does_not() -> None:
    step = saved_values(6 * MIB, *[MIB] * 10)
    least = least_peak_bytes(step, machine_with("host", host_bytes=5 * MIB))
    assert least == least_peak_bytes(step, machine_with()) - 5 * MIB
    plan = solve(step, machine_with("host", host_bytes=5 * MIB), least, seconds=0.1)
    assert moved_bytes(step, plan) == {"host": 5 * MIB}


def test_of_two_tiers_with_limits_each_takes_what_the_other_does_not() -> None:
    step = saved_values(*[MIB] * 10)
    (host, disk), links = machine_with("host", "disk").tiers[1:], machine_with("host", "disk").links
    small = tuple(Tier(tier.name, tier.kind, 4 * MIB) for tier in (host, disk))
    both = Machine("two", "ram", (Tier("ram", "device"), *small), links)
    least = least_peak_bytes(step, both)
    assert least == least_peak_bytes(step, machine_with("host", host_bytes=8 * MIB))
    assert moved_bytes(step, solve(step, both, least, seconds=0.1)) == {"host": 4 * MIB, "disk": 4 * MIB}


def quick_return() -> Machine:
    """Two slow tiers; the one that is named last takes longer out, and is the first to be back."""
    rates = {("ram", "disk"): 4e9, ("disk", "ram"): 1e9, ("ram", "host"): 2e9, ("host", "ram"): 3e9}
    links = tuple(Link(source, target, 0.0, rate, rate) for (source, target), rate in rates.items())
    return Machine("two", "ram", (Tier("ram", "device"), Tier("disk", "disk"), Tier("host", "host")), links)


def test_the_tier_with_the_fastest_return_comes_first() -> None:
    machine, step = quick_return(), saved_values(*[MIB] * 6)
    assert [tier.name for tier in machine.slow_tiers()] == ["host", "disk"]
    assert list(Problem.of(step, machine).routes) == ["host", "disk"]
    assert slow_links(machine) == (machine.link("ram", "host"), machine.link("host", "ram"))
    assert set(moved_bytes(step, POLICIES["offload-all"](step, machine, 1 << 50))) == {"host"}


def test_of_equal_tiers_the_one_that_is_named_first_comes_first() -> None:
    tiers = (Tier("ram", "device"), Tier("b", "disk"), Tier("a", "disk"))
    links = tuple(Link(*pair, 0.0, 1e9, 1e9) for name in "ab" for pair in (("ram", name), (name, "ram")))
    assert [tier.name for tier in Machine("even", "ram", tiers, links).slow_tiers()] == ["b", "a"]


def test_no_policy_puts_more_into_a_tier_than_it_takes() -> None:
    """The first of eleven values alone is larger than the tier, which takes five of the others."""
    step, machine = saved_values(6 * MIB, *[MIB] * 10), machine_with("host", host_bytes=5 * MIB)
    assert moved_bytes(step, POLICIES["offload-all"](step, machine, 1 << 50)) == {"host": 5 * MIB}
    planned = 0
    for policy in POLICIES.values():
        for limit_bytes in (1 << 50, plain_peak_bytes(step) - 4 * MIB):
            with contextlib.suppress(BudgetError, PolicyError):
                assert moved_bytes(step, policy(step, machine, limit_bytes)).get("host", 0) <= 5 * MIB
                planned += 1
    assert planned > 10
