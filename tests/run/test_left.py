"""A step that leaves its plan: what that has held moves out, as what is saved later does, before memory is short."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.machine import Machine
from ebbtide.run.meter import PeakMeter
from ebbtide.run.safe import SafePolicy
from ebbtide.run.tiers import DiskTier
from tests.run.harness import FAST_DISK, SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")

WIDTH, BATCH, BLOCKS = 64, 512, 8


class Odd(nn.Module):
    """Blocks, of which one may be followed by another that no other step has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))
        self.odd = nn.Sequential(nn.Linear(WIDTH, WIDTH + 8), nn.Tanh(), nn.Linear(WIDTH + 8, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, odd: int) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == odd:
                x = self.odd(x)
        return x.square().mean()


def gradients(model: Odd) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("odd", [0, 2, 4])
def test_a_step_that_leaves_its_plan_stays_within_the_limit(machine: Machine, odd: int, tmp_path: Path) -> None:
    plain, model, data = Odd(), Odd(), torch.randn(BATCH, WIDTH)
    with ebbtide.Budget("70%", spill=tmp_path, machine=machine) as memory:
        for _ in range(8):
            with memory.step():
                model(data, -1).backward()
            model.zero_grad()
        assert memory.state == "planned"
        with PeakMeter() as meter, memory.step():
            model(data, odd).backward()
        assert memory.measured[-1].left
        assert memory.limit_bytes is not None
        assert meter.peak_bytes <= memory.limit_bytes
    plain(data, odd).backward()
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


class _Counting:
    """Memory that is short, and counts how often somebody asks how short."""

    device = torch.device("cpu")
    asked = 0

    def size_of(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def allocated_bytes(self) -> int:
        self.asked += 1
        return 1 << 30

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 1 << 30


def test_what_is_live_is_asked_once_where_nothing_can_leave(tmp_path: Path) -> None:
    """A CUDA device takes long to say; all that was saved stays, as somebody else has it, too."""
    memory, kept = _Counting(), [torch.zeros(1 << 14) for _ in range(50)]
    with contextlib.closing(DiskTier(tmp_path)) as disk:
        policy = SafePolicy(1 << 20, lambda: disk, memory=memory)
        handles = [policy.pack(tensor) for tensor in kept[1:]]
        before = memory.asked
        handles.append(policy.pack(kept[0]))
        assert memory.asked - before < 4
        assert disk.written_bytes == 0
