"""Rotor gives the published optima, beats every persistent schedule there is, and lands on a step as predicted."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Iterator

import pytest

from ebbtide.errors import BudgetError, PolicyError
from ebbtide.plan.problem import Problem
from ebbtide.plan.published.chain import Action, Chain, Stage
from ebbtide.plan.published.cut import cut
from ebbtide.plan.published.mapping import mapped
from ebbtide.plan.published.rotor import rotor, rounded_up, table
from tests.plan.limits import limit_at
from tests.plan.published.chain_steps import chain_step, random_chain
from tests.plan.random_steps import lone_machine

HOMOGENEOUS = Chain((Stage(1, 2, 1, 3),) * 10, 1)
HETEROGENEOUS = Chain(
    tuple(
        Stage(forward, 2 * forward, output, saved, over_forward, over_backward)
        for forward, output, saved, over_forward, over_backward in zip(
            (3, 1, 4, 1, 5, 9, 2, 6),
            (4, 4, 2, 2, 1, 1, 3, 1),
            (9, 8, 6, 5, 3, 2, 7, 3),
            (0, 1, 0, 2, 0, 1, 0, 0),
            (1, 0, 2, 0, 1, 0, 0, 1),
            strict=True,
        )
    ),
    2,
)


def optimum(chain: Chain, memory: int) -> float:
    """Rotor's optimum with slots of one byte; infinite if there is none."""
    plan = table(chain, memory, memory).plan(memory)
    return math.inf if plan is None else plan.seconds


# Both published tables are for memory in which the chain's input is not counted, although the text that comes with them
# takes it off: with it taken off no entry fits, without all do. `Table.plan` counts it, hence the sums below.
@pytest.mark.parametrize(
    ("memory", "seconds"),
    [(5, math.inf), (6, 75), (7, 50), (8, 45), (10, 40), (12, 38), (15, 37), (20, 35), (25, 33), (30, 31), (32, 30)],
)
def test_published_homogeneous(memory: int, seconds: float) -> None:
    assert optimum(HOMOGENEOUS, memory + HOMOGENEOUS.input_bytes) == seconds


@pytest.mark.parametrize(
    ("memory", "seconds"),
    [(18, math.inf), (20, 111), (22, 107), (24, 105), (28, 100), (32, 98), (36, 97), (40, 96), (44, 94)],
)
def test_published_heterogeneous(memory: int, seconds: float) -> None:
    assert optimum(HETEROGENEOUS, memory + HETEROGENEOUS.input_bytes) == seconds


def schedules(first: int, last: int) -> Iterator[tuple[Action, ...]]:
    """Every persistent schedule of stages ``first..last``."""
    back = Action("backward", first)
    if first == last:
        yield (Action("forward_all", first), back)
        return
    for rest in schedules(first + 1, last):
        yield (Action("forward_all", first), *rest, back)
    for stage in range(first + 1, last + 1):
        sweep = [Action("forward_keep", first), *(Action("forward_drop", k) for k in range(first + 1, stage))]
        for right in schedules(stage, last):
            for left in schedules(first, stage - 1):
                yield (*sweep, *right, *left)


def seconds_of(chain: Chain, actions: tuple[Action, ...]) -> float:
    """Time of a schedule; the loss takes none."""
    stages = [*chain.stages, Stage(0, 0, 0, 0)]
    return sum(
        stages[a.stage].backward_seconds if a.kind == "backward" else stages[a.stage].forward_seconds for a in actions
    )


def peak_of(chain: Chain, actions: tuple[Action, ...]) -> int:
    """Most bytes that a schedule holds, one action after the other; what stays is there from a stage's first forward
    op to its backward."""
    stages = [*chain.stages, Stage(0, 0, 0, 0)]
    read = [*chain.boundary_bytes, 0]
    inputs, saved, staying, gradient, peak = {0}, set[int](), set[int](), len(stages), 0
    for action in actions:
        k, stage = action.stage, stages[action.stage]
        if action.kind != "backward":
            staying.add(k)
        # What a stage saved holds its output, so that is not counted as the next one's input too.
        held = sum(read[i] for i in inputs if i - 1 not in saved) + sum(stages[i].saved_bytes for i in saved)
        held += read[gradient] + sum(stages[i].fixed_bytes for i in staying)
        if action.kind == "backward":
            peak = max(peak, held + read[k] + stage.backward_overhead_bytes)
            saved.remove(k)
            staying.remove(k)
            inputs -= {k, k + 1}
            gradient = k
            continue
        made = stage.saved_bytes if action.kind == "forward_all" else stage.output_bytes
        peak = max(peak, held + made + stage.forward_overhead_bytes)
        inputs.add(k + 1)
        if action.kind == "forward_all":
            saved.add(k)
        if action.kind == "forward_drop":
            inputs.discard(k)
    return peak


@functools.cache
def judged_schedules(seed: int) -> list[tuple[int, float]]:
    chain = random_chain(seed, 4)
    return [(peak_of(chain, actions), seconds_of(chain, actions)) for actions in schedules(0, 4)]


@pytest.mark.parametrize("seed", range(8))
def test_no_persistent_schedule_is_faster(seed: int) -> None:
    chain = random_chain(seed, 4)
    peaks = sorted({peak for peak, _ in judged_schedules(seed)})
    for memory in (peaks[0] - 1, *peaks, peaks[-1] + 5):
        best = min((seconds for peak, seconds in judged_schedules(seed) if peak <= memory), default=math.inf)
        assert optimum(chain, memory) == best


@pytest.mark.parametrize("seed", range(6))
def test_actions_take_what_the_table_says(seed: int) -> None:
    chain = random_chain(seed, 12, overheads=True)
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    found = 0
    for memory in range(1, chain.plain_bytes + 1):
        plan = solved.plan(memory)
        if plan is not None:
            found += 1
            assert seconds_of(chain, plan.actions) == plan.seconds
            assert peak_of(chain, plan.actions) <= memory
    assert found > 3


def test_a_table_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"table of 10 stages and 100000000 slots would take .* GiB; .* fewer slots"):
        table(HOMOGENEOUS, 10**9, 10**8)
    with pytest.raises(PolicyError, match="fewer slots"):
        rotor(chain_step(9), lone_machine(), 10**9, slots=10**8)


@pytest.mark.parametrize("seed", range(4))
def test_nested_schedules_land_on_a_step_exactly(seed: int) -> None:
    """Each value is computed again by one recipe, and still every time of the chain's optimum is met to the digit.

    Only where a stage's last op takes no time: its backward does not need the result, so a step does not replay it.
    """
    stages = cut(Problem.of(chain_step(9, seed=seed, joining_seconds=0.0), lone_machine()))
    whole = rounded_up(stages.chain)
    solved = table(stages.chain, whole)
    nested = 0
    for share in range(20, 101, 4):
        plan = solved.plan(whole * share / 100)
        if plan is None:
            continue
        landed = mapped(stages, plan)
        assert landed.plan(landed.peak_bytes, "rotor").seconds == pytest.approx(plan.seconds)
        runs = [action.stage for action in plan.actions if action.kind != "backward"]
        nested += max(runs.count(stage) for stage in runs) > 2
    assert nested > 0


@pytest.mark.parametrize("seed", range(3))
def test_what_must_stay_is_counted(seed: int) -> None:
    step = chain_step(8, seed=seed, noise_every=2)
    stages = cut(Problem.of(step, lone_machine())).chain.stages
    assert sum(stage.fixed_bytes for stage in stages) > 0
    plan = rotor(step, lone_machine(), limit_at(step, 0.7))
    assert plan.peak_bytes <= plan.limit_bytes
    assert plan.plain_seconds < plan.seconds < 1.34 * plan.plain_seconds


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_must_stay_may_take_more_than_all_slots(slots: int) -> None:
    """Each of these sizes is rounded up to one: less than nothing is left, and there is no schedule for that."""
    step = chain_step(8, noise_every=2)
    with pytest.raises(BudgetError, match="cannot be met by rotor"):
        rotor(step, lone_machine(), limit_at(step, 0.7), slots=slots)


@pytest.mark.parametrize("seed", range(4))
def test_actions_take_what_the_table_says_where_bytes_stay(seed: int) -> None:
    """What the stages behind a checkpoint let go of is room for those before it, in the times and in the actions."""
    dice, bare = random.Random(seed), random_chain(seed, 9, overheads=True)
    stages = tuple(dataclasses.replace(stage, fixed_bytes=dice.randrange(5)) for stage in bare.stages)
    chain = Chain(stages, bare.input_bytes)
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    swept = 0
    for memory in range(1, chain.plain_bytes + 1):
        plan = solved.plan(memory)
        if plan is not None:
            swept += any(action.kind == "forward_keep" for action in plan.actions)
            assert seconds_of(chain, plan.actions) == pytest.approx(plan.seconds)
            assert peak_of(chain, plan.actions) <= memory
    assert swept > 3


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_may_be_more_than_the_table_has_slots(seed: int) -> None:
    """No part takes less time than with all memory: what a part needs is not what the table ends at."""
    dice, bare = random.Random(seed), random_chain(seed, 9, overheads=True)
    stages = tuple(dataclasses.replace(stage, fixed_bytes=dice.randrange(8)) for stage in bare.stages)
    chain = Chain(stages, bare.input_bytes)
    whole = table(chain, 2 * chain.plain_bytes, 2 * chain.plain_bytes).seconds
    assert sum(stage.fixed_bytes for stage in stages) > 14
    for slots in range(1, chain.plain_bytes):
        assert (table(chain, slots, slots).seconds >= whole[..., : slots + 1] - 1e-9).all()


@pytest.mark.parametrize("stays_bytes", [0, 5])
@pytest.mark.parametrize("seed", range(4))
def test_memory_for_everything_is_the_least_one(seed: int, stays_bytes: int) -> None:
    """Sizes are rounded up to slots of it, also those of what stays: a byte less, and something is computed again."""
    dice, bare = random.Random(seed), random_chain(seed, 20, overheads=True)
    stages = tuple(dataclasses.replace(stage, fixed_bytes=dice.randrange(stays_bytes + 1)) for stage in bare.stages)
    chain, slots = Chain(stages, bare.input_bytes), 90
    whole = rounded_up(chain, slots)
    assert chain.plain_bytes < whole < 2 * chain.plain_bytes
    plans = [table(chain, memory, slots).plan(memory) for memory in (whole, whole - 1)]
    seconds = [math.inf if plan is None else plan.seconds for plan in plans]
    assert seconds[0] == pytest.approx(chain.plain_seconds)
    assert seconds[1] > seconds[0]


def test_slots_of_long_chains_are_not_too_coarse() -> None:
    """Rounded up to a slot, each of 400 sizes would take several times as much."""
    chain = Chain((Stage(1, 2, 1, 1),) * 400, 1)
    assert rounded_up(chain) < 2 * chain.plain_bytes
