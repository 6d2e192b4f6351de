"""The first planned step is counted: one that holds more than the observed one did gets another plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.errors import BudgetError
from ebbtide.run.meter import PeakMeter
from tests.run.harness import FAST_DISK, SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

OBSERVED = 2
STEPS = 20
SIZE = 1 << 16


def steps_that_hold(more: int, limit: str, directory: Path) -> tuple[ebbtide.Budget, int]:
    """Steps of one kind that hold ``more`` numbers besides once observed: the budget, and the peak of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data = torch.randn(SIZE // 64, 64)
    meter = PeakMeter()
    with ebbtide.Budget(limit, spill=directory, machine=FAST_DISK) as memory:
        for index in range(STEPS):
            if index == STEPS - 1:
                meter.enter()
            with memory.step():
                held: list[Tensor] = [torch.zeros(more)] if index >= OBSERVED else []
                model(data).sum().backward()
                del held
            model.zero_grad()
        meter.leave()
    return memory, meter.peak_bytes


def test_a_step_that_holds_more_is_planned_again(tmp_path: Path) -> None:
    memory, peak_bytes = steps_that_hold(SIZE, "70%", tmp_path)
    assert memory.plan is not None
    assert memory.limit_bytes is not None
    assert memory.plan.peak_bytes <= memory.limit_bytes
    assert peak_bytes <= memory.limit_bytes
    assert memory.state == "planned"


def test_a_step_that_holds_too_much_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="cannot be met"):
        steps_that_hold(16 * SIZE, "70%", tmp_path)


@pytest.mark.parametrize("once", [False, True])
def test_a_step_that_runs_other_ops_from_now_on_is_planned_again(once: bool, tmp_path: Path) -> None:
    """Recipes are matched op by op: they would be left each time. A single step that differs changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data = torch.randn(SIZE // 64, 64)
    with ebbtide.Budget("60%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(STEPS):
            differs = index == 12 if once else index >= 5
            with memory.step():
                hidden = data
                for layer in model:
                    hidden = layer(hidden)
                    if differs:
                        hidden.detach().abs()
                hidden.sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            model(data).sum().backward()
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                assert gradient is not None
                assert parameter.grad is not None
                assert torch.equal(gradient, parameter.grad)
            model.zero_grad()
    assert memory.plan is not None
    assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)
    left = [index for index, step in enumerate(memory.measured) if step.left]
    assert left == [12 if once else 5]
