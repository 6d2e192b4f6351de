"""Cutting a step into a chain at the values through which its whole forward pass goes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools

import numpy as np

from ebbtide.arrays import Ints
from ebbtide.errors import PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.problem import Facts, Problem
from ebbtide.plan.profile import SMALLEST_BYTES, movable
from ebbtide.plan.published.chain import Chain, Stage
from ebbtide.plan.published.remembered import remembered
from ebbtide.plan.recipes import recipe_of
from ebbtide.step import EXTERNAL, Step


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A step as a chain.

    Attributes:
        problem: the step and the machine.
        chain: its stages. The last one ends with the loss, and its ``output_bytes`` is 0.
        first_ticks: first op of each stage.
        boundaries: per stage the value that it reads from the one before; None for the first.
        outputs: per stage the absences of its output that a recipe can end.
        remakeable: per stage the other absences of values made in it that a recipe can end.
        fixed: per stage the absences of values made in it that none can.
        lasting: values that are never recomputed: a recipe may read them wherever they are still there.
        banned: values that no recipe may make.
    """

    problem: Problem
    chain: Chain
    first_ticks: tuple[int, ...]
    boundaries: tuple[int | None, ...]
    outputs: tuple[tuple[int, ...], ...]
    remakeable: tuple[tuple[int, ...], ...]
    fixed: tuple[tuple[int, ...], ...]
    lasting: frozenset[int]
    banned: frozenset[int] = frozenset()

    def sweep(self, target: int, origin: int) -> tuple[int, ...] | None:
        """Recipe of absence ``target`` from the input of stage ``origin``; None if there is none."""
        return self._recipe(target, origin, self.first_ticks[origin])

    def remake(self, target: int, stage: int) -> tuple[int, ...] | None:
        """Recipe of absence ``target`` from the input of ``stage`` and what it saves; None if there is none."""
        last = stage + 1 == len(self.first_ticks)
        return self._recipe(target, stage, len(self.problem.step.ops) if last else self.first_ticks[stage + 1])

    def _recipe(self, target: int, origin: int, before: int) -> tuple[int, ...] | None:
        """Recipe from the input of stage ``origin`` and what ops from there up to tick ``before`` made and saved."""
        step, first, boundary = self.problem.step, self.first_ticks[origin], self.boundaries[origin]

        def is_leaf(number: int) -> bool:
            return number in self.lasting or number == boundary or first <= step.values[number].maker < before

        return recipe_of(
            self.problem.facts,
            step.absences[target],
            self.banned,
            leaves=is_leaf,
            first_tick=first,
            longest=len(step.ops),
        )


@remembered
def stages_of(step: Step, machine: Machine, most_stages: int | None = None) -> Cut:
    """``step`` on ``machine``, cut as `cut` does."""
    return cut(Problem.of(step, machine), most_stages)


def cut(problem: Problem, most_stages: int | None = None, banned: frozenset[int] = frozenset()) -> Cut:
    """Cut the step of ``problem`` behind every value through which all of its forward pass goes.

    Such a value is the only one that ops before a tick made and ops from it on read. External values do not count, nor
    do small ones that are saved anyway. It must be saved and not be overwritten: only then can it be a checkpoint.

    What cannot be computed again (results of random ops, values that autograd asks for twice) counts as ``fixed``.
    Overheads are such that the chain without a plan holds what the step does: the gradients of parameters that pile up
    are part of them.

    Args:
        problem: the step and the machine.
        most_stages: neighbouring stages are joined until there are no more than these; None for as many as there are.
        banned: values that no recipe may make.

    Raises:
        PolicyError: if the step has no backward pass, more than one, or fewer than two stages.
    """
    facts = problem.facts
    step = facts.step
    turn = next((tick for tick, op in enumerate(step.ops) if op.phase == "backward"), None)
    if turn is None:
        raise PolicyError("this policy plans for a chain, and the step has no backward pass")
    if any(event.kind == "pack" and event.tick > turn for event in step.events):
        raise PolicyError(
            "this policy plans for one forward and one backward pass, and the step saves tensors after its backward"
            " pass has begun"
        )
    starts = _starts(facts, turn)
    if not starts:
        raise PolicyError(
            "this policy plans for a chain of stages, and the step is none: there is no saved value through which all"
            " of its forward pass goes"
        )
    if most_stages is not None and len(starts) >= most_stages:
        starts = [starts[number * (len(starts) + 1) // most_stages - 1] for number in range(1, most_stages)]
    first_ticks = (0, *(tick for tick, _ in starts))
    boundaries = (None, *(value for _, value in starts))
    bare = Cut(problem, Chain((Stage(0.0, 0.0, 0, 0),)), first_ticks, boundaries, (), (), (), frozenset(), banned)
    return _measured(_sorted(bare, turn), turn)


def _starts(facts: Facts, turn: int) -> list[tuple[int, int]]:
    """First tick of each stage but the first, and the value that it reads."""
    step = facts.step
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    versions: dict[int, list[int]] = {}
    for number, value in enumerate(step.values):
        if EXTERNAL < value.maker < turn and value.storage not in facts.external:
            made[value.storage] = min(value.maker, made.get(value.storage, value.maker))
            versions.setdefault(value.storage, []).append(number)
    for tick, op in enumerate(step.ops[:turn]):
        for number in (*op.inputs, *(old for old, _ in op.mutated)):
            read[step.values[number].storage] = tick
    count, names = np.zeros(turn + 1, dtype=np.int64), np.zeros(turn + 1, dtype=np.int64)
    for storage, maker in made.items():
        small = step.values[versions[storage][0]].size_bytes < SMALLEST_BYTES
        if not (small and any(number in facts.packed for number in versions[storage])):
            count[maker + 1 : read.get(storage, maker) + 1] += 1
            names[maker + 1 : read.get(storage, maker) + 1] += storage
    starts: list[tuple[int, int]] = []
    seen: set[int] = set()
    for tick in np.flatnonzero(count == 1).tolist():
        storage = int(names[tick])
        read_value = max(number for number in versions[storage] if step.values[number].maker < tick)
        saved = facts.packed.get(read_value, step.moments) <= facts.op_moments[turn]
        lasts = facts.superseded[read_value] == step.moments
        if saved and lasts and step.values[read_value].size_bytes >= SMALLEST_BYTES and storage not in seen:
            seen.add(storage)
            starts.append((tick, read_value))
    return starts


def _sorted(bare: Cut, turn: int) -> Cut:
    """The absences by stage and by whether their values can be computed again, each from the stage's own input."""
    facts = bare.problem.facts
    step = facts.step
    stages = len(bare.first_ticks)
    small = {number for number in facts.packed if step.values[number].size_bytes < SMALLEST_BYTES}
    bare = dataclasses.replace(bare, lasting=frozenset(small))
    first = _asked_first(step)
    outputs: list[list[int]] = [[] for _ in range(stages)]
    remakeable: list[list[int]] = [[] for _ in range(stages)]
    fixed: list[list[int]] = [[] for _ in range(stages)]
    for number, absence in enumerate(step.absences):
        maker = step.values[absence.value].maker
        if not (movable(facts, number) and maker < turn):
            continue
        stage = bisect.bisect_right(bare.first_ticks, maker) - 1
        if absence.value in bare.boundaries:
            outputs[stage].append(number)
        elif first[number] and bare.remake(number, stage) is not None:
            remakeable[stage].append(number)
        else:
            fixed[stage].append(number)
    decided = step.values_of(number for group in (*remakeable, *outputs) for number in group)
    lasting = frozenset(number for number in facts.packed if number not in decided)
    found = dataclasses.replace(bare, lasting=lasting)
    for stage in range(stages):
        stay = [number for number in outputs[stage] if not (first[number] and found.sweep(number, stage) is not None)]
        outputs[stage] = [number for number in outputs[stage] if number not in stay]
        fixed[stage] += stay
        lasting |= step.values_of(stay)
    return dataclasses.replace(
        found, outputs=_frozen(outputs), remakeable=_frozen(remakeable), fixed=_frozen(fixed), lasting=lasting
    )


def _asked_first(step: Step) -> list[bool]:
    """For each absence whether autograd asks for its value for the first time where it closes: in the one backward pass
    that a chain is about."""
    first: dict[int, int] = {}
    for saved in step.saved:
        for moment in saved.unpacked:
            first[saved.value] = min(moment, first.get(saved.value, moment))
    return [first.get(absence.value) == absence.closes for absence in step.absences]


def _frozen(groups: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in groups)


def _measured(found: Cut, turn: int) -> Cut:
    """Times and sizes of the stages."""
    problem, stages = found.problem, len(found.first_ticks)
    step, moments = problem.step, problem.facts.op_moments
    borders = [*(moments[tick] for tick in found.first_ticks), moments[turn]]
    bounds = list(itertools.pairwise(borders))
    bounds[0] = (0, bounds[0][1])
    output = [_bytes(problem.facts, group) for group in found.outputs]
    saved = [output[stage] + _bytes(problem.facts, found.remakeable[stage]) for stage in range(stages)]
    fixed = [_bytes(problem.facts, group) for group in found.fixed]
    stage_of = _backward_stages(found, turn)
    swept = _swept_memory(found)
    forward_seconds, backward_seconds = [0.0] * stages, [0.0] * stages
    for tick, op in enumerate(step.ops):
        if tick < turn:
            forward_seconds[bisect.bisect_right(found.first_ticks, tick) - 1] += op.duration_seconds
        else:
            backward_seconds[stage_of[moments[tick]]] += op.duration_seconds
    records = []
    held = swept_held = problem.resting_bytes
    for stage, (start, end) in enumerate(bounds):
        read = output[stage - 1] if stage else 0
        held += saved[stage] + fixed[stage]
        swept_held += fixed[stage]
        backward = problem.plain[stage_of == stage].max(initial=0)
        forward = max(
            int(problem.plain[start:end].max()) - held,
            int(swept[start:end].max()) - swept_held - read - output[stage],
        )
        records.append(
            Stage(
                forward_seconds[stage],
                backward_seconds[stage],
                output[stage],
                saved[stage],
                max(0, forward),
                max(0, int(backward) - held - read - output[stage]),
                fixed[stage],
            )
        )
    return dataclasses.replace(found, chain=Chain(tuple(records)))


def _bytes(facts: Facts, absences: tuple[int, ...]) -> int:
    """Bytes of the storages of ``absences``, each once."""
    values = [facts.step.values[facts.step.absences[number].value] for number in absences]
    return sum({value.storage: value.size_bytes for value in values}.values())


def _swept_memory(found: Cut) -> Ints:
    """Bytes per moment of the step if all that can be computed again is dropped as soon as possible."""
    step = found.problem.step
    change = np.zeros(step.moments + 1, dtype=np.int64)
    for number in itertools.chain(*found.outputs, *found.remakeable):
        absence = step.absences[number]
        change[absence.opens] -= step.values[absence.value].size_bytes
        change[absence.closes] += step.values[absence.value].size_bytes
    swept: Ints = found.problem.plain + np.cumsum(change)[:-1]
    return swept


def _backward_stages(found: Cut, turn: int) -> Ints:
    """Per moment the stage whose backward is under way; -1 in the forward pass.

    Autograd asks for what a stage saved when its backward begins; stages only ever go down.
    """
    facts = found.problem.facts
    step = facts.step
    saved_in = [len(found.first_ticks) - 1] * len(step.saved)
    for event in step.events:
        if event.kind == "pack":
            stage = bisect.bisect_right(found.first_ticks, event.tick) - 1
            value = step.saved[event.saved].value
            maker = step.values[value].maker
            if stage and event.tick == found.first_ticks[stage] and value != found.boundaries[stage]:
                stage -= int(maker >= found.first_ticks[stage - 1])
            saved_in[event.saved] = stage
    stages = np.full(step.moments, len(found.first_ticks) - 1, dtype=np.int64)
    for moment, event in zip(facts.event_moments, step.events, strict=True):
        if event.kind == "unpack":
            stages[moment] = saved_in[event.saved]
    stages = np.minimum.accumulate(stages)
    stages[: facts.op_moments[turn]] = -1
    return stages
