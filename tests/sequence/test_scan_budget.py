"""`scan` inside the steps of a `Budget`, and beside other hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.run.meter import PeakMeter
from tests.run.harness import SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")
WIDTH = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.GELU())
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.after = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor, *, scanned: bool) -> Tensor:
        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(nn.functional.dropout(x, 0.2), h)
            return h, h

        xs, h = self.before(x), torch.zeros(x.shape[1], WIDTH)
        if scanned:
            _, ys = ebbtide.scan(cell, h, xs, memory="64KiB")
        else:
            ys = []
            for row in xs:
                h, y = cell(h, row)
                ys.append(y)
        return self.after(torch.stack(ys)).square().mean()


def train(memory: ebbtide.Budget | None, *, scanned: bool) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model, found = Model(), []
    for _ in range(5):
        x = torch.randn(10, 32, WIDTH)
        if memory is None:
            model(x, scanned=scanned).backward()
        else:
            with memory.step():
                model(x, scanned=scanned).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    return found


@pytest.mark.parametrize("limit", ["80%", "300%"])
def test_inside_the_steps_of_a_budget(limit: str, tmp_path: Path) -> None:
    """Observed, verified and planned steps give the plain loop's gradients."""
    expected = train(None, scanned=False)
    with ebbtide.Budget(limit, spill=tmp_path) as memory:
        found = train(memory, scanned=True)
        assert memory.state != "observe"
        assert memory.plan is not None
        assert memory.plan.binds == (limit == "80%")
        assert not [m.left for m in memory.measured if m.left]
    for step, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, step, other))


def test_hooks_of_others_see_nothing_of_the_steps() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    cell, xs = nn.GRUCell(WIDTH, WIDTH), torch.randn(20, 2, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        h, _ = ebbtide.scan(lambda h, x: (cell(x, h), None), torch.zeros(2, WIDTH), xs)
        h.sum().backward()
    assert len(seen) == len(list(cell.parameters())) + 1  # that they were not altered is known from these


Cell = Callable[[Tensor, Tensor], tuple[Tensor, None]]


def transposed(h: Tensor) -> Tensor:
    return h.t().contiguous().t()


def with_gaps(h: Tensor) -> Tensor:
    return torch.cat([h, h], 1)[:, : h.shape[1]]


def inside_another(h: Tensor) -> Tensor:
    return ebbtide.scan(lambda inner, x: (inner * x, None), h, torch.ones(3), memory="64KiB")[0]


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("change", [torch.sin, transposed, with_gaps, nn.Dropout(0.2), inside_another])
def test_nothing_of_a_chain_is_at_rest(change: Callable[[Tensor], Tensor], spills: bool, tmp_path: Path) -> None:
    """Whatever a scan makes for itself, states that it stores, copies of them, what generators were like: none of it
    was there before the step. Only parameters are at rest, however long the chain."""
    layer = nn.Linear(WIDTH, WIDTH)

    def run(n: int) -> None:
        layer.zero_grad()
        start = change(torch.ones(8, WIDTH))
        spill = tmp_path if spills else None
        h, _ = ebbtide.scan(
            lambda h, x: (change(torch.tanh(layer(h) + x)), None), start, torch.zeros(n), memory="16KiB", spill=spill
        )
        h.square().mean().backward()

    own = sum(parameter.nbytes for parameter in layer.parameters())
    for n in (5, 40):
        assert ebbtide.observe_step(lambda n=n: run(n)).resting_bytes == own  # type: ignore[misc]
        with PeakMeter() as meter:
            run(n)
        assert meter.resting_bytes == own


def test_a_budget_for_a_long_chain(tmp_path: Path) -> None:
    """The states of all its steps would take five times the limit."""
    layer = nn.Linear(WIDTH, WIDTH)
    limit_bytes = 3 << 20

    def step() -> Tensor:
        layer.zero_grad()
        h, _ = ebbtide.scan(
            lambda h, _: (transposed(torch.tanh(layer(h))), None),
            transposed(torch.ones(1024, WIDTH)),
            range(60),
            memory="1MiB",
        )
        h.square().mean().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    expected, peaks = step(), []
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=SLOW_DISK) as memory:
        for _ in range(4):
            with PeakMeter() as meter, memory.step():
                found = step()
            peaks.append(meter.peak_bytes)
            assert torch.equal(found, expected)
    assert max(peaks) <= limit_bytes
