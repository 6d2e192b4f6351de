"""The linear program of the lower bound, as arrays. `bound` says what it answers; this file says why it is true.

NOTE [Relaxation]
Every plan that `moves_of` accepts gives, by the numbers that `follow` finds for it, values of all columns that satisfy
all rows at a cost equal to its delay. So the least cost is at most the delay of any plan. Time falls into *blocks*: the
events of one tick, then the ops up to the next tick with events. Compute is delayed only in the events (by stalls,
recomputation, and transfers that slow it down); ops take their own durations. For a block ``k`` let ``d`` be its ops'
seconds and ``w + h`` its delay, ``h`` being what recomputation and slowed compute cost.

1. ``y`` (per absence and tier) and ``z`` are 1 where the value is offloaded or recomputed. Absences of one storage
   that overlap are not moved together (`moves_of`): at any moment these columns of a storage add up to 1 at most.
2. A link works at most ``d + w + h`` seconds in a block, on one transfer at a time, latency included: ``x`` out,
   ``t`` in. A copy out is worked on from its first possible slot on; all are done in the end. Bytes flow back and forth
   as if each second of a transfer moved its share of them; shares lie between the worst and the best of all values.
3. Bytes ``o`` that are released in a block have been copied in former blocks or during its delay, since releases are
   done by the end of its events; and they may be released only from the first slot that allows it.
4. A load is worked on only after its bytes are taken, which happens in events; so the bytes ``a`` that arrive by the
   end of a block's ops are held throughout them. ``away`` (released, not arrived) is at least what is really absent by
   trips. Back come only bytes that have left: ``away >= 0``.
5. By the end of a block's events, what closes in them has arrived, in bytes and in link time.
6. A recomputed value is absent at most from opens to closes; values that a recipe needs earlier come back earlier,
   which only adds bytes and time. It costs at least what `computed_again` says, in an event from its first possible
   one up to the one that closes it. A transfer costs compute what it costs (`Link.lost_seconds`) in an event after its
   first slot, up to closes.
7. At a moment in a block's ops the bytes held are at least the plain ones less ``away`` at the end of the block, less
   recomputed values absent at the moment. At an event that closes absences, releases of its tick are still to come, so
   there ``away`` of the block before counts, less what closes up to it. Some rows may be left out: those of moments
   whose plain bytes fit, and those of ops that hold less than an earlier op of the block with fewer values recomputed.
8. No value counts for more bytes than the limit is exceeded by anywhere: where such a value is away, nothing else has
   to be, so the rows of memory stay true, and a value's transfers take their full time.
9. Values so small that all of them together are `NEGLIGIBLE` count as absent for free whenever they could be, and so do
   those of final absences.
10. Values leave and come back whole. Those of at least `LARGE` of the largest are counted: at a moment at which, with
   all others absent that can be, bytes are still missing, as many of them are absent as it takes of the largest. ``n``
   of them count as away from release to load; a link's seconds for them are worked on after they were taken, whole.
11. A value has to be absent at a moment in which too much would be held with it, were all others absent that can be.
   So it is moved, is released by the last event before the first such moment, and is taken or computed again from the
   first event after the last one on. No recipe that runs in between reads it. A link's work on it is done between its
   first possible event and its last one, together with that on others whose work has to be done between these. As it
   is moved in one way, whole, compute is delayed between these events as that way demands.
12. Where such a value is computed again, loads that are due before it can be are done first. Of what its recipe reads,
   what has to be absent just before the first event from which on it may be back is loaded after that, or made again by
   a longer recipe: one thing after the other (`Returns`). That takes longer the fewer of those values are loaded.
13. Where even with all others absent only some of a crowd of values can be held (`Crowd`), the rest are absent. Those
   of it that came only just before are released by the last slot before, those needed soon are loaded from the next
   event on: the link works on them, whole, between that and their first possible event or their end. Flows of bytes
   would let parts of values leave, and what was copied of one value make room for another.
14. What a recipe reads is there when it runs, or the recipe makes it itself. So where a value is recomputed, of another
    one that every recipe of it reads or makes, and that is moved, one of these is true (`Read`): it is back by the end
    of the former's absence, to be counted as held from then on; it is released only after the recipe may first run, to
    be counted as held until then; or the recipe runs its maker, and takes that op's time longer.

NOTE [Groups of blocks]
Long steps have their blocks merged into groups. What is written per block above then says less, and stays true: sums of
rows over the group for flows; pools are checked at the group's end only; 3 and 5 allow the plain time from the group's
start to its last event; and within the group ``away`` is at most what was away before plus all that the group releases.
Each is implied by the rows of the blocks, so the merged program is a relaxation of the finer one. The rows of rules 12
and 14, which are about single events, are left out.

NOTE [Boxes]
Each column has a finite upper bound that some best solution respects: flows and pools cannot exceed what is moved in
all; more delay in a block than the largest of the flows that it serves is of no use, hence the upper bounds of stalls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.machine import Link
from ebbtide.plan.bound_absences import Absences, absences_of, needed_absences
from ebbtide.plan.bound_blocks import AFTER, CLOSING, WITHIN, Blocks, memory_rows
from ebbtide.plan.bound_reads import Parts, Read, Reading, reads_of
from ebbtide.plan.bound_recipes import Returns, computed_again
from ebbtide.plan.bound_rows import NARROW, Given
from ebbtide.plan.linear import Assembled
from ebbtide.plan.problem import Problem

LARGE = 0.5
"""Rule 10 counts only values that have at least this share of the largest one's bytes."""
MATTERS = 0.03
"""Rule 10 counts only values that have at least this share of the bytes by which the limit is exceeded: smaller ones
fit in almost anywhere, and there are many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Formulation:
    """A program and where to find in it what callers ask for.

    Attributes:
        program: seconds of delay, in ``unit_seconds``, within a limit.
        unit_seconds, unit_bytes: what 1 means in it.
        memory_rows: its rows of memory.
        memory_moments: the moment of each.
        trips, replays: rows of an absence and the column that says whether it goes to a tier, or is computed again.
        merged: whether it has fewer groups than the step has blocks.
    """

    program: Assembled
    unit_seconds: float
    unit_bytes: float
    memory_rows: Ints
    memory_moments: Ints
    trips: Ints
    replays: Ints
    merged: bool


def formulate(problem: Problem, limit_bytes: int | Ints, banned: Set[int], most_groups: int) -> Formulation:
    """The program of NOTE [Relaxation] for delay within ``limit_bytes``, one for all moments or one for each."""
    absences, plain = absences_of(problem, banned)
    needed = needed_absences(problem, absences, plain - limit_bytes)
    again = computed_again(problem.facts, banned, needed.gone(absences), more_seconds=problem.machine.replay_seconds)
    replay = np.array([one.seconds for one in again])[absences.number]
    absences = dataclasses.replace(absences, replay_seconds=replay)
    returns = Returns(problem.facts, banned, needed.gone(absences), _load_seconds(problem, absences))
    blocks = Blocks(problem, most_groups)
    reads = [] if blocks.merged else reads_of(problem, absences, needed, again, banned)
    builder = _Builder(Given(problem, absences, needed, returns, blocks), reads, plain - limit_bytes)
    for out, back in problem.routes.values():
        builder.add_tier(out, back)
    builder.add_recomputation()
    builder.add_reads()
    builder.add_storages()
    builder.add_needed()
    builder.add_crowds(plain - limit_bytes, builder.moments[builder.kinds == AFTER])
    return builder.finish()


def _load_seconds(problem: Problem, absences: Absences) -> dict[int, float]:
    """By absence the least time of a load, over all tiers; infinite if it cannot be loaded."""
    links = [back for _, back in problem.routes.values()]
    size, numbers = absences.size_bytes.astype(np.int64).tolist(), absences.number.tolist()
    return {
        number: min((link.seconds(bytes_) for link in links), default=math.inf) if movable else math.inf
        for number, bytes_, movable in zip(numbers, size, absences.movable.tolist(), strict=True)
    }


class _Builder(Reading):
    """Puts the program together, rule by rule."""

    def __init__(self, given: Given, reads: Sequence[Read], excess: Floats) -> None:
        super().__init__(given, reads)
        absences = given.absences
        self.size = np.minimum(absences.size_bytes, max(float(excess.max()), 1.0)) / self.unit_bytes
        self.moments, self.kinds = memory_rows(excess, self.blocks, absences.closes)
        self.memory = self.program.rows(excess[self.moments] / self.unit_bytes, np.inf, len(self.moments))
        least_bytes = max(LARGE * absences.size_bytes.max(initial=0.0), MATTERS * float(excess.max()))
        self.large = absences.size_bytes >= least_bytes
        self.counted, numbers = self._whole(excess)
        self.counts = self.program.rows(numbers, np.inf, len(numbers))

    def _whole(self, excess: Floats) -> tuple[Ints, Floats]:
        """Moments at which large values have to be absent, and how many: rule 10."""
        absences, found = self.absences, []
        for moment in self.moments[self.kinds == AFTER].tolist():
            here = (absences.opens <= moment) & (moment < absences.closes)
            missing = excess[moment] - absences.size_bytes[here & ~self.large].sum()
            largest = np.cumsum(np.sort(absences.size_bytes[here & self.large])[::-1])
            number = int(np.searchsorted(largest, missing * (1 - 1e-12))) + 1
            if missing > 0 and number <= len(largest):
                found.append((moment, number))
        columns = np.array(found, dtype=np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1].astype(np.float64)

    def add_tier(self, out_link: Link, in_link: Link) -> None:
        """Trips to one slow tier: rules 2 to 5, and their part in rules 6 and 7."""
        chosen = np.flatnonzero(self.absences.movable)
        if not len(chosen):
            return
        absences = self.absences.some(chosen)
        size, total = self.size[chosen], float(self.size[chosen].sum())
        trips = self.program.columns(len(chosen), 1.0)
        for number, column in zip(chosen.tolist(), trips.tolist(), strict=True):
            self.columns_of[number].append(column)
        out_seconds = self._link_seconds(out_link, self.absences.movable)
        in_seconds = self._link_seconds(in_link, self.absences.movable)
        leaving, back = self._leaving(chosen, trips), self._back(chosen, trips)
        released = self._add_out(absences, trips, size, out_seconds, chosen, leaving)
        arrived, early = self._add_in(absences, trips, size, in_seconds, chosen, back)
        away, rows = self._pool(total)
        self.program.put(rows, released, -1.0)
        self.program.put(rows, arrived, 1.0)
        lost_seconds = self._lost_seconds(out_link, out_seconds), self._lost_seconds(in_link, in_seconds)
        self._add_slowdown(absences, trips, *lost_seconds)
        self._add_away(size, released, early, away, back)
        large = self.large[chosen]
        if large.any() and len(self.counted):
            self._add_counts(size, in_seconds, released, leaving.some(large), back.some(large))

    def _add_out(
        self, absences: Absences, trips: Ints, size: Floats, seconds: Floats, chosen: Ints, leaving: Parts
    ) -> Ints:
        """Copies out and releases: rules 2, 3 and 11. Returns what is released."""
        program, group = self.program, self.blocks.group
        total_seconds, rate = float(seconds.sum()), float((size / seconds).max())
        sent = self._flow(total_seconds)
        _, rows = self._pool(total_seconds, empty_end=True)
        program.put(rows[group[absences.out]], trips, -seconds)
        program.put(rows, sent, 1.0)
        needed = self.needed.absent[chosen]
        if needed.any():
            self._done_by(sent, trips[needed], seconds[needed], self.needed.leaves_by[chosen[needed]])
        self._between(trips, seconds, absences.out, self.needed.leaves_by[chosen], needed)
        released = program.columns(self.blocks.count, np.where(self.blocks.waits, size.sum(), 0.0))
        copied, rows = self._pool(rate * total_seconds)
        program.put(rows, sent, -rate)
        program.put(rows, released, 1.0)
        _, rows = self._pool(float(size.sum()))
        program.put(rows[group[leaving.moments]], leaving.columns, -size[leaving.which] * leaving.signs)
        program.put(rows, released, 1.0)
        until = self.blocks.plain_until(np.array(self.problem.facts.slots, dtype=np.int64)) / self.unit_seconds
        rows = program.rows(-rate * until, np.inf, self.blocks.count)
        program.put(rows[1:], copied[:-1], 1.0)
        self._delay(rows, slice(None), rate)
        program.put(rows, released, -1.0)
        return released

    def _add_in(
        self, absences: Absences, trips: Ints, size: Floats, seconds: Floats, chosen: Ints, back: Parts
    ) -> tuple[Ints, Ints]:
        """Loads: rules 2, 5 and 11. Returns what arrives, and what has arrived before it is needed."""
        program, rates = self.program, size / seconds
        fetched = self._fetched(seconds, back)
        _, rows = self._pool(float(seconds.sum()))
        begin = np.maximum(absences.release, self.needed.back_from[chosen])
        program.put(rows[self.blocks.group[begin]], trips, -seconds)
        program.put(rows, fetched, 1.0)
        self._between(trips, seconds, begin, absences.closes, self.needed.absent[chosen])
        arrived = program.columns(self.blocks.count, float(size.sum()))
        for rate, lower, upper in ((float(rates.max()), -np.inf, 0.0), (float(rates.min()), 0.0, np.inf)):
            rows = program.rows(lower, upper, self.blocks.count)
            program.put(rows, arrived, 1.0)
            program.put(rows, fetched, -rate)
        early, rows = self._pool(float(size.sum()))
        program.put(rows, arrived, -1.0)
        program.put(rows[self.blocks.group[back.moments]], back.columns, size[back.which] * back.signs)
        return arrived, early

    def _fetched(self, seconds: Floats, back: Parts) -> Ints:
        """Seconds of loads in each group, done when the values are needed: rules 2 and 5."""
        fetched = self._flow(float(seconds[np.unique(back.which)].sum()))
        self._done_by(fetched, back.columns, seconds[back.which] * back.signs, back.moments)
        return fetched

    def _add_counts(self, size: Floats, seconds: Floats, released: Ints, leaving: Parts, back: Parts) -> None:
        """Large values of one tier, each away whole or not at all: rule 10."""
        program, group, which = self.program, self.blocks.group, np.unique(back.which)
        count, longest = float(len(which)), float(seconds[which].max())
        left = program.columns(self.blocks.count, np.where(self.blocks.waits, count, 0.0))
        _, rows = self._pool(count)
        program.put(rows[group[leaving.moments]], leaving.columns, -leaving.signs)
        program.put(rows, left, 1.0)
        _, rows = self._pool(float(self.size.sum()))
        program.put(rows, released, -1.0)
        program.put(rows, left, float(size[which].min()))
        taken = program.columns(self.blocks.count, np.where(self.blocks.waits, count, 0.0))
        _, rows = self._pool(count)
        program.put(rows, taken, -1.0)
        program.put(rows[group[back.moments]], back.columns, back.signs)
        away, rows = self._pool(count)
        program.put(rows, left, -1.0)
        program.put(rows, taken, 1.0)
        program.put(self.counts, away[group[self.counted]], 1.0)
        fetched = self._fetched(seconds, back)
        _, rows = self._pool(longest * count)
        program.put(rows, taken, -longest)
        program.put(rows, fetched, 1.0)

    def _add_slowdown(self, absences: Absences, trips: Ints, out_cost: Floats, in_cost: Floats) -> None:
        """What transfers cost compute, after their first slots and before they close: rule 6."""
        group = self.blocks.group
        self.program.put(self.ready_rows[group[absences.out]], trips, -out_cost)
        self.program.put(self.ready_rows[group[absences.release]], trips, -in_cost)
        self.program.put(self.ahead_rows[group[absences.closes]], trips, out_cost + in_cost)

    def _add_away(self, size: Floats, released: Ints, early: Ints, away: Ints, back: Parts) -> None:
        """What one tier takes off the rows of memory: rule 7."""
        program, groups = self.program, self.blocks.group[self.moments]
        after, within = self.kinds == AFTER, self.kinds == WITHIN
        closing = self.kinds == CLOSING
        former = ~after & (groups > 0)
        program.put(self.memory[after], away[groups[after]], 1.0)
        program.put(self.memory[former], away[groups[former] - 1], 1.0)
        program.put(self.memory[within], released[groups[within]], 1.0)
        program.put(self.memory[closing & former], early[groups[closing & former] - 1], 1.0)
        order = np.argsort(back.moments, kind="stable")
        closes = back.moments[order]
        due = self.blocks.group[closes]
        for row in np.flatnonzero(closing).tolist():
            first = int(np.searchsorted(due, groups[row]))
            last = int(np.searchsorted(closes, self.moments[row], side="right"))
            here = order[first:last]
            values = -size[back.which[here]] * back.signs[here]
            program.put(np.full(len(here), self.memory[row]), back.columns[here], values)

    def add_recomputation(self) -> None:
        """Recomputed values: rule 6, and what they take off the rows of memory."""
        absences, size = self.absences.some(self.replayed), self.size[self.replayed]
        replays = self.program.columns(len(self.replayed), 1.0)
        for number, column in zip(self.replayed.tolist(), replays.tolist(), strict=True):
            self.columns_of[number].append(column)
        earliest = self.needed.again_from[self.replayed]
        self.program.put(self.ready_rows[self.blocks.group[earliest]], replays, -self.replay)
        self.program.put(self.ahead_rows[self.blocks.group[absences.closes]], replays, self.replay)
        self._put_replays(self.blocks.group[earliest], self.blocks.group[absences.closes], replays)
        moments, which = np.unique(self.moments, return_inverse=True)
        absent = self.program.columns(len(moments), float(size.sum()))
        rows = self.program.rows(0.0, 0.0, len(moments))
        self.program.put(rows, absent, 1.0)
        self.program.put(rows[1:], absent[:-1], -1.0)
        begin, end = np.searchsorted(moments, absences.opens), np.searchsorted(moments, absences.closes)
        seen, back = begin < end, self._back(self.replayed, replays)
        self.program.put(rows[begin[seen]], replays[seen], -size[seen])
        ends = np.maximum(np.searchsorted(moments, back.moments), begin[back.which])
        inside = seen[back.which] & (ends < len(moments))
        values = size[back.which] * back.signs
        self.program.put(rows[ends[inside]], back.columns[inside], values[inside])
        self.program.put(self.memory, absent[which], 1.0)
        for moment, row in zip(self.counted.tolist(), self.counts.tolist(), strict=True):
            here = self.large[self.replayed] & (absences.opens <= moment) & (moment < absences.closes)
            self.program.put(np.full(int(here.sum()), row), replays[here], 1.0)

    def _put_replays(self, first: Ints, last: Ints, replays: Ints) -> None:
        """What can be computed again in some groups alone is so there; pools mix up the times of all values."""
        if self.blocks.merged:
            return
        windows = np.unique(np.stack((first, last), axis=1), axis=0)
        for begin, end in windows[windows[:, 1] - windows[:, 0] < NARROW].tolist():
            inside = np.flatnonzero((first >= begin) & (last <= end))
            row = self.program.rows(0.0, np.inf, 1)
            self.program.put(np.repeat(row, end + 1 - begin), self.work[begin : end + 1], 1.0)
            self.program.put(np.repeat(row, len(inside)), replays[inside], -self.replay[inside])

    def add_storages(self) -> None:
        """One thing at a time happens to a storage: rule 1."""
        values, step = self.problem.step.values, self.problem.step
        rows: list[int] = []
        columns: list[int] = []
        count = 0
        present: dict[int, list[int]] = {}
        for place in np.argsort(self.absences.opens, kind="stable").tolist():
            storage = values[step.absences[self.absences.number[place]].value].storage
            others = present.get(storage, [])
            here = [other for other in others if self.absences.closes[other] > self.absences.opens[place]]
            present[storage] = [*here, place]
            together = [column for other in present[storage] for column in self.columns_of[other]]
            if len(together) > 1:
                rows += [count] * len(together)
                columns += together
                count += 1
        numbers = self.program.rows(-np.inf, 1.0, count)
        self.program.put(numbers[np.array(rows, dtype=np.int64)], np.array(columns, dtype=np.int64), 1.0)

    def finish(self) -> Formulation:
        """The program."""
        trips: list[tuple[int, int]] = []
        replays: list[tuple[int, int]] = []
        again = set(self.replayed.tolist())
        for place, (number, columns) in enumerate(zip(self.absences.number.tolist(), self.columns_of, strict=True)):
            tiers = len(columns) - (place in again)
            trips += [(number, column) for column in columns[:tiers]]
            replays += [(number, column) for column in columns[tiers:]]
        return Formulation(
            self.program.assemble(),
            self.unit_seconds,
            self.unit_bytes,
            self.memory,
            self.moments,
            np.array(trips, dtype=np.int64).reshape(-1, 2),
            np.array(replays, dtype=np.int64).reshape(-1, 2),
            self.blocks.merged,
        )
