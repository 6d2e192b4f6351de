"""Places to start a search from: plans of published policies, and Rotor's schedule where a step is a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import numpy as np

from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.needs import KEEP, Modes
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.search import Search
from ebbtide.plan.simulate import moves_of

Starts = dict[str, tuple[float, float, float]]
"""Policies by name, with what they cost."""

STARTS: Starts = {
    "autoswap-aoa": (1.2, 0.012, 0.0),
    "autoswap-wdoa": (1.2, 0.012, 0.0),
    "autoswap-doa": (1.2, 0.012, 0.0),
    "autoswap-swdoa": (1.2, 0.012, 0.0),
    "autoswap-voting": (1.2, 0.012, 0.0),
    "capuchin": (2.5, 0.012, 0.0),
    "beaumont-greedy": (2.0, 0.0, 0.01),
}
"""Policies whose plans are places to start from, the cheap ones first: some were ahead of all that the search found on
its own, by much where little memory is left, by the last digits where there is more. For each moment of a step they
take these microseconds on a common machine: always, for each value that has to leave, for each absence."""
FINE_STARTS: Starts = {"autoswap-weighted": (12.0, 0.28, 0.0), "beaumont-dp": (15.0, 0.0, 0.0)}
"""More of them, dear ones that were ahead by the last digits alone: for searches that are near the bound already."""
STARTS_SHARE = 0.5
"""Share of the work that may go into them."""
FAR_SHARE = 0.2
"""The same where the search is far from the bound, of the work that is left then."""

FAR = 1.05
"""How many times the bound a plan takes to be far from it."""
CHAIN_STAGES = 100
"""Into how many stages a step is cut at most to start from Rotor's schedule: of more, neighbours are joined."""
CHAIN_MOMENTS = 10_000
"""Of longer steps it is not tried: its time grows with the square of the stages' lengths. 4,000 moments take 3 s."""


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


def _try_published(
    search: Search, machine: Machine, starts: dict[str, tuple[float, float, float]], left: float
) -> None:
    """Offer ``search`` plans of the policies named in ``starts`` as long as ``left`` microseconds last."""
    # They are made of parts of this package: imported here, they find them complete, and only those who search pay.
    from ebbtide.plan.published.registry import POLICIES

    problem, limit_bytes = search.problem, search.room.limit_bytes
    leave, absences = _fewest_to_leave(problem, limit_bytes), len(problem.step.absences)
    refused = set[str]()
    for name, (always, each, absence) in starts.items():
        cost = problem.step.moments * (always + each * leave + absence * absences)
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
