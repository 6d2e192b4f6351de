"""Final absences: what a graph holds, though nothing asks for it any more.

NOTE [Final absences]
1. A graph that is kept with ``retain_graph=True`` holds what it saved after the last backward pass through it; one that
   was made outside of `torch.no_grad` holds what it saved though no pass comes. Such values can move out; as the loop
   may ask for them after the step, they are never dropped to be computed again.
2. A final absence closes as its value dies. The load there takes no memory, no time, and costs nothing: in a step that
   runs there is none. Where the value outlives the step, that is at an event of its own behind all else, for planning.
3. Plans without them come first: only where none meets the limit, values leave that the loop may want after the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ebbtide.decisions import Decision, Keep
from ebbtide.step import Event, Step

ADVICE = "leave out retain_graph=True, and compute under torch.no_grad() what needs no gradients"
"""What a user can do about them."""


def final_absences(step: Step) -> list[int]:
    """The numbers of the final absences of ``step``."""
    return [number for number, absence in enumerate(step.absences) if step.is_final(absence)]


def without_finals(step: Step) -> Step:
    """``step`` without its final absences, so that their values stay until they die."""
    absences = tuple(absence for absence in step.absences if not step.is_final(absence))
    return step if len(absences) == len(step.absences) else dataclasses.replace(step, absences=absences)


def with_finals_kept(step: Step, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Decisions about all absences of ``step``, from those about `without_finals` of it."""
    rest = iter(decisions)
    return tuple(Keep() if step.is_final(absence) else next(rest) for absence in step.absences)


def with_ends(step: Step) -> Step:
    """``step`` with an event at which each absence closes that outlives it: rule 2 of NOTE [Final absences]."""
    numbers = [number for number, absence in enumerate(step.absences) if absence.closes >= step.moments]
    absences, values = list(step.absences), list(step.values)
    saved_as = {saved.value: number for number, saved in enumerate(step.saved)}
    events: list[Event] = []
    for number in numbers:
        value, closes = absences[number].value, step.moments + len(events)
        events.append(Event("unpack", len(step.ops), saved_as[value], "backward"))
        absences[number] = dataclasses.replace(absences[number], closes=closes)
        values[value] = dataclasses.replace(values[value], dies=closes)
    dying = {step.values[absences[number].value].storage for number in numbers}
    for number, other in enumerate(values):
        if other.storage not in dying and other.dies >= step.moments:
            values[number] = dataclasses.replace(other, dies=step.moments + len(events))
    events_now = (*step.events, *events)
    return dataclasses.replace(step, values=tuple(values), events=events_now, absences=tuple(absences))
