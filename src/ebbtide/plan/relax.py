"""Spending the memory that a plan leaves unused: its releases later, its loads earlier, wherever there is room.

A schedule is lazy: it releases a value when its copy is predicted to be done and loads it as late as it can to be there
in time, with what `Caution` allows for. Where transfers take longer than that, compute waits although memory is free.
So a finished plan is given that memory, in rounds: in each, transfers may take longer than in the one before, and every
release and load that this would make compute wait for moves away from its transfer, as far as there is room. Nothing
else changes: neither what moves, nor the order in which links carry it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.compiled import compiled
from ebbtide.plan.course import BANDWIDTH, LATENCY, RATES, Scene
from ebbtide.plan.follow import Course, Moves
from ebbtide.plan.spans import add_between

ROUNDS = np.array([0.25, 0.5, 0.75, 1.0, 2.0, 4.0])
"""How much longer than predicted transfers may take in each round, as a share of their time."""


class Sent(NamedTuple):
    """What a plan offloads, as arrays with one entry for each trip.

    Attributes:
        tier: place of the tier in `Problem.routes`.
        size_bytes: bytes of the value.
        out: moment in which the copy out is queued.
        outs, backs: the trips in the order of their copies out, and of those back.
        seconds: two rows: of the copy out, and of that back.
        wanted: moment in which the value is needed.
    """

    tier: Ints
    size_bytes: Ints
    out: Ints
    outs: Ints
    backs: Ints
    seconds: Floats
    wanted: Ints


def relaxed(scene: Scene, slots: Ints, moves: Moves, course: Course, room: Ints, rounds: Floats = ROUNDS) -> Moves:
    """``moves`` with later releases and earlier loads.

    Args:
        scene: of the problem.
        slots: moments in which a plan may act.
        moves: a plan.
        course: what it does.
        room: per moment the bytes that may be held besides those that it holds.
        rounds: how much longer transfers may take in each round, as a share of their time.
    """
    numbers = np.flatnonzero(moves.tier >= 0)
    if not len(numbers):
        return moves
    tier, size_bytes = moves.tier[numbers], scene.size_bytes[numbers]
    links = scene.links[tier].T
    latency, bandwidth = links[[LATENCY, RATES + LATENCY]], links[[BANDWIDTH, RATES + BANDWIDTH]]
    wanted = wanted_moments(scene, moves, course)[numbers]
    out, load = moves.out[numbers], np.minimum(moves.load[numbers], wanted)
    outs, backs = np.argsort(out, kind="stable"), np.lexsort((wanted, load))
    sent = Sent(tier, size_bytes, out, outs, backs, latency + size_bytes / bandwidth, wanted)
    starts = np.append(course.starts, course.seconds)
    releases, loads = moves.release.copy(), moves.load.copy()
    releases[numbers], advanced = compiled(spend)(sent, slots, starts, room.copy(), releases[numbers], load, rounds)
    # Where a recipe asks for a value before its load, that stays so: the load keeps its moment.
    planned = loads[numbers] < wanted
    loads[numbers[planned]] = advanced[planned]
    return dataclasses.replace(moves, release=releases, load=loads)


def wanted_moments(scene: Scene, moves: Moves, course: Course) -> Ints:
    """Per absence the moment in which its value is needed: by the program, or by a recipe that runs before."""
    wanted: Ints = scene.closes.copy()
    sent: dict[int, list[int]] = {}
    for number in np.flatnonzero(moves.tier >= 0).tolist():
        sent.setdefault(int(scene.storage[number]), []).append(number)
    for remade, moment in zip(course.replayed.absence.tolist(), course.replayed.moment.tolist(), strict=True):
        first, last = scene.first_leaf[moves.replay[remade] : moves.replay[remade] + 2].tolist()
        for storage in scene.leaves[first:last].tolist():
            for number in sent.get(storage, ()):
                if moves.release[number] < moment:
                    wanted[number] = min(wanted[number], moment)
    return wanted


def spend(
    sent: Sent, slots: Ints, starts: Floats, room: Ints, release: Ints, load: Ints, rounds: Floats
) -> tuple[Ints, Ints]:
    """Slots of releases and loads; ``release``, ``load`` and ``room`` are changed to what they become.

    ``starts`` are the starts of moments, the last one being the end; a load in the moment in which its value is wanted
    is one on demand.
    """
    loads = np.zeros(len(starts), np.int64)
    for moment in load:
        loads[moment] += 1
    for share in rounds:
        postpone(sent, slots, starts, room, release, load, loads, share)
        advance(sent, slots, starts, room, release, load, loads, share)
    return release, load


def postpone(
    sent: Sent, slots: Ints, starts: Floats, room: Ints, release: Ints, load: Ints, loads: Ints, share: float
) -> None:
    """Move each release to where its copy is done even if copies take longer by ``share``, as far as there is room."""
    free = np.zeros(sent.tier.max() + 1)
    for number in sent.outs:
        link, size = sent.tier[number], sent.size_bytes[number]
        free[link] = max(free[link], starts[sent.out[number]]) + (1 + share) * sent.seconds[0, number]
        place, last = np.searchsorted(slots, release[number]), np.searchsorted(slots, load[number]) - 1
        # The moment of the release counts the value already, unless something is loaded in it: that comes in addition.
        first = release[number] + (loads[release[number]] == 0)
        while place < last and starts[slots[place]] < free[link]:
            until = slots[place + 1] + 1
            if room[first:until].min() < size:
                break
            add_between(room, first, until, -size)
            first, place = until, place + 1
        release[number] = slots[place]


def advance(
    sent: Sent, slots: Ints, starts: Floats, room: Ints, release: Ints, load: Ints, loads: Ints, share: float
) -> None:
    """Move each load to where it is in time even if loads take longer by ``share``, as far as there is room."""
    links = sent.tier.max() + 1
    issue, free = np.empty(len(load)), np.full(links, np.inf)
    for number in sent.backs[::-1]:
        link = sent.tier[number]
        free[link] = min(free[link], starts[sent.wanted[number]]) - (1 + share) * sent.seconds[1, number]
        issue[number] = free[link]
    latest, due = np.zeros(links, np.int64), np.zeros(links, np.int64)
    for number in sent.backs:
        link, size, wanted = sent.tier[number], sent.size_bytes[number], sent.wanted[number]
        if load[number] < wanted:
            # The order of loads on a link stays; of loads in one moment, the one that is wanted first comes first.
            bar = max(release[number] + 1, latest[link] + (wanted < due[link]))
            place = np.searchsorted(slots, load[number])
            loads[load[number]] -= 1
            while place > 0 and slots[place - 1] >= bar and starts[slots[place]] > issue[number]:
                if room[slots[place - 1] : slots[place]].min() < size:
                    break
                add_between(room, slots[place - 1], slots[place], -size)
                place -= 1
            load[number] = slots[place]
            loads[load[number]] += 1
        latest[link], due[link] = load[number], wanted
