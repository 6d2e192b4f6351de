"""Operators that others have defined, whose code runs as it does without a dispatch mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.machine import Machine
from tests.run.harness import FAST_DISK, SLOW_DISK, Program, assert_identical_within, run_plain
from tests.run.programs import SAID_BY_PYTORCH, mlp

pytestmark = [
    pytest.mark.usefixtures("nothing_left", "quick_plans"),
    *SAID_BY_PYTORCH,
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]
WIDTH = 128


@torch.library.custom_op("ebbtide_tests::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    grad = grad.to(x.dtype)
    return grad @ weight.t(), x.t() @ grad


project.register_autograd(_back, setup_context=_keep)
_library = torch.library.Library("ebbtide_tests", "FRAGMENT")
_library.define("gate(Tensor x, Tensor weight) -> Tensor")
_library.impl("gate", lambda x, weight: torch.sigmoid(x * weight), "CPU")


class Projected(Program):
    """It multiplies within itself, under autocast, as does PyTorch's own bilinear layer."""

    def build(self) -> nn.Module:
        self.place = 0
        parts = [mlp(WIDTH, WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH), nn.Bilinear(16, 16, 16)]
        return nn.ModuleList([*parts, nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)])])

    def loss(self, index: int) -> Tensor:
        first, second, bilinear, (weight,) = self.model
        h = first(self.data(index, 1024, WIDTH))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = project(h, weight)
            few = bilinear(h[:64, :16].float(), h[64:128, :16].float())
        return second(h.float()).square().mean() + few.float().square().mean()


class Gated(Program):
    """Its kernel is made of ops that autograd differentiates, as nobody has given it a formula. What is saved within it
    is not counted."""

    steady = False

    def build(self) -> nn.Module:
        return nn.ModuleList([mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH), nn.ParameterList([torch.randn(WIDTH)])])

    def loss(self, index: int) -> Tensor:
        first, second, (weight,) = self.model
        h = torch.tanh(first(self.data(index, 1024, WIDTH)))
        h = h + torch.ops.ebbtide_tests.gate(h, weight)
        return second(h).square().mean()


@pytest.mark.parametrize("kind", [Projected, Gated])
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_they_do_as_without_a_mode(kind: type[Program], machine: Machine, tmp_path: Path) -> None:
    assert_identical_within(kind, run_plain(kind), "90%", machine, tmp_path)
