"""What values are computed again from is written to in some steps, between their forward and their backward pass."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from tests.run.harness import SLOW_DISK, Guard, gradients_beside_a_buffer
from tests.run.inside import kinds_of
from tests.run.test_gone_over import same
from tests.run.test_kinds import gradients

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")


class Frozen(nn.Module):
    """Norms in evaluation, with more channels than any weight for images has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ParameterList([nn.Parameter(0.5 + torch.rand(width)) for _ in range(5)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for _ in range(5)])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for scale, norm in zip(self.scales, self.norms, strict=True):
            x = torch.sigmoid(norm(x * scale))
        return x

    def step(self, index: int, trains: bool, guard: Guard) -> list[Tensor | None]:
        dice = torch.Generator().manual_seed(index)
        first, second = (torch.randn(64, 8192, generator=dice) for _ in range(2))
        with guard():
            loss = self(first).square().mean()
            if trains:
                with torch.no_grad():
                    self.train()(3 * second + 1)
                self.eval()
            loss.backward()
        return [*gradients(self), *(buffer.clone() for buffer in self.buffers())]


def test_statistics_of_wide_norms(tmp_path: Path) -> None:
    """A training forward writes to them without counting a version."""
    plain = Frozen(8192)
    model = copy.deepcopy(plain)
    with ebbtide.Budget("50%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(14):
            expected = plain.step(index, index in (9, 10), contextlib.nullcontext)
            assert same(expected, model.step(index, index in (9, 10), memory.step)), index
        assert memory.plan is not None
        assert memory.observed is not None
        again = [one for one in memory.plan.decisions if isinstance(one, Recompute)]
        assert any("batch_norm" in memory.observed.ops[op].name for one in again for op in one.ops)


class _BatchFailedError(Exception):
    """What a loop makes of any error of a step."""


@pytest.mark.parametrize("way", ["left", "caught", "wrapped"])
def test_the_next_step_spares_it_wherever_the_error_ends(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers, shift = nn.ModuleList(nn.Linear(128, 128) for _ in range(6)), torch.zeros(128)

    def step(writes: bool, guard: Guard) -> list[Tensor] | None:
        shift.zero_()
        h = torch.ones(1024, 128)
        with guard():
            for layer in layers:
                h = torch.sigmoid(layer(h) + shift)
            if writes:
                shift.add_(1)  # plain PyTorch has saved nothing of it
            try:
                return list(torch.autograd.grad(h.square().mean(), list(layers.parameters())))
            except RuntimeError as fault:
                if way == "caught":
                    return None
                raise _BatchFailedError if way == "wrapped" else fault from None

    expected, failed = step(True, contextlib.nullcontext), []
    assert expected is not None
    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(14):
            found = None
            with contextlib.suppress(_BatchFailedError, RuntimeError):
                found = step(index >= 6, memory.step)
            if found is None:
                failed.append(index)
            else:
                assert all(map(torch.equal, expected, found))
    assert failed == [6]


def test_a_plan_for_many_sizes_that_is_made_anew_spares_it_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))
    step = functools.partial(gradients_beside_a_buffer, layers, torch.zeros(128))

    with PeakMeter() as meter:
        step(760, False, contextlib.nullcontext)
    some, larger = [700 + 10 * number for number in range(7)], [900 + 5 * number for number in range(6)]
    writing = [(731, True), *((rows, False) for rows in some[:3]), (744, True)]
    order = [*((rows, False) for rows in some * 2), *writing, *((rows, False) for rows in larger), *writing]
    failed, kinds = [], list[Kind]()
    with ebbtide.Budget(int(0.75 * meter.peak_bytes), spill=tmp_path, machine=SLOW_DISK) as memory:
        for index, (rows, writes) in enumerate(order):
            expected = step(rows, writes, contextlib.nullcontext)
            try:
                assert all(map(torch.equal, expected, step(rows, writes, memory.step))), index
            except RuntimeError:
                failed.append(index)
                kinds += kinds_of(memory)
        assert [bool(kind.samples) for kind in kinds] == [True]
        assert kinds[0] not in kinds_of(memory), "there is a plan for larger ones, too"
    assert failed == [len(some) * 2]
