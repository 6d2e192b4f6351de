"""Places to start a search from: plans of published policies, and Rotor's schedule where a step is a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np

from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.needs import KEEP, Modes
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.search import Search
from ebbtide.plan.simulate import moves_of


class StartCost(NamedTuple):
    """What it costs to plan by a published policy: microseconds on a common machine for each moment of the step.

    Attributes:
        always: whatever has to leave.
        per_leaving: for each value that has to leave.
        per_absence: for each absence of the step.
    """

    always: float
    per_leaving: float = 0.0
    per_absence: float = 0.0

    def of(self, moments: int, leaving: int, absences: int) -> float:
        """The cost for a step of so many ``moments`` and ``absences`` from which so many values have to leave."""
        return moments * (self.always + self.per_leaving * leaving + self.per_absence * absences)


STARTS = {
    "autoswap-aoa": StartCost(1.2, per_leaving=0.012),
    "autoswap-wdoa": StartCost(1.2, per_leaving=0.012),
    "autoswap-doa": StartCost(1.2, per_leaving=0.012),
    "autoswap-swdoa": StartCost(1.2, per_leaving=0.012),
    "autoswap-voting": StartCost(1.2, per_leaving=0.012),
    "capuchin": StartCost(2.5, per_leaving=0.012),
    "beaumont-greedy": StartCost(2.0, per_absence=0.01),
}
"""Policies whose plans are places to start from, the cheap ones first: some were ahead of all that the search found on
its own, by much where little memory is left, by the last digits where there is more."""
FINE_STARTS = {"autoswap-weighted": StartCost(12.0, per_leaving=0.28), "beaumont-dp": StartCost(15.0)}
"""Dear policies whose plans were ahead by the last digits alone: for searches that are near the bound already."""
STARTS_SHARE = 0.5
"""Share of the work that may go into plans of policies where the search is near the bound."""
FAR = 1.05
"""How many times the bound the best plan takes where the search counts as far from it."""
FAR_SHARE = 0.2
"""Share of the work left that may go into plans of policies where the search is far from the bound."""
CHAIN_STAGES = 100
"""Into how many stages a step is cut at most to start from Rotor's schedule: of more, neighbours are joined."""
CHAIN_MOMENTS = 10_000
"""Longest step that is started from Rotor's schedule: its time grows with the square of the stages' lengths. 4,000
moments take 3 s."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule as the ``modes`` of candidates that have its recipes besides their own."""

    candidates: Candidates
    modes: Modes


def seed_with_policies(search: Search, machine: Machine, bound_seconds: float, work: float, banned: Set[int]) -> Search:
    """Offer ``search`` plans of published policies, as many as take a part of ``work`` microseconds.

    Returns ``search``; or, where the machine has no slow tier and Rotor's schedule is faster than all of these, another
    one that has the recipes of that schedule besides. The search itself rarely gets there: recipes of that schedule
    read what others of it make, so that one alone gains nothing.
    """
    assert search.best is not None
    problem = search.problem
    if problem.spans.final.any():
        return search  # nobody published what to do with those
    is_far = search.best.course.seconds > FAR * bound_seconds
    # Far from the bound most is won by the search itself: it keeps its part of what is left.
    left = FAR_SHARE * (work - search.spent()) if is_far else STARTS_SHARE * work
    _try_published(search, machine, STARTS if is_far else STARTS | FINE_STARTS, left)
    if problem.routes or search.best.course.seconds <= FAR * bound_seconds:
        return search
    chain = as_chain(problem, search.candidates, search.room.limit_bytes, banned)
    if chain is None:
        return search
    wider = search.with_candidates(chain.candidates)
    found = wider.offer(chain.modes, wider.selector.profile(chain.modes))
    return search if found is None or found is not wider.best else wider


def _try_published(search: Search, machine: Machine, starts: Mapping[str, StartCost], left: float) -> None:
    """Offer ``search`` plans of the policies named in ``starts`` as long as ``left`` microseconds last."""
    # They are made of parts of this package: imported here, they find them complete, and only those who search pay.
    from ebbtide.plan.published.registry import POLICIES

    problem, limit_bytes = search.problem, search.room.limit_bytes
    moments, absences = problem.step.moments, len(problem.step.absences)
    leaving = _fewest_to_leave(problem, limit_bytes)
    refused = set[str]()
    for name, start_cost in starts.items():
        cost = start_cost.of(moments, leaving, absences)
        # What one variant of a policy cannot do, the others cannot either.
        family = name.partition("-")[0]
        if cost > left or family in refused:
            continue
        left -= cost
        try:
            plan = POLICIES[name](problem.step, machine, limit_bytes)
        except (BudgetError, PolicyError):
            refused.add(family)
            search.walked += cost
        else:
            search.consider(moves_of(problem, plan.decisions), cost)


def as_chain(problem: Problem, candidates: Candidates, limit_bytes: int, banned: Set[int]) -> Scheduled | None:
    """Rotor's schedule within ``limit_bytes``, or that of its least peak where it finds none.

    Returns:
        None if the step is no chain, or longer than `CHAIN_MOMENTS`.
    """
    from ebbtide.plan.published.rotor import rotor_schedule

    if problem.step.moments > CHAIN_MOMENTS:
        return None
    try:
        found = rotor_schedule(problem, limit_bytes, CHAIN_STAGES, frozenset(problem.step.values_of(banned)))
    except PolicyError:
        return None
    recipes = {number: recipe for number, recipe in enumerate(found.recipes) if recipe is not None}
    wider = candidates.with_recipes(problem, recipes)
    modes = np.full(len(wider.absence), KEEP, dtype=np.int8)
    for place, number in enumerate(wider.absence.tolist()):
        if number in recipes:
            modes[place] = wider.mode_of(place, recipes[number])
    return Scheduled(wider, modes)


def _fewest_to_leave(problem: Problem, limit_bytes: int) -> int:
    """How many values have to leave where the plain step holds most, if the largest ones do."""
    peak, spans = int(np.argmax(problem.plain)), problem.spans
    absent = (spans.opens <= peak) & (peak < spans.closes)
    gone = np.cumsum(np.sort(spans.size_bytes[absent])[::-1])
    return int(np.searchsorted(gone, problem.plain[peak] - limit_bytes)) + 1
