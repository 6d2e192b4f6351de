"""Whether the records of a step can be those of one that happened."""

from __future__ import annotations

import bisect
from collections.abc import Collection

from ebbtide.errors import RecordError
from ebbtide.fields import wrong_field
from ebbtide.step import EXTERNAL, MOST_BYTES, MOST_SECONDS, RECORD_TYPES, Step, Value


def check_step(step: Step, name: str = "step") -> None:
    """Check that a step can have happened.

    Raises:
        RecordError: naming the first record that cannot be.
    """
    try:
        _check_ops(step, name)
        _check_values(step, name)
        _check_saved(step, name)
        _check_events(step, name)
        made = _made_at(step)
        _check_lives(step, name, made)
        _check_absences(step, name, made)
    except (TypeError, AttributeError) as fault:  # made by hand: others have the right types
        parts = [part for part in (getattr(step, field) for field in RECORD_TYPES) if isinstance(part, Collection)]
        records = (record for part in parts for record in part if isinstance(record, tuple(RECORD_TYPES.values())))
        raise RecordError(f"{name}: {wrong_field([*records, step]) or fault}") from fault


def check_agreement(step: Step, name: str = "step") -> None:
    """Check that the records of a step which `check_step` has passed do not contradict each other.

    What was recorded in this process is not looked through for that each time that it is planned for; a file may have
    been written or altered by others.

    Raises:
        RecordError: naming the first record that another one contradicts.
    """
    op_moments = step.op_moments()
    _check_ops_and_values(step, name, op_moments)
    _check_requests(step, name)
    _check_gaps(step, name, op_moments)


def check_trains(step: Step, name: str = "the step") -> None:
    """Check that what is observed is a training step that takes time, so that there is something to plan and compare.

    Raises:
        RecordError: if it has no ops, no backward pass, or takes no time.
    """
    if not step.ops:
        raise RecordError(f"{name} has no ops: observe one that runs a forward and a backward pass")
    if all(op.phase == "forward" for op in step.ops):
        raise RecordError(
            f"{name} has no backward pass, so that nothing waits in memory for one: observe one that calls backward()"
        )
    if not step.plain_seconds > 0:
        raise RecordError(f"{name} takes no time, so nothing can be said of overheads: observe one that computes")


def _check_ops(step: Step, name: str) -> None:
    for tick, op in enumerate(step.ops):
        if not 0 <= op.duration_seconds < MOST_SECONDS:
            raise RecordError(
                f"{name}: op {tick} ({op.name}) has duration {op.duration_seconds}; it must be >= 0, and"
                f" < {MOST_SECONDS:.0e} seconds"
            )
        if not 0 <= op.workspace_bytes < MOST_BYTES:
            raise RecordError(f"{name}: op {tick} ({op.name}) has a workspace of {op.workspace_bytes} bytes")
        for named in (*op.inputs, *op.outputs, *(value for pair in op.mutated for value in pair)):
            if not 0 <= named < len(step.values):
                raise RecordError(f"{name}: op {tick} ({op.name}) names value {named}, which does not exist")


def _check_values(step: Step, name: str) -> None:
    count, moments = len(step.ops), step.moments
    for number, value in enumerate(step.values):
        if not _can_be(value, count, moments):
            raise RecordError(f"{name}: value {number} is impossible: {value}")
    if sum(value.size_bytes for value in step.values) >= MOST_BYTES:
        raise RecordError(f"{name}: its values take more bytes than there are")


def _can_be(value: Value, ops: int, moments: int) -> bool:
    ends = (*value.uses[:1], *value.uses[-1:])
    return (
        value.size_bytes >= 0
        and 0 <= value.storage < MOST_BYTES
        and EXTERNAL <= value.maker < ops
        and 0 <= value.dies <= moments
        and all(0 <= tick < ops for tick in ends)
        and list(value.uses) == sorted(value.uses)
    )


def _check_saved(step: Step, name: str) -> None:
    for number, saved in enumerate(step.saved):
        if not 0 <= saved.value < len(step.values):
            raise RecordError(f"{name}: saved tensor {number} names value {saved.value}, which does not exist")


def _check_events(step: Step, name: str) -> None:
    count, last = len(step.ops), 0
    for number, event in enumerate(step.events):
        if not last <= event.tick <= count or not 0 <= event.saved < len(step.saved):
            raise RecordError(f"{name}: event {number} is impossible: {event}")
        last = event.tick


def _check_lives(step: Step, name: str, made: list[int]) -> None:
    """Check that values die after they are ``made``, which has the moments of that."""
    for number, value in enumerate(step.values):
        if value.dies <= made[number]:
            raise RecordError(f"{name}: value {number} is impossible: it dies before it is made: {value}")


def _check_absences(step: Step, name: str, made: list[int]) -> None:
    asked = {moment for moment, event in zip(step.event_moments(), step.events, strict=True) if event.kind == "unpack"}
    saved_values = {saved.value for saved in step.saved}
    for number, absence in enumerate(step.absences):
        exists = absence.value in saved_values and made[absence.value] < absence.opens < absence.closes
        if not exists or not (absence.closes in asked or absence.closes == step.values[absence.value].dies):
            raise RecordError(f"{name}: absence {number} is impossible: {absence}")


def _made_at(step: Step) -> list[int]:
    """The moment at which each value is made; -1 for external ones."""
    op_moments = step.op_moments()
    return [-1 if value.maker == EXTERNAL else op_moments[value.maker] for value in step.values]


def _check_ops_and_values(step: Step, name: str, op_moments: list[int]) -> None:
    """Check that ops and values name each other, in an order in which ops can run."""
    read: list[list[int]] = [[] for _ in step.values]
    made = 0
    for tick, op in enumerate(step.ops):
        for number in op.inputs:
            read[number].append(tick)
            if step.values[number].maker >= tick:
                raise RecordError(f"{name}: op {tick} ({op.name}) reads value {number}, which is made later")
        for old, new in op.mutated:
            if step.values[old].storage != step.values[new].storage or step.values[old].maker >= tick:
                raise RecordError(f"{name}: op {tick} ({op.name}) cannot write value {new} in place of value {old}")
        for number in {*op.outputs, *(new for _, new in op.mutated)}:
            if step.values[number].maker != tick:
                raise RecordError(f"{name}: op {tick} ({op.name}) makes value {number}, which says it does not")
        made += len(set(op.outputs))
    if made != sum(value.maker != EXTERNAL for value in step.values):
        raise RecordError(f"{name}: some values are made by ops that do not say so")
    for number, value in enumerate(step.values):
        if value.uses != tuple(read[number]):
            raise RecordError(f"{name}: value {number} is not read by the ops that it names as its uses: {value}")
        if value.uses and op_moments[value.uses[-1]] >= value.dies:
            raise RecordError(f"{name}: value {number} is impossible: it is read after it is gone: {value}")


def _check_requests(step: Step, name: str) -> None:
    """Check that each saved tensor was asked for at events that say so: at all but those of `plan.finals.with_ends`."""
    asked: list[set[int]] = [set() for _ in step.saved]
    for moment, event in zip(step.event_moments(), step.events, strict=True):
        if event.kind == "unpack":
            asked[event.saved].add(moment)
    for number, saved in enumerate(step.saved):
        if not asked[number].issuperset(saved.unpacked):
            raise RecordError(f"{name}: saved tensor {number} is asked for where no event is: {saved.unpacked}")


def _check_gaps(step: Step, name: str, op_moments: list[int]) -> None:
    """Check that no op reads a value in its absences, and that these do not overlap."""
    ended: dict[int, int] = {}
    for number, absence in enumerate(step.absences):
        uses = step.values[absence.value].uses
        following = bisect.bisect_left(uses, absence.opens, key=op_moments.__getitem__)
        if following < len(uses) and op_moments[uses[following]] < absence.closes:
            raise RecordError(f"{name}: absence {number} is impossible: an op reads its value meanwhile: {absence}")
        if absence.opens < ended.get(absence.value, 0):
            raise RecordError(f"{name}: absence {number} is impossible: it overlaps another of its value: {absence}")
        ended[absence.value] = absence.closes
