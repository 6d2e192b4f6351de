"""Memory without a clock is the memory of the plan that releases first and loads on demand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ebbtide.decisions import Keep, Recompute
from ebbtide.errors import PlanError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import find_recipes, least_peak_bytes, plain_peak_bytes, simulate, solve
from ebbtide.plan.follow import Move, Trip, follow
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates, needs_of, profile
from ebbtide.plan.recipes import deeper_recipes
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, lone_machine, network_step, random_step


def ways(candidates: Candidates) -> list[list[int]]:
    """The modes that each candidate may have."""
    columns = zip(candidates.can_offload, candidates.can_recompute, candidates.deepest().tolist(), strict=True)
    return [
        [KEEP, *([OFFLOAD] * bool(possible)), *(range(RECOMPUTE, deepest + 1) if again else ())]
        for possible, again, deepest in columns
    ]


def random_modes(candidates: Candidates, seed: int) -> list[int]:
    """Any possible mode for each candidate, by chance."""
    dice = random.Random(seed)
    return [dice.choice(possible) for possible in ways(candidates)]


def with_deeper(step: Step, problem: Problem) -> Candidates:
    """The candidates of a step with all their recipes."""
    candidates = Candidates.of(problem, "disk", find_recipes(step))
    deeper = [
        [] if shortest is None else deeper_recipes(problem.facts, step.absences[number], shortest)
        for number, shortest in zip(candidates.absence.tolist(), candidates.ops, strict=True)
    ]
    return candidates.deepened(problem, deeper)


@pytest.mark.parametrize("seed", range(60))
def test_profile_is_what_the_simulator_finds(seed: int) -> None:
    step = random_step(seed, length=6 + seed % 14) if seed % 3 else network_step(6, size_bytes=MIB, seed=seed)
    problem = Problem.of(step, disk_machine())
    candidates = with_deeper(step, problem)
    modes = random_modes(candidates, seed)
    recipes = candidates.recipe(np.array(modes, dtype=np.int8)).tolist()
    moves: list[Move] = [None] * len(step.absences)
    for place, mode in enumerate(modes):
        number = int(candidates.absence[place])
        if mode >= RECOMPUTE:
            assert candidates.mode(place, recipes[place]) == mode
            moves[number] = candidates.replays[recipes[place]]
        elif mode == OFFLOAD:
            first, end = int(candidates.release[place]), int(candidates.closes[place])
            moves[number] = Trip("disk", int(candidates.out[place]), first, end)
    found = profile(needs_of(problem, candidates), np.array(modes, dtype=np.int8))
    course = follow(problem, moves)
    assert int(found.level.max()) == int(course.memory.max())
    assert (found.level <= course.memory).all()
    assert found.extra_seconds.sum() == pytest.approx(sum(r.seconds for r in course.recomputations))


def deep_step(depth: int) -> Step:
    """A chain in which every value can be made from the one before, and only from it."""
    tape = Tape()
    value = tape.external(64 * KIB)
    numbers = []
    for _ in range(depth):
        value = tape.op([value], [64 * KIB], seconds=1e-3)[0]
        numbers.append(tape.pack(value))
    tape.op(tape.op([value], [KIB], replay="opaque"), [KIB], replay="opaque")
    for number in reversed(numbers):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [KIB], seconds=2e-3, phase="backward")
    return tape.step()


def test_recipes_that_wait_for_each_other_too_deeply_are_refused() -> None:
    step = deep_step(150)
    recipes = find_recipes(step)
    with pytest.raises(PlanError, match="wait for each other"):
        simulate(step, lone_machine(), [Recompute(recipe) if recipe else Keep() for recipe in recipes])


def test_deep_chains_are_cut() -> None:
    step = deep_step(150)
    limit_bytes = plain_peak_bytes(step) // 3
    plan = solve(step, lone_machine(), limit_bytes, seconds=0.2)
    assert plan.peak_bytes <= limit_bytes
    assert plan.seconds <= 1.4 * plan.plain_seconds


def test_slow_tier_is_not_overfilled() -> None:
    step = network_step(12, size_bytes=MIB)
    links = disk_machine().links
    machine = Machine("small", "ram", (Tier("ram", "device"), Tier("disk", "disk", 2 * MIB)), links)
    limit_bytes = limit_at(step, 0.6)
    plan = solve(step, machine, limit_bytes, seconds=0.1)
    moved = sum(t.size_bytes for t in simulate(step, machine, plan.decisions).transfers if t.direction == "out")
    assert moved <= 2 * MIB
    assert plan.peak_bytes <= limit_bytes


def test_physical_ceiling_gives_way_only_where_it_must() -> None:
    tape = Tape()
    x = tape.external(64 * KIB)
    (a,) = tape.op([x], [MIB], seconds=0.1, replay="opaque")
    saved = tape.pack(a)
    (b,) = tape.op([a], [MIB], seconds=0.1, workspace=4 * MIB, replay="opaque")
    tape.pack(x)
    (c,) = tape.op([b], [MIB], seconds=0.1, replay="opaque")
    tape.pack(x)
    tape.op([c], [KIB], seconds=0.1, replay="opaque")
    tape.unpack(saved)
    tape.op([a], [KIB], seconds=0.1, phase="backward")
    step = tape.step()
    machine = Machine(
        "quick",
        "ram",
        (Tier("ram", "device"), Tier("disk", "disk")),
        (Link("ram", "disk", 0.0, 1e9, 1e9), Link("disk", "ram", 0.0, 1e9, 1e9)),
    )
    limit_bytes = plain_peak_bytes(step) - MIB // 2
    plan = solve(step, machine, limit_bytes, seconds=0.1)
    assert plan.peak_bytes <= limit_bytes
    # The op with the workspace needs both its tensors: no plan helps there.
    assert plan.physical_peak_bytes == step.resting_bytes + 2 * MIB + 4 * MIB


def test_a_value_whose_save_is_its_last_use_leaves_at_the_event_after() -> None:
    """Its absence opens with the event at which its copy is queued, which is too early for its release."""
    tape = Tape()
    x = tape.external(KIB)
    (value,) = tape.op([x], [4 * MIB], replay="opaque")
    saved = tape.pack(value)
    (small,) = tape.op([x], [KIB], replay="opaque")
    tape.pack(x)
    (big,) = tape.op([small], [8 * MIB], replay="opaque")
    (gradient,) = tape.op([big], [KIB], replay="opaque")
    tape.unpack(saved)
    tape.op([gradient, value], [KIB], replay="opaque", phase="backward")
    step = tape.step()
    assert [(absence.opens, absence.closes) for absence in step.absences] == [(1, 6)]
    assert plain_peak_bytes(step) == 12 * MIB + 2 * KIB
    assert least_peak_bytes(step, disk_machine()) == 8 * MIB + 2 * KIB
