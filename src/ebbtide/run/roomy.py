"""One step in the place of many that run the same ops on tensors of other sizes each time.

Experts take as many rows as they are sent, so that hardly two steps are of the same sizes, and no step is the largest
in each of its tensors. What is planned for one as large as all of them, and with some room, holds for whatever steps
come that are smaller: see NOTE [Leaving the plan] in `ebbtide.run.tracker`. Where images have each so many boxes in
them, what a loss makes of the boxes varies, beside hundreds of larger tensors that do not: room for that costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from ebbtide.arrays import Ints
from ebbtide.step import Op, Saved, Step, Value

LEAST_BLOCK_BYTES = 64 * 1024
"""Smaller tensors lie outside the arena (`run/native`): where only they vary, steps take the same blocks in it."""
EXCEEDED_SHARE = 0.01
"""Share of steps that may turn out to be larger in some tensor, if sizes vary at random."""
MOST_SIZES = 4
"""Kinds that differ in sizes alone and are planned for one by one, at most; of more, all are planned for as one."""
MOST_TIMES = 1.15
"""How many times as large as any that was seen tensors may be in that plan, at most, where one of the kinds has the
largest throughout, as with texts of several lengths."""
MOST_SAMPLES = 16
"""Steps that such a plan is made from: more would tell little more of how sizes vary."""
TRIFLES_SHARE = 0.01
"""Kinds are planned for as one, however few, if all tensors that differ in size are small and together take at most
this share of the limit."""
TRIFLES_TIMES = 2.0
"""How many times as large as any that was seen such tensors may be in that plan, at least."""


def largest_of(steps: Sequence[Step]) -> Step | None:
    """The one of ``steps``, of the same structure, that is at least as large as all others in each value, if any is."""
    sizes = _value_sizes(steps)
    found = np.flatnonzero((sizes == sizes.max(axis=0)).all(axis=1))
    return steps[found[0]] if len(found) else None


def fits(step: Step, room: Step) -> bool:
    """Whether a step is at most as large as ``room``, of the same structure, in each value, saved tensor and workspace;
    ``room`` may hold values besides."""
    return (
        all(a.size_bytes <= b.size_bytes for a, b in zip(step.values, room.values, strict=False))
        and all(math.prod(a.shape) <= math.prod(b.shape) for a, b in zip(step.saved, room.saved, strict=True))
        and all(a.workspace_bytes <= b.workspace_bytes for a, b in zip(step.ops, room.ops, strict=True))
    )


def sizes_with_room(sizes: Ints) -> Ints:
    """By column what has room for each of ``sizes`` and for others that vary as they do; no more than `MOST_TIMES` the
    largest if one row has the largest throughout. What does not vary has no room.

    Args:
        sizes: one row for each step, of the same things in each.
    """
    is_one_largest = bool((sizes == sizes.max(axis=0)).all(axis=1).any())
    return _with_room(sizes, 1.0, MOST_TIMES if is_one_largest else math.inf)


def varying_bytes(steps: Sequence[Step], room: Step) -> list[int]:
    """How large values are in ``room``, which is what `roomy` made of ``steps``, that differ in size between them."""
    sizes = _value_sizes(steps)
    varying = np.flatnonzero(sizes.min(axis=0) < sizes.max(axis=0))
    return [room.values[value].size_bytes for value in varying.tolist()]


def roomy(steps: Sequence[Step], least: float = 1.0, most: float = math.inf) -> Step:
    """A step as large as each of ``steps`` in each tensor, with room for others that vary as they do.

    Durations are medians. Saved tensors that vary have the shape of their largest, but for one dimension.

    Args:
        steps: two or more, of one structure (see `ebbtide.structure.structure`).
        least, most: where sizes differ, there is room for at least and at most so many times the largest.
    """
    shapes = _roomy_shapes([[saved.shape for saved in step.saved] for step in steps], least, most)
    sizes = _with_room(_value_sizes(steps), least, most)
    for number, (saved, shape) in enumerate(zip(steps[0].saved, shapes, strict=True)):
        # A step whose saved tensors fit must fit all in all: a value has room for the largest tensor that may show it.
        per_element = max(s.values[saved.value].size_bytes / max(1, math.prod(s.saved[number].shape)) for s in steps)
        if shape != saved.shape:
            sizes[saved.value] = max(sizes[saved.value], math.ceil(per_element * math.prod(shape)))
    return dataclasses.replace(
        steps[0],
        ops=tuple(map(_median_op, zip(*(step.ops for step in steps), strict=True))),
        values=tuple(map(_resized, steps[0].values, sizes.tolist())),
        saved=tuple(map(_reshaped, steps[0].saved, shapes)),
    )


def latest_and_largest(steps: Sequence[Step]) -> list[Step]:
    """The steps that tell how sizes vary now, and the largest of all, among steps that differ in sizes alone."""
    largest = max(steps, key=lambda step: sum(value.size_bytes for value in step.values))
    latest = list(steps[-MOST_SAMPLES:])
    return latest if any(step is largest for step in latest) else [largest, *latest[1:]]


def in_place_of(samples: Sequence[Step], limit_bytes: int, is_many: bool) -> Iterator[Step]:
    """Steps to plan for in the place of all ``samples``, the one with most room first; none where they are few, unless
    it is trifles that vary."""
    room = roomy(samples, least=TRIFLES_TIMES)
    varying = varying_bytes(samples, room)
    if max(varying, default=0) < LEAST_BLOCK_BYTES and sum(varying) <= TRIFLES_SHARE * limit_bytes:
        yield room
    elif is_many:
        largest = largest_of(samples)
        yield roomy(samples, most=MOST_TIMES if largest is not None else math.inf)
        if largest is not None:
            yield largest


def _value_sizes(steps: Sequence[Step]) -> Ints:
    return np.array([[value.size_bytes for value in step.values] for step in steps], np.int64)


def _with_room(numbers: Ints, least: float, most: float) -> Ints:
    """By column the largest of all rows, and more where they differ: what a normal distribution hardly ever passes, but
    at least and at most so many times the largest.

    A few rows tell little of how a column varies: it is taken to vary as all do on average, by share of its mean, or
    more if it does.
    """
    room: Ints = numbers.max(axis=0)
    varies = numbers.min(axis=0) < room
    if varies.any():
        largest = room[varies]
        mean, deviation = numbers[:, varies].mean(axis=0), numbers[:, varies].std(axis=0, ddof=1)
        deviation = np.maximum(deviation, mean * np.sqrt(np.mean((deviation / mean) ** 2)))
        deviations = statistics.NormalDist().inv_cdf(1 - EXCEEDED_SHARE / np.count_nonzero(varies))
        enough = np.clip(mean + deviations * deviation, least * largest, most * largest)
        room[varies] = np.maximum(largest + 1, np.ceil(enough).astype(np.int64))
    return room


def _roomy_shapes(shapes: Sequence[Sequence[tuple[int, ...]]], least: float, most: float) -> list[tuple[int, ...]]:
    """For each saved tensor, of each step's shapes the largest, longer in one of the dimensions that vary."""
    elements = _with_room(np.array([list(map(math.prod, row)) for row in shapes], np.int64), least, most).tolist()
    return [_longer(column, room) for column, room in zip(zip(*shapes, strict=True), elements, strict=True)]


def _longer(shapes: Sequence[tuple[int, ...]], elements: int) -> tuple[int, ...]:
    """The largest of ``shapes``, longer in the first dimension that varies, so that it has room for ``elements``."""
    largest = max(shapes, key=math.prod)
    varying = (axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if len(set(lengths)) > 1)
    axis = next(varying, None)
    if axis is None or math.prod(largest) <= 0:
        return largest
    length = math.ceil(elements / (math.prod(largest) // largest[axis]))
    return (*largest[:axis], length, *largest[axis + 1 :])


def _median_op(ops: Sequence[Op]) -> Op:
    return dataclasses.replace(
        ops[0],
        duration_seconds=statistics.median(op.duration_seconds for op in ops),
        workspace_bytes=max(op.workspace_bytes for op in ops),
    )


def _resized(value: Value, size_bytes: int) -> Value:
    return dataclasses.replace(value, size_bytes=size_bytes)


def _reshaped(saved: Saved, shape: tuple[int, ...]) -> Saved:
    return dataclasses.replace(saved, shape=shape)
