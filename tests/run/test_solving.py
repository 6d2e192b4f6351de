"""What plans for devices leave out, and what they count that costs the device nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ebbtide.decisions import Offload, Plan, Recompute
from ebbtide.machine import Link, Machine, Tier
from ebbtide.machines import load_machine
from ebbtide.plan import simulate, solve
from ebbtide.run import allocator
from ebbtide.run.kinds import Kind
from ebbtide.run.resident import rss_bytes
from ebbtide.run.solving import plan_for
from ebbtide.run.tiers.layouts import planned_places
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import disk_machine, network_step

STEP = dataclasses.replace(network_step(24), device="cuda")
LIMIT = limit_at(STEP, 0.5)
OBSERVED = Path(__file__).parents[1] / "fixtures/resnet50.json.gz"
RECORDED = Path(__file__).parents[2] / "benchmarks/results/2026-11-26-h200-step-gpt2-xl.json.gz"
EVERYTHING = frozenset(range(len(STEP.absences)))


def machine(host_bytes: int | None) -> Machine:
    """A device with host memory, and a disk."""
    tiers = Tier("gpu", "device"), Tier("host", "host", host_bytes), Tier("disk", "disk")
    rates = {"host": 2e8, "disk": 1e8}
    links = (Link(*way, 1e-5, rates[name], rates[name]) for name in rates for way in (("gpu", name), (name, "gpu")))
    return Machine("paper", "gpu", tiers, tuple(links))


def moved(plan: Plan, tier: str) -> int:
    return sum(isinstance(decision, Offload) and decision.tier == tier for decision in plan.decisions)


def test_disks_are_left_out_where_host_memory_takes_what_moves() -> None:
    """It need not take all that may move."""
    anything = machine(None)
    plan = plan_for(STEP, anything, LIMIT, banned=EVERYTHING)
    assert moved(plan, "host") > 0 == moved(plan, "disk")
    assert moved(solve(STEP, anything, LIMIT, banned=EVERYTHING), "disk") > 0
    needed = planned_places(STEP, plan.decisions, "host").footprint_bytes
    saved = sum(STEP.values[value].size_bytes for value in {absence.value for absence in STEP.absences})
    assert needed < saved
    enough = plan_for(STEP, machine(needed), LIMIT, banned=EVERYTHING)
    assert enough.decisions == plan.decisions


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_disks_take_what_host_memory_does_not(host_bytes: int) -> None:
    plan = plan_for(STEP, machine(host_bytes), LIMIT, banned=EVERYTHING)
    assert moved(plan, "disk") > 0
    assert planned_places(STEP, plan.decisions, "host").footprint_bytes <= host_bytes


def test_where_there_is_but_a_disk_it_is_used() -> None:
    plan = plan_for(STEP, machine(None).without({"host"}), LIMIT, banned=frozenset())
    assert moved(plan, "disk") > 0


def test_the_host_has_less_to_do() -> None:
    """GPT-2 XL on an H200: half as much, for a fiftieth more of the device's time at most."""
    step, gpu = Step.load(RECORDED), load_machine("h200")
    limit = limit_at(step, 0.5)
    plans = plan_for(step, gpu, limit, banned=frozenset()), solve(step, gpu, limit)
    fewer, more = (sum(isinstance(d, Offload | Recompute) for d in plan.decisions) for plan in plans)
    assert fewer < 0.75 * more
    quick, best = (simulate(step, gpu, plan.decisions) for plan in plans)
    assert quick.peak_bytes <= limit
    assert quick.seconds <= 1.02 * best.seconds


def test_what_is_predicted_is_the_devices_time() -> None:
    kind = Kind(STEP, verify=False)
    kind.make_plan(machine(None), LIMIT)
    assert kind.plan is not None
    assert kind.plan.seconds == simulate(STEP, machine(None), kind.plan.decisions).seconds
    bound = kind.bounded_plan(machine(None)).bound_seconds
    assert bound is not None
    assert bound <= kind.plan.seconds * (1 + 1e-9)
    kind.state = "planned"
    assert kind.settled, "its durations are known from the observed steps"
    assert not kind.is_timed


def test_on_a_cpu_nothing_else_counts() -> None:
    step: Step = dataclasses.replace(STEP, device="cpu")
    assert plan_for(step, disk_machine(), LIMIT, banned=frozenset()) == solve(step, disk_machine(), LIMIT)


@pytest.mark.skipif(allocator._LIBRARY is None, reason="needs malloc_trim")
def test_the_search_leaves_no_holes_in_the_heap() -> None:
    """They stayed resident beside steps planned anew: of ResNet-50 within half, 25 MiB, a tenth of its live bytes."""
    step = Step.load(OBSERVED)
    plan_for(step, disk_machine(1e9), limit_at(step, 0.4), banned=frozenset())
    left_bytes = rss_bytes()
    allocator.trim_heap()
    assert left_bytes - rss_bytes() < 2 << 20
