"""The step that verifies: what is computed again is compared with what is true, in the memory that the plan has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.errors import SpillError
from ebbtide.run.holdings import Holding, view_of
from ebbtide.run.meter import PeakMeter
from ebbtide.run.recipes import Recipe
from ebbtide.run.tiers import DiskTier
from ebbtide.run.verify import PART_BYTES, Truth
from tests.run.harness import SLOW_DISK

SIZES = {
    "empty": 0,
    "small": 1000,
    "one part": PART_BYTES,
    "several parts": 3 * PART_BYTES,
    "and a rest": 2 * PART_BYTES + 12,
}


class Given(Recipe):
    """Makes what it is told to."""

    def __init__(self, make: Callable[[], Tensor], *, is_exact: bool = True) -> None:
        super().__init__(7, [], {}, ())
        self.make = make
        self._is_exact = is_exact

    @property
    def is_exact(self) -> bool:
        return self._is_exact

    def replay(self) -> Tensor:
        return self.make()


def changed(size: int, at: int) -> Tensor:
    """``torch.arange(size)`` but for one byte; nothing else is touched or made."""
    other = torch.arange(size)
    other.view(torch.uint8)[at].add_(1)
    return other


def refuse() -> Tensor:
    raise RuntimeError("cannot be made")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path)
    yield tier
    tier.close()


def shown(disk: DiskTier, recipe: Given, value: Tensor) -> tuple[Tensor, Truth, int]:
    """What is shown in place of ``value``, what was found, and the bytes made meanwhile."""
    truth, holding = Truth(), Holding()
    holding.fill(value)
    view = view_of(holding, value, 0)
    truth.watch(holding, recipe, disk)
    assert holding.tensor is None
    with PeakMeter() as meter:
        tensor = view.show()
    assert disk.places_in_use == 0
    return tensor, truth, meter.peak_bytes


@pytest.mark.parametrize("size", SIZES)
def test_what_is_the_same_is_used(disk: DiskTier, size: str) -> None:
    value = torch.randn(SIZES[size] // 4)
    again = value.clone()
    tensor, truth, made_bytes = shown(disk, Given(lambda: again), value)
    assert tensor.data_ptr() == again.data_ptr()
    assert tensor.shape == again.shape
    assert (truth.compared, truth.differing) == ({(7, 0)}, set())
    assert made_bytes == 0, "the truth has no place of its own"


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("size", [size for size in SIZES if SIZES[size]])
def test_what_differs_is_found_and_the_truth_is_used(disk: DiskTier, size: str, at: int) -> None:
    length = SIZES[size] // 8
    tensor, truth, made_bytes = shown(disk, Given(lambda: changed(length, at)), torch.arange(length))
    assert torch.equal(tensor, torch.arange(length))
    assert (truth.compared, truth.differing) == ({(7, 0)}, {7})
    assert made_bytes == 8 * length, "the two are never there together"


@pytest.mark.parametrize(
    "make", [refuse, lambda: torch.zeros(3 * PART_BYTES // 4 - 1), lambda: torch.zeros(1), lambda: torch.zeros(0)]
)
def test_what_cannot_be_made_or_has_another_size_differs(disk: DiskTier, make: Callable[[], Tensor]) -> None:
    value = torch.randn(3 * PART_BYTES // 4)
    tensor, truth, _ = shown(disk, Given(make), value)
    assert torch.equal(tensor, value)
    assert truth.differing == {7}


def test_why_a_value_cannot_be_made_is_logged(disk: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ebbtide.run.verify"):
        shown(disk, Given(refuse), torch.randn(1000))
    assert caplog.messages == ["value 7 cannot be computed again: RuntimeError: cannot be made"]


def test_of_what_is_written_in_part_it_is_looked_whether_it_can_be_made(disk: DiskTier) -> None:
    value = torch.arange(1000)
    assert not shown(disk, Given(lambda: changed(1000, 5), is_exact=False), value)[1].differing
    assert shown(disk, Given(refuse, is_exact=False), value)[1].differing == {7}


@pytest.mark.parametrize("fault", [SpillError("the disk is full"), MemoryError("no more"), torch.OutOfMemoryError("")])
def test_faults_that_say_nothing_of_the_recipe_are_raised(disk: DiskTier, fault: Exception) -> None:
    def fail() -> Tensor:
        raise fault

    with pytest.raises(type(fault)):
        shown(disk, Given(fail), torch.randn(PART_BYTES))


def test_what_is_never_asked_for_leaves_no_place_behind(disk: DiskTier) -> None:
    truth, holding, value = Truth(), Holding(), torch.randn(PART_BYTES)
    holding.fill(value)
    truth.watch(holding, Given(refuse), disk)
    assert disk.places_in_use == 4
    del holding
    assert disk.places_in_use == 0


def long_chain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), *(part for _ in range(12) for part in (nn.Tanh(), nn.GELU(), nn.Sigmoid())))


def short_chain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh(), nn.Softplus(), nn.Linear(64, 64))


@pytest.mark.usefixtures("nothing_left", "quick_plans")
@pytest.mark.parametrize(("build", "limit"), [(long_chain, "60%"), (long_chain, "40%"), (short_chain, "60%")])
def test_the_step_that_verifies_keeps_to_the_limit(build: Callable[[], nn.Module], limit: str, tmp_path: Path) -> None:
    """It would hold much more if what is true and what is computed again were there together."""
    torch.manual_seed(0)
    model = build()
    states, peaks = [], []
    with ebbtide.Budget(limit, spill=tmp_path, machine=SLOW_DISK) as memory:
        for _ in range(5):
            states.append(memory.state)
            with PeakMeter() as meter, memory.step():
                model(torch.randn(4096, 64)).square().mean().backward()
            peaks.append(meter.peak_bytes)
            model.zero_grad()
        assert states[2] == "verify"
        assert memory.plan is not None
        assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)
        assert max(peaks[2:]) <= memory.plan.limit_bytes, (peaks, memory.plan.limit_bytes)
