"""Capuchin swaps what hides, recomputes what costs less than waiting, and learns when to start loads."""

from __future__ import annotations

import pytest

from ebbtide.decisions import Keep, Offload, Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.published.capuchin import capuchin
from tests.plan.limits import limit_at
from tests.plan.random_steps import MIB, disk_machine, lone_machine, network_step

STEP = network_step(12, seed=3)


def test_with_a_quick_link_everything_is_swapped_and_hidden() -> None:
    plan = capuchin(STEP, disk_machine(5e9, 5e9), limit_at(STEP, 0.6))
    assert plan.binds
    assert not any(isinstance(decision, Recompute) for decision in plan.decisions)
    assert plan.seconds < 1.01 * plan.plain_seconds


def test_with_a_slow_link_the_rest_is_recomputed() -> None:
    slow = disk_machine(5e7, 5e7)
    plan = capuchin(STEP, slow, limit_at(STEP, 0.6))
    kinds = {type(decision) for decision in plan.decisions}
    assert kinds == {Keep, Offload, Recompute}
    swap_only = capuchin(STEP, slow, limit_at(STEP, 0.6), recompute=False)
    assert not any(isinstance(decision, Recompute) for decision in swap_only.decisions)
    assert plan.seconds < swap_only.seconds


def test_longest_free_time_first() -> None:
    """A byte too much: the one candidate of the longest free time goes."""
    machine = disk_machine(5e9, 5e9, latency=0.0)
    plan = capuchin(STEP, machine, plain_peak_bytes(STEP) - 1)
    (number,) = [number for number, decision in enumerate(plan.decisions) if isinstance(decision, Offload)]
    clock = simulate(STEP, machine, [Keep()] * len(STEP.absences)).compute_seconds

    def free_seconds(number: int) -> float:
        absence = STEP.absences[number]
        transfers = 2 * STEP.values[absence.value].size_bytes / 5e9
        return clock[absence.closes] - clock[absence.opens] - transfers

    large = [n for n, absence in enumerate(STEP.absences) if STEP.values[absence.value].size_bytes >= MIB // 2]
    assert number == max(large, key=free_seconds)


def test_without_a_slow_tier_only_recomputation_is_left() -> None:
    plan = capuchin(STEP, lone_machine(), limit_at(STEP, 0.8))
    assert {type(decision) for decision in plan.decisions} == {Keep, Recompute}
    with pytest.raises(BudgetError):
        capuchin(STEP, lone_machine(), limit_at(STEP, 0.05))


def test_feedback_never_makes_it_slower() -> None:
    gained = 0
    for bandwidth in (2e8, 4e8, 8e8):
        for seed in range(4):
            step, machine = network_step(10, seed=seed), disk_machine(bandwidth, bandwidth, slowdown=0.1)
            limit_bytes = limit_at(step, 0.7)
            tuned, first = (capuchin(step, machine, limit_bytes, feedback=rounds) for rounds in (10, 0))
            assert tuned.peak_bytes <= limit_bytes
            assert tuned.seconds <= first.seconds
            gained += tuned.seconds < first.seconds
    assert gained > 0


def test_fewer_rounds_than_none_are_refused() -> None:
    with pytest.raises(PolicyError, match="feedback is -1; it must be 0 or more"):
        capuchin(STEP, disk_machine(), limit_at(STEP, 0.7), feedback=-1)
