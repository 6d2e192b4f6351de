"""Small random steps on random machines, and all that plans for them can reach: the truth to compare `solve` with."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from ebbtide.compiled import compiled
from ebbtide.decisions import Decision, Keep
from ebbtide.machine import Machine
from ebbtide.plan.course import DONE, order_actions, run_course
from ebbtide.plan.follow import Follower, Trip
from ebbtide.plan.problem import CheckedRecipe, Problem
from ebbtide.plan.simulate import moves_of
from ebbtide.step import Step
from tests.plan.random_steps import KIB, Tape, disk_machine, lone_machine
from tests.plan.test_bound import every_decision

MOST_PLANS = 300_000


def small_case(seed: int) -> tuple[Step, Machine]:
    """Three to five values and their absences around one turn, on a disk somewhere between far too slow and quick."""
    dice = random.Random(seed)
    step = _turn(dice, dice.choice([3, 4, 4, 5]), opaque=0.33)
    back = 10 ** dice.uniform(7.5, 9)
    costs = {"slowdown": dice.choice([0, 0, 0.1]), "latency": dice.choice([0, 1e-4])}
    machine = disk_machine(back * dice.choice([1, 2]), back, **costs, compute_seconds=dice.choice([0, 0, 2e-4]))
    return step, machine


def wide_case(seed: int) -> tuple[Step, Machine]:
    """Eight to fourteen values, most of which can only be kept or computed again: the machine has no slow tier."""
    dice = random.Random(seed)
    return _turn(dice, dice.randrange(8, 15), opaque=0.2), lone_machine()


def _turn(dice: random.Random, values: int, opaque: float) -> Step:
    tape = Tape()
    value, saved = tape.external(64 * KIB), []
    for _ in range(values):
        if dice.random() < 0.3:
            size, seconds = 64 * KIB * dice.randrange(1, 4), 1e-3 * dice.uniform(0.2, 3)
            value = tape.op([value], [size], seconds=seconds, replay="opaque")[0]
        size, seconds = 64 * KIB * dice.randrange(1, 6), 1e-3 * dice.uniform(0.5, 6)
        replayed = dice.random() >= opaque
        value = tape.op([value], [size], seconds=seconds, replay="pure" if replayed else "opaque")[0]
        saved.append(tape.pack(value))
    gradient = tape.op([value], [KIB], seconds=1e-3, replay="opaque")[0]
    size, seconds = 64 * KIB * dice.randrange(0, 6), 1e-3 * dice.uniform(0.5, 4)
    gradient = tape.op([gradient], [size], seconds=seconds, replay="opaque")[0]
    for number in reversed(saved):
        tape.unpack(number)
        inputs, size = [gradient, tape.saved[number][0]], 64 * KIB * dice.randrange(0, 4)
        gradient = tape.op(inputs, [size], seconds=1e-3 * dice.uniform(0.5, 6), phase="backward")[0]
    return tape.step()


def best_plans(step: Step, machine: Machine) -> list[tuple[int, float]]:
    """Peak and time of the plans that no other beats in both, by falling time; empty if there are too many to try.

    Every plan is tried: each absence kept, recomputed by its shortest recipe, or offloaded with any three ticks. Plans
    with deeper recipes are not, so that one may be faster still.
    """
    problem, count = Problem.of(step, machine), len(step.absences)
    kept: list[Decision] = [Keep()] * count
    replays: list[CheckedRecipe] = []
    rows, first = [], [0]
    for number in range(count):
        for decision in every_decision(step, number, deeper=False):
            if hasattr(decision, "tier") and not problem.routes:
                continue
            move = moves_of(problem, [*kept[:number], decision, *kept[number + 1 :]])[number]
            if isinstance(move, CheckedRecipe):
                rows.append((-1, len(replays), -1, -1, -1))
                replays.append(move)
            else:
                rows.append((0, -1, move.out, move.release, move.load) if isinstance(move, Trip) else (-1,) * 5)
        first.append(len(rows))
    if math.prod(np.diff(first).tolist()) > MOST_PLANS:
        return []
    follower = Follower(problem, replays)
    choices, starts = np.array(rows, dtype=np.int64).reshape(-1, 5), np.array(first, dtype=np.int64)
    peaks, seconds = compiled(try_all)(follower.scene, choices, starts, follower.unlimited)
    best: list[tuple[int, float]] = []
    for plan in np.lexsort((seconds, peaks)).tolist():
        if not best or seconds[plan] < best[-1][1] * (1 - 1e-12):
            best.append((int(peaks[plan]), float(seconds[plan])))
    return best


def try_all(scene: Any, choices: Any, first: Any, unlimited: Any) -> Any:
    """Peak and seconds of every plan; those of ``choices`` from ``first`` on are an absence's. Compiled by numba."""
    count, total = len(first) - 1, 1
    for number in range(count):
        total *= first[number + 1] - first[number]
    peaks, seconds = np.full(total, 1 << 60), np.full(total, np.inf)
    turn, plan = first[:-1].copy(), np.empty((5, count), np.int64)
    for trial in range(total):
        for number in range(count):
            plan[:, number] = choices[turn[number]]
        actions = order_actions(scene, plan[0], plan[1], plan[2], plan[3], plan[4])
        ran = run_course(scene, actions, plan[0], plan[1], 1 << 60, unlimited, np.inf)
        if ran.ending == DONE:
            peaks[trial], seconds[trial] = ran.memory.max(), ran.starts[-1]
        for number in range(count):
            turn[number] += 1
            if turn[number] < first[number + 1]:
                break
            turn[number] = first[number]
    return peaks, seconds
