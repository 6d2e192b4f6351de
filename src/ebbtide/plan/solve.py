"""From a step, a machine and a budget to a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import numpy as np

from ebbtide.arguments import as_duration, as_whole, check_instance
from ebbtide.arrays import Ints
from ebbtide.decisions import Keep, Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan.bound import Bound, bound_of
from ebbtide.plan.caution import Caution
from ebbtide.plan.finals import with_finals_kept, without_finals
from ebbtide.plan.finish import spend_unused_memory
from ebbtide.plan.floor import least_peak, lowest_peak, schedule_within_least_peak
from ebbtide.plan.follow import follow
from ebbtide.plan.judged import budget_error, to_plan
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.recipes import deeper_recipes, find_recipes
from ebbtide.plan.search import Found, Search
from ebbtide.plan.select import Room
from ebbtide.plan.simulate import decisions_of
from ebbtide.plan.starts import as_chain, seed_with_policies
from ebbtide.step import Step

DEEPEN_FAR = 1.02
"""How many times the bound the first plans take at least where deeper recipes are worth the search that they slow."""
DEEPENED_SHARE = 0.01
"""Deeper recipes are looked for of values that have at least this share of the bytes that have to be absent."""
MOST_DEEPENED = 50
"""Of how many of the largest values deeper recipes are looked for, whatever their share, where no plan was found
without. In chains of 120 and 220 equal values twice as many took 1.3 to 1.9 times as long, and found higher peaks."""

LEAST_SEARCH_SECONDS = 0.5
"""How long to search a short step, unless told otherwise."""
SEARCH_SECONDS_PER_OP = 3e-4
"""How long to search a step of more than 1,700 ops for each of them, unless told otherwise."""
MOST_SEARCH_SECONDS = 5.0
"""How long to search at most, unless told otherwise: of longer steps the bound takes most of the time anyway."""

METHOD = "learnt prices, ruin and recreate"


def solve(
    step: Step,
    machine: Machine,
    limit_bytes: int,
    *,
    seconds: float | None = None,
    seed: int = 0,
    banned: Set[int] = frozenset(),
    caution: Caution | None = None,
) -> Plan:
    """A fast plan for ``step`` that never holds more than ``limit_bytes``. The same arguments give the same plan.

    The plan says which time no plan within the limit can beat, under the same ``caution`` about workspaces; that takes
    some 0.1 s for 1,000 ops, besides the search, unless the plan is as fast as the plain step. Its own time is exact:
    that of transfers that end when predicted.

    Args:
        step: the observed step.
        machine: all its slow tiers are used, if it has any.
        limit_bytes: the budget: most bytes held at once, resting bytes included.
        seconds: about how long to search at most, on a common machine; None for half a second, and up to five where a
            step has more than 1,700 ops.
        seed: seed of the search's random choices.
        banned: numbers of absences, in `Step.absences`, whose values must not be computed again.
        caution: what the plan leaves free for what nobody can predict; None for what suits the machine, `NO_CAUTION`
            where plans are compared on paper with the bound and with published policies.

    Returns:
        The plan: a decision for each of `Step.absences`, the peak and the time that are predicted, and the bound. It
        keeps every value where the step needs no plan.

    Raises:
        BudgetError: if no plan was found that stays within the budget.
        ArgumentError: if ``seconds`` is negative or not finite, ``limit_bytes`` or ``seed`` is not a whole number, or
            ``step`` or ``machine`` is of another type; it is a `ValueError`.
        RecordError: if the step or the machine describes something impossible.
    """
    check_instance("step", step, Step)
    limit_bytes, seed = as_whole("limit_bytes", limit_bytes), as_whole("seed", seed, 0)
    if seconds is None:
        seconds = min(max(LEAST_SEARCH_SECONDS, SEARCH_SECONDS_PER_OP * len(step.ops)), MOST_SEARCH_SECONDS)
    search_seconds = as_duration("seconds", seconds)
    whole = Problem.of(step, machine)  # checks both, before anything is looked up in them
    asked = [number for number, absence in enumerate(step.absences) if not step.is_final(absence)]
    refused: BudgetError | None = None
    # Without final absences nobody would know of values that are banned as these alone.
    if len(asked) < len(step.absences) and step.values_of(banned) == step.values_of(banned & set(asked)):
        without = {place for place, number in enumerate(asked) if number in banned}
        problem = Problem.of(without_finals(step), machine)
        try:
            plan = _solve(problem, limit_bytes, search_seconds, seed, without, caution)
        except BudgetError as error:
            refused = error
        else:
            bound_seconds = bound_of(whole, limit_bytes, banned=banned).seconds
            decisions = with_finals_kept(step, plan.decisions)
            return dataclasses.replace(plan, decisions=decisions, bound_seconds=min(plan.seconds, bound_seconds))
    try:
        return _solve(whole, limit_bytes, search_seconds, seed, banned, caution)
    except BudgetError as error:
        # What a small tier is given to final values it has not for others.
        if refused is None or error.reachable_bytes <= refused.reachable_bytes:
            raise
        raise refused from None


def _solve(
    problem: Problem, limit_bytes: int, search_seconds: float, seed: int, banned: Set[int], caution: Caution | None
) -> Plan:
    """`solve` for a step and a machine that are indexed."""
    step, machine = problem.step, problem.machine
    plain_peak = int(problem.plain.max(initial=problem.resting_bytes))
    if plain_peak <= limit_bytes:
        bound_seconds = bound_of(problem, limit_bytes).seconds
        return to_plan(problem, limit_bytes, [Keep()] * len(step.absences), METHOD, bound_seconds=bound_seconds)
    if not step.ops:
        raise budget_error(problem, follow(problem, [None] * len(step.absences)), limit_bytes)
    caution = Caution.of(machine) if caution is None else caution
    recipes = find_recipes(step, banned)
    tiers = list(problem.routes)
    candidates = Candidates.of(problem, tiers[0] if tiers else None, recipes)
    ceiling = caution.ceiling_bytes(limit_bytes, problem.resting_bytes)
    search = _first_search(problem, candidates, tiers, Room.of(problem, limit_bytes, ceiling), seed, caution)
    if search.best is None:
        candidates, least = _least(problem, candidates, tiers, limit_bytes, banned)
        if _peak(least) > limit_bytes:
            raise budget_error(problem, least.course, limit_bytes)
        room = Room.of(problem, limit_bytes, np.maximum(ceiling, least.course.physical))
        search = Search(problem, candidates, tiers, room, seed, caution)
        search.adopt(least.moves)
        search.start(deepen=search.has_deeper)
    assert search.best is not None
    bound, enough = Bound.plain(problem), 1 + caution.near_share
    if search.best.course.seconds > enough * bound.seconds:
        bound = bound_of(problem, search.room.cap, banned=banned)
    enough_seconds = enough * bound.seconds
    if search.best.course.seconds > enough_seconds:
        if search.selector.cuts and search.best.course.seconds > DEEPEN_FAR * bound.seconds:
            search = _search_deeper(search, bound, limit_bytes, seed, banned)
        search = seed_with_policies(search, machine, bound.seconds, search_seconds * 1e6, banned)
        search.improve(search_seconds * 1e6, enough_seconds)
    assert search.best is not None
    moves = spend_unused_memory(search)
    chosen = [search.candidates.ops[recipe] if recipe >= 0 else None for recipe in moves.replay.tolist()]
    decisions = decisions_of(problem, search.follower.listed(moves), chosen)
    return to_plan(problem, limit_bytes, decisions, METHOD, is_policy=False, bound_seconds=bound.seconds)


def _first_search(
    problem: Problem, candidates: Candidates, tiers: Sequence[str], room: Room, seed: int, caution: Caution
) -> Search:
    """A search that is started; of two, filling tiers with a limit either way, that with the faster plan."""
    search = Search(problem, candidates, tiers, room, seed, caution)
    search.start()
    if not _is_limited(problem, tiers):
        return search
    other = Search(problem, dataclasses.replace(candidates, takes_first="largest"), tiers, room, seed, caution)
    if (other.trips.possible == search.trips.possible).all():
        return search
    other.start()
    is_faster = other.best is not None and (
        search.best is None or other.best.course.seconds < search.best.course.seconds
    )
    return other if is_faster else search


def _least(
    problem: Problem, candidates: Candidates, tiers: Sequence[str], limit_bytes: int, banned: Set[int]
) -> tuple[Candidates, Found]:
    """The plan of least peak found, and the candidates that it is of; more is tried where it is above the limit."""
    least, lowest = least_peak(problem, candidates, tiers), lowest_peak(problem, candidates)
    shallow, tried = candidates, list[list[tuple[int, ...]]]()
    for at_least in (0, MOST_DEEPENED):
        # What no slow tier takes is computed again: by deeper recipes, less of what they read is there meanwhile.
        if limit_bytes < _peak(least) > lowest:
            deeper = _deeper(problem, shallow, lowest, banned, at_least)
            others = shallow.deepened(problem, deeper)
            found = least_peak(problem, others, tiers) if deeper != tried else least
            tried = deeper
            if _peak(found) < _peak(least):
                candidates, least = others, found
    if limit_bytes < _peak(least) > lowest:
        chain = as_chain(problem, candidates, limit_bytes, banned)
        scheduled = None if chain is None else schedule_within_least_peak(problem, chain.candidates, tiers, chain.modes)
        if chain is not None and scheduled is not None and _peak(scheduled) < _peak(least):
            candidates, least = chain.candidates, scheduled
    for takes_first in ("largest", "fullest") if _is_limited(problem, tiers) else ():
        if limit_bytes < _peak(least) > lowest:
            # What takes long to compute again may have taken the room of more bytes, and a large value that of two.
            others = dataclasses.replace(candidates, takes_first=takes_first)
            found = least_peak(problem, others, tiers)
            if _peak(found) < _peak(least):
                candidates, least = others, found
    return candidates, least


def _is_limited(problem: Problem, tiers: Sequence[str]) -> bool:
    return any(problem.machine.tier(tier).capacity_bytes is not None for tier in tiers)


def _peak(found: Found) -> int:
    return int(found.course.memory.max())


def _search_deeper(search: Search, bound: Bound, limit_bytes: int, seed: int, banned: Set[int]) -> Search:
    """Start a search with deeper recipes, with these and with what is moved in the bound's program; return it."""
    deepened = search
    if not search.has_deeper:
        deepened = search.deepened(_deeper(search.problem, search.candidates, limit_bytes, banned), seed)
        deepened.start(deepen=True)
    deepened.start_from(bound.offloaded, bound.recomputed)
    return deepened


def _deeper(
    problem: Problem, candidates: Candidates, limit_bytes: int, banned: Set[int], at_least: int = 0
) -> list[list[tuple[int, ...]]]:
    """The deeper recipes of large candidates, and of ``at_least`` so many."""
    step = problem.step
    never = step.values_of(banned)
    least_bytes = DEEPENED_SHARE * (int(problem.plain.max()) - limit_bytes)
    deeper: list[list[tuple[int, ...]]] = [[] for _ in candidates.absence]
    large = candidates.size_bytes >= least_bytes
    large[_largest(candidates.size_bytes, at_least)] = True
    for place in np.flatnonzero(large).tolist():
        shortest = candidates.ops[place]
        if shortest is not None:
            absence = step.absences[candidates.absence[place]]
            deeper[place] = deeper_recipes(problem.facts, absence, shortest, never)
    return deeper


def _largest(sizes: Ints, count: int) -> Ints:
    """The places of the ``count`` largest; of those that are as large as the last of them, some all over the step."""
    if not 0 < count < len(sizes):
        return np.arange(len(sizes) if count else 0)
    last = np.partition(sizes, -count)[-count]
    larger, equal = np.flatnonzero(sizes > last), np.flatnonzero(sizes == last)
    return np.concatenate((larger, equal[np.linspace(0, len(equal) - 1, count - len(larger)).astype(np.int64)]))
