"""What a step leaves in reference cycles, which Python's garbage collector gives back at moments that nobody knows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.observe import storages
from ebbtide.plan import plain_peak_bytes
from ebbtide.run.meter import PeakMeter
from ebbtide.run.observing import observe_step
from tests.run.harness import FAST_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

LAYERS, WIDTH, ROWS = 40, 64, 256
HIDDEN_BYTES = ROWS * WIDTH * 4


class Scope:
    """Keeps a method of its own, and with it itself."""

    def __init__(self, h: Tensor) -> None:
        self.h = h
        self.finish = self.run

    def run(self, layer: nn.Module) -> Tensor:
        """The next hidden state."""
        return torch.sigmoid(layer(self.h))


class Straight(Scope):
    """The same without a cycle."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def finish(self, layer: nn.Module) -> Tensor:
        """The next hidden state."""
        return self.run(layer)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def compute(net: nn.ModuleList, scope: type[Scope] = Scope, between: Callable[[], object] = lambda: None) -> None:
    h = torch.ones(ROWS, WIDTH)
    for layer in net:
        h = scope(h).finish(layer)
        between()
    h.square().mean().backward()


def make_scopes(count: int) -> None:
    """One after the other, nothing of which is saved."""
    for _ in range(count):
        Scope(torch.ones(ROWS, WIDTH))


def peak_bytes(budget: ebbtide.Budget, run: Callable[[], object]) -> int:
    """What a step that calls ``run`` held."""
    with PeakMeter() as meter, budget.step():
        run()
    return meter.peak_bytes


def run_twice(budget: ebbtide.Budget, run: Callable[[], object]) -> None:
    """Two steps that call ``run``: the second one makes a plan."""
    for _ in range(2):
        with budget.step():
            run()


@pytest.mark.parametrize("is_on", [True, False])
def test_they_count_to_the_end_of_a_step(is_on: bool) -> None:
    """Whether or not the collector runs, which it does the more often the more objects a recorder makes."""
    if not is_on:
        gc.disable()
    try:
        step = observe_step(lambda: make_scopes(1000))
    finally:
        gc.enable()
    assert plain_peak_bytes(step) == 1000 * HIDDEN_BYTES


def test_planned_steps_hold_what_is_planned(tmp_path: Path) -> None:
    net = model()
    with ebbtide.Budget("100%", spill=tmp_path, machine=FAST_DISK) as budget:
        peaks = [peak_bytes(budget, lambda: compute(net)) for _ in range(8)]
    assert budget.limit_bytes is not None
    assert max(peaks) <= budget.limit_bytes


def test_an_error_names_them(tmp_path: Path) -> None:
    net = model()
    compute(net)
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as budget, pytest.raises(BudgetError) as caught:
        run_twice(budget, lambda: compute(net))
    assert "in reference cycles" in caught.value.__notes__[0]
    assert len(budget.measured) == 2


def test_an_error_does_not_name_them_where_there_are_none(tmp_path: Path) -> None:
    net = model()
    with ebbtide.Budget("5%", spill=tmp_path, machine=FAST_DISK) as budget, pytest.raises(BudgetError) as caught:
        run_twice(budget, lambda: compute(net, Straight))
    assert not hasattr(caught.value, "__notes__")


def test_steps_that_collect_themselves_are_planned(tmp_path: Path) -> None:
    net = model()
    compute(net)
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as budget:
        peaks = [peak_bytes(budget, lambda: compute(net, between=lambda: gc.collect(1))) for _ in range(8)]
    assert budget.state == "planned"
    assert budget.limit_bytes is not None
    assert max(peaks[2:]) <= budget.limit_bytes


def test_they_are_collected_where_there_is_no_room(tmp_path: Path) -> None:
    """As the first step is observed, within a limit; that plans are made as if they were not is another matter."""
    net = model()
    limit = sum(parameter.nbytes for parameter in net.parameters()) + LAYERS // 2 * HIDDEN_BYTES
    between_two_hooks = 4 * HIDDEN_BYTES
    gc.disable()
    try:
        with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as budget:
            assert peak_bytes(budget, lambda: compute(net)) <= limit + between_two_hooks
    finally:
        gc.enable()


def test_they_are_collected_where_there_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, too, and where nothing is saved; to the step, they live."""
    monkeypatch.setattr(storages, "COLLECTS_BYTES", 4 * HIDDEN_BYTES)

    with PeakMeter() as meter:
        step = observe_step(lambda: make_scopes(LAYERS))
    assert meter.peak_bytes <= 4 * HIDDEN_BYTES
    assert plain_peak_bytes(step) == LAYERS * HIDDEN_BYTES
