"""What a plan has to do at each save and each request of a step."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence

from ebbtide.decisions import Decision, Offload, Recompute
from ebbtide.errors import PlanError
from ebbtide.step import Absence, Step


@dataclasses.dataclass(frozen=True, slots=True)
class Actions:
    """What to do at one event, in this order: values to drop, to release, to send out and to which tier, to fetch.

    Attributes:
        spent: values to send out that nothing asks for any more, as the graph is kept that has them.
    """

    drops: tuple[int, ...]
    releases: tuple[int, ...]
    outs: tuple[tuple[int, str], ...]
    loads: tuple[int, ...]
    spent: frozenset[int] = frozenset()


def dropped_later(step: Step, decisions: Sequence[Decision]) -> dict[Absence, int]:
    """Absences whose values are recomputed, and were asked for before: those stay until the absence opens.

    Returns:
        For each of them the last event before it opens. Others are dropped when they are saved, as somebody else has
        them still.
    """
    asked: dict[int, int] = {}
    for saved in step.saved:
        asked[saved.value] = min(asked.get(saved.value, step.moments), *saved.unpacked, step.moments)
    moments = step.event_moments()
    return {
        absence: bisect.bisect_left(moments, absence.opens) - 1
        for absence, decision in zip(step.absences, decisions, strict=True)
        if isinstance(decision, Recompute) and asked.get(absence.value, step.moments) < absence.opens
    }


@dataclasses.dataclass(slots=True)
class _Agenda:
    """What `Actions` are made from."""

    drops: list[int] = dataclasses.field(default_factory=list)
    releases: list[int] = dataclasses.field(default_factory=list)
    outs: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    loads: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    spent: list[int] = dataclasses.field(default_factory=list)

    def actions(self) -> Actions:
        """The actions; loads by moment of need."""
        loads = tuple(value for _, value in sorted(self.loads))
        return Actions(tuple(self.drops), tuple(self.releases), tuple(self.outs), loads, frozenset(self.spent))


def actions_of(step: Step, decisions: Sequence[Decision]) -> tuple[Actions | None, ...]:
    """By event, what is to be done there. Raises `PlanError` where a plan acts between two events."""
    last_at = {event.tick: index for index, event in enumerate(step.events)}
    moments = step.event_moments()
    agendas: dict[int, _Agenda] = collections.defaultdict(_Agenda)

    def at(tick: int) -> _Agenda:
        if tick not in last_at:
            raise PlanError(f"the plan acts at tick {tick}, at which nothing is saved or asked for")
        return agendas[last_at[tick]]

    for absence, decision in zip(step.absences, decisions, strict=True):
        if isinstance(decision, Offload):
            at(decision.release).releases.append(absence.value)
            at(decision.out).outs.append((absence.value, decision.tier))
            if step.is_final(absence):
                at(decision.out).spent.append(absence.value)
            elif moments[last_at[decision.load]] < absence.closes:
                at(decision.load).loads.append((absence.closes, absence.value))
    for absence, event in dropped_later(step, decisions).items():
        agendas[event].drops.append(absence.value)
    actions: list[Actions | None] = [None] * len(step.events)
    for event, agenda in agendas.items():
        actions[event] = agenda.actions()
    return tuple(actions)
