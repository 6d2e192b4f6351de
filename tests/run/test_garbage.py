"""The garbage collector is told of the objects that a step's saved tensors make, and of nothing else."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.observe.garbage import expect_objects
from tests.run.harness import SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

OPS = 1200
"""So many saved tensors that the collector would look several times."""


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Those of the interpreter, put back afterwards."""
    found = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*found)


@contextlib.contextmanager
def looks() -> Iterator[list[int]]:
    """The generations that the collector looks at meanwhile."""
    seen: list[int] = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(look)
    yield seen
    gc.callbacks.remove(look)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compute(start: Tensor, fails: bool = False) -> None:
    x = start
    for _ in range(OPS // 2):
        x = x.sin().tanh()
    if fails:
        raise KeyError("of the user's")
    x.sum().backward()


def test_the_collector_does_not_look_in_vain(thresholds: tuple[int, int, int], tmp_path: Path) -> None:
    start = torch.randn(1 << 14, requires_grad=True)
    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK, tune_allocator=False) as memory:
        while not memory.measured or memory.measured[-1].state != "planned":
            with memory.step():
                compute(start)
            assert gc.get_threshold() == thresholds
        gc.collect()
        with memory.step(), looks() as seen:
            compute(start)
    assert len(seen) <= 1


@pytest.mark.parametrize("fails", [False, True])
def test_thresholds_are_put_back(thresholds: tuple[int, int, int], fails: bool, tmp_path: Path) -> None:
    start = torch.randn(1 << 14, requires_grad=True)
    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for number in range(5):
            with contextlib.suppress(KeyError), memory.step():
                compute(start, fails and number > 2)
            assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("limit", ["1GiB", "70%"])
def test_thresholds_that_are_read_in_a_step_and_set_after_it(
    limit: str, thresholds: tuple[int, int, int], tmp_path: Path
) -> None:
    """In an observed step the collector is held off, by a threshold that is out of reach; in a planned one it is told
    of objects that are gone with the step."""
    start = torch.randn(1 << 14, requires_grad=True)
    with ebbtide.Budget(limit, spill=tmp_path, machine=SLOW_DISK) as memory:
        for _ in range(6):
            with memory.step():
                read = gc.get_threshold()
                gc.set_threshold(0)
                compute(start)
            gc.set_threshold(*read)
        with memory.step():
            compute(start)
    assert gc.get_threshold() == thresholds


def test_a_collector_that_is_off_stays_off(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(0, 10, 10)
    expect_objects(1000)
    assert gc.get_threshold() == (0, 10, 10)
    expect_objects(-1000)
    assert gc.get_threshold() == (0, 10, 10)


def test_who_sets_thresholds_meanwhile_is_believed(thresholds: tuple[int, int, int]) -> None:
    expect_objects(1000)
    gc.set_threshold(500, 5, 5)
    expect_objects(-1000)
    assert gc.get_threshold() == (500, 5, 5)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_step_was_given_goes_without_the_collector(fails: bool, tmp_path: Path) -> None:
    weights = torch.ones(1 << 14, requires_grad=True)
    left = []
    with collector_off(), ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for number in range(8):
            batch = torch.randn(5, 1 << 14)
            with contextlib.suppress(KeyError), memory.step():
                x = batch
                for _ in range(8):
                    x = (x * weights + batch).sin()
                if fails and number > 2:
                    raise KeyError("of the user's")
                x.sum().backward()
            del batch, x
            left.append(sum(type(each) is Tensor and each.shape == (5, 1 << 14) for each in gc.get_objects()))
        assert memory.plan is not None
        assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)
    assert left == [0] * 8
