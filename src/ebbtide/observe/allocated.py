"""Steps on devices whose allocator says what is taken: every byte of it counts, whoever took it.

NOTE [Everything allocated]
1. Such an allocator hands out memory for more than the storages that ops name: workspaces, what it loses by rounding,
   optimizer state and whatever else lies there. All of it is in the way, so all of it is counted.
2. Per op, the most that was handed out at once is read from the allocator's own peak. What of it no storage explains
   that the step touched or made is *unseen*.
3. The least that is unseen in any op is there all the time: one external value. What is unseen beyond that in an op is
   a value that lives in this op alone, so that a replay of the op takes it, too.

So the bytes of the step at every op are those that the allocator had handed out when it was observed.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from ebbtide.step import EXTERNAL, Op, Step, Value


class Memory(Protocol):
    """What an allocator says of its device.

    Attributes:
        device: the device.
    """

    device: torch.device

    def size_of(self, storage: torch.UntypedStorage, /) -> int:
        """Bytes that were handed out for ``storage``; 0 if it lies elsewhere."""
        ...

    def allocated_bytes(self) -> int:
        """Bytes handed out now."""
        ...

    def start_peak(self) -> None:
        """From now on `peak_bytes` counts."""
        ...

    def peak_bytes(self) -> int:
        """The most bytes handed out at once since `start_peak`."""
        ...


class AllocatedProbe:
    """A `WorkspaceProbe` that says of each op what was handed out in all, less what the step had made before it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._made_bytes = 0

    def before(self, made_bytes: int) -> None:
        """See `WorkspaceProbe.before`."""
        self._made_bytes = made_bytes
        self._memory.start_peak()

    def after(self) -> int:
        """See `WorkspaceProbe.after`."""
        return self._memory.peak_bytes() - self._made_bytes


def with_everything_allocated(step: Step) -> Step:
    """``step`` with values for all that was allocated. See NOTE [Everything allocated].

    Args:
        step: its workspaces are what an `AllocatedProbe` said, less what the ops made.
    """
    moments = step.op_moments()
    unseen = [op.workspace_bytes - step.resting_bytes for op in step.ops]
    always = max(0, min(unseen, default=0))
    values, ops = list(step.values), []
    storage = step.next_storage
    values.append(Value(always, storage, EXTERNAL, (), step.moments))
    for tick, op in enumerate(step.ops):
        more: tuple[int, ...] = ()
        if unseen[tick] > always:
            storage += 1
            more = (len(values),)
            values.append(Value(unseen[tick] - always, storage, tick, (), moments[tick] + 1))
        ops.append(_without_workspace(op, more))
    return dataclasses.replace(step, ops=tuple(ops), values=tuple(values))


def _without_workspace(op: Op, more: tuple[int, ...]) -> Op:
    # At the end: a replay gives its results to the outputs in order, and it has none for a workspace.
    return dataclasses.replace(op, outputs=(*op.outputs, *more), workspace_bytes=0)
