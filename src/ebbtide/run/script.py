"""Plans written out for the conductor. All that can be looked up is looked up here, once, so that the hooks only index
lists."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence, Set

import torch

from ebbtide.decisions import Decision, Offload, Plan, Recompute
from ebbtide.errors import PlanError
from ebbtide.plan.problem import replayable_from
from ebbtide.run.actions import Actions, actions_of, dropped_later
from ebbtide.run.calls import KnownOp
from ebbtide.run.footprint import Footprint, footprint_of, spans_of
from ebbtide.run.keys import signature
from ebbtide.run.stretches import next_saves, one_stretch, shows_nodes_that_ask, stretches
from ebbtide.step import EXTERNAL, Absence, Event, Saved, Step

NOBODY = -2
"""The number of no saved tensor; those that no script counts have -1."""


OBJECTS_SAVED = 2
"""Python's objects for each saved tensor."""
OBJECTS_HELD = 6
"""Python's objects more for each saved tensor that does not just stay."""
OBJECTS_CAPTURED = 9
"""Python's objects for each op that runs again."""


class Treatment(enum.IntEnum):
    """What becomes of a saved tensor when it is saved: ``KEEP`` alone, ``SHARE`` through a holding, ``MOVE`` away,
    ``REMAKE``: drop at once."""

    KEEP = 0
    SHARE = 1
    MOVE = 2
    REMAKE = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Remake:
    """How a value is computed again.

    Attributes:
        ops: ticks of the calls that make it.
        leaves: values that those start from and that a holding keeps, in order of first use.
    """

    ops: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedSave:
    """What is expected of, and done with, one saved tensor.

    Attributes:
        value: the value that it shows.
        treatment: what becomes of it as it is saved.
        first: whether it is the first saved tensor that shows its value.
        dtype, shape: its type and shape.
        tiers: names of the tiers that it moves to, in order.
        remakes: for each of the value's absences to come at whose end it is computed again.
    """

    value: int
    treatment: Treatment
    first: bool
    dtype: torch.dtype
    shape: torch.Size
    tiers: tuple[str, ...] = ()
    remakes: tuple[Remake, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The type and shape of a saved tensor."""

    dtype: torch.dtype
    shape: torch.Size


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A plan written out for the conductor: what to do at each save and each request of a step, by index.

    Attributes:
        saves: by number of the saved tensor.
        expected: by event: the number of the saved tensor that is packed, or ``~number`` of the one unpacked.
        actions: by event; None where there is nothing to do.
        stretches: by event: tick of the next op if the capture mode has to run from here on, -1 if it has to be off.
            The last entry is for the start of the step.
        next_saves: by event: how many ops have run when a tensor is next saved; again with an entry for the start.
        stays_on: whether there is but one stretch, from the start of the step to its end.
        known: by tick, the ops that recipes replay.
        names: by tick, of all ops.
        limit_bytes: the plan's.
        resting_bytes: alive at rest.
        alive: by event, bytes alive above those at rest.
        headroom: by event, bytes that the ops up to the next event take at most above what is alive at it.
        footprint: what such steps hold without a plan, and what the plan has away.
        prefixes: by number of the saved tensor, a hash of those saved before it.
        held: numbers of the saved tensors that do not just stay, ascending.
        kept: by event: the form of the saved tensor that is expected, if all that happens there is that it is kept,
            unless the capture mode has to be put on or taken off.
        holds: by event: the same for one that is held, if nothing is to be done with another.
        shown: by event: number of the saved tensor, if all that happens there is that it is asked for; else `NOBODY`.
        numbers: by event: how many tensors were saved before, so the number of the one that is saved there, if any.
            These four have one entry more, for whatever comes after the last event.
    """

    saves: tuple[ExpectedSave, ...]
    expected: tuple[int, ...]
    actions: tuple[Actions | None, ...]
    stretches: tuple[int, ...]
    next_saves: tuple[int, ...]
    stays_on: bool
    known: dict[int, KnownOp]
    names: tuple[str, ...]
    limit_bytes: int
    resting_bytes: int
    alive: tuple[int, ...]
    headroom: tuple[int, ...]
    footprint: Footprint
    prefixes: tuple[int, ...]
    held: tuple[int, ...]
    kept: tuple[Form | None, ...]
    holds: tuple[ExpectedSave | None, ...]
    shown: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def remakes(self) -> bool:
        """Whether any value is computed again."""
        return bool(self.known)

    def moving(self, values: Set[int]) -> Script:
        """This script, but that ``values`` move out where it drops them: nothing says how to compute them again."""

        def moved(save: ExpectedSave) -> ExpectedSave:
            return dataclasses.replace(save, remakes=()) if save.value in values else save

        holds = tuple(None if save is None else moved(save) for save in self.holds)
        return dataclasses.replace(self, saves=tuple(map(moved, self.saves)), holds=holds)

    @property
    def objects(self) -> int:
        """About how many of Python's objects are made for it that live until the backward pass."""
        return OBJECTS_SAVED * len(self.saves) + OBJECTS_HELD * len(self.held) + OBJECTS_CAPTURED * len(self.known)

    def alive_at(self, event: int) -> int:
        """All bytes alive at an event, or after the last one."""
        return self.resting_bytes + (self.alive[min(event, len(self.alive) - 1)] if self.alive else 0)


def write_script(step: Step, plan: Plan, memory: Sequence[int], *, captures_all: bool = False) -> Script:
    """Write ``plan`` out for the conductor.

    Args:
        step, plan: what was seen, and what is planned.
        memory: bytes alive at each moment under the plan.
        captures_all: whether the capture mode, if it is needed, stays on from beginning to end.

    Raises:
        PlanError: if the plan is not one for this step.
    """
    if len(plan.decisions) != len(step.absences):
        raise PlanError(f"the plan decides about {len(plan.decisions)} absences; the step has {len(step.absences)}")
    first = _first_versions(step)
    known = _known_ops(step, plan.decisions, first)
    saves = _saves(step, plan.decisions, first)
    actions = actions_of(step, plan.decisions)
    runs = stretches(step, known)
    stays_on = captures_all or shows_nodes_that_ask(step, known, runs)
    if stays_on:
        runs = one_stretch(step)
    return Script(
        saves=saves,
        expected=tuple(e.saved if e.kind == "pack" else ~e.saved for e in step.events),
        actions=actions,
        stretches=runs,
        next_saves=next_saves(step),
        stays_on=stays_on,
        known=known,
        names=tuple(op.name for op in step.ops),
        limit_bytes=plan.limit_bytes,
        resting_bytes=plan.resting_bytes,
        alive=tuple(memory[moment] - plan.resting_bytes for moment in step.event_moments()),
        headroom=_headroom(step, memory),
        footprint=footprint_of(step, plan.decisions, memory),
        prefixes=_prefixes(step.saved),
        held=tuple(n for n, save in enumerate(saves) if save.treatment != Treatment.KEEP),
        kept=_kept(step.events, actions, saves),
        holds=_holds(step.events, actions, saves),
        shown=(
            *(
                e.saved if action is None and e.kind == "unpack" else NOBODY
                for e, action in zip(step.events, actions, strict=True)
            ),
            NOBODY,
        ),
        numbers=tuple(itertools.accumulate((e.kind == "pack" for e in step.events), initial=0)),
    )


def _prefixes(saved: Sequence[Saved]) -> tuple[int, ...]:
    """By number of saved tensor: a hash of all that were saved before it."""
    prefixes, prefix = [], 0
    for item in saved:
        prefixes.append(prefix)
        prefix = hash((prefix, signature(item)))
    return tuple(prefixes)


def _leaves(step: Step, ops: tuple[int, ...], first: Sequence[int]) -> tuple[int, ...]:
    made: set[int] = set()
    leaves: dict[int, None] = {}
    for op in ops:
        for value in step.ops[op].inputs:
            if value not in made and step.values[first[value]].maker != EXTERNAL:
                leaves[value] = None
        made.update(step.ops[op].outputs)
    return tuple(leaves)


def _first_versions(step: Step) -> list[int]:
    """By value: the first value of its storage, external if the step did not make the storage.

    Outputs of an op that are later ones are written, or a norm's statistics.
    """
    first: dict[int, int] = {}
    return [first.setdefault(value.storage, number) for number, value in enumerate(step.values)]


def _known_ops(step: Step, decisions: Sequence[Decision], first: Sequence[int]) -> dict[int, KnownOp]:
    """By tick, the ops that recipes replay. Raises `PlanError` if one cannot be."""
    moments = replayable_from(step)
    ticks = dict.fromkeys(tick for decision in decisions if isinstance(decision, Recompute) for tick in decision.ops)
    for tick in ticks:
        if moments[tick] > step.moments:
            raise PlanError(f"op {tick} ({step.ops[tick].name}) cannot be run again, but the plan wants it")
    return {tick: _known(step, tick, first) for tick in ticks}


def _known(step: Step, tick: int, first: Sequence[int]) -> KnownOp:
    op = step.ops[tick]
    external = frozenset(value for value in op.inputs if step.values[first[value]].maker == EXTERNAL)
    written = {new for _, new in op.mutated}
    outputs = tuple(value for value in op.outputs if value in written or value == first[value])
    return KnownOp(op.name, op.inputs, outputs, op.mutated, external)


def _saves(step: Step, decisions: Sequence[Decision], versions: Sequence[int]) -> tuple[ExpectedSave, ...]:
    moves: dict[int, list[tuple[Absence, Decision]]] = {}
    remakes: dict[Absence, Remake] = {}
    for absence, decision in zip(step.absences, decisions, strict=True):
        moves.setdefault(absence.value, []).append((absence, decision))
        if isinstance(decision, Recompute):
            remakes[absence] = Remake(decision.ops, _leaves(step, decision.ops, versions))
    shared = {leaf for remake in remakes.values() for leaf in remake.leaves}
    dropped_at_once = set(remakes) - set(dropped_later(step, decisions))
    saves, seen = [], set()
    for saved, moment in zip(step.saved, _pack_moments(step), strict=True):
        first = saved.value not in seen
        seen.add(saved.value)
        coming = [(a, d) for a, d in moves.get(saved.value, ()) if first or moment < a.opens]
        tiers = [decision.tier for _, decision in coming if isinstance(decision, Offload)]
        if any(absence in dropped_at_once for absence, _ in coming):
            treatment = Treatment.REMAKE
        elif tiers:
            treatment = Treatment.MOVE
        else:
            shares = saved.value in shared or any(absence in remakes for absence, _ in coming)
            treatment = Treatment.SHARE if shares else Treatment.KEEP
        saves.append(
            ExpectedSave(
                value=saved.value,
                treatment=treatment,
                first=first,
                dtype=getattr(torch, saved.dtype),
                shape=torch.Size(saved.shape),
                tiers=tuple(dict.fromkeys(tiers)),
                remakes=tuple(remakes[absence] for absence, _ in coming if absence in remakes),
            )
        )
    return tuple(saves)


def _pack_moments(step: Step) -> list[int]:
    """The moment at which each saved tensor is saved."""
    moments = zip(step.events, step.event_moments(), strict=True)
    return [moment for event, moment in moments if event.kind == "pack"]


def _kept(
    events: Sequence[Event], actions: Sequence[Actions | None], saves: Sequence[ExpectedSave]
) -> tuple[Form | None, ...]:
    """By event: the form of what is saved, where that is all that happens and the tensor stays alone.

    Equal ones are one object, so that looking at them takes one place in the processor's caches, not thousands.
    """
    kept: list[Form | None] = [None] * (len(events) + 1)
    known: dict[Form, Form] = {}
    for index, event in enumerate(events):
        if event.kind == "pack" and actions[index] is None:
            save = saves[event.saved]
            if save.treatment == Treatment.KEEP:
                form = Form(save.dtype, save.shape)
                kept[index] = known.setdefault(form, form)
    return tuple(kept)


def _holds(
    events: Sequence[Event], actions: Sequence[Actions | None], saves: Sequence[ExpectedSave]
) -> tuple[ExpectedSave | None, ...]:
    """By event: what is saved and held there, if nothing else is to be done."""
    holds: list[ExpectedSave | None] = [None] * (len(events) + 1)
    for index, event in enumerate(events):
        if event.kind == "pack" and actions[index] is None and saves[event.saved].treatment != Treatment.KEEP:
            holds[index] = saves[event.saved]
    return tuple(holds)


def _headroom(step: Step, memory: Sequence[int]) -> tuple[int, ...]:
    op_moments = step.op_moments()
    headroom = []
    for moment, span in zip(step.event_moments(), spans_of(step), strict=True):
        most = max((memory[op_moments[t]] + step.ops[t].workspace_bytes for t in span), default=0)
        headroom.append(max(0, most - memory[moment]))
    return tuple(headroom)
