"""What of a step does not depend on how large its tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ebbtide.step import Op, Saved, Step, Value


def _of_op(op: Op) -> tuple[Any, ...]:
    return (op.name, op.inputs, op.outputs, op.mutated, op.replay, op.phase, op.module)


def _of_value(value: Value) -> tuple[Any, ...]:
    return (value.storage, value.maker, value.uses, value.dies, value.exclusive)


def _of_saved(saved: Saved) -> tuple[Any, ...]:
    return (saved.value, saved.dtype, len(saved.shape), saved.unpacked)


FIXED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ops": ("op", _of_op),
    "values": ("value", _of_value),
    "saved": ("saved tensor", _of_saved),
    "events": ("event", lambda event: event),
    "absences": ("absence", lambda absence: absence),
}
"""By field of a step: what one of its records is called, and what of it is the same whatever the sizes."""


def structure(step: Step) -> int:
    """A hash that steps share which differ in sizes, durations and workspaces alone."""
    return hash((step.device, *(tuple(map(fixed, getattr(step, field))) for field, (_, fixed) in FIXED.items())))
