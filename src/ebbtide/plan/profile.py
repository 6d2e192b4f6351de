"""Where memory goes if each candidate is kept, offloaded or recomputed: exact in bytes, without any clock.

A *mode* says what happens to a candidate. Under given modes the bytes of a moment are least if every offloaded value is
released at its first slot and loaded on demand; `Profile.level` are those bytes. Everything that a schedule adds to
them, a later release or an earlier load, it adds knowingly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ebbtide.machine import Link
from ebbtide.plan.follow import DEEPEST_NESTING
from ebbtide.plan.problem import Facts, Floats, Ints, Problem
from ebbtide.plan.replay import Replay, check_recipe

KEEP, OFFLOAD, RECOMPUTE = range(3)
Modes = npt.NDArray[np.int8]
Mask = npt.NDArray[np.bool_]

SMALLEST_BYTES = 32 * 1024
"""Smaller values are kept: their bytes do not matter, their latency would."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """The absences worth deciding about, as columns.

    Attributes:
        absence: number of the absence.
        size_bytes, opens, closes: as in the step.
        out: slot at which its copy out is queued.
        release: first slot at which it can be released.
        out_seconds, in_seconds: time of its transfers.
        out_compute_seconds, in_compute_seconds: what they cost compute.
        can_offload: whether a slow tier may take it.
        replays: its checked recipe, or None.
        leaves: candidates that its recipe may have to bring back first, in order of first use.
        order: candidates by moment of need.
    """

    absence: Ints
    size_bytes: Ints
    opens: Ints
    closes: Ints
    out: Ints
    release: Ints
    out_seconds: Floats
    in_seconds: Floats
    out_compute_seconds: Floats
    in_compute_seconds: Floats
    can_offload: Mask
    replays: list[Replay | None]
    leaves: list[list[int]]
    order: list[int]

    @classmethod
    def of(cls, problem: Problem, tier: str | None, recipes: Sequence[tuple[int, ...] | None]) -> Candidates:
        """The candidates of ``problem`` with ``tier`` as the slow memory, if any."""
        step, facts = problem.step, problem.facts
        numbers = [number for number in range(len(step.absences)) if movable(facts, number)]
        absences = [step.absences[number] for number in numbers]
        sizes = np.array([step.values[absence.value].size_bytes for absence in absences], dtype=np.int64)
        opens = np.array([absence.opens for absence in absences], dtype=np.int64)
        closes = np.array([absence.closes for absence in absences], dtype=np.int64)
        slots = np.array([*facts.slots, step.moments + 1], dtype=np.int64)
        earliest = [problem.earliest_out[number] for number in numbers]
        latest = [step.moments if moment is None else moment for moment in earliest]
        outs = slots[np.searchsorted(slots, np.array(latest, dtype=np.int64))]
        releases = slots[np.searchsorted(slots, np.minimum(np.maximum(opens, outs + 1), step.moments))]
        replays: list[Replay | None] = []
        for number, absence in zip(numbers, absences, strict=True):
            recipe = recipes[number]
            replays.append(None if recipe is None else check_recipe(facts, absence.value, recipe))
        out_link, in_link = problem.routes[tier] if tier is not None else (None, None)
        out_seconds, in_seconds = _transfer_seconds(out_link, sizes), _transfer_seconds(in_link, sizes)
        return cls(
            absence=np.array(numbers, dtype=np.int64),
            size_bytes=sizes,
            opens=opens,
            closes=closes,
            out=outs,
            release=releases,
            out_seconds=out_seconds,
            in_seconds=in_seconds,
            out_compute_seconds=out_seconds * (out_link.compute_slowdown if out_link is not None else 0.0),
            in_compute_seconds=in_seconds * (in_link.compute_slowdown if in_link is not None else 0.0),
            can_offload=_offloadable(problem, tier, sizes, (outs < releases) & (releases < closes)),
            replays=replays,
            leaves=_leaf_candidates(problem, numbers, replays),
            order=sorted(range(len(numbers)), key=lambda place: (closes[place], place)),
        )


def _transfer_seconds(link: Link | None, sizes: Ints) -> Floats:
    if link is None:
        return np.zeros(len(sizes))
    return np.array([link.seconds(size) for size in sizes.tolist()], dtype=np.float64)


def _offloadable(problem: Problem, tier: str | None, sizes: Ints, in_time: Mask) -> Mask:
    """Candidates that may go to ``tier``: the largest ones, as many as find a place there at the same time."""
    if tier is None:
        return np.zeros(len(sizes), dtype=np.bool_)
    capacity = problem.machine.tier(tier).capacity_bytes
    if capacity is None:
        return in_time
    largest = np.argsort(-sizes, kind="stable")
    fits = np.zeros(len(sizes), dtype=np.bool_)
    fits[largest] = np.cumsum(np.where(in_time, sizes, 0)[largest]) <= capacity
    return in_time & fits


def movable(facts: Facts, number: int) -> bool:
    """Whether absence ``number`` is worth deciding about."""
    value = facts.step.values[facts.step.absences[number].value]
    return value.size_bytes >= SMALLEST_BYTES and value.storage not in facts.external


def _leaf_candidates(problem: Problem, numbers: list[int], replays: list[Replay | None]) -> list[list[int]]:
    step = problem.step
    by_storage: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        by_storage.setdefault(step.values[step.absences[number].value].storage, []).append(place)
    return [
        [] if replay is None else [place for storage in replay.leaves for place in by_storage.get(storage, [])]
        for replay in replays
    ]


@dataclasses.dataclass(slots=True)
class Profile:
    """Memory under some modes.

    Attributes:
        level: bytes per moment with every release and load at its least; a moment's recomputations included.
        begin, end: moments between which a candidate is absent in `level`.
        parent: per candidate, the one whose recipe brought it back before its own time, or -1.
        busy: per moment, whether something is brought back in it.
        extra_seconds: recomputation per moment.
        nested: whether recipes wait for each other too deeply for this to be run.
    """

    level: Ints
    begin: Ints
    end: Ints
    parent: Ints
    busy: Mask
    extra_seconds: dict[int, float]
    nested: bool


def profile(problem: Problem, candidates: Candidates, modes: Modes, headroom: Ints) -> Profile:
    """Memory under ``modes``.

    Args:
        problem: the problem.
        candidates: its candidates.
        modes: one for each candidate.
        headroom: bytes per moment that workspaces of recomputed ops may take beyond the limit.
    """
    needs = _Needs(candidates, modes)
    for place in candidates.order:
        if modes[place] == RECOMPUTE and not needs.done[place]:
            needs.start(int(candidates.closes[place]), headroom)
            needs.bring(place, -1)
            needs.stop()
    moved = np.flatnonzero(modes)
    end = np.array(needs.end, dtype=np.int64)
    begin = np.array(needs.begin, dtype=np.int64)
    # Where a value is brought back, releases of the same event come too late for that moment's memory.
    busy = np.zeros(problem.step.moments + 2, dtype=np.bool_)
    busy[end[moved]] = True
    relieved = begin + (busy[begin] & (modes == OFFLOAD))
    change = np.zeros(problem.step.moments + 2, dtype=np.int64)
    np.subtract.at(change, relieved[moved], candidates.size_bytes[moved])
    np.add.at(change, end[moved], candidates.size_bytes[moved])
    level = problem.plain + np.cumsum(change)[: problem.step.moments]
    for moment, excess in needs.excess.items():
        level[moment] += excess
    return Profile(level, begin, end, np.array(needs.parent, dtype=np.int64), busy, needs.seconds, needs.nested)


class _Needs:
    """Which values are brought back when, because something else is computed from them."""

    def __init__(self, candidates: Candidates, modes: Modes) -> None:
        self.candidates = candidates
        self.modes: list[int] = modes.tolist()
        self.sizes: list[int] = candidates.size_bytes.tolist()
        begin: list[int] = np.where(modes == OFFLOAD, candidates.release, candidates.opens).tolist()
        closes: list[int] = candidates.closes.tolist()
        self.begin, self.closes, self.end = begin, closes, list(closes)
        self.done = [False] * len(self.modes)
        self.parent = [-1] * len(self.modes)
        self.seconds: dict[int, float] = {}
        self.excess: dict[int, int] = {}
        self.moment = self.depth = self.added = self.high = self.headroom = 0
        self.nested = False

    def start(self, moment: int, headroom: Ints) -> None:
        """Go to an event."""
        self.moment, self.added, self.high, self.headroom = moment, 0, 0, int(headroom[moment])

    def stop(self) -> None:
        """Note how far the event's recomputations went above what is held after them."""
        self.excess[self.moment] = max(self.excess.get(self.moment, 0), self.high - self.added)

    def bring(self, place: int, parent: int) -> None:
        """Make a candidate present at this event."""
        self.done[place] = True
        self.parent[place] = parent
        self.end[place] = self.moment
        if self.modes[place] == RECOMPUTE:
            self._recompute(place)
        self.added += self.sizes[place]
        self.high = max(self.high, self.added)

    def _recompute(self, place: int) -> None:
        replay = self.candidates.replays[place]
        assert replay is not None
        self.depth += 1
        if self.depth > DEEPEST_NESTING:
            self.nested = True
        else:
            for leaf in self.candidates.leaves[place]:
                if self._is_away(leaf):
                    self.bring(leaf, place)
        self.depth -= 1
        peak = max(replay.peak_bytes, replay.physical_peak_bytes - self.headroom)
        self.high = max(self.high, self.added + peak)
        self.seconds[self.moment] = self.seconds.get(self.moment, 0.0) + replay.seconds

    def _is_away(self, leaf: int) -> bool:
        if self.modes[leaf] == KEEP or self.done[leaf]:
            return False
        # A release happens after the recomputations of its own event, so the value is still there in them.
        first = self.begin[leaf] + int(self.modes[leaf] == OFFLOAD)
        return first <= self.moment < self.closes[leaf]
