"""Planned places: every value of a plan finds its place free, and the arena is hardly larger than it has to be."""

from __future__ import annotations

import pytest
import torch

from ebbtide.decisions import Offload
from ebbtide.place import Block, max_live_bytes
from ebbtide.plan import plain_peak_bytes, solve
from ebbtide.run.tiers import Arena
from ebbtide.run.tiers.layouts import planned_places
from ebbtide.run.tiers.pinned import GROWTH_BYTES, Place
from tests.plan.random_steps import disk_machine, network_step


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_step_as_planned(share: float) -> None:
    step = network_step(20)
    plan = solve(step, disk_machine(), int(share * plain_peak_bytes(step)), seconds=0.1)
    planned = planned_places(step, plan.decisions, "disk")
    last_at = {event.tick: moment for event, moment in zip(step.events, step.event_moments(), strict=True)}
    trips = [
        (last_at[decision.out], absence.closes, number)
        for number, (absence, decision) in enumerate(zip(step.absences, plan.decisions, strict=True))
        if isinstance(decision, Offload)
    ]
    assert len(trips) == len(planned.sizes_bytes) > 5
    sizes = [step.values[step.absences[number].value].size_bytes for *_, number in trips]
    least = max_live_bytes([Block(size, out, back + 1) for (out, back, _), size in zip(trips, sizes, strict=True)])
    assert planned.footprint_bytes <= 1.05 * least + GROWTH_BYTES

    arena = Arena(torch.UntypedStorage, planned.footprint_bytes)
    for _ in range(2):
        arena.settle(planned, lambda: None)
        offsets: list[int] = []
        here: dict[int, Place] = {}
        changes = [(back, 0, number) for _, back, number in trips] + [(out, 1, number) for out, _, number in trips]
        for _, goes, number in sorted(changes, key=lambda change: (change[0], -change[1])):
            if goes:
                place = arena.reserve(step.values[step.absences[number].value].size_bytes)
                assert place is not None
                here[number] = place
                offsets.append(place.offset_bytes)
            else:
                arena.give_back(here.pop(number))
        assert tuple(offsets) == planned.offsets_bytes
    assert planned_places(step, plan.decisions, "elsewhere").footprint_bytes == 0
