"""The least peak that a step can be brought to, whatever it costs in time."""

from __future__ import annotations

import numpy as np

from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import KEEP, OFFLOAD, RECOMPUTE, Candidates, Modes
from ebbtide.plan.search import Found, Search
from ebbtide.plan.select import Room

ATTEMPTS = ((True, 0.5), (False, 0.5), (True, 0.25), (False, 0.75))
"""Ways to choose that are tried for each peak: by worst moment or wherever memory is short; where to cut chains."""
PRECISION = 1e-3
"""Share of the moved bytes within which the least peak is looked for."""


def least_peak(problem: Problem, candidates: Candidates, tier: str | None) -> Found:
    """The plan of least peak found: everything moved that can be, then ever lower peaks aimed at, halving the distance
    to what would be left if every value were gone throughout its absence. It does not depend on any budget."""
    searcher = _searcher(problem, candidates, tier, 0)
    best: Found | None = None
    for modes in _everything(candidates):
        lowest = int(searcher.selector.profile(modes).level.max())
        found = _reach(problem, candidates, tier, lowest, modes)
        if found is not None and (best is None or _peak(found) < _peak(best)):
            best = found
    assert best is not None, "a step that keeps everything stays within its own peak"
    low = _bound(problem, candidates)
    step_bytes = max(1, int(PRECISION * (int(problem.plain.max()) - low)))
    while _peak(best) - low > step_bytes:
        aim = (low + _peak(best)) // 2
        found = _aim(problem, candidates, tier, aim)
        if found is None:
            low = aim
        else:
            best = found
    return best


def _peak(found: Found) -> int:
    return int(found.course.memory.max())


def _everything(candidates: Candidates) -> list[Modes]:
    """Modes that move nothing, and all that can be moved, by offloading first and by recomputing first."""
    can_recompute = np.array([replay is not None for replay in candidates.replays], dtype=np.bool_)
    offload_first = np.where(candidates.can_offload, OFFLOAD, np.where(can_recompute, RECOMPUTE, KEEP))
    recompute_first = np.where(can_recompute, RECOMPUTE, np.where(candidates.can_offload, OFFLOAD, KEEP))
    return [np.zeros(len(can_recompute), dtype=np.int8), offload_first.astype(np.int8), recompute_first.astype(np.int8)]


def _bound(problem: Problem, candidates: Candidates) -> int:
    change = np.zeros(problem.step.moments + 1, dtype=np.int64)
    np.subtract.at(change, candidates.opens, candidates.size_bytes)
    np.add.at(change, candidates.closes, candidates.size_bytes)
    return int((problem.plain + np.cumsum(change)[:-1]).max())


def _searcher(problem: Problem, candidates: Candidates, tier: str | None, peak_bytes: int) -> Search:
    unlimited = np.full(problem.step.moments, np.iinfo(np.int64).max // 4, dtype=np.int64)
    room = Room(np.full(problem.step.moments, peak_bytes, dtype=np.int64), unlimited)
    return Search(problem, candidates, tier, room, peak_bytes, unlimited, 0)


def _reach(problem: Problem, candidates: Candidates, tier: str | None, peak_bytes: int, modes: Modes) -> Found | None:
    search = _searcher(problem, candidates, tier, peak_bytes)
    return search.offer(modes, search.selector.profile(modes))


def _aim(problem: Problem, candidates: Candidates, tier: str | None, peak_bytes: int) -> Found | None:
    nothing = np.zeros(len(candidates.absence), dtype=np.bool_)
    for peak_only, pivot in ATTEMPTS:
        search = _searcher(problem, candidates, tier, peak_bytes)
        modes = np.zeros(len(candidates.absence), dtype=np.int8)
        found = search.choose(modes, search.prices(), nothing, peak_only, pivot)
        if found is not None:
            return found
    return None
