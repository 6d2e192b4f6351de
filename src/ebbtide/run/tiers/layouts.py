"""Where the values of a plan lie in an arena."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.decisions import Decision, Offload
from ebbtide.place import Block, place
from ebbtide.run.tiers.pinned import PlannedPlaces
from ebbtide.step import Step


def planned_places(step: Step, decisions: Sequence[Decision], tier: str) -> PlannedPlaces:
    """A place for each value that goes to ``tier``, in the order in which they go; less than a second.

    A place is taken from when its value is copied out until the value is needed again.
    """
    last_at = {event.tick: moment for event, moment in zip(step.events, step.event_moments(), strict=True)}
    trips = [
        (last_at[decision.out], absence.closes, step.values[absence.value].size_bytes)
        for absence, decision in zip(step.absences, decisions, strict=True)
        if isinstance(decision, Offload) and decision.tier == tier
    ]
    trips.sort(key=lambda trip: trip[0])
    layout = place([Block(size, out, closes + 1) for out, closes, size in trips])
    return PlannedPlaces(tuple(size for _, _, size in trips), layout.offsets, layout.footprint_bytes)
