"""Tensors with a class of their own, which are ordinary ones to kernels, move and are computed again as those do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.decisions import Offload, Recompute
from ebbtide.machine import Machine
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard, Program, Record, assert_identical_within, run_plain
from tests.run.programs import Chain, mlp
from tests.run.test_identical import Forbidden

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


class Image(Tensor):
    """A tensor with a name, of which results know nothing, and code that runs with every function on it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Image.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def image(tensor: Tensor, name: str = "") -> Image:
    """``tensor`` as one."""
    made = tensor.as_subclass(Image)
    vars(made)["name"] = name
    return made


class Weighed(torch.autograd.Function):
    """A product whose gradient depends on the name of what it was multiplied with."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values)
        return weights * values

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, _ = ctx.saved_tensors
        assert type(weights) is Image
        return None, gradients[0] * weights.as_subclass(Tensor) * len(vars(weights)["name"])


class Images(Program):
    """All that is saved is one."""

    def build(self) -> nn.Module:
        return mlp(64, 256, 256, 16)

    def loss(self, index: int) -> Tensor:
        scores = self.model(image(self.data(index, 512, 64)))
        assert type(scores) is Image
        weights = image(self.data(index + 100, 512, 16) * 1.0, "a" * (index + 2))
        weighed = Weighed.apply(weights, scores.tanh())  # type: ignore[no-untyped-call]
        return weighed.sin().square().mean().as_subclass(Tensor)


@pytest.mark.parametrize("limit", ["70%", "40%"])
@pytest.mark.parametrize(("machine", "kind"), [(FAST_DISK, Offload), (SLOW_DISK, Recompute)], ids=["fast", "slow"])
def test_they_leave(limit: str, machine: Machine, kind: type, tmp_path: Path) -> None:
    trial = assert_identical_within(Images, run_plain(Images), limit, machine, tmp_path, may_raise_limit=1)
    assert trial.plan is not None
    assert sum(isinstance(decision, kind) for decision in trial.plan.decisions) > 1
    assert trial.plan.peak_bytes < 0.8 * trial.plan.plain_peak_bytes


class Counted(Images):
    """Notes how often the class's own code ran in a step."""

    def compute(self, index: int, guard: Guard) -> Record:
        before = Image.calls
        record = super().compute(index, guard)
        assert {type(parameter.grad) for parameter in self.model.parameters()} == {Tensor}
        return {**record, "calls": torch.tensor(Image.calls - before)}


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_their_own_code_runs_as_often_as_without_a_budget(machine: Machine, tmp_path: Path) -> None:
    expected = run_plain(Counted)
    assert int(expected[0]["calls"]) > 5
    assert_identical_within(Counted, expected, "50%", machine, tmp_path, may_raise_limit=1)


class Penalized(Counted):
    """Has a second backward pass, of which the first is a part."""

    def loss(self, index: int) -> Tensor:
        scores = self.model(image(self.data(index, 512, 64))).sin()
        steepness = torch.autograd.grad(scores.square().sum(), self.model[0].weight, create_graph=True)[0]
        return (scores.mean() + steepness.square().mean()).as_subclass(Tensor)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_gradients_of_gradients(machine: Machine, tmp_path: Path) -> None:
    assert_identical_within(Penalized, run_plain(Penalized), "60%", machine, tmp_path, may_raise_limit=1)


class WrittenLater(Forbidden):
    """One is written to after it was saved."""

    def begin(self, index: int) -> tuple[Tensor, Tensor]:
        hidden = image(self.model[:4](self.data(index, 256, 64))).sigmoid()
        return hidden, self.model[4:](hidden.sin()).square().mean().as_subclass(Tensor)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
@pytest.mark.parametrize("limit", ["90%", "60%"])
def test_a_forbidden_in_place_op_is_still_refused(limit: str, machine: Machine, tmp_path: Path) -> None:
    assert_identical_within(WrittenLater, run_plain(WrittenLater), limit, machine, tmp_path)


class Fixed(Tensor):
    """Fixed-point numbers: products are rounded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result if func is not torch.mul else (result.as_subclass(Tensor) * 256).round().as_subclass(cls) / 256


@torch.library.custom_op("ebbtide_tests::fixed_square", mutates_args=())
def fixed_square(x: Tensor) -> Tensor:
    """Python code, which uses a subclass of its own."""
    number = x.detach().as_subclass(Fixed)
    return torch.mul(number, number).as_subclass(Tensor)


def _fixed_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return gradient * 2 * x.sign() * fixed_square(x)


fixed_square.register_autograd(
    _fixed_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


class OwnOperator(Chain):
    """An operator in Python finds the class of its own tensors in the forward and in the backward pass."""

    def loss(self, index: int) -> Tensor:
        scores: Tensor = fixed_square(self.model(self.data(index, 512, 64)))
        return scores.square().mean()


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_an_operator_in_python_finds_its_own_class(machine: Machine, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 8)
    assert not torch.equal(fixed_square(x), x * x)
    assert_identical_within(OwnOperator, run_plain(OwnOperator), "70%", machine, tmp_path)
