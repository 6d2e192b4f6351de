"""Every policy's plans are accepted by the simulator and stay within the limit whenever they are returned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.decisions import Offload, Plan, Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.needs import KEEP, OFFLOAD
from ebbtide.plan.profile import needs_of, profile
from ebbtide.plan.published.transfers import Ground
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.published.memory_policies import POLICIES
from tests.plan.random_steps import MIB, disk_machine, lone_machine, network_step, random_step

FIXTURES = Path(__file__).parents[2] / "fixtures"
QUICK, SLOW = disk_machine(3e9, 1.5e9, slowdown=0.1), disk_machine(2e8, 2e8)


def check(step: Step, machine: Machine, name: str, fraction: float) -> str:
    """Plan, and hold the plan against what it says of itself; what came of it."""
    limit_bytes = limit_at(step, fraction)
    refused: BudgetError | None = None
    try:
        plan = POLICIES[name](step, machine, limit_bytes)
    except PolicyError:
        return "unsuited"
    except BudgetError as error:
        refused = error
    if refused is not None:
        assert refused.limit_bytes == limit_bytes < refused.reachable_bytes
        assert step.ops[refused.tick].name == refused.op
        return "above"
    outcome = simulate(step, machine, plan.decisions)
    assert (outcome.peak_bytes, outcome.physical_peak_bytes) == (plan.peak_bytes, plan.physical_peak_bytes)
    assert plan.peak_bytes <= limit_bytes == plan.limit_bytes
    assert plan.seconds == pytest.approx(outcome.seconds)
    assert (plan.plain_peak_bytes, plan.resting_bytes) == (plain_peak_bytes(step), step.resting_bytes)
    assert plan.method.split()[0].rstrip(",") == name.split()[0]
    if "none offload" in plan.method:
        assert not any(isinstance(decision, Offload) for decision in plan.decisions)
    if "none recompute" in plan.method:
        assert not any(isinstance(decision, Recompute) for decision in plan.decisions)
    return "within"


@pytest.mark.parametrize("name", POLICIES)
def test_random_steps(name: str) -> None:
    for seed in range(14):
        for machine in (QUICK, SLOW, lone_machine()):
            check(random_step(seed, length=14), machine, name, 0.55 + 0.1 * (seed % 4))


@pytest.mark.parametrize("name", POLICIES)
def test_a_convolutional_network(name: str) -> None:
    found = check(network_step(8, size_bytes=MIB), QUICK, name, 0.99)
    assert found == ("above" if name == "superneurons none, none" else "within")


@pytest.mark.parametrize("fixture", ["resnet50", "gpt2", "lstm"])
@pytest.mark.parametrize("name", POLICIES)
def test_recorded_steps(name: str, fixture: str) -> None:
    step = Step.load(FIXTURES / f"{fixture}.json.gz")
    found = check(step, QUICK, name, 0.6)
    assert (found == "unsuited") == (fixture != "resnet50" and name in ("vdnn conv", "hascoet conv"))
    if name.startswith(("autoswap", "capuchin", "offload", "superneurons c")):
        assert found == "within"


@pytest.mark.parametrize("name", ["vdnn all", "hascoet all", "offload all", "superneurons cache, cost", "capuchin"])
def test_a_machine_without_a_slow_tier(name: str) -> None:
    step = network_step(4, size_bytes=MIB)
    if name == "capuchin":
        assert check(step, lone_machine(), name, 0.95) == "within"
    else:
        with pytest.raises(PolicyError, match="has no slow tier"):
            POLICIES[name](step, lone_machine(), plain_peak_bytes(step))


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_arguments_give_the_same_plan(name: str) -> None:
    """Within a limit that makes each of them do something, or say that it reaches no less."""
    step = network_step(8, size_bytes=MIB, seed=2)
    limit_bytes = limit_at(step, 0.8)
    found: list[Plan | int] = []
    for _ in range(2):
        try:
            found.append(POLICIES[name](step, QUICK, limit_bytes))
        except BudgetError as error:
            found.append(error.reachable_bytes)
    assert found[0] == found[1]
    assert isinstance(found[0], int) or found[0].binds


@pytest.mark.parametrize("seed", range(16))
def test_offload_all_reaches_the_least_that_offloading_can(seed: int) -> None:
    """Every value gone from its first release until it is asked for."""
    step, machine = random_step(seed, length=4 + seed), QUICK if seed % 2 else SLOW
    ground = Ground.of(step, machine, "offload all")
    modes = np.where(ground.candidates.can_offload, OFFLOAD, KEEP).astype(np.int8)
    least = int(profile(needs_of(ground.problem, ground.candidates), modes).level.max())
    assert POLICIES["offload all"](step, machine, least).peak_bytes <= least
    with pytest.raises(BudgetError) as caught:
        POLICIES["offload all"](step, machine, least - 1)
    assert caught.value.reachable_bytes == least
