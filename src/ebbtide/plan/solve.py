"""From a step, a machine and a budget to a plan."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from ebbtide.decisions import Decision, Keep, Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan.bound import bound_of
from ebbtide.plan.floor import least_peak
from ebbtide.plan.follow import follow
from ebbtide.plan.problem import Ints, Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.recipes import find_recipes
from ebbtide.plan.search import Found, Search
from ebbtide.plan.select import Room
from ebbtide.plan.simulate import decisions_of, moves_of
from ebbtide.step import Step
from ebbtide.units import format_bytes

PHYSICAL_SHARE = 1.06
"""What the system may see above rest, workspaces included, as a multiple of the budget above rest. The promise is 1.10;
the rest is for what nobody plans: the allocator's own slack, transfer buffers."""

NEAR = 1e-4
"""How near the lower bound a plan is good enough for the search to stop."""

METHOD = "learnt prices, ruin and recreate"


def solve(
    step: Step,
    machine: Machine,
    limit_bytes: int,
    *,
    seconds: float = 1.0,
    seed: int = 0,
    banned: Set[int] = frozenset(),
) -> Plan:
    """A fast plan for ``step`` that never holds more than ``limit_bytes``. The same arguments give the same plan.

    Workspaces of ops are kept within `PHYSICAL_SHARE` of the budget wherever the step allows it. The plan says which
    time no plan within the limit can beat; that takes some 0.1 s for 1,000 ops, besides the search.

    Args:
        step: the observed step.
        machine: its slow tier with the fastest return is used, if it has one.
        limit_bytes: the budget: most bytes held at once, resting bytes included.
        seconds: about how long to search at most, on a common machine.
        seed: seed of the search's random choices.
        banned: absences whose values must not be computed again.

    Raises:
        BudgetError: if no plan was found that stays within the budget.
    """
    problem = Problem.of(step, machine)
    plain_peak = int(problem.plain.max(initial=problem.resting_bytes))
    if plain_peak <= limit_bytes:
        return _plan(problem, [Keep()] * len(step.absences), limit_bytes, bound_of(problem, limit_bytes).seconds)
    if not step.ops:
        raise _nothing_to_plan(problem, limit_bytes)
    recipes = find_recipes(step, banned)
    tiers = machine.slow_tiers()
    tier = tiers[0].name if tiers else None
    candidates = Candidates.of(problem, tier, recipes)
    ceiling = np.full(step.moments, _ceiling_bytes(problem, limit_bytes), dtype=np.int64)
    search = _search(problem, candidates, tier, limit_bytes, ceiling, seed)
    search.start()
    if search.best is None:
        least = least_peak(problem, candidates, tier)
        if int(least.course.memory.max()) > limit_bytes:
            raise _budget_error(problem, least, limit_bytes)
        search = _search(problem, candidates, tier, limit_bytes, np.maximum(ceiling, least.course.physical), seed)
        search.best = least
        search.start()
    bound_seconds = bound_of(problem, limit_bytes, banned=banned).seconds
    search.improve(int(seconds * 1e6), (1 + NEAR) * bound_seconds)
    assert search.best is not None
    decisions = decisions_of(problem, search.follower.listed(search.best.moves), recipes)
    return _plan(problem, decisions, limit_bytes, bound_seconds)


def _ceiling_bytes(problem: Problem, limit_bytes: int) -> int:
    return problem.resting_bytes + int(PHYSICAL_SHARE * max(0, limit_bytes - problem.resting_bytes))


def _search(
    problem: Problem, candidates: Candidates, tier: str | None, limit_bytes: int, ceiling: Ints, seed: int
) -> Search:
    room = Room(np.minimum(limit_bytes, ceiling - problem.workspace), ceiling - limit_bytes)
    return Search(problem, candidates, tier, room, limit_bytes, ceiling, seed)


def _plan(problem: Problem, decisions: list[Decision], limit_bytes: int, bound_seconds: float) -> Plan:
    course = follow(problem, moves_of(problem, decisions))
    rest = problem.resting_bytes
    return Plan(
        decisions=tuple(decisions),
        limit_bytes=limit_bytes,
        peak_bytes=int(course.memory.max(initial=rest)),
        seconds=course.seconds,
        physical_peak_bytes=int(course.physical.max(initial=rest)),
        plain_peak_bytes=int(problem.plain.max(initial=rest)),
        plain_seconds=problem.step.plain_seconds,
        resting_bytes=rest,
        bound_seconds=bound_seconds,
        method=METHOD,
    )


def _nothing_to_plan(problem: Problem, limit_bytes: int) -> BudgetError:
    rest = problem.resting_bytes
    message = (
        f"budget {format_bytes(limit_bytes)} cannot be met: the step has no ops, and what it was given takes"
        f" {format_bytes(rest)}; ask for at least {rest} bytes"
    )
    return BudgetError(message, limit_bytes=limit_bytes, reachable_bytes=rest, tick=0, op="", module="")


def _budget_error(problem: Problem, least: Found, limit_bytes: int) -> BudgetError:
    step = problem.step
    moment = int(np.argmax(least.course.memory))
    reachable = int(least.course.memory[moment])
    tick = min(int(np.searchsorted(problem.facts.op_moments, moment)), len(step.ops) - 1)
    op = step.ops[tick]
    place = f" of {op.module}" if op.module else ""
    message = (
        f"budget {format_bytes(limit_bytes)} cannot be met: the least reachable peak is {format_bytes(reachable)},"
        f" at op {tick} {op.name}{place}; ask for at least {reachable} bytes"
    )
    return BudgetError(
        message, limit_bytes=limit_bytes, reachable_bytes=reachable, tick=tick, op=op.name, module=op.module
    )
