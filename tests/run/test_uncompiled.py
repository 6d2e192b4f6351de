"""Code that torch.compile was asked to compile, where steps and scans run it as it was written, or lie within it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils import parametrize

import ebbtide
from ebbtide.observe.uncompiled import uncompiled

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.filterwarnings("ignore::UserWarning")]


def test_contexts_that_overlap() -> None:
    """The stance is one for all threads: the last that ends puts back what the first found."""
    runs = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            runs.append(1)
            return graph.forward(*values)

        return run

    model = torch.compile(nn.Linear(8, 8), backend=backend)

    def is_compiled() -> bool:
        before = len(runs)
        model(torch.ones(2, 8))
        return len(runs) > before

    assert is_compiled()
    one, other = uncompiled(), uncompiled()
    one.__enter__()
    assert not is_compiled()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not is_compiled()
    other.__exit__(None, None, None)
    assert is_compiled()
    torch.compiler.reset()


class Net(nn.Module):
    """A model with a scan in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(24, 24), nn.Linear(24, 1)

    def forward(self, xs: Tensor) -> Tensor:
        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(self.inner(h) + x), None

        final, _ = ebbtide.scan(cell, torch.zeros(3, 24), xs, memory="60KiB")
        loss: Tensor = self.head(torch.relu(final)).square().mean()
        return loss


def test_a_scan_in_a_model_that_is_compiled() -> None:
    found = []
    for compiles in (False, True):
        torch.compiler.reset()
        net = Net()
        call = torch.compile(net, backend="eager") if compiles else net
        for index in range(3):
            call(torch.randn(40, 3, 24, generator=torch.Generator().manual_seed(index))).backward()
        found.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    torch.compiler.reset()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_cached_weights_of_another_thread() -> None:
    """A scan that lies within somebody's `parametrize.cached()`, and ends after it, does not leave that on."""
    layer = nn.Linear(24, 24)
    parametrize.register_parametrization(layer, "weight", Doubled())
    begun, ended = threading.Event(), threading.Event()

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        if not begun.is_set():
            begun.set()
            assert ended.wait(20)
        return torch.tanh(layer(h) + x), None

    scanning = threading.Thread(
        target=lambda: ebbtide.scan(cell, torch.zeros(3, 24), torch.randn(8, 3, 24), memory="60KiB")
    )
    with parametrize.cached():
        scanning.start()
        assert begun.wait(20)
    ended.set()
    scanning.join()
    assert parametrize._cache_enabled == 0
    assert not parametrize._cache
