"""Which steps are observed once the first ones were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.machine import Machine
from ebbtide.plan import plain_peak_bytes
from ebbtide.run.kinds import Kind
from ebbtide.run.looks import Looks
from ebbtide.run.meter import PeakMeter
from ebbtide.run.observing import observe_step
from tests.run.harness import FAST_DISK
from tests.run.inside import expected_kind, kinds_of

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


def observed(looks: Looks, first: int, last: int) -> list[int]:
    found = []
    for number in range(first, last):
        if looks.are_due(number):
            looks.note_observed()
            found.append(number)
    return found


def test_after_one_that_left_its_plan_those_next_and_the_one_as_long_after_it() -> None:
    looks = Looks()
    assert observed(looks, 0, 9) == [0, 1]
    looks.again(9, ops_only=False)
    assert observed(looks, 10, 30) == [10, 11, 12, 13, 19], "every tenth is likely to be another one"
    looks.again(30, ops_only=False)
    assert observed(looks, 31, 60)[-1] == 51


def test_one_that_ran_other_ops_is_no_other_kind() -> None:
    looks = Looks()
    assert observed(looks, 0, 30) == [0, 1]
    looks.again(30, ops_only=True)
    assert observed(looks, 31, 90) == [31, 32]


@pytest.mark.parametrize("share", [0.5, 0.6, 0.8])
def test_only_the_first_step_of_all_may_pass_a_limit_in_bytes(share: float, tmp_path: Path) -> None:
    """What steps take from one hook to the next is known from then on: in the second one, and in later looks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data, peaks = torch.randn(1024, 64), []
    step = observe_step(lambda: model(data).square().mean().backward(), torch.device("cpu"))
    model.zero_grad()
    with ebbtide.Budget(int(share * plain_peak_bytes(step)), spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(8):
            memory._loop.looks.left = max(memory._loop.looks.left, int(number == 6))
            with PeakMeter() as meter, memory.step():
                model(data).square().mean().backward()
            model.zero_grad()
            peaks.append(meter.peak_bytes)
        assert [measured.state for measured in memory.measured].count("observe") == 3
        assert memory.limit_bytes is not None
        assert max(peaks[1:]) <= memory.limit_bytes


def test_a_step_counts_though_its_kind_is_planned_for_anew_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is known all the same what comes next, and when that came last."""
    planned_anew = []

    def watch(kind: Kind, machine: Machine, between: Sequence[float]) -> None:
        assert kind.plan is not None
        state = kind.state
        kind.make_plan(machine, kind.plan.limit_bytes)
        kind.state = state
        planned_anew.append(kind)

    monkeypatch.setattr(Kind, "watch", watch)
    torch.manual_seed(0)
    models = [nn.Sequential(*(layer for _ in range(n) for layer in (nn.Linear(64, 64), nn.Tanh()))) for n in (6, 8)]
    data = torch.randn(1024, 64)
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(40):
            expected = expected_kind(memory)
            with memory.step():
                models[number % 2](data).square().mean().backward()
            latest = {kind.comings.latest for kind in kinds_of(memory)}
            assert number in latest
            if number > 20:
                assert expected is not None
                assert expected.comings.latest == number, "the kind that was expected is the one that came"
        assert len(set(map(id, planned_anew))) == 2
