"""The judge: what a step under a plan takes, by the rules of NOTE [What happens in a moment] in `follow`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import numpy as np

from ebbtide.decisions import Decision, Keep, Offload, Recompute
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan.follow import Move, Recomputation, Stall, Transfer, Trip, follow
from ebbtide.plan.problem import Problem
from ebbtide.plan.replay import check_recipe
from ebbtide.step import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a step under a plan takes.

    Attributes:
        peak_bytes, peak_moment: the most bytes held at once, and the first moment at which they are.
        physical_peak_bytes: the same with the workspaces of ops.
        seconds: the end of compute.
        memory: most bytes held in each moment of the step, without workspaces.
        start_seconds: when each moment starts, in seconds.
        transfers, stalls, recomputations: in the order in which they happen.
    """

    peak_bytes: int
    peak_moment: int
    physical_peak_bytes: int
    seconds: float
    memory: list[int]
    start_seconds: list[float]
    transfers: tuple[Transfer, ...]
    stalls: tuple[Stall, ...]
    recomputations: tuple[Recomputation, ...]


def simulate(step: Step, machine: Machine, decisions: Sequence[Decision]) -> Outcome:
    """Run ``step`` under ``decisions`` on paper. Time O(moments + absences x log absences).

    Args:
        step: the observed step.
        machine: where it runs: its links say how long transfers take.
        decisions: one for each of `Step.absences`, in their order, as in `Plan.decisions`.

    Returns:
        Memory in bytes and time in seconds, over the step and in each of its moments, and what was moved or computed
        again when.

    Raises:
        PlanError: if the decisions do not fit the step or the machine, naming the first absence that does not.
        ArgumentError: if ``step`` or ``machine`` is of another type; it is a `ValueError`.
        RecordError: if the step or the machine describes something impossible.
    """
    problem = Problem.of(step, machine)
    course = follow(problem, moves_of(problem, decisions))
    peak_moment = int(np.argmax(course.memory[: step.moments])) if step.moments else 0
    return Outcome(
        peak_bytes=int(course.memory[peak_moment]) if step.moments else step.resting_bytes,
        peak_moment=peak_moment,
        physical_peak_bytes=int(course.physical[: step.moments].max()) if step.moments else step.resting_bytes,
        seconds=course.seconds,
        memory=course.memory[: step.moments].tolist(),
        start_seconds=course.starts[: step.moments].tolist(),
        transfers=tuple(course.transfers),
        stalls=tuple(course.stalls),
        recomputations=tuple(course.recomputations),
    )


def moves_of(problem: Problem, decisions: Sequence[Decision]) -> list[Move]:
    """Decisions in moments, checked against the rules.

    Raises:
        PlanError: naming the first absence whose decision breaks one.
    """
    step = problem.step
    if not isinstance(decisions, Sequence):
        raise PlanError(f"decisions={decisions!r}: give those of a plan, plan.decisions")
    if len(decisions) != len(step.absences):
        raise PlanError(f"the plan has {len(decisions)} decisions, but the step has {len(step.absences)} absences")
    moves = [_move(problem, number, decision) for number, decision in enumerate(decisions)]
    ends: dict[int, int] = {}
    for number in sorted(range(len(moves)), key=lambda number: step.absences[number].opens):
        if moves[number] is not None:
            absence = step.absences[number]
            storage = step.values[absence.value].storage
            if absence.opens < ends.get(storage, 0):
                raise PlanError(f"absence {number}: its storage is absent already at moment {absence.opens}")
            ends[storage] = absence.closes
    return moves


def _move(problem: Problem, number: int, decision: Decision) -> Move:
    absence = problem.step.absences[number]
    if isinstance(decision, Keep):
        return None
    if problem.step.values[absence.value].storage in problem.facts.external:
        raise PlanError(f"absence {number}: value {absence.value} is external and cannot leave")
    if isinstance(decision, Recompute):
        if problem.spans.final[number]:
            raise PlanError(f"absence {number}: nothing asks for value {absence.value} again, to be computed for that")
        try:
            return check_recipe(problem.facts, absence.value, decision.ops, problem.machine.replay_seconds)
        except PlanError as fault:
            raise PlanError(f"absence {number}: {fault}") from fault
    return _trip(problem, number, decision)


def _trip(problem: Problem, number: int, decision: Offload) -> Trip:
    absence, earliest = problem.step.absences[number], problem.earliest_out[number]
    if decision.tier not in problem.routes:
        raise PlanError(f"absence {number}: the machine has no slow tier {decision.tier!r} with links both ways")
    moments = []
    final = bool(problem.spans.final[number])
    for tick in (decision.out, decision.release) if final else (decision.out, decision.release, decision.load):
        if tick not in problem.facts.slot_of_tick:
            raise PlanError(f"absence {number}: nothing can be done at tick {tick}, it has no event")
        moments.append(problem.facts.slot_of_tick[tick])
    out, release = moments[:2]
    load = absence.closes if final else min(moments[2], absence.closes)
    if earliest is None or not earliest <= out < release or release < absence.opens or release >= load:
        raise PlanError(
            f"absence {number}: copied out at moment {out}, released at {release}, loaded at {load}; it can be copied"
            f" from {earliest}, released later and from {absence.opens} on, and loaded later still"
        )
    return Trip(decision.tier, out, release, load)


def decisions_of(problem: Problem, moves: Sequence[Move], recipes: Sequence[tuple[int, ...] | None]) -> list[Decision]:
    """``moves`` as decisions, in ticks; ``recipes`` gives each absence's ops."""
    ticks = dict(map(operator.itemgetter(1, 0), problem.facts.slot_of_tick.items()))
    events = dict(zip(problem.facts.event_moments, problem.step.events, strict=True))
    decisions: list[Decision] = []
    for number, move in enumerate(moves):
        if move is None:
            decisions.append(Keep())
        elif isinstance(move, Trip):
            if problem.spans.final[number]:
                load = len(problem.step.ops)
            elif move.load == problem.step.absences[number].closes:  # on demand
                load = events[move.load].tick
            else:
                load = ticks[move.load]
            decisions.append(Offload(move.tier, ticks[move.out], ticks[move.release], load))
        else:
            recipe = recipes[number]
            assert recipe is not None
            decisions.append(Recompute(recipe))
    return decisions
