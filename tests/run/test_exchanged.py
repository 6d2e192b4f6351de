"""Parameters whose data is there only while their layer runs, as where they are shared out among processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Keep
from ebbtide.machine import Machine
from ebbtide.run.meter import PeakMeter
from tests.run.harness import FAST_DISK, SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

WIDTH, ROWS, STEPS = 128, 1024, 9


class Product(torch.autograd.Function):
    """A product that saves the weight itself, not a view of it, which would keep its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Weight(nn.Parameter):
    """A parameter with a class of its own, as libraries have them."""


class Image(Tensor):
    """A tensor with a class of its own, of which parameters are made."""


Make = Callable[[Tensor], nn.Parameter]
MAKES: dict[str, Make] = {
    "parameter": nn.Parameter,
    "subclass": Weight,
    "of a subclass": lambda data: nn.Parameter(data.as_subclass(Image)),
}


class Layer(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.weight = make(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result.tanh().exp()


class Sharded(nn.Sequential):
    """Layers whose weights are empty but for when they run, forward or backward.

    Args:
        backward_scale: of the weights that come back for the backward pass.
        make: makes weights.
    """

    def __init__(self, backward_scale: float = 1.0, make: Make = nn.Parameter) -> None:
        torch.manual_seed(0)
        super().__init__(*(Layer(make) for _ in range(8)))
        for layer in self.children():
            assert isinstance(layer, Layer)
            shard = layer.weight.detach().clone()
            layer.register_forward_pre_hook(_gather(shard, 1.0))
            layer.register_forward_hook(_drop)
            layer.register_full_backward_pre_hook(_gather(shard, backward_scale))
            layer.weight.register_post_accumulate_grad_hook(_empty)
            _drop(layer)

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.zero_grad()
        return found


def _gather(shard: Tensor, scale: float) -> Callable[..., None]:
    def gather(layer: Layer, *_: object) -> None:
        layer.weight.data = shard * scale

    return gather


def _drop(layer: Any, *_: object) -> None:
    _empty(layer.weight)


def _empty(parameter: Tensor) -> None:
    parameter.data = torch.empty(0)


def step(model: nn.Module) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x.requires_grad_()).square().mean().backward()


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("limit", ["150%", "60%"])
def test_parameters_take_memory_only_while_they_are_there(machine: Machine, limit: str, tmp_path: Path) -> None:
    model = Sharded()
    with PeakMeter() as plain:
        step(model)
    expected = model.gradients()
    with ebbtide.Budget(limit, spill=tmp_path, machine=machine) as memory:
        for _ in range(STEPS):
            with PeakMeter() as meter, memory.step():
                step(model)
            assert all(map(torch.equal, model.gradients(), expected))
        assert memory.limit_bytes is not None
        assert memory.plan is not None
        assert meter.peak_bytes <= min(memory.limit_bytes, plain.peak_bytes)
        assert memory.state == ("idle" if limit == "150%" else "planned")
        assert memory.measured[-1].left == ""
        assert any(not isinstance(decision, Keep) for decision in memory.plan.decisions) == (limit == "60%")


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_the_backward_pass_reads_what_is_there_by_then(machine: Machine, make: str, tmp_path: Path) -> None:
    """Data that has been given to a parameter meanwhile, which its version does not count."""
    model, same = Sharded(backward_scale=0.5, make=MAKES[make]), Sharded(make=MAKES[make])
    step(model)
    expected = model.gradients()
    step(same)
    assert not any(map(torch.equal, same.gradients()[:-1], expected[:-1]))
    with ebbtide.Budget("60%", spill=tmp_path, machine=machine) as memory:
        for _ in range(STEPS):
            with memory.step():
                step(model)
            assert all(map(torch.equal, model.gradients(), expected))
