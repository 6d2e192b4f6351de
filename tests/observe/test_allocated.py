"""What an allocator hands out, as values of a step."""

from __future__ import annotations

import pytest
import torch

from ebbtide.observe.allocated import AllocatedProbe, with_everything_allocated
from ebbtide.observe.recorder import Recorder
from ebbtide.plan import plain_peak_bytes
from ebbtide.plan.problem import Facts
from ebbtide.plan.replay import check_recipe
from ebbtide.run.backends.cuda import CudaMemory
from ebbtide.step import EXTERNAL, Event, Op, Saved, Step, Value
from ebbtide.step_checks import check_step

PARAMETERS, FIRST, SECOND = 1000, 300, 200
"""Bytes of what the step touches, and of what its two ops make."""


def step_with(*besides: int) -> Step:
    """Two ops; the allocator had handed out ``besides`` bytes in each, besides what they and earlier ones made."""
    ops = (
        Op("aten.mm.default", (0,), (1,), workspace_bytes=besides[0], replay="pure"),
        Op("aten.tanh.default", (1,), (2,), workspace_bytes=besides[1], replay="pure"),
    )
    values = (
        Value(PARAMETERS, 0, EXTERNAL, (0,), 3),
        Value(FIRST, 1, 0, (1,), 3),
        Value(SECOND, 2, 1, (), 3),
    )
    return Step(ops, values, (Saved(2, "float32", (50,), (1,), 0, ()),), (Event("pack", 2, 0),), ())


@pytest.mark.parametrize(
    ("besides", "always", "workspaces"),
    [
        ((1000, 1000), 0, {}),
        ((1000, 1064), 0, {1: 64}),
        ((1500, 1000), 0, {0: 500}),  # something that went early in the step
        ((1070, 1570), 70, {1: 500}),
        ((900, 1064), 0, {1: 64}),  # a storage that was touched had not been there from the beginning
    ],
)
def test_every_byte_is_a_value(besides: tuple[int, int], always: int, workspaces: dict[int, int]) -> None:
    step = with_everything_allocated(step_with(*besides))
    check_step(step)
    assert step.resting_bytes == PARAMETERS + always
    made = {op: step.values[value].size_bytes for op in (0, 1) for value in step.ops[op].outputs[1:]}
    assert made == workspaces
    peaks = [besides[0] + FIRST, besides[1] + FIRST + SECOND]
    assert plain_peak_bytes(step) == max(*peaks, PARAMETERS + FIRST + SECOND)
    assert [op.workspace_bytes for op in step.ops] == [0, 0]


def test_a_replay_takes_the_workspace_again() -> None:
    step = with_everything_allocated(step_with(PARAMETERS, PARAMETERS + 64))
    replay = check_recipe(Facts.of(step), 2, (0, 1))
    assert replay.peak_bytes == FIRST + SECOND + 64


def test_a_step_without_ops() -> None:
    empty = Step((), (Value(PARAMETERS, 0, EXTERNAL, (), 0),), (), (), ())
    assert with_everything_allocated(empty).resting_bytes == PARAMETERS


class _Allocator:
    """Hands out ``allocated`` bytes, ``peak`` at once."""

    allocated = peak = 0

    def start_peak(self) -> None:
        self.peak = self.allocated

    def peak_bytes(self) -> int:
        return self.peak


def test_the_probe_counts_what_was_lost_before_the_op_too() -> None:
    memory = _Allocator()
    probe = AllocatedProbe(memory)  # type: ignore[arg-type]
    memory.allocated, memory.peak = 700, 900
    probe.before(300)
    memory.peak = 850
    assert probe.after() == 550


class _Constant(CudaMemory):
    """An allocator of the CPU's that has handed out as much all along."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def start_peak(self) -> None: ...

    def _count(self, what: str, which: str) -> int:
        return 1 << 20


def test_what_others_have_allocated_does_not_count() -> None:
    """As what CuPy has made, or another process, of which PyTorch's allocator knows nothing."""
    memory, foreign = _Constant(), torch.frombuffer(bytearray(8 << 20), dtype=torch.float32)
    assert memory.size_of(foreign.untyped_storage()) == 0
    assert memory.size_of(torch.empty(1000).untyped_storage()) == 4096
    weight, recorder = torch.ones(16, requires_grad=True), Recorder(memory=memory)
    with recorder:
        (foreign[:16] * weight).sum().backward()
    assert plain_peak_bytes(recorder.finish()) < 2 << 20
