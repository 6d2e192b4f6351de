"""The inner loop of `follow`: one pass over the moments of a step, on arrays alone, compiled by numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask

GONE, NEED, RELEASE, OUT, LOAD = range(5)
"""Phases of a moment, in order: see NOTE [What happens in a moment] in `follow`."""
PRESENT, AWAY, COMING = range(3)
DONE, STALE, NESTED, EXCESS = range(4)
"""How a course ends: well, at a recipe that reads what is gone, at recipes that wait for each other too deeply, or
where it takes more memory or time than it may."""

OUT_WAY, BACK_WAY = range(2)
"""The two ways of a transfer: to a slow tier, and back from it."""
RELEASE_WAIT, LOAD_WAIT = range(2)
"""The two reasons for which compute waits: a release whose copy is not done, and a load."""
LATENCY, BANDWIDTH, SLOWDOWN, COMPUTE = range(4)
"""Columns of `Scene.links` for the link out."""
RATES = 4
"""How many columns of `Scene.links` one link has: that many further to the right is the same of the link back."""
DEEPEST_NESTING = 100
"""Recipes that wait for each other at most, each for a value that the next one makes."""


class Scene(NamedTuple):
    """What is the same for all plans of a problem, as arrays.

    Attributes:
        clock, plain, workspace: per moment, as in `Problem`.
        opens, closes, size_bytes, storage: per absence; storages are numbered from 0 to ``storages - 1``.
        storages: how many there are.
        final: per absence, whether its value dies as it closes: see `ebbtide.plan.finals`.
        links: per tier latency, bandwidth, slowdown and seconds of compute of the link out, then of the link in.
        late_share, late_seconds: per way (`OUT_WAY`, `BACK_WAY`) how much longer transfers take than their links say,
            as a share and in seconds.
        first_leaf, leaves: per recipe where its leaves begin, with one entry more than recipes; leaves as storages.
        replay_seconds: per recipe.
        replay_peak_bytes, replay_physical_peak_bytes: per recipe the most bytes it holds, without and with workspaces.
        valid_until: per recipe the first moment at which what it reads is gone or written.
    """

    clock: Floats
    plain: Ints
    workspace: Ints
    opens: Ints
    closes: Ints
    size_bytes: Ints
    storage: Ints
    storages: int
    final: Mask
    links: Floats
    late_share: Floats
    late_seconds: Floats
    first_leaf: Ints
    leaves: Ints
    replay_seconds: Floats
    replay_peak_bytes: Ints
    replay_physical_peak_bytes: Ints
    valid_until: Ints


class TransferRows(NamedTuple):
    """Transfers, in the order in which they were queued.

    Attributes:
        absence: whose value it carried.
        way: `OUT_WAY` or `BACK_WAY`.
        queued, started, ended: when, in seconds from the beginning of the step.
    """

    absence: Ints
    way: Ints
    queued: Floats
    started: Floats
    ended: Floats


class StallRows(NamedTuple):
    """Waits of compute, in order.

    Attributes:
        moment: when it was.
        reason: `RELEASE_WAIT` or `LOAD_WAIT`.
        absence: whose value it waited for.
        seconds: how long it took.
    """

    moment: Ints
    reason: Ints
    absence: Ints
    seconds: Floats


class RecomputationRows(NamedTuple):
    """Recomputations, in the order in which they ran.

    Attributes:
        absence: whose value it made.
        moment: in which it ran.
        started: when, in seconds from the beginning of the step.
    """

    absence: Ints
    moment: Ints
    started: Floats


class RawCourse(NamedTuple):
    """What `run_course` found, as arrays and numbers.

    Attributes:
        memory, physical: per moment its most bytes, and the same with workspaces.
        starts: per moment when it starts, in seconds; the last entry is the end.
        sent, waited, replayed: transfers, stalls and recomputations.
        ending: how it ended: `DONE`, `STALE`, `NESTED` or `EXCESS`.
        absence, moment: where it did, unless it is done; what ends by `EXCESS` has no absence.
    """

    memory: Ints
    physical: Ints
    starts: Floats
    sent: TransferRows
    waited: StallRows
    replayed: RecomputationRows
    ending: int
    absence: int
    moment: int


def order_actions(scene: Scene, tier: Ints, replay: Ints, out: Ints, release: Ints, load: Ints) -> Ints:
    """What is to be done, in order, as rows of moment, phase, absence; columns are as in `Moves`.

    The value of a final absence goes as that closes, and is not loaded before. Within a phase of a moment, loads are
    ordered by moment of need, everything by number of absence.
    """
    opens, closes, moments = scene.opens, scene.closes, len(scene.plain)
    rows, size = np.empty((4 * len(closes), 3), np.int64), 0
    ends = np.zeros(moments + 2, np.int64)
    for number in range(len(closes)):
        if tier[number] < 0 and replay[number] < 0:
            continue
        rows[size, 0], rows[size, 1], rows[size, 2] = closes[number], GONE if scene.final[number] else NEED, number
        size += 1
        if replay[number] >= 0:
            rows[size, 0], rows[size, 1], rows[size, 2] = opens[number], GONE, number
            size += 1
            continue
        rows[size, 0], rows[size, 1], rows[size, 2] = out[number], OUT, number
        size += 1
        rows[size, 0], rows[size, 1], rows[size, 2] = release[number], RELEASE, number
        size += 1
        if load[number] < closes[number] and not scene.final[number]:
            rows[size, 0], rows[size, 1], rows[size, 2] = load[number], LOAD, number
            size += 1
    for row in range(size):
        ends[rows[row, 0] + 1] += 1
    for moment in range(moments):
        ends[moment + 1] += ends[moment]
    # Rows were written by ascending absence. Each is put behind those rows of its moment that do not come after it.
    actions, first = np.empty((size, 3), np.int64), ends.copy()
    for row in range(size):
        moment, phase, number = rows[row, 0], rows[row, 1], rows[row, 2]
        place = ends[moment]
        ends[moment] += 1
        while place > first[moment]:
            before, other = actions[place - 1, 1], actions[place - 1, 2]
            later = before > phase or (before == phase == LOAD and closes[other] > closes[number])
            if not later:
                break
            actions[place, 0], actions[place, 1], actions[place, 2] = moment, before, other
            place -= 1
        actions[place, 0], actions[place, 1], actions[place, 2] = moment, phase, number
    return actions


def run_course(
    scene: Scene, actions: Ints, tier: Ints, replay: Ints, limit_bytes: int, ceiling: Ints, longest: float
) -> RawCourse:
    """Carry out ``actions`` by NOTE [What happens in a moment] in `follow`.

    It is one long function because a recipe and what it waits for share all of the state; recursion is a stack in it.

    Args:
        scene: what does not depend on the plan.
        actions: from `order_actions`.
        tier, replay: per absence the tier or recipe it goes by, or -1.
        limit_bytes, ceiling: most bytes in all moments; most with workspaces in each.
        longest: most seconds.

    Returns:
        What happened. A course that takes more than it may ends in the first moment in which that is seen.
    """
    clock, plain, workspace, links = scene.clock, scene.plain, scene.workspace, scene.links
    size_bytes, storage, first_leaf, leaves = scene.size_bytes, scene.storage, scene.first_leaf, scene.leaves
    final = scene.final
    late_share, late_seconds = scene.late_share, scene.late_seconds
    replay_seconds, valid_until, storages = scene.replay_seconds, scene.valid_until, scene.storages
    replay_peak, replay_physical_peak = scene.replay_peak_bytes, scene.replay_physical_peak_bytes
    moments, absences = len(plain), len(size_bytes)
    memory, physical = np.empty(moments, np.int64), np.empty(moments, np.int64)
    starts = np.empty(moments + 1, np.float64)
    transfers, transfer_times = np.empty((2 * absences, 2), np.int64), np.empty((2 * absences, 3), np.float64)
    stalls, stall_seconds = np.empty((2 * absences, 3), np.int64), np.empty(2 * absences, np.float64)
    replays, replay_starts = np.empty((absences, 2), np.int64), np.empty(absences, np.float64)
    sent, stalled, replayed = 0, 0, 0
    state = np.zeros(absences, np.int8)
    absent = np.full(storages, -1, np.int64)
    written, loaded = np.zeros(absences), np.zeros(absences)
    free = np.zeros((len(links), 2))
    waiting, position = np.empty(DEEPEST_NESTING + 1, np.int64), np.empty(DEEPEST_NESTING + 1, np.int64)
    ending, offset, delay, row = DONE, 0, 0.0, 0
    fault = np.zeros(2, np.int64)
    for moment in range(moments):
        starts[moment] = clock[moment] + delay
        high = physical_high = offset
        while row < len(actions) and actions[row, 0] == moment and ending == DONE:
            phase, number = actions[row, 1], actions[row, 2]
            row += 1
            if phase == GONE and final[number]:
                # The value dies here and does not come back: from now on `plain` does not count it.
                if state[number] == AWAY:
                    offset += size_bytes[number]
                    high = physical_high = offset
                state[number] = PRESENT
                absent[storage[number]] = -1
                continue
            if phase in (GONE, RELEASE):
                if phase == RELEASE:
                    seconds = written[number] - (clock[moment] + delay)
                    if seconds > 0:
                        delay += seconds
                        stalls[stalled, 0], stalls[stalled, 1], stalls[stalled, 2] = moment, RELEASE_WAIT, number
                        stall_seconds[stalled] = seconds
                        stalled += 1
                state[number] = AWAY
                absent[storage[number]] = number
                offset -= size_bytes[number]
                if phase == GONE:
                    high = physical_high = offset
                continue
            # What remains is a copy out, a load, or a need, which may ask for the loads and recipes of others first.
            depth = 0
            if (phase == NEED and state[number] == PRESENT) or (phase == LOAD and state[number] != AWAY):
                continue
            waiting[0], position[0] = number, -1
            while depth >= 0:
                number = waiting[depth]
                here, recipe = tier[number], replay[number]
                if recipe < 0:
                    if phase == OUT or state[number] == AWAY:
                        way = OUT_WAY if phase == OUT else BACK_WAY
                        if way == BACK_WAY:
                            offset += size_bytes[number]
                            high = max(high, offset)
                        now = clock[moment] + delay
                        own = RATES * way  # where the columns of its link begin
                        seconds = links[here, own + LATENCY] + size_bytes[number] / links[here, own + BANDWIDTH]
                        start = max(now, free[here, way])
                        if way == BACK_WAY:
                            start = max(start, written[number])
                        end = start + (1.0 + late_share[way]) * seconds + late_seconds[way]
                        free[here, way] = end
                        delay += links[here, own + SLOWDOWN] * seconds + links[here, own + COMPUTE]
                        transfers[sent, 0], transfers[sent, 1] = number, way
                        transfer_times[sent, 0], transfer_times[sent, 1], transfer_times[sent, 2] = now, start, end
                        sent += 1
                        if way == OUT_WAY:
                            written[number] = end
                        else:
                            loaded[number], state[number] = end, COMING
                    if phase == NEED:
                        seconds = loaded[number] - (clock[moment] + delay)
                        if seconds > 0:
                            delay += seconds
                            stalls[stalled, 0], stalls[stalled, 1], stalls[stalled, 2] = moment, LOAD_WAIT, number
                            stall_seconds[stalled] = seconds
                            stalled += 1
                        state[number] = PRESENT
                        absent[storage[number]] = -1
                    depth -= 1
                    continue
                if position[depth] < 0:
                    if moment >= valid_until[recipe]:
                        ending = STALE
                    elif depth >= DEEPEST_NESTING:
                        ending = NESTED
                    if ending != DONE:
                        fault[0], fault[1] = number, moment
                        break
                    position[depth] = first_leaf[recipe]
                if position[depth] < first_leaf[recipe + 1]:
                    leaf = absent[leaves[position[depth]]]
                    position[depth] += 1
                    if leaf >= 0:
                        depth += 1
                        waiting[depth], position[depth] = leaf, -1
                    continue
                high = max(high, offset + replay_peak[recipe])
                physical_high = max(physical_high, offset + replay_physical_peak[recipe])
                offset += size_bytes[number]
                high = max(high, offset)
                replays[replayed, 0], replays[replayed, 1] = number, moment
                replay_starts[replayed] = clock[moment] + delay
                replayed += 1
                delay += replay_seconds[recipe]
                state[number] = PRESENT
                absent[storage[number]] = -1
                depth -= 1
        memory[moment] = plain[moment] + high
        physical[moment] = plain[moment] + max(high + workspace[moment], physical_high)
        excess = memory[moment] > limit_bytes or physical[moment] > ceiling[moment]
        if ending == DONE and (excess or clock[moments] + delay > longest):
            ending, fault[1] = EXCESS, moment
        if ending != DONE:
            break
    starts[moments] = clock[moments] + delay
    return RawCourse(
        memory,
        physical,
        starts,
        TransferRows(
            transfers[:sent, 0],
            transfers[:sent, 1],
            transfer_times[:sent, 0],
            transfer_times[:sent, 1],
            transfer_times[:sent, 2],
        ),
        StallRows(stalls[:stalled, 0], stalls[:stalled, 1], stalls[:stalled, 2], stall_seconds[:stalled]),
        RecomputationRows(replays[:replayed, 0], replays[:replayed, 1], replay_starts[:replayed]),
        ending,
        fault[0],
        fault[1],
    )
