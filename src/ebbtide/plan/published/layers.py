"""Layers as the papers mean them, found in a step: kinds of ops, inputs of layers, the backward pass layer by layer."""

from __future__ import annotations

import bisect
import dataclasses
import re

from ebbtide.plan.problem import Facts, Problem
from ebbtide.plan.profile import Candidates
from ebbtide.step import Op, Step

_CONVOLUTION = re.compile(r"conv(?!ert)")
_COSTLY = re.compile(
    r"conv(?!ert)|rnn|lstm|gru|attention|softmax|einsum|(^|add|b|_)mm(_|$)|^_?(linear|matmul|cat|stack)$"
)
_JOIN = re.compile(r"^add_?$")


def _base(op: Op) -> str:
    """``convolution`` of ``aten.convolution.default``."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name


def is_convolution(op: Op) -> bool:
    """Whether ``op`` is a convolution, forward or backward."""
    return _CONVOLUTION.search(_base(op)) is not None


def is_checkpoint(step: Step, op: Op) -> bool:
    """Whether SuperNeurons would call ``op`` a checkpoint layer, one whose output it does not compute again.

    CONV, FC, SOFTMAX and CONCAT by name, and what came later and costs as much: attention, recurrent layers. JOIN is
    an addition of two values that the step made.
    """
    if _COSTLY.search(_base(op)):
        return True
    return _JOIN.match(_base(op)) is not None and sum(step.values[value].maker >= 0 for value in op.inputs) > 1


def forward_readers(step: Step, value: int) -> list[int]:
    """Ticks of the forward ops that read ``value``, ascending; views do not read."""
    uses = step.values[value].uses
    return [tick for tick in uses if step.ops[tick].phase == "forward" and step.ops[tick].replay != "view"]


def turn_moment(facts: Facts) -> int:
    """The first moment of the backward pass: its first request for a saved tensor, or its first op."""
    ops = zip(facts.op_moments, facts.step.ops, strict=True)
    events = zip(facts.event_moments, facts.step.events, strict=True)
    found = [moment for moment, op in ops if op.phase == "backward"][:1]
    found += [moment for moment, event in events if event.kind == "unpack"][:1]
    return min(found, default=facts.step.moments)


def spanning(candidates: Candidates, moment: int) -> list[int]:
    """Candidates that may leave and whose absence spans ``moment``, which need not be a slot."""
    columns = zip(candidates.can_offload, candidates.release, candidates.closes, strict=True)
    return [place for place, (able, release, closes) in enumerate(columns) if able and release < moment <= closes]


def slot_before(problem: Problem, moment: int) -> int:
    """The last slot at or before ``moment``, or -1."""
    position = bisect.bisect_right(problem.facts.slots, moment) - 1
    return problem.facts.slots[position] if position >= 0 else -1


def slot_after(problem: Problem, moment: int) -> int:
    """The first slot at or after ``moment``, or the number of moments if there is none."""
    position = bisect.bisect_left(problem.facts.slots, moment)
    return problem.facts.slots[position] if position < len(problem.facts.slots) else problem.step.moments


def during_last_reader(problem: Problem, candidates: Candidates, place: int) -> tuple[int, int]:
    """Slots before and after the last forward op that reads a candidate: where its copy starts and when it is over.

    Both are the earliest possible ones if they would otherwise be too early.
    """
    readers = forward_readers(problem.step, problem.step.absences[candidates.absence[place]].value)
    latest = problem.facts.op_moments[readers[-1]] if readers else -1
    out = max(int(candidates.out[place]), slot_before(problem, latest))
    release = slot_after(problem, max(out + 1, int(candidates.opens[place])))
    if release >= candidates.closes[place]:
        return int(candidates.out[place]), int(candidates.release[place])
    return out, release


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardLayer:
    """What the backward pass asks for at one tick: the saved tensors of a layer, just before its backward ops.

    Attributes:
        slot: the moment after its requests, at which a transfer that overlaps its ops is queued.
        closing: candidates whose absence ends here.
        convolution: whether it is the backward pass of a convolution.
    """

    slot: int
    closing: tuple[int, ...]
    convolution: bool


def backward_layers(problem: Problem, candidates: Candidates) -> list[BackwardLayer]:
    """The backward pass, layer by layer."""
    step, facts = problem.step, problem.facts
    closing: dict[int, list[int]] = {}
    for place, closes in enumerate(candidates.closes.tolist()):
        closing.setdefault(slot_after(problem, closes), []).append(place)
    convolutions = _saved_by_convolutions(step)
    found: dict[int, bool] = {}
    for event in step.events:
        if event.kind == "unpack":
            slot = facts.slot_of_tick[event.tick]
            found[slot] = found.get(slot, False) or event.saved in convolutions
    return [BackwardLayer(slot, tuple(closing.get(slot, ())), convolution) for slot, convolution in found.items()]


def _saved_by_convolutions(step: Step) -> set[int]:
    """Saved tensors that belong to convolutions.

    An op's inputs are saved just before it runs, after what the op before it saves of its results; so of the saves
    of one value at one tick the last is that of the op that follows.
    """
    last: dict[tuple[int, int], int] = {}
    for event in step.events:
        if event.kind == "pack" and event.tick < len(step.ops):
            value = step.saved[event.saved].value
            op = step.ops[event.tick]
            if is_convolution(op) and value in op.inputs:
                last[event.tick, value] = event.saved
    return set(last.values())
