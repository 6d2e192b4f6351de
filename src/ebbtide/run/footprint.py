"""What kinds of step hold, with and without their plans, event by event."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ebbtide.decisions import Decision, Keep, Offload
from ebbtide.plan.problem import plain_memory
from ebbtide.step import Absence, Step


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """An absence, in events.

    Attributes:
        opens, closes: from event ``opens`` until just before event ``closes``, nothing but autograd has the value.
        leaves, returns: from event ``leaves`` until just before event ``returns``, the plan has it away; both are
            ``closes`` if it stays.
        size_bytes: bytes of the value.
        lingers: whether it is still in memory at the beginning of event ``leaves``.
    """

    opens: int
    closes: int
    leaves: int
    returns: int
    size_bytes: int
    lingers: bool

    @property
    def stays(self) -> bool:
        """Whether the plan never has the value away."""
        return self.leaves == self.returns


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """What a kind of step holds without a plan, event by event, and which values the plan has away meanwhile.

    From both together follows what steps hold that another kind's plan runs: see `ebbtide.run.covering`.

    Attributes:
        plain: by event, bytes alive at it without a plan.
        plain_between: the same for the ops up to the next one, with what those take inside themselves.
        besides: by event, bytes that the plan takes at it on top of what is not away: for recipes while they run, for
            what they have read and stays, and for what is let go of at that event only.
        besides_between: the same for the ops up to the next one.
        gaps: by value, its absences, ascending.
    """

    plain: tuple[int, ...]
    plain_between: tuple[int, ...]
    besides: tuple[int, ...]
    besides_between: tuple[int, ...]
    gaps: dict[int, tuple[Gap, ...]]

    @property
    def growth_bytes(self) -> int:
        """What ops take at most from one event to the next."""
        return _growth_bytes(self.plain, self.plain_between)


def footprint_of(step: Step, decisions: Sequence[Decision], memory: Sequence[int]) -> Footprint:
    """The footprint of ``step``.

    Args:
        step, decisions: what was seen, and what is planned.
        memory: bytes alive at each moment under the plan.
    """
    gaps, spans = _gaps(step, decisions), spans_of(step)
    plain, moments, op_moments = plain_memory(step), step.event_moments(), step.op_moments()
    besides, between = [], []
    for moment, span, away in zip(moments, spans, _away(gaps, len(moments)), strict=True):
        taken = (memory[op_moments[tick]] - plain[op_moments[tick]] + away for tick in span)
        besides.append(max(0, memory[moment] - plain[moment] + away))
        between.append(max(0, max(taken, default=0)))
    alive, alive_between = _alive_without_a_plan(step)
    return Footprint(
        plain=alive,
        plain_between=alive_between,
        besides=tuple(besides),
        besides_between=tuple(between),
        gaps=gaps,
    )


def growth_bytes_of(step: Step) -> int:
    """What the ops of ``step`` take at most from one event to the next, with what they take inside themselves."""
    return _growth_bytes(*_alive_without_a_plan(step))


def _growth_bytes(alive: Sequence[int], between: Sequence[int]) -> int:
    return max((most - before for before, most in zip(alive, between, strict=True)), default=0)


def spans_of(step: Step) -> list[range]:
    """By event, the ticks of the ops up to the next one."""
    return [range(first, end) for first, end in itertools.pairwise((*step.event_ticks(), len(step.ops)))]


def _alive_without_a_plan(step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """See ``plain`` and ``plain_between`` of `Footprint`."""
    plain, op_moments = plain_memory(step), step.op_moments()
    most = (
        max((plain[op_moments[tick]] + step.ops[tick].workspace_bytes for tick in span), default=0)
        for span in spans_of(step)
    )
    return tuple(plain[moment] for moment in step.event_moments()), tuple(most)


def _away(gaps: Mapping[int, Sequence[Gap]], events: int) -> list[int]:
    """By event: bytes that the plan has away once it has done what is to be done there."""
    change = [0] * (events + 1)
    for gap in itertools.chain.from_iterable(gaps.values()):
        change[gap.leaves] += gap.size_bytes
        change[gap.returns] -= gap.size_bytes
    return list(itertools.accumulate(change[:-1]))


def _gaps(step: Step, decisions: Sequence[Decision]) -> dict[int, tuple[Gap, ...]]:
    moments = step.event_moments()
    last_at = {event.tick: index for index, event in enumerate(step.events)}
    gaps: dict[int, list[Gap]] = {}
    for absence, decision in zip(step.absences, decisions, strict=True):
        gaps.setdefault(absence.value, []).append(_gap(step, absence, decision, moments, last_at))
    return {value: tuple(sorted(each, key=lambda gap: gap.opens)) for value, each in gaps.items()}


def _gap(step: Step, absence: Absence, decision: Decision, moments: Sequence[int], last_at: Mapping[int, int]) -> Gap:
    opens, closes = (bisect.bisect_left(moments, moment) for moment in (absence.opens, absence.closes))
    leaves, returns = opens, closes
    if isinstance(decision, Keep):
        leaves = closes
    elif isinstance(decision, Offload):
        leaves = last_at[decision.release]
        returns = closes if step.is_final(absence) else min(last_at[decision.load], closes)
    lingers = isinstance(decision, Offload)
    return Gap(opens, closes, leaves, returns, step.values[absence.value].size_bytes, lingers)
