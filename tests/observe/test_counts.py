"""Tensors that show one storage and count their versions each by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ebbtide
from ebbtide.machine import Machine
from ebbtide.run.meter import PeakMeter
from ebbtide.run.observing import observe_step
from ebbtide.run.tiers import DiskTier
from ebbtide.run.versions import count_together
from ebbtide.step import Step
from tests.run.harness import FAST_DISK, SLOW_DISK
from tests.run.inside import latest_kind

ROWS, WIDTH = 128, 96
SIZE_BYTES = ROWS * WIDTH * 4

Loss = Callable[[Tensor], Tensor]


def observed(loss: Loss) -> Step:
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    return observe_step(lambda: loss(x @ w).backward())


def planned_sizes(step: Step) -> list[int]:
    """Of the values about which there is something to plan."""
    return [step.values[absence.value].size_bytes for absence in step.absences]


def taken(w: Tensor) -> Tensor:
    """The gradient, which is gone afterwards."""
    gradient, w.grad = w.grad, None
    assert gradient is not None
    return gradient


def test_who_counts_together() -> None:
    t = torch.randn(4, 4)
    t.add_(1)
    for other in (t, t[1:], t.detach(), t.view(-1), t.view(torch.int32)):
        assert count_together(t, other)
        assert count_together(other, t)
    for other in (t.data, torch.ops.aten._unsafe_view(t, (16,)), t.clone()):
        assert not count_together(t, other)
    assert t._version == 1
    apart = t.data
    apart.add_(1)
    assert not count_together(t, apart)  # though they have the same number
    assert (t._version, apart._version) == (1, 1)


def written_to(h: Tensor) -> Tensor:
    t = h.square()
    t.add_(1)
    return t


@pytest.mark.parametrize("first", [True, False])
def test_what_was_written_to_and_is_saved_by_another_count_stays(first: bool) -> None:
    def loss(h: Tensor) -> Tensor:
        t = written_to(h)
        one = torch.kron(t, t[:1, :2]).tanh().mean() if first else None
        other = t.sin().mean()
        return other + (one if one is not None else torch.kron(t, t[:1, :2]).tanh().mean())

    step = observed(loss)
    (t,) = {
        pair[1] for op in step.ops for pair in op.mutated if op.phase == "forward" and op.name == "aten.add_.Tensor"
    }
    assert any(saved.value == t for saved in step.saved)
    assert all(absence.value != t for absence in step.absences)
    assert all(op.replay in ("opaque", "view") for op in step.ops if t in op.inputs)
    assert planned_sizes(step)  # the product itself may leave


def test_what_counts_together_may_leave() -> None:
    def loss(h: Tensor) -> Tensor:
        t = written_to(h)
        return t.sin().mean() + t.view(-1).cos().mean() + t.detach()[1:].mul(h[1:]).mean()

    step = observed(loss)
    assert SIZE_BYTES in planned_sizes(step)
    assert all(op.replay != "opaque" for op in step.ops if op.phase == "forward")


def test_what_is_saved_as_conjugated_or_negated_stays() -> None:
    """It is kept as it is, and what was to be computed from it would find nothing: it moved out instead."""

    def loss(h: Tensor) -> Tensor:
        t = torch.fft.fft(h).conj()
        product = (t * t).real
        return (product * t.imag).tanh().sum()

    step = observed(loss)
    (t,) = next(op.outputs for op in step.ops if op.name == "aten._fft_r2c.default")
    assert all(absence.value != t for absence in step.absences)
    assert all(op.replay in ("opaque", "view") for op in step.ops if t in op.inputs)


@pytest.mark.parametrize(
    "use", [lambda h, t: (t * t).real, lambda h, t: (h * t.imag).tanh()], ids=["conjugated", "negated"]
)
def test_what_is_saved_as_conjugated_or_negated_comes_back_so(
    use: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    """In a step near its limit, in which other things move."""
    w, x = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(4 * ROWS, WIDTH)

    def run() -> Tensor:
        h = x @ w
        loss = use(h, torch.fft.fft(h).conj()).mean()
        for _ in range(6):
            h = h.tanh()
        (loss + h.mean()).backward()
        return taken(w)

    with PeakMeter() as meter:
        expected = run()
    with ebbtide.Budget(meter.peak_bytes // 2, spill=tmp_path, machine=FAST_DISK) as memory:
        with memory.step():
            found = run()
        disk = memory.tiers["disk"]
        assert isinstance(disk, DiskTier)
        assert disk.written_bytes > 0
    assert torch.equal(found, expected)


def test_parameters_may_be_read_as_data() -> None:
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with torch.no_grad():
        w.add_(1)
    x = torch.randn(ROWS, WIDTH)
    step = observe_step(lambda: (x @ w.data @ w).tanh().sum().backward())
    assert [op.replay for op in step.ops if op.name == "aten.mm.default" and op.phase == "forward"] == ["pure"] * 2


def test_what_nobody_writes_to_may_leave_whoever_counts(tmp_path: Path) -> None:
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)

    def run() -> Tensor:
        t = x @ w
        loss = torch.kron(t[:1, :1], t).tanh().mean() + t.sin().mean() + (t.data * t).mean()
        del t
        loss.backward()
        return loss

    step = observe_step(run)
    (t,) = step.ops[0].outputs
    assert any(absence.value == t for absence in step.absences)
    taken(w)
    expected = run().detach()
    gradient = taken(w)
    with ebbtide.Budget("90%", spill=tmp_path) as memory:
        for _ in range(6):
            with memory.step():
                assert torch.equal(run(), expected)
            assert torch.equal(taken(w), gradient)
        assert memory.plan is not None
        assert memory.plan.binds
        assert memory.state == "planned"


def test_what_came_back_is_no_other_tensor(tmp_path: Path) -> None:
    """Observed within a limit, values move out and come back as new tensors, at addresses of old ones maybe."""
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)

    def run() -> None:
        h = x
        for _ in range(8):
            h = torch.sin(h @ w)
            h = h.mul_(1.1).tanh()
        h.square().mean().backward()

    free = len(observe_step(run).absences)
    with ebbtide.Budget(10 * SIZE_BYTES, spill=tmp_path, machine=FAST_DISK) as memory:
        with memory.step():
            run()
        disk = memory.tiers["disk"]
        assert isinstance(disk, DiskTier)
        assert disk.written_bytes > 0
        kind = latest_kind(memory)
        assert kind is not None
        assert len(kind.step.absences) == free > 8


@pytest.mark.usefixtures("quick_plans")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("planned", [False, True], ids=["observed", "planned"])
def test_writes_are_seen_by_whom_they_are_counted(planned: bool, machine: Machine, tmp_path: Path) -> None:
    """What is saved first counts apart, and is not written to; plain PyTorch refuses the backward pass all the same."""
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(4 * ROWS, WIDTH)

    def run(*, writes: bool) -> None:
        h = x @ w
        loss = (h.data * h).mean()
        t = h.sin()
        for _ in range(4):
            t = t.tanh()
        if writes:
            h.detach().add_(1)
        (loss + t.mean()).backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(writes=True)
    with ebbtide.Budget(1_300_000, spill=tmp_path, machine=machine) as memory:
        for _ in range(8 if planned else 0):
            with memory.step():
                run(writes=False)
            w.grad = None
        assert memory.state == ("planned" if planned else "observe")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"), memory.step():
                run(writes=True)
