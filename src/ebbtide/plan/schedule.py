"""When each offloaded candidate is copied out, released and loaded: as lazily as the limit and the links allow.

Copies out are queued as soon as they may be. If they are *put off*, each is queued right before its value may be
released, so that values that can be released first are copied first. A release comes when its copy is predicted to be
done; where memory needs it, it comes earlier, and compute waits. A load comes as late as it can and still be done in
time; where there is no room, it comes later.
"""

from __future__ import annotations

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.compiled import compiled
from ebbtide.plan.caution import Caution
from ebbtide.plan.follow import Moves
from ebbtide.plan.needs import OFFLOAD, RECOMPUTE, Modes, Profile
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates, Trips
from ebbtide.plan.spans import add_between, count_below, count_to


class Scheduler:
    """Places the transfers of modes, for one problem.

    Args:
        problem: the problem.
        candidates: its candidates.
        trips: what their trips take.
        cap: bytes allowed per moment.
        caution: time to leave free around transfers.
    """

    def __init__(self, problem: Problem, candidates: Candidates, trips: Trips, cap: Ints, caution: Caution) -> None:
        self.candidates, self.trips, self.cap, self.caution = candidates, trips, cap, caution
        self.absences = len(problem.step.absences)
        self.final = problem.spans.final[candidates.absence]
        self.slots = slots = np.array(problem.facts.slots, dtype=np.int64)
        # Where nothing can be released there is no slot before it either; such a candidate is never offloaded.
        before = slots[np.maximum(np.searchsorted(slots, candidates.release) - 1, 0)] if len(slots) else candidates.out
        self.latest_out = np.maximum(candidates.out, before)

    def moves(
        self, modes: Modes, rows: Ints, profile: Profile, starts: Floats, *, put_off: bool = False
    ) -> Moves | None:
        """A move for each absence of the step, or None if the modes cannot stay within the cap.

        Args:
            modes: one for each candidate.
            rows: the tier of each candidate that is offloaded, as a row of `Trips`.
            profile: memory under these modes.
            starts: expected start of each moment, seconds.
            put_off: whether copies out are put off.
        """
        if profile.nested:
            return None
        candidates, trips = self.candidates, self.trips
        offloaded = np.flatnonzero(modes == OFFLOAD)
        out = self.latest_out if put_off else candidates.out
        queue = offloaded[np.argsort(out[offloaded], kind="stable")]
        level, links = profile.level.copy(), rows[queue]
        release = compiled(place_releases)(
            self.slots, starts[self.slots], profile.busy, level, self.cap, queue, links, candidates.size_bytes,
            profile.begin, profile.end, trips.out_seconds[links, queue], starts[out[queue]],
            self.caution.out_share, self.caution.out_seconds,
        )  # fmt: skip
        if release is None:
            return None
        order = np.lexsort((queue, profile.end[queue]))
        load = compiled(place_loads)(
            self.slots, starts[self.slots], level, self.cap, queue, order, links, release, candidates.size_bytes,
            profile.end, candidates.closes, self.final, trips.in_seconds[links, queue], starts[profile.end[queue]],
            self.caution.in_share, self.caution.in_seconds,
        )  # fmt: skip
        moves = Moves.none(self.absences)
        recomputed, numbers = np.flatnonzero(modes >= RECOMPUTE), candidates.absence[queue]
        moves.replay[candidates.absence[recomputed]] = candidates.recipe(modes)[recomputed]
        moves.tier[numbers] = trips.tiers[links]
        moves.out[numbers], moves.release[numbers], moves.load[numbers] = out[queue], release, load
        return moves


def place_releases(
    slots: Ints, slot_seconds: Floats, busy: Mask, level: Ints, cap: Ints, queue: Ints, links: Ints, size_bytes: Ints,
    begin: Ints, end: Ints, out_seconds: Floats, queued_seconds: Floats, late_share: float, late_seconds: float,
) -> Ints | None:  # fmt: skip
    """Slot of each release in ``queue``, when copied or as early as memory needs; None if memory needs more.

    ``links``, ``out_seconds`` and ``queued_seconds`` are per place in the queue; ``late_share`` and ``late_seconds``
    are `Caution.out_share` and `Caution.out_seconds`. ``level`` is changed to the bytes held then. A release relieves
    its own moment, unless something is brought back in it (``busy``).
    """
    count = len(queue)
    release = np.empty(count, np.int64)
    # Copies that are late make those behind them late, too.
    free_seconds = np.zeros(links.max() + 1 if count else 0)
    for rank in range(count):
        place, link = queue[rank], links[rank]
        free_seconds[link] = max(free_seconds[link], queued_seconds[rank]) + (1 + late_share) * out_seconds[rank]
        copied = free_seconds[link] + late_seconds
        first = begin[place]
        last = slots[count_below(slots, end[place]) - 1]
        position = min(count_below(slot_seconds, copied), len(slots) - 1)
        slot = max(first, min(last, slots[position]))
        release[rank] = slot
        add_between(level, first + busy[first], slot + busy[slot], size_bytes[place])
    moment = settled = 0
    while moment < len(level):
        if level[moment] <= cap[moment]:
            moment += 1
            continue
        # Releases that are as early as they can be, or that come before this moment, cannot help from here on.
        while settled < count:
            slot = release[settled]
            if slot > begin[queue[settled]] and slot + busy[slot] > moment:
                break
            settled += 1
        # The copy that was queued first is done first, so its release is moved first.
        relieved = False
        for rank in range(settled, count):
            place = queue[rank]
            first, slot = begin[place], release[rank]
            until = slot + busy[slot]
            if slot > first and first + busy[first] <= moment < until:
                position = count_to(slots, moment) - 1
                if slots[position] + busy[slots[position]] > moment:
                    position -= 1
                slot = max(first, slots[position]) if position >= 0 else first
                add_between(level, slot + busy[slot], until, -size_bytes[place])
                release[rank] = slot
                relieved = True
                break
        if not relieved:
            return None
    return release


def place_loads(
    slots: Ints, slot_seconds: Floats, level: Ints, cap: Ints, queue: Ints, order: Ints, links: Ints, release: Ints,
    size_bytes: Ints, end: Ints, closes: Ints, final: Mask, in_seconds: Floats, due_seconds: Floats,
    late_share: float, late_seconds: float,
) -> Ints:  # fmt: skip
    """Slot of each load in ``queue``: in time if there is room, else the first with room, else on demand.

    ``order`` has the places in the queue by moment of need. What is ``final`` is not loaded: rule 2 of NOTE [Final
    absences].
    """
    count = len(queue)
    load = np.empty(count, np.int64)
    wanted = np.empty(count)
    free_until = np.full(links.max() + 1 if count else 0, np.inf)
    for turn in range(count - 1, -1, -1):
        rank = order[turn]
        if final[queue[rank]]:
            continue
        link = links[rank]
        taken = (1 + late_share) * in_seconds[rank] + late_seconds
        free_until[link] = min(free_until[link], due_seconds[rank]) - taken
        wanted[rank] = free_until[link]
    for rank in order:
        place = queue[rank]
        if final[place]:
            load[rank] = closes[place]
            continue
        position = count_to(slot_seconds, wanted[rank]) - 1
        position = max(position, count_to(slots, release[rank]))
        slot = slots[position] if position < len(slots) else end[place]
        for moment in range(end[place] - 1, slot - 1, -1):
            if cap[moment] - level[moment] < size_bytes[place]:
                position = count_to(slots, moment)
                slot = slots[position] if position < len(slots) else end[place]
                break
        if slot < end[place]:
            load[rank] = slot
            add_between(level, slot, end[place], size_bytes[place])
        else:
            load[rank] = closes[place]
    return load
