"""A step and a machine, indexed for planning: clocks, plain memory, versions, places where a plan may act."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ebbtide.arguments import check_instance
from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.machine import Link, Machine, check_machine
from ebbtide.plan.finals import final_absences, with_ends
from ebbtide.step import EXTERNAL, Step
from ebbtide.step_checks import check_step


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A checked recipe.

    Attributes:
        leaves: storages that the step made and the recipe reads, in order of first use.
        seconds: sum of the durations of its ops, and of what each of them costs besides.
        peak_bytes: most bytes it holds at once, its result included, the leaves not.
        physical_peak_bytes: the same with workspaces.
        valid_until: the first moment at which a leaf is gone or written.
    """

    leaves: tuple[int, ...]
    seconds: float
    peak_bytes: int
    physical_peak_bytes: int
    valid_until: int


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What follows from a step alone. Moments are those of NOTE [The clock] in `ebbtide.step`.

    Attributes:
        step: the step.
        op_moments, event_moments: moment of each op and of each event.
        slots: moments at which a plan may act, ascending: the last event of each tick that has one.
        slot_of_tick: the slot of a tick.
        external: storages that the step did not make.
        makes_storage: per value, whether it is the first version of a storage that the step made.
        superseded: per value, the moment of the op that writes the next version of its storage; `Step.moments` if none.
        dies: per value, the moment from which its storage is gone; `Step.moments` for external ones.
        packed: per saved value, the moment at which it was first saved.
        held: per saved value, for each time it was saved: from when to when autograd is known to hold it. It lets go
            when it asked for it the last time; if it never does, perhaps when it next asks for anything.
        replayable_from: per op, the moment from which recipes that replay it are looked for: 0 in the forward pass, the
            end of its backward pass if ops of the forward pass follow, as where a loss has gradients in it. More than
            `Step.moments` if it cannot be replayed: see rule 7 of NOTE [Replay] in `ebbtide.plan.replay`.
        checked: recipes that were checked so far, by the value that they make, their ops, and what an op costs besides.
    """

    step: Step
    op_moments: list[int]
    event_moments: list[int]
    slots: list[int]
    slot_of_tick: dict[int, int]
    external: frozenset[int]
    makes_storage: list[bool]
    superseded: list[int]
    dies: list[int]
    packed: dict[int, int]
    held: dict[int, list[tuple[int, int]]]
    replayable_from: list[int]
    checked: dict[tuple[int, tuple[int, ...], float], CheckedRecipe] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(cls, step: Step) -> Facts:
        """Index ``step``."""
        op_moments, event_moments = step.op_moments(), step.event_moments()
        slot_of_tick = {event.tick: moment for event, moment in zip(step.events, event_moments, strict=True)}
        held = _held(step, event_moments)
        chains = _versions(step)
        external = frozenset(s for s, chain in chains.items() if step.values[chain[0]].maker == EXTERNAL)
        makes_storage = [False] * len(step.values)
        superseded = [step.moments] * len(step.values)
        dies = [step.moments] * len(step.values)
        for storage, chain in chains.items():
            makes_storage[chain[0]] = storage not in external
            for older, newer in itertools.pairwise(chain):
                superseded[older] = op_moments[step.values[newer].maker]
            if storage not in external:
                last = max(step.values[number].dies for number in chain)
                for number in chain:
                    dies[number] = last
        return cls(
            step=step,
            op_moments=op_moments,
            event_moments=event_moments,
            slots=sorted(slot_of_tick.values()),
            slot_of_tick=slot_of_tick,
            external=external,
            makes_storage=makes_storage,
            superseded=superseded,
            dies=dies,
            packed={value: spans[0][0] for value, spans in held.items()},
            held=held,
            replayable_from=replayable_from(step),
        )


def _held(step: Step, event_moments: list[int]) -> dict[int, list[tuple[int, int]]]:
    """`Facts.held`."""
    asked = [moment for event, moment in zip(step.events, event_moments, strict=True) if event.kind == "unpack"]
    held: dict[int, list[tuple[int, int]]] = {}
    for event, moment in zip(step.events, event_moments, strict=True):
        if event.kind == "pack":
            saved = step.saved[event.saved]
            place = bisect.bisect(asked, moment)
            unasked = asked[place] if place < len(asked) else step.moments
            held.setdefault(saved.value, []).append((moment, max(saved.unpacked, default=unasked)))
    return held


def replayable_from(step: Step) -> list[int]:
    """`Facts.replayable_from`, in moments."""
    op_moments = step.op_moments()
    never = following = step.moments + 1
    found = [never] * len(step.ops)
    for tick in reversed(range(len(step.ops))):
        op = step.ops[tick]
        if op.phase == "forward":
            following = op_moments[tick]
        if op.replay in ("pure", "in_place", "batch_norm"):
            found[tick] = 0 if op.phase == "forward" else following
    return found


def _versions(step: Step) -> dict[int, list[int]]:
    """The values of each storage, by the ops that made them."""
    versions: dict[int, list[int]] = {}
    for number in sorted(range(len(step.values)), key=lambda number: step.values[number].maker):
        versions.setdefault(step.values[number].storage, []).append(number)
    return versions


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """The absences of a step as columns, in their order.

    Attributes:
        opens, closes: moments.
        size_bytes: bytes of the value.
        final: whether it is a final absence: see NOTE [Final absences] in `ebbtide.plan.finals`.
        storage: the number of its storage among ``storages``.
        storages: the storages that have absences, numbered from 0.
    """

    opens: Ints
    closes: Ints
    size_bytes: Ints
    final: Mask
    storage: Ints
    storages: dict[int, int]

    @classmethod
    def of(cls, step: Step, final: Sequence[int] = ()) -> Spans:
        """The absences of ``step``; ``final`` has the numbers of the final ones."""
        values = [step.values[absence.value] for absence in step.absences]
        storages = {storage: place for place, storage in enumerate(dict.fromkeys(value.storage for value in values))}
        return cls(
            np.array([absence.opens for absence in step.absences], dtype=np.int64),
            np.array([absence.closes for absence in step.absences], dtype=np.int64),
            np.array([value.size_bytes for value in values], dtype=np.int64),
            np.isin(np.arange(len(values)), np.array(final, dtype=np.int64)),
            np.array([storages[value.storage] for value in values], dtype=np.int64),
            storages,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A step on a machine.

    Attributes:
        facts: the indexed step.
        machine: the machine.
        routes: for each slow tier its links out and in; the tier with the fastest return first.
        clock: start of each moment without a plan, seconds; one more entry than moments, the last is the end.
        plain: bytes of the storages alive in each moment without a plan, external ones included.
        workspace: bytes of workspace in each moment.
        resting_bytes: bytes of external storages.
        earliest_out: per absence, the first moment at which its bytes may be copied: after its value was first saved
            and after the storage's former absence has ended; None if it was never saved.
        spans: the absences as columns.
    """

    facts: Facts
    machine: Machine
    routes: dict[str, tuple[Link, Link]]
    clock: Floats
    plain: Ints
    workspace: Ints
    resting_bytes: int
    earliest_out: list[int | None]
    spans: Spans

    @classmethod
    def of(cls, step: Step, machine: Machine) -> Problem:
        """Index ``step`` and ``machine``. Raises `RecordError` if one cannot be, `ArgumentError` if it is none."""
        check_instance("step", step, Step)
        check_instance("machine", machine, Machine)
        check_step(step)
        check_machine(machine)
        final = final_absences(step)
        step = with_ends(step) if final else step
        facts = Facts.of(step)
        durations = np.zeros(step.moments)
        workspace = np.zeros(step.moments, dtype=np.int64)
        for moment, op in zip(facts.op_moments, step.ops, strict=True):
            durations[moment] = op.duration_seconds
            workspace[moment] = op.workspace_bytes
        clock = np.concatenate(([0.0], np.cumsum(durations)))
        routes = {
            tier.name: (machine.link(machine.fast, tier.name), machine.link(tier.name, machine.fast))
            for tier in machine.slow_tiers()
        }
        plain = _plain_memory(facts)
        rest, outs, spans = step.resting_bytes, _earliest_outs(facts), Spans.of(step, final)
        return cls(facts, machine, routes, clock, plain, workspace, rest, outs, spans)

    @property
    def step(self) -> Step:
        """The step, with the events at which its final absences close."""
        return self.facts.step


def plain_peak_bytes(step: Step) -> int:
    """Most bytes held at once without a plan.

    Args:
        step: the observed step. It is not checked: one made by hand should have passed `check_step`.

    Returns:
        Bytes, resting ones included and workspaces not.
    """
    return int(_plain_memory(Facts.of(step)).max(initial=step.resting_bytes))


def plain_memory(step: Step) -> list[int]:
    """Bytes held at each moment without a plan, resting ones included."""
    return [int(size_bytes) for size_bytes in _plain_memory(Facts.of(step))]


def bytes_within(begin: Ints, end: Ints, size_bytes: Ints | Floats, moments: int) -> Ints | Floats:
    """Bytes in each of so many ``moments`` of values of ``size_bytes``, each from ``begin`` to before ``end``."""
    change = np.zeros(moments + 1, dtype=size_bytes.dtype)
    np.add.at(change, begin, size_bytes)
    np.subtract.at(change, end, size_bytes)
    return change.cumsum()[:-1]


def _plain_memory(facts: Facts) -> Ints:
    step = facts.step
    change = np.zeros(step.moments + 1, dtype=np.int64)
    change[0] = step.resting_bytes
    for number, value in enumerate(step.values):
        if facts.makes_storage[number]:
            change[facts.op_moments[value.maker]] += value.size_bytes
            change[facts.dies[number]] -= value.size_bytes
    return np.cumsum(change[: step.moments], dtype=np.int64)


def _earliest_outs(facts: Facts) -> list[int | None]:
    step = facts.step
    earliest: list[int | None] = [facts.packed.get(absence.value) for absence in step.absences]
    latest_end: dict[int, int] = {}
    for number in sorted(range(len(step.absences)), key=lambda number: step.absences[number].opens):
        absence, moment = step.absences[number], earliest[number]
        storage = step.values[absence.value].storage
        if moment is not None:
            earliest[number] = max(moment, latest_end.get(storage, 0))
        latest_end[storage] = absence.closes
    return earliest
