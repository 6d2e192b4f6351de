"""`scan` in the planned steps of a `Budget`, where values move and where they are computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.machine import Machine
from tests.run.harness import FAST_DISK, SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")
WIDTH, STEPS = 64, 14


class Model(nn.Module):
    """Layers with dropout before and after a chain with dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, WIDTH)
        )
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.after = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor, spill: Path | None, *, scanned: bool) -> Tensor:
        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(nn.functional.dropout(x, 0.2), h)
            return h, h

        xs, h = self.before(x), torch.zeros(x.shape[1], WIDTH)
        if scanned:
            _, ys = ebbtide.scan(cell, h, xs, memory="64KiB", spill=spill)
        else:
            ys = []
            for row in xs:
                h, y = cell(h, row)
                ys.append(y)
        loss: Tensor = self.after(torch.stack(ys)).square().mean()
        return loss


def train(memory: ebbtide.Budget | None, spill: Path | None, states: list[str]) -> list[list[Tensor]]:
    """Gradients, parameters and the generator after each step; with a budget by `scan`, without by a plain loop."""
    torch.manual_seed(0)
    model, found = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        x = torch.randn(20, 32, WIDTH)
        if memory is None:
            model(x, spill, scanned=False).backward()
        else:
            states.append(memory.state)
            with memory.step():
                model(x, spill, scanned=True).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found.append([*gradients, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()])
    return found


@pytest.mark.parametrize("spilled", [False, True], ids=["in memory", "spilled"])
@pytest.mark.parametrize(("machine", "kind"), [(FAST_DISK, Offload), (SLOW_DISK, Recompute)], ids=["fast", "slow"])
def test_in_planned_steps(
    machine: Machine, kind: type[Offload] | type[Recompute], spilled: bool, tmp_path: Path
) -> None:
    states: list[str] = []
    (tmp_path / "chain").mkdir()
    spill = tmp_path / "chain" if spilled else None
    expected = train(None, None, states)
    with ebbtide.Budget("75%", spill=tmp_path, machine=machine) as memory:
        found = train(memory, spill, states)
        assert memory.plan is not None
        assert any(isinstance(decision, kind) for decision in memory.plan.decisions), memory.plan.decisions
        assert not [measured.left for measured in memory.measured if measured.left]
    assert states.count("planned") >= 4, states
    for index, (step, other) in enumerate(zip(expected, found, strict=True)):
        assert all(map(torch.equal, step, other)), f"step {index} ({states[index]})"
