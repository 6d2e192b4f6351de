"""The least peak that a step can be brought to, whatever it costs in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import KEEP, OFFLOAD, RECOMPUTE, Candidates, Mask, Modes
from ebbtide.plan.search import Found, Search
from ebbtide.plan.select import Room

ATTEMPTS = ((True, 0.5), (False, 0.5), (True, 0.25), (False, 0.75))
"""Ways to choose that are tried for each peak: by worst moment or wherever memory is short; where to cut chains."""
PRECISION = 1e-3
"""Share of the moved bytes within which the least peak is looked for."""
LOWERING_SECONDS = 0.05
"""About how long small changes are tried in the end."""


def least_peak(problem: Problem, candidates: Candidates, tiers: Sequence[str]) -> Found:
    """The plan of least peak found: everything moved that can be, then ever lower peaks aimed at, halving the distance
    to `lowest_peak`. It does not depend on any budget."""
    searcher = _searcher(problem, candidates, tiers, 0)
    best: Found | None = None
    for modes in _everything(searcher.candidates):
        lowest = int(searcher.selector.profile(modes).level.max())
        found = _reach(problem, candidates, tiers, lowest, modes)
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
    modes = _lowered(searcher, best.modes)
    found = _reach(problem, candidates, tiers, int(searcher.selector.profile(modes).level.max()), modes)
    return best if found is None or _peak(best) <= _peak(found) else found


def _lowered(searcher: Search, start: Modes) -> Modes:
    """Modes of a lower peak than those of ``start``, if changes of one or two of what could be absent at the worst
    moment find some: what the halving missed, as it takes greedy choices alone."""
    candidates, selector, random = searcher.candidates, searcher.selector, np.random.default_rng(0)
    ways = _ways(candidates)
    found = selector.profile(start)
    modes, high = start, int(found.level.max())
    for _ in range(int(LOWERING_SECONDS * 1e6 / searcher.costs()[1])):
        moment = int(np.argmax(found.level))
        near = np.flatnonzero((candidates.opens <= moment) & (moment <= candidates.closes))
        if not near.size:
            break
        trial = modes.copy()
        for place in random.choice(near, size=min(near.size, int(random.integers(1, 3))), replace=False).tolist():
            trial[place] = random.choice(np.flatnonzero(ways[:, place]))
        tried = selector.profile(trial)
        if not tried.nested and int(tried.level.max()) <= high:
            modes, high, found = trial, int(tried.level.max()), tried
    return modes


def _ways(candidates: Candidates) -> Mask:
    """Which modes, as rows, each candidate may have."""
    can_recompute, deepest = candidates.can_recompute, candidates.deepest()
    kept = np.ones(len(deepest), dtype=np.bool_)
    modes = np.arange(RECOMPUTE, int(deepest.max(initial=RECOMPUTE)) + 1)
    return np.vstack((kept, candidates.can_offload, can_recompute & (modes[:, None] <= deepest)))


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
    """Whether they have no deeper recipes."""
    return len(candidates.replays) == len(candidates.absence)


def lowest_peak(problem: Problem, candidates: Candidates) -> int:
    """What would be left if every value were gone throughout its absence."""
    change = np.zeros(problem.step.moments + 1, dtype=np.int64)
    np.subtract.at(change, candidates.opens, candidates.size_bytes)
    np.add.at(change, candidates.closes, candidates.size_bytes)
    return int((problem.plain + np.cumsum(change)[:-1]).max())


def _searcher(problem: Problem, candidates: Candidates, tiers: Sequence[str], peak_bytes: int) -> Search:
    return Search(problem, candidates, tiers, Room.of(problem, peak_bytes))


def _reach(
    problem: Problem, candidates: Candidates, tiers: Sequence[str], peak_bytes: int, modes: Modes
) -> Found | None:
    search = _searcher(problem, candidates, tiers, peak_bytes)
    return search.offer(modes, search.selector.profile(modes))


def _aim(problem: Problem, candidates: Candidates, tiers: Sequence[str], peak_bytes: int) -> Found | None:
    nothing = np.zeros(len(candidates.absence), dtype=np.bool_)
    for peak_only, pivot in ATTEMPTS:
        search = _searcher(problem, candidates, tiers, peak_bytes)
        modes = np.zeros(len(candidates.absence), dtype=np.int8)
        found = search.choose(modes, search.prices(), nothing, peak_only, pivot, deepen=search.has_deeper)
        if found is not None:
            return found
    return None
