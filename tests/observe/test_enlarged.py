"""Tensors that an op gives more memory count with what they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ebbtide.machine import Machine
from ebbtide.observe.recorder import Recorder
from ebbtide.plan import plain_peak_bytes
from ebbtide.run.meter import PeakMeter
from tests.run.harness import FAST_DISK, SLOW_DISK, Program, assert_identical_within, run_plain
from tests.run.programs import SAID_BY_PYTORCH, mlp

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

COUNT = 1 << 16


def by_out() -> None:
    """A result put into a tensor of nothing."""
    data, found = torch.ones(COUNT), torch.empty(0)
    torch.mul(data, 2, out=found)


def by_resizing() -> None:
    """A tensor that grows twice: each time the former memory is there while it is copied."""
    data = torch.ones(COUNT // 4)
    data.resize_(COUNT // 2)
    data.resize_(COUNT)


def by_sorting() -> None:
    """Two results, put into a tensor of nothing and into one that is large enough."""
    data, order = torch.ones(COUNT), torch.empty(2 * COUNT, dtype=torch.int32)
    torch.sort(data, out=(torch.empty(0), order.view(torch.int64)))


def by_setting() -> None:
    """None has more memory: one shows another one's."""
    torch.empty(16).set_(torch.ones(COUNT).untyped_storage())


def held_outside() -> None:
    """What is larger was there before; it is there no longer than the code that made it so."""
    torch.add(torch.ones(COUNT), 1, out=_outside.zero_())


_outside = torch.empty(16)
CASES = {
    by_out: 8 * COUNT,
    by_resizing: 6 * COUNT,
    by_sorting: 16 * COUNT,
    by_setting: 4 * COUNT + 64,
    held_outside: 8 * COUNT + 64,
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("code", CASES)
def test_the_peak(code: Callable[[], None]) -> None:
    global _outside
    _outside = torch.empty(16)
    with PeakMeter() as meter:
        code()
    assert meter.peak_bytes == CASES[code]
    _outside = torch.empty(16)
    with Recorder() as recorder:
        code()
    step = recorder.finish()
    assert plain_peak_bytes(step) == CASES[code]
    assert step.ops[-1].workspace_bytes == 0


class Scratch(Program):
    """Looks at what layers give in a buffer that has to grow each time."""

    def build(self) -> nn.Module:
        return mlp(64, 256, 256, 256, 64)

    def loss(self, index: int) -> Tensor:
        h = self.data(index, 256, 64)
        for layer in self.model:
            h = layer(h)
            with torch.no_grad():
                scratch = torch.empty(0)
                torch.exp(h.detach(), out=scratch)
                scale = torch.empty(0).resize_(h.shape).copy_(scratch).mean()
            h = h / scale
        return h.square().mean()


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_a_step_with_buffers_that_grow(machine: Machine, tmp_path: Path) -> None:
    trial = assert_identical_within(Scratch, run_plain(Scratch), "60%", machine, tmp_path, may_raise_limit=1)
    assert trial.plan is not None
    assert trial.plan.binds
