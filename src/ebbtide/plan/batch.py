"""The largest batch that a machine can train within a budget and a given share of extra time.

A step is observed at two batch sizes. In between, and beyond, every size and duration is taken to grow evenly with the
batch, which is exact for bytes and nearly so for times; so any batch can be planned for without observing it. The
answer is then observed and planned for. Whether it holds or not, it is one more known point, and the search goes on
from it until an observed step holds and the next batch is not expected to; from 2,000 samples on, one that is larger by
a thousandth.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from ebbtide.arguments import as_duration, as_seconds, as_whole
from ebbtide.decisions import Plan
from ebbtide.errors import ArgumentError, BudgetError, RecordError
from ebbtide.machine import Machine
from ebbtide.plan.problem import plain_peak_bytes
from ebbtide.plan.solve import solve
from ebbtide.step import MOST_BYTES, Op, Saved, Step, Value
from ebbtide.step_checks import check_trains
from ebbtide.structure import FIXED
from ebbtide.units import format_bytes

FINE = 1e-3
"""Share by which the largest batch may be larger than the answer: a plan takes a second or so, and to find the very
largest one of millions takes as many more as twenty of them."""
ROUNDING = 1e-9
"""Share of its time by which a plan that does nothing may differ from the sum of its ops' durations."""


@dataclasses.dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch within a budget and a share of extra time.

    Attributes:
        batch: its size.
        step: the step that was observed with it.
        plan: the plan for that step.
        plain_batch: the largest batch that needs no plan, predicted; 0 if there is none.
        plain_step: the step with that batch, interpolated; None if there is none.
        observed: batch sizes that were observed, in order; all but the first two to check an answer.
    """

    batch: int
    step: Step
    plan: Plan
    plain_batch: int
    plain_step: Step | None
    observed: tuple[int, ...]

    @property
    def overhead(self) -> float:
        """Time of the plan beyond the plain step's with the same batch, as a share of that."""
        return self.plan.seconds / self.plan.plain_seconds - 1


def largest_batch(
    observe: Callable[[int], Step],
    machine: Machine,
    limit_bytes: int,
    *,
    overhead: float = 0.05,
    between: tuple[int, int] = (8, 16),
    seconds: float = 0.5,
    progress: Callable[[str], None] | None = None,
) -> LargestBatch:
    """The largest batch whose step has a plan within ``limit_bytes`` that takes at most ``overhead`` more time.

    Args:
        observe: the step with a batch of a given size.
        machine: where it runs.
        limit_bytes: the budget.
        overhead: most time beyond the plain step's with the same batch, as a share of that.
        between: two batch sizes to observe first.
        seconds: about how long the solver may search for each batch that is tried.
        progress: told what is being done.

    Raises:
        BudgetError: if not even one sample can be trained so.
        RecordError: if the steps differ in more than sizes, do not train, or do not need more memory for more samples.
        ArgumentError: if ``between`` are not two positive sizes, ``overhead`` is not a share, ``limit_bytes`` not a
            whole number, ``seconds`` negative or not finite, or nothing has so much memory; it is a `ValueError`.
    """
    limit_bytes, between, overhead = _as_numbers(limit_bytes, between, overhead)
    seconds = as_duration("seconds", seconds)
    say = progress or (lambda _what: None)
    steps: dict[int, Step] = {}

    def look_at(batch: int) -> None:
        say(f"observing a batch of {batch}")
        step = observe(batch)
        check_trains(step)
        _check_rises(steps, batch, step)
        steps[batch] = step

    def planned(batch: int) -> Plan | None:
        say(f"planning for a batch of {batch}")
        return _plan_within(step_at(steps, batch), machine, limit_bytes, overhead, seconds)

    for batch in between:
        look_at(batch)
    good, beyond = 0, None
    best: Plan | None = None
    while True:
        plain_batch = _most(lambda batch: plain_peak_bytes(step_at(steps, batch)) <= limit_bytes, 0, None)
        start = plain_batch if beyond is None else min(plain_batch, beyond - 1)
        batch = _most(lambda batch: planned(batch) is not None, max(good, start), beyond, FINE)
        if not batch:
            raise _no_batch(step_at(steps, 1), machine, limit_bytes, overhead, seconds)
        if batch == good and best is not None:
            plain_step = step_at(steps, plain_batch) if plain_batch else None
            return LargestBatch(batch, steps[batch], best, plain_batch, plain_step, tuple(steps))
        if batch not in steps:
            look_at(batch)
        plan = planned(batch)
        if plan is None:
            beyond = batch
        else:
            good, best = batch, plan


def _as_numbers(limit_bytes: int, between: tuple[int, int], overhead: float) -> tuple[int, tuple[int, int], float]:
    """What `largest_batch` is given, as numbers of Python's. Raises `ArgumentError` as that does."""
    limit_bytes = as_whole("limit_bytes", limit_bytes)
    if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
        raise ArgumentError(f"between={between!r}: two batch sizes are needed, the smaller one first")
    between = as_whole("between", between[0]), as_whole("between", between[1])
    if not 0 < between[0] < between[1]:
        raise ArgumentError(f"two batch sizes are needed, the smaller one first, not {between}")
    share = as_seconds(overhead)
    if share is None:
        raise ArgumentError(f"the overhead is a share of the plain time, 0 or more, not {overhead!r}")
    if limit_bytes >= MOST_BYTES:
        raise ArgumentError(f"a batch within {format_bytes(limit_bytes)} has no end: name what a machine has")
    return limit_bytes, between, share


def step_at(steps: Mapping[int, Step], batch: int) -> Step:
    """The step with a batch of another size, from two or more that were observed, by batch size.

    Sizes and durations are those on the line through the two nearest ones that enclose ``batch``; outside of all, on
    that through the smallest and the largest. Sizes are rounded up.

    Raises:
        RecordError: if these differ in more than sizes and durations.
    """
    if batch in steps:
        return steps[batch]
    sizes = sorted(steps)
    enclosing = (pair for pair in itertools.pairwise(sizes) if pair[0] < batch < pair[1])
    low, high = next(enclosing, (sizes[0], sizes[-1]))
    small, large = steps[low], steps[high]
    _check_same_kind(small, large, low, high)
    rise, run = batch - low, high - low

    def size(first: int, second: int) -> int:
        return max(0, first - ((first - second) * rise) // run)

    def op(first: Op, second: Op) -> Op:
        slope = (second.duration_seconds - first.duration_seconds) / run
        return dataclasses.replace(
            first,
            duration_seconds=max(0.0, first.duration_seconds + slope * rise),
            workspace_bytes=size(first.workspace_bytes, second.workspace_bytes),
        )

    def value(first: Value, second: Value) -> Value:
        return dataclasses.replace(first, size_bytes=size(first.size_bytes, second.size_bytes))

    def saved(first: Saved, second: Saved) -> Saved:
        shape = tuple(map(size, first.shape, second.shape))
        stride = tuple(map(size, first.stride, second.stride))
        return dataclasses.replace(first, shape=shape, stride=stride, offset=size(first.offset, second.offset))

    return dataclasses.replace(
        small,
        ops=tuple(map(op, small.ops, large.ops)),
        values=tuple(map(value, small.values, large.values)),
        saved=tuple(map(saved, small.saved, large.saved)),
    )


def _check_rises(steps: Mapping[int, Step], batch: int, step: Step) -> None:
    """Check that ``step`` needs more memory than one with half as many samples: else no batch would be the largest.

    Of the first two steps the larger one needs more, whatever their batches. Later ones may need as much as one with a
    little fewer samples: a batch may be padded.
    """
    fewer = list(steps) if len(steps) == 1 else [size for size in steps if 2 * size <= batch]
    if fewer and plain_peak_bytes(step) <= plain_peak_bytes(steps[max(fewer)]):
        raise RecordError(
            f"the step needs no more memory for more samples ({max(fewer)} and {batch} were observed): is its batch"
            " fixed, or limited?"
        )


def _check_same_kind(small: Step, large: Step, low: int, high: int) -> None:
    advice = (
        f"so batches between {low} and {high} cannot be told from these two; name two whose steps differ in sizes alone"
    )
    for field, (name, fixed) in FIXED.items():
        pairs = zip(getattr(small, field), getattr(large, field), strict=False)
        for number, (first, second) in enumerate(pairs):
            if fixed(first) != fixed(second):
                names = f"{name} {number}"
                if isinstance(first, Op):
                    names += f" ({first.name} with {low} samples, {second.name} with {high})"
                raise RecordError(f"the steps differ from {names} on, {advice}")
        counts = len(getattr(small, field)), len(getattr(large, field))
        if counts[0] != counts[1]:
            raise RecordError(f"a batch of {low} has {counts[0]} {field}, one of {high} has {counts[1]}, {advice}")


def _plan_within(step: Step, machine: Machine, limit_bytes: int, overhead: float, seconds: float) -> Plan | None:
    """Plan within the budget; None if no plan takes at most ``overhead`` more time."""
    try:
        plan = solve(step, machine, limit_bytes, seconds=seconds)
    except BudgetError:
        return None
    return plan if plan.seconds <= (1 + overhead + ROUNDING) * step.plain_seconds else None


def _most(holds: Callable[[int], bool], low: int, beyond: int | None, fine: float = 0.0) -> int:
    """The largest number for which ``holds``, which is so up to some number: at least ``low``, and below ``beyond``. It
    may be less by a share of ``fine``."""
    stride = max(1, int(fine * low))
    while beyond is None:
        if holds(low + stride):
            low, stride = low + stride, 2 * stride
        else:
            beyond = low + stride
    while beyond - low > max(1, int(fine * low)):
        middle = (low + beyond) // 2
        low, beyond = (middle, beyond) if holds(middle) else (low, middle)
    return low


def _no_batch(step: Step, machine: Machine, limit_bytes: int, overhead: float, seconds: float) -> BudgetError:
    """Why one sample is too many."""
    try:
        plan = solve(step, machine, limit_bytes, seconds=seconds)
    except BudgetError as error:
        return error
    # Told from larger batches, a step of one sample may take no time at all.
    more = plan.seconds / step.plain_seconds - 1 if step.plain_seconds else math.inf
    message = (
        f"with one sample a plan within {format_bytes(limit_bytes)} takes {more:.1%} more time, and {overhead:.1%} are"
        f" allowed; allow more, or a budget of {format_bytes(plan.plain_peak_bytes)}, which needs no plan"
    )
    reachable = plan.plain_peak_bytes
    return BudgetError(message, limit_bytes=limit_bytes, reachable_bytes=reachable, tick=0, op="", module="")
