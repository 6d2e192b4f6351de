"""What the chain policies make of steps: valid plans within the limit, or an error that names the least peak."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ebbtide.decisions import Offload, Plan, Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.judged import Planner
from ebbtide.plan.published.beaumont import dynamic_program, greedy
from ebbtide.plan.published.chain import Chain, Stage
from ebbtide.plan.published.checkpointing import block_plan, every_block, segment_plan, square_root
from ebbtide.plan.published.pofo import pofo
from ebbtide.plan.published.rotor import rotor
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.published.chain_steps import chain_step
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, lone_machine, network_step, random_step
from tests.plan.test_tiers import saved_values

FIXTURES = Path(__file__).parents[2] / "fixtures"
POLICIES: dict[str, Planner] = {
    "rotor": rotor,
    "pofo": pofo,
    "greedy": greedy,
    "dynamic program": dynamic_program,
    "every block": every_block,
    "square root": square_root,
}
RECOMPUTING = [rotor, every_block, square_root]
DISK = disk_machine(2e9, 1e9, slowdown=0.05)


def check(policy: Planner, step: Step, machine: Machine, limit_bytes: int) -> Plan:
    """The policy's plan for the limit, or, if that is too low, for the least one that it says it can meet."""
    least = None
    try:
        plan = policy(step, machine, limit_bytes)
    except BudgetError as error:
        least = error.reachable_bytes
    if least is not None:
        plan = policy(step, machine, least)
        assert plan.peak_bytes <= least
        assert least > limit_bytes
    outcome = simulate(step, machine, plan.decisions)
    assert outcome.peak_bytes == plan.peak_bytes <= plan.limit_bytes
    assert outcome.seconds == pytest.approx(plan.seconds)
    assert plan.seconds >= plan.plain_seconds * (1 - 1e-9)
    return plan


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("name", ["gpt2", "lstm", "resnet50"])
def test_recorded_steps(name: str, policy: Planner) -> None:
    step = Step.load(FIXTURES / f"{name}.json.gz")
    for fraction in (1.0, 0.6, 0.3):
        check(policy, step, DISK, limit_at(step, fraction))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_random_steps(policy: Planner) -> None:
    """Random programs are chains now and then, with every kind of op, values held by the user and asked for twice."""
    planned = 0
    for seed in range(60):
        step = random_step(seed, length=14)
        try:
            check(policy, step, DISK, limit_at(step, 0.7))
            planned += 1
        except PolicyError:
            continue
    assert planned > 5


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_random_chains(policy: Planner) -> None:
    for seed in range(3):
        for step in (chain_step(7, seed=seed, noise_every=3), network_step(9, seed=seed)):
            for fraction in (0.8, 0.5):
                check(policy, step, DISK, limit_at(step, fraction))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_no_chain_is_refused(policy: Planner) -> None:
    step = random_step(0, length=1)
    with pytest.raises(PolicyError, match="chain"):
        policy(step, DISK, plain_peak_bytes(step))


def test_what_each_policy_does() -> None:
    step = chain_step(9)
    for policy in RECOMPUTING:
        plan = check(policy, step, DISK, limit_at(step, 0.6))
        assert any(isinstance(decision, Recompute) for decision in plan.decisions)
        assert not any(isinstance(decision, Offload) for decision in plan.decisions)
    for policy in (greedy, dynamic_program):
        plan = check(policy, step, DISK, limit_at(step, 0.6))
        assert any(isinstance(decision, Offload) for decision in plan.decisions)
        assert not any(isinstance(decision, Recompute) for decision in plan.decisions)


def test_without_a_slow_tier() -> None:
    step = chain_step(9)
    for policy in (greedy, dynamic_program):
        with pytest.raises(PolicyError, match="no slow tier"):
            policy(step, lone_machine(), limit_at(step, 0.6))
    assert not any(isinstance(d, Offload) for d in check(pofo, step, lone_machine(), limit_at(step, 0.6)).decisions)


def test_rotor_is_no_slower_than_fixed_checkpointing() -> None:
    for seed in range(4):
        step = chain_step(9, seed=seed)
        for policy in (every_block, square_root):
            plan = policy(step, DISK, plain_peak_bytes(step))
            assert rotor(step, DISK, plan.peak_bytes).seconds <= plan.seconds * 1.05


def test_very_deep_chains_do_not_nest_too_deeply() -> None:
    step = network_step(150)
    plan = check(square_root, step, DISK, plain_peak_bytes(step))
    assert plan.peak_bytes < limit_at(step, 0.5)


@pytest.mark.parametrize("policy", [rotor, pofo, every_block, square_root])
@pytest.mark.parametrize("count", [98, 99, 100, 101, 250])
def test_stages_of_many_values_do_not_nest_too_deeply(policy: Planner, count: int) -> None:
    """A stage's saved values each from the one before, as in a dense block whose input is read again at its end."""
    tape = Tape()
    value = tape.op([tape.external(64 * KIB)], [64 * KIB])[0]
    saved = [tape.pack(value)]
    for _ in range(3):
        inner = value
        for _ in range(count):
            inner = tape.op([inner], [64 * KIB])[0]
            saved.append(tape.pack(inner))
        value = tape.op([inner, value], [64 * KIB])[0]
        saved.append(tape.pack(value))
    gradient = tape.op([value], [KIB], replay="opaque", phase="backward")[0]
    for number in reversed(saved):
        tape.unpack(number)
        read = [gradient, tape.saved[number][0]]
        gradient = tape.op(read, [64 * KIB], replay="opaque", phase="backward")[0]
    step = tape.step()
    plan = check(policy, step, DISK, int(0.6 * plain_peak_bytes(step)))
    assert any(isinstance(decision, Recompute) for decision in plan.decisions)


def test_schedules_of_fixed_checkpointing() -> None:
    chain = Chain((Stage(1.0, 2.0, 1, 2),) * 9, 1)
    assert block_plan(chain).seconds == 27 + 9
    # The last of three segments is not computed again.
    assert segment_plan(chain).seconds == 27 + 6
    kinds = [action.kind for action in segment_plan(chain).actions]
    assert [kinds.count(k) for k in ("forward_keep", "forward_drop", "forward_all", "backward")] == [2, 4, 9, 9]
    with pytest.raises(PolicyError, match="10 segments"):
        segment_plan(chain, 10)


def test_as_many_segments_as_are_nearest_to_the_square_root() -> None:
    """Of seven stages 2.6, so three: two, two and three of them, of which the last three run once."""
    plan = segment_plan(Chain((Stage(1.0, 2.0, 1, 2),) * 7, 1))
    assert plan.seconds == 7 * 3.0 + 4
    assert [action.stage for action in plan.actions if action.kind == "forward_keep"] == [0, 2]
    assert [action.stage for action in plan.actions if action.kind == "forward_drop"] == [1, 3]


@pytest.mark.parametrize("policy", [greedy, dynamic_program])
def test_what_no_recipe_makes_goes_out(policy: Planner) -> None:
    """Ten values of 1 MiB, all of which are there at the turn; nothing can be computed again."""
    step = saved_values(*[MIB] * 10)
    plan = policy(step, disk_machine(), plain_peak_bytes(step) - 3 * MIB)
    moved = [number for number, decision in enumerate(plan.decisions) if isinstance(decision, Offload)]
    assert len(moved) >= 3
    if policy is greedy:
        assert moved == list(range(len(moved)))  # the earliest first


@pytest.mark.parametrize("name", ["pofo", "dynamic program"])
def test_links_are_as_fast_as_the_simulator_takes_them(name: str) -> None:
    """That has each transfer at the rate of a link whose opposite direction is idle."""
    step, machine = Step.load(FIXTURES / "resnet50.json.gz"), disk_machine(3e9, 3e9)
    limit = limit_at(step, 0.45 if name == "pofo" else 0.9)
    links = tuple(dataclasses.replace(link, duplex_bytes_per_second=2e8) for link in machine.links)
    slower = dataclasses.replace(machine, links=links)
    assert POLICIES[name](step, slower, limit).decisions == POLICIES[name](step, machine, limit).decisions
