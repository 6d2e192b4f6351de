"""The registry: complete, lazy, and every entry a policy that keeps its word."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.decisions import Offload, Plan, Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.plan import lower_bound, plain_peak_bytes, simulate
from ebbtide.plan.published.autoswap import autoswap
from ebbtide.plan.published.beaumont import dynamic_program
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.pofo import pofo
from ebbtide.plan.published.registry import POLICIES, policies_named
from ebbtide.plan.published.remembered import remembered
from ebbtide.plan.published.rotor import rotor
from ebbtide.plan.published.superneurons import superneurons
from ebbtide.plan.published.vdnn import vdnn
from tests.plan.limits import limit_at
from tests.plan.published.chain_steps import chain_step
from tests.plan.published.test_superneurons import QUICK, UNLIMITED, alexnet_step
from tests.plan.random_steps import disk_machine, network_step

FOLDER = Path(__file__).parents[3] / "src" / "ebbtide" / "plan" / "published"


@pytest.mark.parametrize("name", POLICIES)
def test_every_entry_plans(name: str) -> None:
    """Each plan is what the simulator says, within its limit, and no faster than the bound; or it says why not."""
    step, machine = chain_step(12), disk_machine()
    limit_bytes = limit_at(step, 0.7)
    if "conv" in name:
        with pytest.raises(PolicyError, match="saves no input of a convolution"):
            POLICIES[name](step, machine, limit_bytes)
        return
    refused: BudgetError | None = None
    try:
        plan = POLICIES[name](step, machine, limit_bytes)
    except BudgetError as error:
        refused = error
    if refused is not None:
        assert refused.reachable_bytes > limit_bytes
        return
    outcome = simulate(step, machine, plan.decisions)
    assert plan.peak_bytes == outcome.peak_bytes
    assert plan.seconds == pytest.approx(outcome.seconds)
    assert plan.peak_bytes <= limit_bytes
    assert plan.seconds >= lower_bound(step, machine, limit_bytes).seconds


def test_every_file_of_policies_is_registered() -> None:
    named = {getattr(policy, "func", policy).__module__.rpartition(".")[2] for policy in POLICIES.values()}
    policy = re.compile(r"^def \w+\(\s*step: Step,\s*machine: Machine,\s*limit_bytes: int\b", re.MULTILINE)
    assert named == {path.stem for path in FOLDER.glob("*.py") if policy.search(path.read_text())}


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    assert list(policies_named(["rotor", "pofo"])) == ["rotor", "pofo"]
    with pytest.raises(PolicyError, match=r"no policy 'magic'; there are offload-all, .*square-root"):
        policies_named(["rotor", "magic"])


@pytest.mark.parametrize(
    ("policy", "switch", "expected"),
    [
        (vdnn, {"offload": "convs"}, "vdnn's offload is 'convs'; it can be 'all', 'conv', 'dyn'"),
        (hascoet, {"layers": "convs"}, "it can be 'conv', 'all'"),
        (superneurons, {"offload": "cached"}, "it can be 'none', 'checkpoints', 'cache'"),
        (superneurons, {"recompute": "costs"}, "it can be 'none', 'speed', 'memory', 'cost'"),
        (autoswap, {"score": "dao"}, "it can be 'doa', "),
        (autoswap, {"mode": "no overhead"}, "it can be 'stick to limit', 'zero overhead'"),
        (autoswap, {"score": "weighted", "trials": 0}, "it must be 1 or more"),
        (rotor, {"slots": 0}, "rotor's slots is 0; it must be 1 or more"),
        (pofo, {"slots": -1}, "it must be 1 or more"),
        (dynamic_program, {"slots": 0}, "it must be 1 or more"),
    ],
)
def test_a_misspelt_switch_is_an_error(policy: Callable[..., Plan], switch: dict[str, Any], expected: str) -> None:
    """It must not plan as another switch does."""
    step = chain_step(4)
    with pytest.raises(PolicyError, match=expected):
        policy(step, disk_machine(), plain_peak_bytes(step), **switch)


def test_policies_cost_nothing_until_they_are_asked_for() -> None:
    code = "import sys, ebbtide, ebbtide.cli, ebbtide.plan; print([n for n in sys.modules if '.plan.published.' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_answers_are_kept_for_equal_arguments() -> None:
    calls: list[tuple[int, str]] = []

    @remembered
    def make(number: int, text: str = "x") -> list[int]:
        calls.append((number, text))
        return [number]

    assert make(1) is make(1)
    assert make(2) is make(2)
    assert make(1) == [1]
    assert calls == [(1, "x"), (2, "x")]
    assert make(3) == [3]
    assert make(4) == [4]
    assert make(1) == [1]
    assert make(1, text="y") == [1]
    assert calls[2:] == [(3, "x"), (4, "x"), (1, "x"), (1, "y")]


def test_a_policy_gives_the_same_plan_again() -> None:
    """What is kept from one budget to the next changes no plan."""
    machine = disk_machine()
    steps = [chain_step(12), chain_step(9)]
    for name in ("rotor", "pofo", "capuchin", "autoswap-swdoa", "beaumont-greedy"):
        found: list[object] = []
        for step in (*steps, *steps[::-1]):
            try:
                found.append(POLICIES[name](step, machine, int(0.85 * plain_peak_bytes(step))))
            except BudgetError as error:
                found.append(error.reachable_bytes)
        assert found == found[::-1]


METHODS = {
    "offload-all": "offload all",
    "vdnn-all": "vdnn all",
    "vdnn-conv": "vdnn conv",
    "vdnn-dyn": "vdnn dyn",
    "hascoet-conv": "hascoet conv",
    "hascoet-all": "hascoet all",
    "beaumont-greedy": "beaumont greedy",
    "beaumont-dp": "beaumont dynamic program",
    "autoswap-doa": "autoswap doa",
    "autoswap-aoa": "autoswap aoa",
    "autoswap-wdoa": "autoswap wdoa",
    "autoswap-swdoa": "autoswap swdoa",
    "autoswap-voting": "autoswap voting",
    "autoswap-weighted": "autoswap weighted",
    "superneurons-offload": "superneurons, checkpoints offload, none recompute",
    "superneurons-recompute": "superneurons, none offload, cost recompute",
    "superneurons-both": "superneurons, checkpoints offload, cost recompute",
    "superneurons-cache": "superneurons, cache offload, cost recompute",
    "capuchin": "capuchin",
    "rotor": "rotor",
    "pofo": "pofo",
    "every-block": "recompute every block",
    "square-root": "checkpoint segments",
}


def test_every_name_means_its_switches() -> None:
    step, machine = network_step(4), disk_machine()
    assert {name: policy(step, machine, 1 << 50).method for name, policy in POLICIES.items()} == METHODS


@pytest.mark.parametrize(
    ("name", "layers", "moves"),
    [
        ("superneurons-offload", 0, True),
        ("superneurons-recompute", 17, False),
        ("superneurons-both", 17, True),
        ("superneurons-cache", 17, False),
    ],
)
def test_alexnet_recomputes_cost_aware_as_in_the_paper(name: str, layers: int, moves: bool) -> None:
    """17 layers: 14 would be speed-centric, 23 memory-centric. The cache moves nothing where memory is not short."""
    plan = POLICIES[name](alexnet_step(as_autograd=False), QUICK, UNLIMITED)
    again = [decision.ops for decision in plan.decisions if isinstance(decision, Recompute)]
    assert sum(map(len, again)) == layers
    assert any(isinstance(decision, Offload) for decision in plan.decisions) == moves
