"""Steps of which no saved tensor comes to the budget: they evaluate, or others' hooks have it; beside training ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

import ebbtide
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from tests.run.harness import FAST_DISK, SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")

WIDTH, BATCH = 128, 512
LIMIT, PLENTY = 4_000_000, 7_000_000
Step = Callable[[int], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)))


def train(model: nn.Module) -> None:
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()


def evaluate(model: nn.Module, batch: int) -> None:
    with torch.no_grad():
        model(torch.randn(batch, WIDTH))


def train_elsewhere(model: nn.Module) -> None:
    with allow_mutation_on_saved_tensors():
        train(model)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("limit", [LIMIT, PLENTY], ids=["binds", "idle"])
def test_they_are_no_training_steps(
    limit: int, machine: ebbtide.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in what is measured nor in what is learnt."""
    model, evaluations, timed = network(), list[int](), list[int]()
    watch = Kind.watch

    def noted(*arguments: object) -> None:
        timed.append(len(memory.measured) - 1)
        watch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Kind, "watch", noted)
    with ebbtide.Budget(limit, spill=tmp_path, machine=machine) as memory:
        for number in range(60):
            with memory.step():
                if number > 12 and number % 3:
                    evaluations.append(number)
                    evaluate(model, 64)
                else:
                    train(model)
            model.zero_grad()
        measured = list(memory.measured)
    evaluated, trained = (
        {measured[n].kind for n in evaluations},
        {one.kind for one in measured if one.state != "observe"},
    )
    assert len(evaluated) == 1
    assert len(trained - evaluated) == 1
    assert [one.left for one in measured] == [""] * 60
    assert [one.state for one in measured[2:]].count("observe") == 0
    assert timed
    assert not {*timed} & {*evaluations}


@pytest.mark.parametrize(
    ("way", "limit"),
    [("evaluates", LIMIT), ("evaluates", PLENTY), ("has hooks of its own", LIMIT)],
    ids=["evaluates", "evaluates, idle", "has hooks of its own"],
)
def test_they_are_warned_of_once_if_they_pass_the_limit(way: str, limit: int, tmp_path: Path) -> None:
    model, told = network(), list[int]()
    with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(60):
            is_empty = number > 8 and number % 4 == 0
            with warnings.catch_warnings(record=True, action="always") as caught, PeakMeter() as meter, memory.step():
                if not is_empty:
                    train(model)
                elif way == "evaluates":
                    evaluate(model, 8 * BATCH)
                else:
                    train_elsewhere(model)
            model.zero_grad()
            assert not number or (meter.peak_bytes > limit) == is_empty, number
            told += [number] * len(caught)
            assert all("no saved tensor came to this budget" in str(each.message) for each in caught)
    assert len(told) == 1
    assert told[0] % 4 == 0


def test_they_are_not_warned_of_within_the_limit(tmp_path: Path) -> None:
    model = network()
    with ebbtide.Budget(LIMIT, spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(40):
            with memory.step():
                evaluate(model, BATCH) if number % 4 == 3 else train(model)
            model.zero_grad()
        assert memory.plan is not None
        assert memory.plan.binds
