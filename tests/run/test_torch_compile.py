"""Models that `torch.compile` was asked to compile run as they were written under a budget, and compiled elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.run.observing import observe_step
from tests.run.harness import FAST_DISK, SLOW_DISK

STEPS = 6

pytestmark = [  # the second is Dynamo's own, of a tensor that has a graph
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Compiled:
    """A backend of `torch.compile` that counts how often what it made runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        """See `torch.compile`."""

        def run(*values: Tensor) -> Any:
            self.runs += 1
            return graph.forward(*values)

        return run


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU())))


def gradients(net: nn.Module, call: Any, batch: Tensor) -> list[Tensor]:
    net.zero_grad()
    call(batch).square().mean().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def under(budget: ebbtide.Budget, net: nn.Module, call: Any, batch: Tensor) -> list[Tensor]:
    with budget.step():
        return gradients(net, call, batch)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["offload", "recompute"])
@pytest.mark.parametrize("warm", [False, True], ids=["new", "compiled before"])
def test_steps_are_those_of_the_model_as_it_was_written(machine: Any, warm: bool, tmp_path: Path) -> None:
    batch, backend = torch.randn(400, 96), Compiled()
    expected = gradients(net := model(), net, batch)
    net = model()
    compiled = torch.compile(net, backend=backend)
    if warm:
        gradients(net, compiled, batch)
    runs = backend.runs
    with ebbtide.Budget("60%", spill=tmp_path, machine=machine) as budget:
        with pytest.warns(UserWarning, match="without torch.compile"):
            found = [under(budget, net, compiled, batch) for _ in range(STEPS)]
        assert all(torch.equal(a, b) for step in found for a, b in zip(expected, step, strict=True))
        assert budget.plan is not None
        assert budget.plan.peak_bytes <= budget.plan.limit_bytes
        assert budget.plan.peak_bytes < budget.plan.plain_peak_bytes
    assert backend.runs == runs
    gradients(net, compiled, batch)
    assert backend.runs > runs


def test_a_compiled_function_does_not_make_a_plan_invalid(tmp_path: Path) -> None:
    batch, backend, net = torch.randn(400, 96), Compiled(), model()
    loss = torch.compile(lambda outputs: (outputs * 2).exp().clamp(max=9).square(), backend=backend)
    expected = gradients(net, lambda given: loss(net(given)), batch)
    runs = backend.runs
    assert runs > 0
    with ebbtide.Budget("60%", spill=tmp_path, machine=SLOW_DISK) as budget:
        for _ in range(STEPS):
            found = under(budget, net, lambda given: loss(net(given)), batch)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert backend.runs == runs


def test_what_is_observed_is_the_model_as_it_was_written() -> None:
    batch, backend, net = torch.randn(400, 96), Compiled(), model()
    plain = observe_step(lambda: gradients(net, net, batch))
    call = torch.compile(net.forward, backend=backend)
    gradients(net, call, batch)
    seen = observe_step(lambda: gradients(net, call, batch))
    assert [op.name for op in seen.ops] == [op.name for op in plain.ops]


def test_a_step_that_fails_leaves_the_compiler_as_it_was(tmp_path: Path) -> None:
    batch, backend, net = torch.randn(40, 96), Compiled(), model()
    call = torch.compile(net.forward, backend=backend)
    gradients(net, call, batch)
    runs = backend.runs
    with (
        ebbtide.Budget("90%", spill=tmp_path, machine=FAST_DISK) as budget,
        pytest.raises(ZeroDivisionError),
        budget.step(),
    ):
        raise ZeroDivisionError
    gradients(net, call, batch)
    assert backend.runs > runs


def test_a_compiled_cell_is_run_as_it_was_written() -> None:
    torch.manual_seed(4)
    layer, state, inputs = nn.Linear(24, 24), torch.randn(8, 24), [torch.randn(8, 24) for _ in range(12)]

    def cell(state: Tensor, given: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(layer(state) + given), None

    last = state
    for given in inputs:
        last, _ = cell(last, given)
    last.sum().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    backend = Compiled()
    final, _ = ebbtide.scan(torch.compile(cell, backend=backend), state, inputs, memory="24KiB")
    final.sum().backward()
    assert torch.equal(final, last)
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, layer.parameters(), strict=True) if p.grad is not None)
    assert backend.runs == 0
