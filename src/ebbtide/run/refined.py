"""A step as observed, changed by what later steps of its kind have told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from ebbtide.step import Op, Step


def runs_same_ops(one: Step, other: Step) -> bool:
    """Whether both run ops of the same names in the same order."""
    return [op.name for op in one.ops] == [op.name for op in other.ops]


def merged(later: Step, earlier: Step) -> Step:
    """``later`` with each op's smaller duration and larger workspace of the two observations."""
    return dataclasses.replace(later, ops=tuple(map(_merged_op, later.ops, earlier.ops)))


def _merged_op(later: Op, earlier: Op) -> Op:
    seconds = min(later.duration_seconds, earlier.duration_seconds)
    workspace = max(later.workspace_bytes, earlier.workspace_bytes)
    return dataclasses.replace(later, duration_seconds=seconds, workspace_bytes=workspace)


def without_reruns(step: Step, values: Set[int]) -> Step:
    """``step``, in which no recipe runs an op again that reads the storage of any of ``values``; views still may."""
    storages = {step.values[value].storage for value in values if value >= 0}
    return dataclasses.replace(step, ops=tuple(_run_once(op, step, storages) for op in step.ops))


def _run_once(op: Op, step: Step, storages: Set[int]) -> Op:
    reads = op.replay != "view" and any(step.values[value].storage in storages for value in op.inputs)
    return dataclasses.replace(op, replay="opaque") if reads else op


def as_spared(step: Step, others: Iterable[Step]) -> Step:
    """``step``, in which no recipe runs an op again that must not run again in any of ``others``, which run the same
    ops: see `without_reruns`."""
    spared = {place for other in others for place, op in enumerate(other.ops) if op.replay == "opaque"}
    ops = (
        dataclasses.replace(op, replay="opaque") if place in spared and op.replay != "opaque" else op
        for place, op in enumerate(step.ops)
    )
    return dataclasses.replace(step, ops=tuple(ops))
