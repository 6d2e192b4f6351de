"""On recorded steps no policy is faster than `solve`, and none beats the bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ebbtide.decisions import Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan import NO_CAUTION, least_peak_bytes, plain_peak_bytes, solve
from ebbtide.plan.judged import Planner
from ebbtide.plan.published.registry import POLICIES, policies_named
from ebbtide.plan.published.rotor import rotor
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.published.chain_steps import equal_chain
from tests.plan.random_steps import MIB, disk_machine, lone_machine, network_step, random_step

FIXTURES = Path(__file__).parents[1] / "fixtures"
MACHINES = {"quick": disk_machine(3e9, 1.5e9, slowdown=0.1), "slow": disk_machine(3e8, 2e8)}
SAME = 1e-9
WITHOUT_TRANSFERS = policies_named(["rotor", "every-block", "square-root"])
"""Those that plan for machines without a slow tier."""


def beside_all(
    step: Step, machine: Machine, limit_bytes: int, seconds: float, policies: Mapping[str, Planner] = POLICIES
) -> None:
    plan = solve(step, machine, limit_bytes, seconds=seconds, caution=NO_CAUTION)
    assert plan.bound_seconds is not None
    assert plan.bound_seconds <= plan.seconds * (1 + SAME)
    faster, below = {}, {}
    for name, policy in policies.items():
        try:
            found = policy(step, machine, limit_bytes)
        except (BudgetError, PolicyError):
            continue
        if found.seconds < plan.seconds * (1 - SAME):
            faster[name] = found.seconds / plan.seconds
        if found.seconds < plan.bound_seconds * (1 - SAME):
            below[name] = found.seconds / plan.bound_seconds
    assert not faster, f"faster than ours: {faster}"
    assert not below, f"faster than is possible: {below}"


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(("name", "share"), [("resnet50", 0.4), ("gpt2", 0.0), ("lstm", 0.4)])
def test_recorded_steps(name: str, share: float, machine: Machine) -> None:
    step = Step.load(FIXTURES / f"{name}.json.gz")
    least, plain = least_peak_bytes(step, machine), plain_peak_bytes(step)
    beside_all(step, machine, least + int(share * (plain - least)), 0.3)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_random_steps(seed: int, machine: Machine) -> None:
    step = random_step(seed, length=16) if seed % 2 else network_step(6 + seed, size_bytes=MIB, seed=seed)
    least, plain = least_peak_bytes(step, machine), plain_peak_bytes(step)
    for share in (0.0, 0.4):
        beside_all(step, machine, least + int(share * (plain - least)), 0.3)


@pytest.mark.parametrize("share", [0.06, 0.1, 0.15, 0.3])
def test_chains_without_a_slow_tier(share: float) -> None:
    """What recipes make is read by other recipes there, which a search that changes them one by one rarely finds."""
    step = equal_chain(80)
    beside_all(step, lone_machine(), limit_at(step, share), 0.3, WITHOUT_TRANSFERS)


def test_chains_that_only_nested_recipes_fit() -> None:
    """Twice the memory needed it where few ops stood between what stays and what is computed from it."""
    step, machine = equal_chain(120), lone_machine()
    with pytest.raises(BudgetError) as refused:
        solve(step, machine, 0)
    with pytest.raises(BudgetError) as by_rotor:
        rotor(step, machine, 0)
    assert refused.value.reachable_bytes <= 1.5 * by_rotor.value.reachable_bytes
    limit_bytes = refused.value.reachable_bytes
    assert solve(step, machine, limit_bytes, seconds=0.3).peak_bytes <= limit_bytes


def test_banned_values_of_a_chain_are_not_computed_again() -> None:
    step, banned = equal_chain(80), frozenset(range(0, 80, 2))
    plan = solve(step, lone_machine(), limit_at(step, 0.6), banned=banned)
    never = step.values_of(banned)
    recipes = [decision.ops for decision in plan.decisions if isinstance(decision, Recompute)]
    assert recipes
    assert not never & {value for recipe in recipes for tick in recipe for value in step.ops[tick].outputs}


def test_the_same_plan_for_the_same_step_and_seed() -> None:
    step, machine = Step.load(FIXTURES / "lstm.json.gz"), MACHINES["slow"]
    limit_bytes = max(limit_at(step, 0.4), least_peak_bytes(step, machine))
    one, other = (solve(step, machine, limit_bytes, seed=3) for _ in range(2))
    assert one == other
