"""What custom Functions do with what they have saved: give it out as a gradient, look at it, empty it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.decisions import Recompute
from ebbtide.machine import Machine
from ebbtide.run.native import arena_library
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard, Program, Record, assert_identical_within, run_plain
from tests.run.programs import SAID_BY_PYTORCH
from tests.run.test_leaves import Weighing

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]
MACHINES = pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])


class GivingOut(torch.autograd.Function):
    """Returns what it has saved as the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return data * 2 + weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad * 2, factor, None


_give_out: Any = GivingOut.apply


class GivenOut(Program):
    """Plain PyTorch copies what leaves get so, as another node has saved it, too. Then gradients are clipped."""

    def build(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(1 << 15)) for _ in range(3)])

    def factor(self, h: Tensor) -> Tensor:
        """What is saved."""
        return h.mean(0)

    def loss(self, index: int) -> Tensor:
        h = torch.tanh(self.data(index, 16, 1 << 15) * self.model[0])
        factor = self.factor(h)
        h = torch.tanh(_give_out(h, self.model[1], factor))
        h = torch.tanh(_give_out(h, self.model[2], factor))
        return torch.tanh(h).square().mean()

    def compute(self, index: int, guard: Guard) -> Record:
        record = super().compute(index, guard)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return record


class PassedOn(GivenOut):
    """The same, but that another node hands it on to the leaf."""

    def loss(self, index: int) -> Tensor:
        h = torch.tanh(self.data(index, 16, 1 << 15) * self.model[0])
        factor = self.factor(h)
        h = torch.tanh(_give_out(h, self.model[1] + 0.5, factor))
        h = torch.tanh(_give_out(h, self.model[2] + 0.5, factor))
        return torch.tanh(h).square().mean()


class WithoutGraph(GivenOut):
    """The same, of what needs no gradient."""

    def factor(self, h: Tensor) -> Tensor:
        return h.detach().mean(0)


class KeptBesides(GivenOut):
    """The same of one node, and the user has what it has saved."""

    def loss(self, index: int) -> Tensor:
        h = torch.tanh(self.data(index, 16, 1 << 15) * self.model[0])
        self.kept = {"factor": self.factor(h)}
        h = torch.tanh(_give_out(h, self.model[1], self.kept["factor"]))
        return torch.tanh(h * self.model[2]).square().mean()


@pytest.mark.parametrize("kind", [GivenOut, PassedOn, WithoutGraph, KeptBesides])
@MACHINES
def test_what_is_given_out_is_not_taken(kind: type[Program], machine: Machine, tmp_path: Path) -> None:
    """Otherwise two gradients would be one, and be clipped twice."""
    assert_identical_within(kind, run_plain(kind), "80%", machine, tmp_path)


class Tagged(Program):
    """Masks with attributes that the step makes."""

    def build(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    def loss(self, index: int) -> Tensor:
        weigh: Any = Weighing.apply
        h = self.data(index, 512, 512)
        for number, layer in enumerate(self.model):
            mask: Any = (h.detach() > -0.5).float()
            mask.tag = 1.5 + number
            h = weigh(torch.tanh(layer(h)), mask)
        return h.square().mean()


@MACHINES
def test_masks_keep_their_attributes(machine: Machine, tmp_path: Path) -> None:
    """Also where they were away."""
    trial = assert_identical_within(Tagged, run_plain(Tagged), "70%", machine, tmp_path)
    assert trial.plan is not None
    assert trial.plan.binds


class Gaining(torch.autograd.Function):
    """Multiplies by a mask, and by the gain that it has, if any."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return data * mask * float(getattr(mask, "gain", 1.0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask * float(getattr(mask, "gain", 1.0)), None


_gain: Any = Gaining.apply


class Gained(Tagged):
    """Two tensors with the memory of one are saved, of which one has an attribute."""

    def build(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))

    def loss(self, index: int) -> Tensor:
        h = self.data(index, 512, 128)
        for layer in self.model:
            mask: Any = (h.detach() > -0.5).float()
            plain = mask.detach()
            mask.gain = 1.5
            h = _gain(_gain(torch.tanh(layer(h)), plain), mask)
        return h.square().mean()


@MACHINES
def test_attributes_are_those_of_the_tensor_that_was_saved(machine: Machine, tmp_path: Path) -> None:
    """Both are shown by what holds the memory."""
    trial = assert_identical_within(Gained, run_plain(Gained), "60%", machine, tmp_path)
    assert trial.plan is not None
    assert trial.plan.binds


class Emptying(torch.autograd.Function):
    """Frees what it has saved once it has used it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad * x.cos()
        x.untyped_storage().resize_(0)
        return grad


_empty: Any = Emptying.apply


class Emptied(Program):
    """Nobody else has what is emptied."""

    def build(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(128, 128) / 11)])

    def loss(self, index: int) -> Tensor:
        h = self.data(index, 2048, 128) @ self.model[0]
        for _ in range(8):
            h = _empty(h)
        return h.sum()


@pytest.mark.skipif(arena_library() is None, reason="without the arena, what came back cannot be resized")
def test_what_is_emptied_in_a_backward_pass(tmp_path: Path) -> None:
    trial = assert_identical_within(Emptied, run_plain(Emptied), "60%", FAST_DISK, tmp_path)
    assert trial.plan is not None
    assert trial.plan.binds


class InPlaceLeaky(torch.autograd.Function):
    """Says that it has written, for which PyTorch counts another version beside that of the op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(torch.where(x > 0, 1.0, 0.1))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.where(x > 0, 1.0, 0.1)


class MarkedDirty(Program):
    """In-place activations between layers whose results can be computed again."""

    def build(self) -> nn.Module:
        return nn.ModuleList(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128)) for _ in range(4))

    def loss(self, index: int) -> Tensor:
        leak: Any = InPlaceLeaky.apply
        x = self.data(index, 256, 128)
        for layer in self.model:
            x = leak(layer(x) + 0).sigmoid() * x.tanh()
        return x.square().mean()


def test_what_is_counted_twice_is_made_from_and_not_again(tmp_path: Path) -> None:
    """No plan counts on what is not known again when it is captured: what is computed again is compared at once."""
    trial = assert_identical_within(MarkedDirty, run_plain(MarkedDirty), "50%", SLOW_DISK, tmp_path)
    assert any(isinstance(decision, Recompute) for decision in trial.decisions)
    assert trial.states.count("verify") == 1
