"""A plan that is given the memory it leaves unused still fits, is no slower, and is faster where transfers are late."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import NO_CAUTION, simulate, solve
from ebbtide.plan.caution import EXPECTED, Caution
from ebbtide.plan.course import BACK_WAY, OUT_WAY
from ebbtide.plan.finish import spend_unused_memory
from ebbtide.plan.follow import Course, Follower, Moves, Trip
from ebbtide.plan.problem import CheckedRecipe, Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.relax import relaxed
from ebbtide.plan.search import Search
from ebbtide.plan.select import Room
from ebbtide.plan.simulate import moves_of
from ebbtide.step import Step
from tests.plan.limits import limit_at, solve_or_least
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, network_step, random_step

MACHINES = {"fast": disk_machine(3e9, 1.5e9), "slow": disk_machine(2e8, 2e8)}


def slower(machine: Machine, times: float) -> Machine:
    """``machine`` with transfers that take so many times as long."""
    links = [
        dataclasses.replace(
            link,
            latency_seconds=times * link.latency_seconds,
            bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / times,
        )
        for link in machine.links
    ]
    return dataclasses.replace(machine, links=tuple(links))


class Relaxed:
    """A plan made on paper, before and after.

    Attributes:
        before, after: moves.
        courses: what they take.
    """

    def __init__(self, step: Step, machine: Machine, fraction: float) -> None:
        plan = solve_or_least(step, machine, limit_at(step, fraction), NO_CAUTION)
        self.step, self.limit_bytes = step, plan.limit_bytes
        problem = Problem.of(step, machine)
        listed = moves_of(problem, plan.decisions)
        self.replays = [move for move in listed if isinstance(move, CheckedRecipe)]
        follower = Follower(problem, self.replays)
        self.before, recipes = Moves.none(len(listed)), iter(range(len(self.replays)))
        for number, move in enumerate(listed):
            if isinstance(move, Trip):
                self.before.send(number, follower.tiers[move.tier], move)
            elif move is not None:
                self.before.replay[number] = next(recipes)
        course = follower.follow(self.before)
        slots = np.array(problem.facts.slots, dtype=np.int64)
        room = self.limit_bytes - course.memory
        self.after = relaxed(follower.scene, slots, self.before, course, room)
        self.courses = course, follower.follow(self.after)

    def on(self, machine: Machine) -> tuple[Course, Course]:
        """What the moves take on another machine."""
        follower = Follower(Problem.of(self.step, machine), self.replays)
        return follower.follow(self.before), follower.follow(self.after)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("seed", range(40))
def test_fits_and_is_never_slower(seed: int, machine: Machine) -> None:
    for fraction in (0.7, 0.4):
        plan = Relaxed(random_step(seed, length=16), machine, fraction)
        before, after = plan.courses
        assert int(after.memory.max()) <= plan.limit_bytes
        assert (plan.after.release >= plan.before.release).all()
        assert (plan.after.load <= plan.before.load).all()
        for name in ("tier", "replay", "out"):
            assert (getattr(plan.after, name) == getattr(plan.before, name)).all()
        for way in (OUT_WAY, BACK_WAY):
            queues = [course.sent.absence[course.sent.way == way].tolist() for course in plan.courses]
            assert queues[0] == queues[1]
        for times in (1.0, 1.5, 4.0):
            before, after = plan.on(slower(machine, times))
            assert after.seconds <= before.seconds + 1e-9


def test_late_transfers_cost_less() -> None:
    gains = []
    for seed in range(4):
        plan = Relaxed(network_step(24, seed=seed), disk_machine(1.5e9, 1e9), 0.6)
        before, after = plan.on(disk_machine(7.5e8, 5e8))
        gains.append((before.seconds - after.seconds) / (before.seconds - plan.step.plain_seconds))
    assert min(gains) >= 0
    assert max(gains) > 0.1


def test_no_room_no_change() -> None:
    step, machine = network_step(24), disk_machine()
    plan = solve(step, machine, limit_at(step, 0.5))
    problem = Problem.of(step, machine)
    follower = Follower(problem, [])
    moves = Moves.none(len(step.absences))
    for number, move in enumerate(moves_of(problem, plan.decisions)):
        if isinstance(move, Trip):
            moves.send(number, follower.tiers[move.tier], move)
    course = follower.follow(moves)
    slots = np.array(problem.facts.slots, dtype=np.int64)
    after = relaxed(follower.scene, slots, moves, course, np.zeros_like(course.memory))
    assert (after.rows() == moves.rows()).all()


def test_plans_that_run_are_relaxed() -> None:
    step, machine = network_step(24), disk_machine(1.5e9, 1e9)
    limit_bytes = limit_at(step, 0.6)
    careful, paper = solve(step, machine, limit_bytes), solve(step, machine, limit_bytes, caution=NO_CAUTION)
    assert careful.physical_peak_bytes <= Caution().ceiling_bytes(limit_bytes, careful.resting_bytes)
    slow = slower(machine, 2.0)
    lost = [simulate(step, slow, plan.decisions).seconds - step.plain_seconds for plan in (careful, paper)]
    assert lost[0] < 0.9 * lost[1]


SMALL = 64 * KIB
COST_SECONDS = 0.2
SLOW_IN = Machine(
    "slow in",
    "ram",
    (Tier("ram", "device"), Tier("disk", "disk")),
    (
        Link("ram", "disk", 0.0, MIB / 1.8, MIB / 1.8),
        Link("disk", "ram", 0.0, SMALL / 0.6, SMALL / 0.6, 0.0, COST_SECONDS),
    ),
)
"""A large value takes 1.8 s out; a load costs compute `COST_SECONDS` when it is queued."""


def two_large_and_a_small_one() -> Step:
    """Events at moments 1, 3, .. 17; compute is at 1, 2, 3, 4, 4.5, 5 s there, as far as it does not wait."""
    tape = Tape()
    x = tape.external(KIB)
    (small,) = tape.op([x], [SMALL], seconds=1.0, replay="opaque")
    saved = [tape.pack(small)]  # moment 1
    (first,) = tape.op([small], [MIB], seconds=1.0, replay="opaque")
    saved.append(tape.pack(first))  # moment 3: `small` leaves, `first` is copied
    (link,) = tape.op([first], [KIB], seconds=1.0, replay="opaque")
    tape.pack(x)  # moment 5
    (second,) = tape.op([link], [MIB], seconds=1.0, replay="opaque")
    saved.append(tape.pack(second))  # moment 7: `second` is copied
    (link,) = tape.op([second], [KIB], seconds=0.5, replay="opaque")
    tape.pack(x)  # moment 9: `small` is loaded
    (link,) = tape.op([link], [KIB], seconds=0.5, replay="opaque")
    tape.pack(x)  # moment 11: both leave
    (peak,) = tape.op([link], [2 * MIB], seconds=0.5, replay="opaque")
    tape.unpack(saved[0])  # moment 13
    (gradient,) = tape.op([peak, small], [KIB], seconds=0.5, phase="backward", replay="opaque")
    for number in (saved[2], saved[1]):
        tape.unpack(number)  # moments 15, 17
        inputs = [gradient, tape.saved[number][0]]
        (gradient,) = tape.op(inputs, [KIB], seconds=0.5, phase="backward", replay="opaque")
    return tape.step()


def test_a_load_that_would_put_off_a_copy_stays() -> None:
    """A load costs compute 0.2 s where it is queued. At moment 9 these pass while compute waits for a copy out anyway;
    at moment 5 the copy is queued later by them, unless the one before it is late, so that it has to wait for that.
    """
    step, caution = two_large_and_a_small_one(), Caution(1.5, 0.0, 0.0, 0.0, math.inf, 1e-6)
    problem = Problem.of(step, SLOW_IN)
    trips = [Trip("disk", 1, 3, 9), Trip("disk", 3, 11, 17), Trip("disk", 7, 11, 15)]
    moves = Moves.none(len(trips))
    for number, trip in enumerate(trips):
        moves.send(number, 0, trip)
    on_time, late = Follower(problem, []), Follower(problem, [], caution)
    # On time the copies take from 2 to 3.8 s and from 4 to 5.8 s; late ones from 2 to 5.15 s and on to 8.3 s.
    assert on_time.follow(moves).starts[12] == pytest.approx(5.8)
    assert late.follow(moves).starts[12] == pytest.approx(2 + 2 * 1.8 * (1 + 1.5 * EXPECTED))
    limit_bytes = int(late.follow(moves).memory.max()) + 2 * SMALL
    search = Search(
        problem, Candidates.of(problem, "disk", [None] * 3), ["disk"], Room.of(problem, limit_bytes), 0, caution
    )
    search.adopt(moves)
    assert search.best is not None
    course, slots = search.best.course, np.array(problem.facts.slots, dtype=np.int64)
    earlier = relaxed(late.scene, slots, moves, course, limit_bytes - course.memory)
    assert earlier.load.tolist() == [5, 17, 15]
    assert earlier.release.tolist() == moves.release.tolist()
    assert late.follow(earlier).seconds == pytest.approx(course.seconds)
    assert on_time.follow(earlier).seconds == pytest.approx(on_time.follow(moves).seconds + COST_SECONDS)
    assert spend_unused_memory(search).load.tolist() == [9, 17, 15]
