"""The least peak that a step can be brought to, whatever it costs in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbtide.compiled import compiled
from ebbtide.plan.fill import Manner
from ebbtide.plan.lower_peak import lower
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE, Modes
from ebbtide.plan.problem import Problem, bytes_within
from ebbtide.plan.profile import Candidates
from ebbtide.plan.search import Found, Search
from ebbtide.plan.select import Room

ATTEMPTS = ((True, 0.5), (False, 0.5), (True, 0.25), (False, 0.75))
"""Pairs of `Wishes.peak_only` and `Wishes.pivot` that are tried for each peak, one after the other."""
PRECISION = 1e-3
"""Share of the moved bytes within which the least peak is looked for."""
LOWERING_SECONDS = 0.02
"""About how long small changes to the plan of least peak are tried, on a common machine."""


def least_peak(problem: Problem, candidates: Candidates, tiers: Sequence[str]) -> Found:
    """The plan of least peak found: everything moved that can be, then ever lower peaks aimed at, halving the distance
    to `lowest_peak`. No budget has a part in it."""
    searcher = _searcher(problem, candidates, tiers, 0)
    best: Found | None = None
    for modes in _everything(searcher.candidates):
        found = schedule_within_least_peak(problem, candidates, tiers, modes)
        if found is not None and (best is None or _peak(found) < _peak(best)):
            best = found
    assert best is not None, "a step that keeps everything stays within its own peak"
    low = lowest_peak(problem, candidates)
    step_bytes = max(1, int(PRECISION * (int(problem.plain.max()) - low)))
    while _peak(best) - low > step_bytes:
        aim = (low + _peak(best)) // 2
        found = _aim(problem, candidates, tiers, aim)
        if found is None:
            low = aim
        else:
            best = found
    found = schedule_within_least_peak(problem, candidates, tiers, _lower(searcher, best.modes))
    return best if found is None or _peak(best) <= _peak(found) else found


def _lower(searcher: Search, start: Modes) -> Modes:
    """Try small changes to ``start`` and return the modes of least peak that they find.

    They find what the halving misses, as it takes greedy choices alone.
    """
    selector = searcher.selector
    deepest = np.where(selector.can_recompute, selector.deepest, 0)
    can_offload = searcher.candidates.can_offload
    return compiled(lower)(selector.needs, can_offload, deepest, start, LOWERING_SECONDS * 1e6, 0)


def _peak(found: Found) -> int:
    return int(found.course.memory.max())


def _everything(candidates: Candidates) -> list[Modes]:
    """Modes that move nothing, and all that can be moved, by offloading first and by recomputing first."""
    can_recompute = candidates.can_recompute
    offload_first = np.where(candidates.can_offload, OFFLOAD, np.where(can_recompute, RECOMPUTE, KEEP))
    recompute_first = np.where(can_recompute, RECOMPUTE, np.where(candidates.can_offload, OFFLOAD, KEEP))
    deepest = np.where(can_recompute, candidates.deepest(), np.where(candidates.can_offload, OFFLOAD, KEEP))
    every = [np.zeros(len(can_recompute)), offload_first, recompute_first]
    return [modes.astype(np.int8) for modes in (every if _is_shallow(candidates) else [*every, deepest])]


def _is_shallow(candidates: Candidates) -> bool:
    """Whether no candidate has deeper recipes."""
    return len(candidates.replays) == len(candidates.absence)


def lowest_peak(problem: Problem, candidates: Candidates) -> int:
    """The peak, in bytes, if every value were gone throughout its absence."""
    gone = bytes_within(candidates.opens, candidates.closes, candidates.size_bytes, problem.step.moments)
    return int((problem.plain - gone).max())


def _searcher(problem: Problem, candidates: Candidates, tiers: Sequence[str], peak_bytes: int) -> Search:
    return Search(problem, candidates, tiers, Room.of(problem, peak_bytes))


def schedule_within_least_peak(
    problem: Problem, candidates: Candidates, tiers: Sequence[str], modes: Modes
) -> Found | None:
    """Schedule ``modes`` within the least peak that they can have; None if transfers do not fit into it."""
    searcher = _searcher(problem, candidates, tiers, 0)
    lowest = int(searcher.selector.profile(modes).level.max())
    search = _searcher(problem, candidates, tiers, lowest)
    return search.offer(modes, search.selector.profile(modes))


def _aim(problem: Problem, candidates: Candidates, tiers: Sequence[str], peak_bytes: int) -> Found | None:
    nothing = np.zeros(len(candidates.absence), dtype=np.bool_)
    for peak_only, pivot in ATTEMPTS:
        search = _searcher(problem, candidates, tiers, peak_bytes)
        modes = np.zeros(len(candidates.absence), dtype=np.int8)
        found = search.choose(modes, search.prices(), Manner(nothing, peak_only, pivot, search.has_deeper))
        if found is not None:
            return found
    return None
