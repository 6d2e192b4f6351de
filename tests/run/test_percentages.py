"""What a percentage is of, and what is said to whoever puts half a training step within `Budget.step`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.run.looks import MOST_SKIPPED
from ebbtide.run.meter import PeakMeter
from tests.run.harness import FAST_DISK, NO_DISK
from tests.run.inside import kinds_of

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

NO_BACKWARD_PASS, NO_FORWARD_PASS = "call backward", "run the forward pass within it, too"


class Loop:
    """A training loop, of which a part may lie outside the steps."""

    def __init__(self, limit: int | str, directory: Path, machine: Machine = FAST_DISK) -> None:
        torch.manual_seed(0)
        layers = (layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU()))
        self.net = nn.Sequential(*layers, nn.Linear(128, 10))
        self.batch, self.labels = torch.randn(256, 128), torch.randint(0, 10, (256,))
        self.memory = ebbtide.Budget(limit, spill=directory, machine=machine)

    def loss(self) -> Tensor:
        """The forward pass."""
        loss: Tensor = F.cross_entropy(self.net(self.batch), self.labels)
        return loss

    def train(self) -> None:
        """A step."""
        with self.memory.step():
            self.loss().backward()
        self.net.zero_grad()

    def evaluate(self) -> None:
        """A step without gradients."""
        with self.memory.step(), torch.no_grad():
            self.loss()

    def go_forward(self) -> None:
        """A step with the forward pass alone."""
        with self.memory.step():
            loss = self.loss()
        loss.backward()
        self.net.zero_grad()

    def go_back(self) -> None:
        """A step with the backward pass alone."""
        loss = self.loss()
        with self.memory.step():
            loss.backward()
        self.net.zero_grad()


def limit_of(order: str, directory: Path) -> tuple[int | None, str]:
    """The limit after a loop that trains (t) and evaluates (e) in this order, and the state of the next step."""
    loop = Loop("80%", directory)
    with loop.memory:
        for what in order:
            loop.train() if what == "t" else loop.evaluate()
        return loop.memory.limit_bytes, loop.memory.state


@pytest.mark.parametrize("order", ["ettttttt", "eeettttttt", "etetetetetttttt", "teettttttt"])
def test_evaluation_before_training_does_not_count(order: str, tmp_path: Path) -> None:
    expected, state = limit_of("tttttttt", tmp_path)
    assert state == "planned"
    assert limit_of(order, tmp_path) == (expected, state)


def test_where_nothing_is_trained_there_is_no_limit(tmp_path: Path) -> None:
    assert limit_of("eeee", tmp_path) == (None, "observe")


def test_evaluation_alone_that_is_too_large_is_no_want_of_a_backward_pass(tmp_path: Path) -> None:
    loop = Loop(1 << 18, tmp_path)
    with loop.memory:
        loop.evaluate()
        with pytest.raises(BudgetError) as caught:
            loop.evaluate()
    assert NO_BACKWARD_PASS not in str(caught.value)
    assert NO_FORWARD_PASS not in str(caught.value)


def test_a_step_without_its_backward_pass_is_told_of_it(tmp_path: Path) -> None:
    """Where nothing can leave, and once it cannot be that all batches were skipped."""
    loop = Loop("80%", tmp_path, NO_DISK)
    with loop.memory:
        for _ in range(MOST_SKIPPED + 1):
            loop.go_forward()
        with pytest.raises(BudgetError, match=NO_BACKWARD_PASS):
            loop.go_forward()


def test_no_percentage_is_of_a_step_without_its_backward_pass(tmp_path: Path) -> None:
    loop = Loop("80%", tmp_path)
    with loop.memory:
        for _ in range(3):
            loop.go_forward()
        assert loop.memory.limit_bytes is None
        for _ in range(8):
            loop.train()
        assert (loop.memory.limit_bytes, loop.memory.state) == limit_of("tttttttt", tmp_path)


def test_no_plan_stays_that_is_for_more_than_the_percentage(tmp_path: Path) -> None:
    """Larger steps without a backward pass, as many as are planned for before the first one with such a pass."""
    loop = Loop("80%", tmp_path)
    batch = torch.randn(512, 128)
    with loop.memory:
        for evaluates in [True] * (MOST_SKIPPED + 4) + [False] * 8 + [True] * 8:
            with PeakMeter() as meter, loop.memory.step():
                loss = loop.net(batch).square().mean() if evaluates else loop.loss()
                if not evaluates:
                    loss.backward()
            del loss
            loop.net.zero_grad()
        assert loop.memory.limit_bytes is not None
        plans = [kind.plan for kind in kinds_of(loop.memory)]
        assert all(plan is None or plan.limit_bytes <= loop.memory.limit_bytes for plan in plans)
        assert meter.peak_bytes <= loop.memory.limit_bytes


def test_a_step_without_its_forward_pass_is_told_of_it(tmp_path: Path) -> None:
    loop = Loop("80%", tmp_path)
    with loop.memory:
        loop.go_back()
        with pytest.raises(BudgetError, match=NO_FORWARD_PASS):
            loop.go_back()
