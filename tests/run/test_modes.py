"""The capture mode: on where calls are captured, off in backward passes, and never in the way of the user's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.machine import Machine
from ebbtide.run.capture import CaptureMode
from ebbtide.run.meter import PeakMeter
from ebbtide.run.stretches import BRIDGED
from tests.conftest import modes_left
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard
from tests.run.test_gone_over import same

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

STEPS = 7
Compute = Callable[[nn.Module, Tensor], None]


class Counter(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def network(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), activation(), nn.LayerNorm(64), activation()) for _ in range(4))
    )


def plain_peak(compute: Compute, model: nn.Module, x: Tensor) -> int:
    with PeakMeter() as meter:
        compute(model, x)
    return meter.peak_bytes


def run(compute: Compute, activation: type[nn.Module], directory: Path, machine: Machine = SLOW_DISK) -> None:
    """Steps that compute values again, or move some, with the gradients of plain ones; no mode is left after any."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    plain, model = network(activation), network(activation)
    limit_bytes = int(0.75 * plain_peak(compute, network(activation), x))
    with ebbtide.Budget(limit_bytes, spill=directory, machine=machine) as memory:
        for step in range(STEPS):
            compute(plain, x)
            with memory.step():
                compute(model, x)
            assert modes_left() == 0, f"after step {step}"
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert torch.equal(one.grad, other.grad)
            plain.zero_grad()
            model.zero_grad()
        assert memory.plan is not None
        kind = Recompute if machine is SLOW_DISK else Offload
        assert any(isinstance(decision, kind) for decision in memory.plan.decisions)
        assert [measured.left for measured in memory.measured if measured.left] == []
        assert memory.measured[-1].state == "planned"


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh])
def test_no_mode_is_on_in_backward_passes(
    activation: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the op that saves the last tensor is captured, behind which no save comes to take the mode off at."""
    seen: list[str] = []
    original = vars(CaptureMode)["__torch_dispatch__"]

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_graph_task_id() >= 0:
            seen.append(str(func))
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(CaptureMode, "__torch_dispatch__", dispatch)
    run(lambda model, x: model(x).square().mean().backward(), activation, tmp_path)
    assert seen == []


def test_the_mode_sees_nothing_of_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it go off and on again between two ops that run again, for the few that do not."""
    hidden: list[str] = []
    ticks: list[int] = []
    dispatch, begin, end = CaptureMode.__torch_dispatch__, CaptureMode.begin, CaptureMode.end

    def watched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.hidden:
            hidden.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    def on(self: CaptureMode, tick: int, between_ops: bool) -> None:
        if not self.entered:
            ticks.append(tick)
        begin(self, tick, between_ops)

    def off(self: CaptureMode) -> None:
        if self.entered:
            ticks.append(self.tick)
        end(self)

    def compute(model: nn.Module, x: Tensor) -> None:
        hidden.clear()
        ticks.clear()
        model(x).square().mean().backward()

    monkeypatch.setattr(CaptureMode, "__torch_dispatch__", watched)
    monkeypatch.setattr(CaptureMode, "begin", on)
    monkeypatch.setattr(CaptureMode, "end", off)
    run(compute, nn.GELU, tmp_path)
    assert ticks
    assert all(on - off > BRIDGED for off, on in zip(ticks[1::2], ticks[2::2], strict=False))
    assert hidden == []


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU])
@pytest.mark.parametrize("last", [torch.square, torch.tanh])
def test_gradient_penalties(activation: type[nn.Module], last: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Autograd saves tensors in the middle of a backward pass, and more ops run after it."""

    def compute(model: nn.Module, x: Tensor) -> None:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(last(model(x)).sum(), x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().mean() + model(x).square().mean()
        loss.backward()

    run(compute, activation, tmp_path)


def product(h: Tensor) -> Tensor:
    """A loss whose gradient has another formula while a mode is on."""
    return (1 + 0.1 * h.tanh()).prod(-1).square().mean()


def test_nodes_that_ask_find_no_mode_where_it_stays_on(tmp_path: Path) -> None:
    """As it does where autograd saves within `vmap`."""

    def compute(model: nn.Module, x: Tensor) -> None:
        product(torch.vmap(lambda row: row.sin() * row.cos())(model(x))).backward()

    run(compute, nn.GELU, tmp_path)


def test_nodes_that_ask_find_no_mode_where_backward_passes_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those of ops that run where nothing is captured; and each counts as the one op that it was recorded as."""
    captured: list[bool] = []
    original = CaptureMode._run_known

    def run_known(self: Any, *call: Any) -> Any:
        captured.append(torch._C._current_graph_task_id() >= 0)
        return original(self, *call)

    def compute(model: nn.Module, x: Tensor) -> None:
        x, level = x.clone().requires_grad_(), torch.tensor(0.1, requires_grad=True)
        made = model(x).masked_fill(x < 0, level).sin().square().sum()
        gradient, slope = torch.autograd.grad(made, [x, level], create_graph=True)
        ((gradient.norm(dim=1) - 1).square().mean() * slope + model(x).square().mean()).backward()

    monkeypatch.setattr(CaptureMode, "_run_known", run_known)
    run(compute, nn.GELU, tmp_path)
    assert any(captured)


@pytest.mark.parametrize("asks", [lambda p: (1 - 0.02 * p).prod(1).log(), lambda p: p.masked_fill(p > 0.5, p.mean())])
def test_nodes_that_ask_find_no_mode_where_what_comes_behind_their_pass_is_captured(
    asks: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """It can only be put on at a save before that pass."""

    def gradients(step: Guard) -> list[Tensor | None]:
        batches, model = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(1)), wide_network()
        with step():
            for batch in batches:
                asks(model(batch)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(contextlib.nullcontext)
    with ebbtide.Budget("90%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for _ in range(STEPS):
            assert same(expected, gradients(memory.step))
        assert memory.plan is not None
        assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)


def wide_network() -> nn.Module:
    torch.manual_seed(0)
    linears = (nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Sigmoid())
    return nn.Sequential(*linears)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh])
@pytest.mark.parametrize("over", ["forward", "part", "all"])
def test_modes_of_the_user(activation: type[nn.Module], over: str, tmp_path: Path) -> None:
    """A mode that is on in a part of the step sees the ops of that part, and goes when it is to go."""
    counters: list[Counter] = []

    def compute(model: nn.Module, x: Tensor) -> None:
        counters.append(Counter())
        if over == "part":
            assert isinstance(model, nn.Sequential)
            x = model[0](x)
            with counters[-1]:
                x = model[1](x)
            model[2:](x).square().mean().backward()
        elif over == "forward":
            with counters[-1]:
                loss = model(x).square().mean()
            loss.backward()
        else:
            with counters[-1]:
                model(x).square().mean().backward()

    run(compute, activation, tmp_path)
    for plain, planned in zip(counters[1::2], counters[2::2], strict=True):
        if over == "all":  # it sees what is computed again, too
            assert len(planned.seen) >= len(plain.seen)
        else:
            assert [op for op in planned.seen if "detach" not in op] == [op for op in plain.seen if "detach" not in op]


def rounded(found: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.bfloat16().float(), found)


class RoundedOps(TorchDispatchMode):
    """A low precision that is emulated, op by op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rounded(func(*args, **(kwargs or {})))


class RoundedFunctions(TorchFunctionMode):
    """The same, function by function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rounded(func(*args, **(kwargs or {})))


class Product(torch.autograd.Function):
    """Modes that look at functions do not see it applied, and are on where it saves."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(h, scale)
        return h * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (h, scale) = gradients, ctx.saved_tensors
        return gradient * scale, (gradient * h).sum(0)


MODES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "ops": (RoundedOps, torch.mul),
    "functions": (RoundedFunctions, Product.apply),
}


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("name", MODES)
def test_modes_of_the_user_see_nothing_of_how_tensors_are_saved(name: str, machine: Machine, tmp_path: Path) -> None:
    """Autograd saves by no op at all: what such a mode made of one would be another tensor."""
    mode, product = MODES[name]

    def compute(model: Any, x: Tensor) -> None:
        for linear, activation, norm, last in model:
            x = linear(x)  # which nobody has saved so far
            with mode():
                x = product(x, norm.weight)
            x = last(norm(activation(x)))
        x.square().mean().backward()

    run(compute, nn.Tanh, tmp_path, machine)


@pytest.mark.parametrize("name", MODES)
def test_modes_of_the_user_see_nothing_of_how_tensors_are_shown(name: str, tmp_path: Path) -> None:
    """In observed steps, too, and of what was away; nor of how custom functions find leaves. PyTorch itself detaches
    what any hooks show, which they see: so plain steps have some on."""
    mode, product = MODES[name]
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    model: Any = network(nn.Tanh)

    def gradients(guard: Guard) -> list[Tensor | None]:
        h: Any = x
        with guard():
            for linear, activation, norm, last in model:
                h = last(norm(activation(product(linear(h), norm.weight))))
            loss = h.square().mean()
            with mode():
                torch.autograd.backward(loss)  # which no mode is asked to run itself
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    with PeakMeter() as meter:
        gradients(contextlib.nullcontext)
    with ebbtide.Budget(int(0.75 * meter.peak_bytes), spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(STEPS):
            expected = gradients(lambda: saved_tensors_hooks(Tensor.detach, lambda packed: packed))
            assert same(expected, gradients(memory.step))
        assert memory.tiers["disk"].written_bytes > 0  # type: ignore[attr-defined]


class Image(Tensor):
    """What functions make of one is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_modes_of_the_user_see_nothing_of_how_images_are_saved(tmp_path: Path) -> None:
    """They are held as ordinary tensors, which no function makes of them."""

    def compute(model: Any, x: Tensor) -> None:
        dice = torch.Generator().manual_seed(2)
        for block in model:
            x = block(x)
            mask = torch.rand(x.shape, generator=dice).as_subclass(Image)
            with RoundedFunctions():
                x = Product.apply(x, mask)  # type: ignore[no-untyped-call]
        x.square().mean().backward()

    run(compute, nn.Tanh, tmp_path, FAST_DISK)
