"""Over which stretches of a step the capture mode has to run, so that it sees the calls that recipes need."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence

from ebbtide.observe.asking import is_node_that_asks
from ebbtide.run.capture import COPY_NAME, is_clear
from ebbtide.step import Step

BRIDGED = 1
"""Ops for which the capture mode stays on though nobody wants them: between kernels it costs 10 to 15 us for each, and
to take it off and put it on again about as much. With 0 to 3, steps took as long."""


def stretches(step: Step, known: Iterable[int]) -> tuple[int, ...]:
    """Where the capture mode has to run: to the next event after a call that it needs, from the last event at which it
    can be put on and still counts that call right. Where it would be off for a few ops alone, it stays on. See NOTE
    [Counting ops] in `ebbtide.run.capture`.

    Args:
        step: what was seen.
        known: ticks of the calls.

    Returns:
        By event, the tick of the next op if the mode runs from there on, else -1; the last entry is for the start.
    """
    ticks = [0, *step.event_ticks(), len(step.ops)]
    opening = _openings(step, ticks)
    runs = [False] * (len(ticks) - 1)
    for tick in known:
        last = bisect.bisect_right(ticks, tick, 0, len(runs)) - 1
        first = opening(tick, last)
        runs[first : last + 1] = [True] * (last + 1 - first)
    ended: int | None = None
    for index, run in enumerate(runs):
        if index and step.events[index - 1].kind != "pack":
            ended = None
        if run and ended is not None and ticks[index] - ticks[ended] <= BRIDGED:
            runs[ended:index] = [True] * (index - ended)
        ended = index + 1 if run else ended
    starts = [tick if run else -1 for tick, run in zip(ticks, runs, strict=False)]
    return (*starts[1:], starts[0])


def _openings(step: Step, ticks: Sequence[int]) -> Callable[[int, int], int]:
    """Tells at which event at the latest the mode has to be put on for a call, given its tick and the last event before
    it: at a save outside of a backward pass, in which none can be put on. Where an op may be under way there, it must
    not be this one, and which op comes next must be told: by its name, or by a later save before the call.

    Args:
        step: what was seen.
        ticks: of its start, which is event 0, of all events, and of its end.
    """
    saves = [index for index, event in enumerate(step.events, 1) if event.kind == "pack"]
    begins = [index for index in saves if step.events[index - 1].phase == "forward"]
    begin_ticks = [ticks[index] for index in begins]
    names = [op.name for op in step.ops]
    clears = (is_clear(names[tick : tick + 2]) for tick in begin_ticks)
    clear = list(itertools.accumulate((place if good else -1 for place, good in enumerate(clears)), max))
    told_after = [tick + (names[tick : tick + 1] == [COPY_NAME]) for tick in begin_ticks]
    between = [place for place, index in enumerate(begins) if step.events[index - 1].between]

    def opening(tick: int, last: int) -> int:
        under_way = bisect.bisect_left(begin_ticks, tick)  # the first save at which this call may be
        by_name = clear[under_way - 1] if under_way else -1
        save = bisect.bisect_right(saves, last) - 1
        by_save = bisect.bisect_left(told_after, ticks[saves[save]]) - 1 if save >= 0 else -1
        later = bisect.bisect_right(between, bisect.bisect_right(begin_ticks, tick) - 1) - 1
        first = max(by_name, by_save, between[later] if later >= 0 else -1)
        return begins[first] if first >= 0 else 0

    return opening


def one_stretch(step: Step) -> tuple[int, ...]:
    """The stretches with the capture mode on from the start of the step, counting anew from each event."""
    return (*step.event_ticks(), 0)


def shows_nodes_that_ask(step: Step, known: Iterable[int], runs: Sequence[int]) -> bool:
    """Whether the capture mode is on in a backward pass in which nodes may ask whether one is. See NOTE [Nodes that
    ask] in `ebbtide.observe.asking`.

    Args:
        step: what was seen.
        known: ticks of the calls. Where one is in a backward pass, the mode is on in all of that.
        runs: their `stretches`. Those of calls behind a pass may begin before it, as the mode is put on at saves alone.
    """
    asking = [tick for tick, op in enumerate(step.ops) if is_node_that_asks(op.name)]
    if not asking:
        return False
    ticks = step.event_ticks()
    is_on = any(runs[bisect.bisect_right(ticks, tick) - 1] >= 0 for tick in asking)
    return is_on or any(step.ops[tick].phase == "backward" for tick in known)


def next_saves(step: Step) -> tuple[int, ...]:
    """By event, how many ops have run when a tensor is next saved; the last entry is for the start of the step."""
    found, coming = [], len(step.ops)
    for event in reversed(step.events):
        found.append(coming)
        coming = event.tick if event.kind == "pack" else coming
    return (*reversed(found), coming)
