"""Custom Functions find the leaves that they have saved, with their gradients and attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ebbtide
from ebbtide.machine import Machine
from ebbtide.observe.leaves import show_leaves
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard, Program, Record, assert_identical_within, run_plain
from tests.run.programs import SAID_BY_PYTORCH

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]


class Gathering(torch.autograd.Function):
    """Adds to its weight's gradient itself, in one of two places."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(data, weight)
        return data @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        data, weight = ctx.saved_tensors
        more = data.t() @ grad
        if hasattr(weight, "main_grad"):
            weight.main_grad.add_(more)
        elif weight.grad is None:
            weight.grad = more
        else:
            weight.grad += more
        return grad @ weight.t(), None


_gather: Any = Gathering.apply


class Fused(Program):
    """Parameters as Megatron has them, and others, one of which is no parameter."""

    def build(self) -> nn.Module:
        self.own = (torch.randn(128, 128) / 11).requires_grad_()
        return nn.ParameterList([nn.Parameter(torch.randn(128, 128) / 11) for _ in range(5)])

    def loss(self, index: int) -> Tensor:
        self.own.grad = None
        h = self.data(index, 256, 128)
        for place, weight in enumerate([*self.model, self.own]):
            if place % 2:
                weight.main_grad = torch.zeros_like(weight)
            h = torch.tanh(_gather(h, weight)) + h
        return h.square().mean()

    def run(self, index: int, guard: Any) -> Record:
        """Also shows what the parameters have besides."""
        record = super().run(index, guard)
        return record | {f"main {place}": self.model[place].main_grad.clone() for place in (1, 3)}


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
@pytest.mark.parametrize("limit", ["100%", "60%"])
def test_gradients_that_functions_gather_themselves(limit: str, machine: Machine, tmp_path: Path) -> None:
    expected = run_plain(Fused)
    assert "grad of 0" in expected[0]
    trial = assert_identical_within(Fused, expected, limit, machine, tmp_path)
    assert trial.plan is not None
    assert trial.plan.binds == (limit != "100%")


class Looking(torch.autograd.Function):
    """Notes what it finds in its backward pass."""

    found: Tensor

    @staticmethod
    def forward(ctx: Any, data: Tensor, nothing: None) -> Tensor:
        ctx.save_for_backward(nothing, data)
        return data.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        nothing, Looking.found = ctx.saved_tensors
        assert nothing is None
        return grad, None


_look: Any = Looking.apply


def test_what_hooks_of_the_user_put_in_its_place_stays() -> None:
    show_leaves()
    leaf = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor * 2, lambda packed: packed):
        _look(leaf, None).sum().backward()
    assert Looking.found.tolist() == [2, 2, 2]
    _look(leaf, None).sum().backward()
    assert Looking.found is leaf


def test_backward_in_inference_mode() -> None:
    """It finds the leaf there, too, and whatever else it was given where hooks made that in this mode."""
    show_leaves()
    leaf = torch.ones(3, requires_grad=True)
    loss = _look(leaf, None).sum()
    with torch.inference_mode():
        loss.backward()
    assert Looking.found is leaf
    with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda packed: packed.clone()):
        loss = _look(leaf, None).sum()
    with torch.inference_mode():
        loss.backward()
    assert Looking.found.tolist() == [1, 1, 1]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_they_are_found_in_a_step_that_is_only_observed() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    main_grad = torch.zeros(8, 8)
    vars(weight)["main_grad"] = main_grad
    data = torch.ones(4, 8, requires_grad=True)
    step = ebbtide.observe_step(lambda: _gather(data.tanh(), weight).sum().backward())
    assert len(step.saved) == 3
    assert bool((main_grad > 0).all())


class GivingOut(torch.autograd.Function):
    """Returns what it has saved as the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor) -> Tensor:
        factor = data.mean(0)
        ctx.save_for_backward(factor, data)
        return data * 2 + weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        factor, data = ctx.saved_tensors
        return grad * 2 + data * 0, factor


_give_out: Any = GivingOut.apply


class ThreePasses(Program):
    """Its gradients add up over three passes through one graph."""

    def build(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(1 << 15)) for _ in range(4)])

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            h = self.data(index, 8, 1 << 15)
            for weight in self.model:
                h = torch.tanh(_give_out(h, weight))
            loss = h.square().mean()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        return {"loss": loss}


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_gradients_that_functions_have_saved_are_added_to(machine: Machine, tmp_path: Path) -> None:
    """A leaf without a gradient takes the first one as it is, unless somebody else refers to it."""
    assert_identical_within(ThreePasses, run_plain(ThreePasses), "70%", machine, tmp_path)


class Tagged(Program):
    """A Function reads an attribute of a mask that it has saved."""

    def build(self) -> nn.Module:
        self.mask = torch.ones(64, 1 << 12)
        self.mask.tag = 1.5  # type: ignore[attr-defined]
        return nn.Sequential(*(nn.Linear(1 << 12, 1 << 12, bias=False) for _ in range(2)))

    def loss(self, index: int) -> Tensor:
        h = self.data(index, 64, 1 << 12)
        for layer in self.model:
            h = _weigh(torch.tanh(layer(h)), self.mask)
        return h.square().mean()


class Weighing(torch.autograd.Function):
    """Multiplies by a mask, whose attribute says by how much more."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mask: Any) -> Tensor:
        ctx.save_for_backward(mask)
        return data * mask * float(mask.tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask * mask.tag, None


_weigh: Any = Weighing.apply


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_buffers_that_functions_save_keep_their_attributes(machine: Machine, tmp_path: Path) -> None:
    assert_identical_within(Tagged, run_plain(Tagged), "70%", machine, tmp_path, may_raise_limit=1)
