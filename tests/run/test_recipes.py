"""A recipe gives back what the captured calls made, whatever view of a value they read."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.errors import RecipeError
from ebbtide.observe.schema import operator_info
from ebbtide.run.calls import Argument, KnownOp, capture
from ebbtide.run.holdings import Holding, View, view_of
from ebbtide.run.recipes import Recipe
from ebbtide.run.versions import ChangedError, version_of
from tests.run.harness import (
    SLOW_DISK,
    Guard,
    Program,
    Record,
    assert_identical_within,
    gradients_beside_a_buffer,
    run_plain,
)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "transposed": lambda x: x.t(),
    "part": lambda x: x[1:, ::2],
    "conjugated": torch.conj,
    "conjugated and transposed": lambda x: x.mH,
    "negated": lambda x: x.conj().imag,
    "both": lambda x: torch._neg_view(x.conj()),
    "real": torch.view_as_real,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_value_is_read_again_as_it_was(view: str) -> None:
    value = torch.randn(6, 5, dtype=torch.complex64)
    read = VIEWS[view](value)
    known = KnownOp("aten.mul.Tensor", (0,), (1,), (), frozenset())
    call, _ = capture(torch.ops.aten.mul.Tensor, (read, 2.0), {}, known)
    expected = read * 2.0
    leaf = Holding()
    leaf.fill(value)
    again = Recipe(1, [call], {0: leaf}, (0,)).replay()
    assert torch.equal(again, expected)
    assert again.stride() == expected.stride()


def test_autocast_where_it_is_made_again_changes_nothing() -> None:
    """As where a backward pass runs within it: what it had cast then was captured as calls of their own."""
    value = torch.randn(6, 6)
    known = KnownOp("aten.mm.default", (0,), (1,), (), frozenset())
    call, _ = capture(torch.ops.aten.mm.default, (value, value), {}, known)
    leaf = Holding()
    leaf.fill(value)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(value, value).dtype is torch.bfloat16
        again = Recipe(1, [call], {0: leaf}, (0,)).replay()
    assert torch.equal(again, value @ value)


class _SeesGradients(TorchDispatchMode):
    """Notes of each op whether gradients were on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(torch.is_grad_enabled())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_gradients_are_on_as_they_were(then: bool, now: bool) -> None:
    """Some ops choose by that what they compute with."""
    value = torch.randn(6, 6)
    known = KnownOp("aten.mm.default", (0,), (1,), (), frozenset())
    with torch.set_grad_enabled(then):
        call, _ = capture(torch.ops.aten.mm.default, (value, value), {}, known)
    leaf = Holding()
    leaf.fill(value)
    with _SeesGradients() as mode, torch.set_grad_enabled(now):
        Recipe(1, [call], {0: leaf}, (0,)).replay()
    assert mode.seen[-1] is then


def dropped_product() -> tuple[Holding, View, Tensor]:
    """A product that was saved, by a view, and is dropped; and the product itself, which somebody else has."""
    value = torch.randn(6, 5)
    known = KnownOp("aten.mul.Tensor", (0,), (1,), (), frozenset())
    call, _ = capture(torch.ops.aten.mul.Tensor, (value, 2.0), {}, known)
    leaf, holding, product = Holding(), Holding(), value * 2.0
    leaf.fill(value)
    holding.fill(product)
    view = view_of(holding, product, 0)
    holding.drop(Recipe(1, [call], {0: leaf}, (0,)))
    return holding, view, product


@pytest.mark.parametrize("writes", [False, True])
def test_who_writes_to_what_was_dropped_is_told(writes: bool) -> None:
    """As by PyTorch, though what is made again is what was saved."""
    holding, view, product = dropped_product()
    expected = product.clone()
    if not writes:
        assert torch.equal(view.show(), expected)
    product.t()[0].zero_()
    for _ in range(2):  # not only where it is made again
        with pytest.raises(RuntimeError, match=r"\[torch.float32 \[6, 5\]\] is at version 1; expected version 0"):
            view.show()
        holding.arrive()


def test_what_was_made_again_is_known_where_it_is_saved_once_more() -> None:
    """As in a backward pass that is differentiated: it would be held as a stranger, beside itself."""
    holding, view, product = dropped_product()
    assert holding.knows(version_of(product))
    again = view.show()
    assert again.data_ptr() != product.data_ptr()
    assert holding.knows(version_of(again))
    assert holding.knows(version_of(product))
    assert not holding.knows(version_of(product.clone()))


def test_what_cannot_be_made_again_now_is_asked_for_later() -> None:
    """A recipe that was refused once is still there."""
    value = torch.ones(4)
    known = KnownOp("aten.mul.Tensor", (0,), (1,), (), frozenset())
    call, _ = capture(torch.ops.aten.mul.Tensor, (value, 2.0), {}, known)
    leaf, holding = Holding(), Holding()
    leaf.fill(value)
    holding.fill(value * 2.0)
    holding.drop(Recipe(1, [call], {0: leaf}, (0,)))
    value.zero_()
    for _ in range(2):
        with pytest.raises(ChangedError):
            holding.arrive()


@pytest.fixture
def cudnn_on_cpu() -> Iterator[None]:
    """The CPU has cuDNN's batch norm: it updates the running statistics, of which its schema says nothing."""
    aten: Any = torch.ops.aten

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return (*aten.native_batch_norm(*arguments), arguments[0].new_empty(0))

    def backward(x: Tensor, gradient: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
        mean, variance, saved_mean, saved_variance, epsilon, _ = others
        statistics = mean, variance, saved_mean, saved_variance
        found: tuple[Tensor, ...] = aten.native_batch_norm_backward(
            gradient, x, weight, *statistics, True, epsilon, [True] * 3
        )
        return found

    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")
    yield
    library._destroy()


class CudnnNorm(nn.BatchNorm2d):
    """As CUDA does it."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var, True, 0.1, self.eps
        return torch.cudnn_batch_norm(input, self.weight, self.bias, *statistics)[0]


class CudnnNormed(Program):
    """Convolutions with such norms."""

    def build(self) -> nn.Module:
        layers = [(nn.Conv2d(16, 16, 3, padding=1), CudnnNorm(16), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(part for layer in layers for part in layer))

    def loss(self, index: int) -> Tensor:
        loss: Tensor = self.model(self.data(index, 8, 3, 20, 20)).square().mean()
        return loss


@pytest.mark.usefixtures("cudnn_on_cpu", "nothing_left", "quick_plans")
def test_cudnn_updates_running_statistics_once(tmp_path: Path) -> None:
    trial = assert_identical_within(CudnnNormed, run_plain(CudnnNormed), "60%", SLOW_DISK, tmp_path)
    assert trial.states[-1] == "planned"
    assert any(isinstance(decision, Recompute) for decision in trial.decisions)


class Switched(Program):
    """Norms are in training in some steps, and in evaluation in others that save tensors of the same shapes."""

    observed = True
    """Whether they are in training in the observed steps."""
    steady = False

    def build(self) -> nn.Module:
        norms = nn.ModuleList(nn.BatchNorm1d(128, affine=False) for _ in range(4))
        for norm in norms:
            norm.register_buffer("num_batches_tracked", None)  # to count batches takes an op
        return nn.ModuleDict({"norms": norms, "layers": nn.ModuleList(nn.Linear(128, 16) for _ in norms)})

    def compute(self, index: int, guard: Guard) -> Record:
        norms, layers = self.model["norms"].train((index % 3 < 2) is self.observed), self.model["layers"]
        given = self.data(index, 1024, 128)
        with guard():
            loss = sum(layer(norm(given)).square().mean() for norm, layer in zip(norms, layers, strict=True))
            loss.backward()
        return {"loss": loss}


class SwitchedLate(Switched):
    """They are in training once the plan is there."""

    observed = False


@pytest.mark.usefixtures("nothing_left", "quick_plans")
@pytest.mark.parametrize("program", [Switched, SwitchedLate])
def test_norms_that_are_switched_between_steps(program: type[Program], tmp_path: Path) -> None:
    trial = assert_identical_within(program, run_plain(program), "60%", SLOW_DISK, tmp_path)
    assert any(isinstance(decision, Recompute) for decision in trial.every_decision)


@pytest.mark.parametrize("name", ["batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"])
def test_statistics_over_devices_are_gathered_once(name: str) -> None:
    """Synchronised batch norm writes them, and its schema says nothing of it."""
    assert operator_info(getattr(torch.ops.aten, name).default).replay == "opaque"


@pytest.mark.usefixtures("nothing_left", "quick_plans")
def test_what_is_written_to_in_a_later_step_is_refused_once(tmp_path: Path) -> None:
    """A buffer that values are computed from; from the next step on they are not."""
    layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
    gradients = functools.partial(gradients_beside_a_buffer, layers, torch.zeros(128), 1024)

    expected = gradients(False, contextlib.nullcontext)
    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(13):
            writes = index in (6, 9, 12)
            if index == 6:
                with pytest.raises(RecipeError, match="changed in place between forward and backward"):
                    gradients(writes, memory.step)
            else:
                assert all(map(torch.equal, gradients(writes, memory.step), expected)), index
        assert memory.plan is not None
        assert memory.plan.binds
        assert memory.measured[-1].state in ("rehearse", "planned")


class Scale(nn.Module):
    """Its parameter has no memory between its forward and its backward pass, as where parameters are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(256, 128))
        self.shard = torch.empty(0)
        self.register_full_backward_pre_hook(lambda _module, _gradients: self.gather())

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        self.shard = self.scale.detach().clone()
        self.scale.untyped_storage().resize_(0)
        return scaled

    def gather(self) -> None:
        self.scale.untyped_storage().resize_(4 * self.scale.numel())
        with torch.no_grad(), _unsafe_preserve_version_counter(self.scale):
            self.scale.copy_(self.shard)


class Sharded(Program):
    """What is saved of a scaled tensor is wanted before the scale is there again."""

    def build(self) -> nn.Module:
        return nn.Sequential(*(part for _ in range(4) for part in (Scale(), nn.GELU(), nn.Linear(128, 128), nn.Tanh())))

    def loss(self, index: int) -> Tensor:
        loss: Tensor = self.model(self.data(index, 256, 128).requires_grad_()).square().mean()
        return loss


@pytest.mark.usefixtures("nothing_left", "quick_plans")
@pytest.mark.parametrize("verify", [True, False])
def test_what_reads_emptied_storages_is_never_run_again(verify: bool, tmp_path: Path) -> None:
    def prepare(memory: ebbtide.Budget) -> None:
        memory._loop.verify = verify

    trial = assert_identical_within(Sharded, run_plain(Sharded), "60%", SLOW_DISK, tmp_path, prepare, may_raise_limit=1)
    assert trial.states[-1] == "planned"
    assert not trial.banned
    assert any(isinstance(decision, Recompute) for decision in trial.decisions)


def test_a_leaf_that_was_emptied_is_no_leaf() -> None:
    external = torch.ones(4)
    known = KnownOp("aten.mul.Tensor", (0,), (1,), (), frozenset({0}))
    call, _ = capture(torch.ops.aten.mul.Tensor, (external, 2.0), {}, known)
    recipe = Recipe(1, [call], {}, ())
    assert torch.equal(recipe.replay(), external * 2)
    external.untyped_storage().resize_(0)
    with pytest.raises(RecipeError, match="memory taken from it"):
        recipe.replay()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_small_external_tensor_is_read_itself_where_it_has_the_same_bits(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.0, 1.0, math.inf, math.nan]).to(dtype)
    argument = Argument(-1, numbers, True)
    assert argument.as_captured(numbers) is numbers
    with _unsafe_preserve_version_counter(numbers):
        numbers.neg_() if dtype.itemsize > 1 else numbers.copy_((-numbers.float()).to(dtype))
    found = argument.as_captured(numbers)
    assert found is argument.copy
    assert math.copysign(1, float(found[0])) == 1
