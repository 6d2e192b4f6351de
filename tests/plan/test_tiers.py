"""A plan may use every slow tier of the machine, each within its capacity."""

from __future__ import annotations

import pytest

from ebbtide.decisions import Offload, Plan
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import lower_bound, simulate, solve
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import MIB, network_step

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
