"""What moves out stays for as long as there is room, and what has room all the time does not move."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ebbtide.decisions import Decision, Keep, Offload
from ebbtide.plan import simulate
from ebbtide.plan.caution import CAUTION
from ebbtide.plan.follow import Follower, Moves, Trip
from ebbtide.plan.linger import linger
from ebbtide.plan.problem import Ints, Problem
from ebbtide.plan.simulate import moves_of
from ebbtide.plan.solve import solve
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, disk_machine, network_step, random_step
from tests.plan.test_simulate import SECOND_A_TRANSFER, chain, random_decisions

MACHINE = disk_machine(1e8, 5e7, slowdown=0.1)


def columns(problem: Problem, decisions: list[Decision]) -> tuple[Follower, Moves]:
    """The trips of ``decisions`` as columns; what would be computed again stays."""
    moves, tiers = Moves.none(len(decisions)), list(problem.routes)
    for number, move in enumerate(moves_of(problem, decisions)):
        if isinstance(move, Trip):
            moves.send(number, tiers.index(move.tier), move)
    return Follower(problem, []), moves


def lingered(problem: Problem, decisions: list[Decision], limit_bytes: int, ceiling: Ints) -> tuple[Moves, Moves]:
    """Moves before and after, both within ``limit_bytes`` and ``ceiling``, and the later no slower."""
    follower, before = columns(problem, decisions)
    course = follower.follow(before)
    after = linger(before, course, limit_bytes, ceiling, np.array(problem.facts.slots))
    again = follower.follow(after)
    assert again.seconds <= course.seconds + 1e-12
    assert int(again.memory.max()) <= limit_bytes
    assert (again.physical <= ceiling).all()
    return before, after


@pytest.mark.parametrize("seed", range(80))
def test_random_plans_stay_within_limits_and_are_no_slower(seed: int) -> None:
    dice = random.Random(seed)
    step = random_step(seed, length=dice.randint(4, 16))
    problem = Problem.of(step, MACHINE)
    decisions = random_decisions(step, seed)
    course = columns(problem, decisions)[0].follow(columns(problem, decisions)[1])
    limit_bytes = int(course.memory.max()) + dice.choice([0, 0, 64 * KIB, MIB])
    ceiling = np.maximum(course.physical, int(course.physical.max()) - dice.choice([0, 64 * KIB, MIB]))
    before, after = lingered(problem, decisions, limit_bytes, ceiling)
    goes = after.tier >= 0
    assert (before.tier[goes] == after.tier[goes]).all()
    assert (after.release[goes] >= before.release[goes]).all()
    assert (after.load[goes] > after.release[goes]).all()
    assert {*after.release[goes]} <= {*problem.facts.slots}


@pytest.mark.parametrize(("limit", "release"), [(231, None), (230, 5), (229, 3)])
def test_a_release_comes_right_before_the_memory_is_wanted(limit: int, release: int | None) -> None:
    """Without a plan moment 4 holds 230 KiB and moment 6 the most, 231; both with the value."""
    step = chain()
    problem = Problem.of(step, SECOND_A_TRANSFER)
    decisions: list[Decision] = [Offload("disk", 1, 2, 5), Keep()]
    moves = lingered(problem, decisions, limit * KIB, np.full(step.moments, 300 * KIB))[1]
    assert (moves.tier[0] < 0) == (release is None)
    assert release in (None, moves.release[0])
    # A ceiling in one moment is as good a reason to go.
    ceiling = np.full(step.moments, 300 * KIB)
    ceiling[4] = 229 * KIB
    assert lingered(problem, decisions, limit * KIB, ceiling)[1].release[0] == 3


def test_plans_use_the_memory_they_may() -> None:
    step, machine = network_step(12, size_bytes=16 * MIB), disk_machine(3e9, 1.5e9)
    limit_bytes = limit_at(step, 0.5)
    problem = Problem.of(step, machine)
    plan = solve(step, machine, limit_bytes, seconds=0.1)
    outcome = simulate(step, machine, plan.decisions)
    ceiling = CAUTION.ceiling_bytes(limit_bytes, step.resting_bytes)
    room = np.minimum(limit_bytes - np.array(outcome.memory), ceiling - problem.workspace - np.array(outcome.memory))
    moves = moves_of(problem, plan.decisions)
    trips = {number: move for number, move in enumerate(moves) if isinstance(move, Trip)}
    assert trips
    for number, trip in trips.items():
        later = [slot for slot in problem.facts.slots if trip.release < slot < trip.load]
        size = problem.spans.size_bytes[number]
        assert not later or room[trip.release + 1 : later[0] + 1].min() < size
