"""What only a device can show of a budget: that its allocator agrees with the plan, its times, and what it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import OutOfMemoryError
from tests.run.harness import Record, compare
from tests.run.programs import Attention, mlp

pytestmark = pytest.mark.usefixtures("deterministic")

SETTLING = 8
"""Steps after which a budget runs its plan."""


class Training:
    """A loop over one of three models with tensors of 16 to 128 MiB, and with Adam's state beside them."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        made: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
            "chain": (mlp(1024, *[2048] * 8, 1024), (16384, 1024)),
            "convolutions": (_convolutions(), (64, 3, 64, 64)),
            "transformer": (nn.Sequential(*(Attention(512, 8) for _ in range(4))), (16, 512, 512)),
        }
        self.model, self.shape = made[name][0].cuda(), made[name][1]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def data(self, index: int) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(index)).cuda()

    def run(self, index: int, guard: contextlib.AbstractContextManager[object]) -> Record:
        """The loss and the gradients of a step."""
        data = self.data(index)
        with guard:
            loss = self.model(data).square().mean()
            loss.backward()
        record = {"loss": loss.detach().clone()}
        record |= {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return record


def _convolutions() -> nn.Module:
    def block(inside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]

    return nn.Sequential(*block(3), *(layer for _ in range(6) for layer in block(64)), nn.AvgPool2d(8))


MODELS = ("chain", "convolutions", "transformer")


@contextlib.contextmanager
def peak_of(guard: contextlib.AbstractContextManager[object], into: list[int]) -> Iterator[None]:
    """What `torch.cuda.max_memory_allocated` says of a step."""
    torch.cuda.reset_peak_memory_stats()
    with guard:
        yield
    into.append(torch.cuda.max_memory_allocated())


@pytest.mark.parametrize("limit", ["85%", "70%"])
@pytest.mark.parametrize("model", MODELS)
def test_the_planned_peak_is_the_allocators(model: str, limit: str, tmp_path: Path) -> None:
    training, peaks = Training(model), list[int]()
    with ebbtide.Budget(limit, spill=tmp_path) as memory:
        for index in range(SETTLING):
            training.run(index, memory.step())
        assert memory.state == "planned"
        plan = memory.plan
        training.run(SETTLING, peak_of(memory.step(), peaks))
    training.run(SETTLING + 1, peak_of(contextlib.nullcontext(), peaks))
    assert plan is not None
    assert plan.binds
    planned, plain = peaks
    assert planned == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plain == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    assert planned <= 1.01 * plan.limit_bytes


@pytest.mark.parametrize("model", MODELS)
def test_ops_take_as_long_as_the_step(model: str, tmp_path: Path) -> None:
    training = Training(model)
    with ebbtide.Budget("200%", spill=tmp_path) as memory:
        for index in range(SETTLING):
            training.run(index, memory.step())
        assert memory.observed is not None
        predicted = memory.observed.plain_seconds
    times = []
    for index in range(5):
        data = training.data(index)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        training.model(data).square().mean().backward()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
        training.optimizer.zero_grad()
    assert predicted == pytest.approx(sorted(times)[2], rel=0.25)


def test_nobody_waits_inside_a_step(tmp_path: Path) -> None:
    """Not in those that are observed, nor in planned ones."""
    training = Training("chain")
    before = torch.cuda.get_sync_debug_mode()

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        with memory.step():
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    with ebbtide.Budget("80%", spill=tmp_path) as memory:
        for index in range(SETTLING + 2):
            # A step that is verified looks at what it compares.
            training.run(index, memory.step() if memory.state == "verify" else step())
        assert memory.state == "planned"


def ask_for(size_bytes: int, training: Training, memory: ebbtide.Budget) -> None:
    """A forward pass, and then so much memory."""
    with memory.step():
        training.model(training.data(0)).square().mean()
        torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def test_running_out_of_memory(tmp_path: Path) -> None:
    reference, training = Training("chain"), Training("chain")
    total = torch.cuda.mem_get_info()[1]
    with ebbtide.Budget("80%", spill=tmp_path) as memory:
        for index in range(2 * SETTLING):
            if index == SETTLING:
                planned = memory.plan
                with pytest.raises(OutOfMemoryError, match=r"CUDA out of memory\. In a step on cuda:0") as caught:
                    ask_for(2 * total, training, memory)
                assert memory.state == "observe"
            expected = reference.run(index, contextlib.nullcontext())
            compare(expected, training.run(index, memory.step()), f"step {index}")
        assert memory.state == "planned"
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert planned is not None
    assert error.planned_bytes == planned.peak_bytes
    assert error.asked_bytes == pytest.approx(2 * total, rel=0.01)
    assert error.fits_bytes is not None
    assert 0.5 * total < error.fits_bytes <= total


def test_a_hard_limit_is_the_allocators(tmp_path: Path) -> None:
    training = Training("chain")
    limit = 4 << 30
    with ebbtide.Budget(limit, spill=tmp_path, hard=True) as memory:
        for index in range(3):
            training.run(index, memory.step())
        with pytest.raises(OutOfMemoryError) as caught:
            ask_for(limit, training, memory)
        training.run(3, memory.step())
    assert caught.value.fits_bytes is not None
    assert caught.value.fits_bytes <= limit
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.empty(limit, dtype=torch.uint8, device="cuda")
