"""Where a user's new tensors are made by default (``torch.set_default_device``), ours are not; those without memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ebbtide.machine import Machine
from ebbtide.run.calibrate import calibrate
from tests.run.harness import FAST_DISK, SLOW_DISK, Program, assert_identical_within, run_plain
from tests.run.programs import mlp

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


@pytest.fixture(params=["for a while", "for good"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """New tensors have no memory unless they are told where to be."""
    if request.param == "for a while":
        with torch.device("meta"):
            yield
    else:
        torch.set_default_device("meta")
        yield
        torch.set_default_device(None)


class Elsewhere(Program):
    """Has all its tensors on the CPU, whatever the default."""

    def build(self) -> nn.Module:
        with torch.device("cpu"):
            return nn.Sequential(mlp(64, 256, 256, 16), nn.Dropout(0.1))

    def loss(self, index: int) -> Tensor:
        with torch.device("cpu"):
            given = self.data(index, 512, 64)
        scores: Tensor = self.model(given)
        return scores.exp().square().mean()


class Sized(Elsewhere):
    """Finds out within the step what its model would make of another batch, without any memory."""

    def loss(self, index: int) -> Tensor:
        sketch = copy.deepcopy(self.model).to("meta")
        sketch(torch.empty(4096, 64, device="meta")).exp().square().mean().backward()
        return super().loss(index)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_steps_within_a_budget(machine: Machine, tmp_path: Path) -> None:
    trial = assert_identical_within(Elsewhere, run_plain(Elsewhere), "60%", machine, tmp_path, may_raise_limit=1)
    assert trial.plan is not None
    assert trial.plan.peak_bytes < trial.plan.plain_peak_bytes


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_what_has_no_memory_is_not_counted(machine: Machine, tmp_path: Path) -> None:
    plans = [
        assert_identical_within(kind, run_plain(kind), "60%", machine, tmp_path, may_raise_limit=1).plan
        for kind in (Elsewhere, Sized)
    ]
    plain, sized = (plan.plain_peak_bytes for plan in plans if plan is not None)
    assert sized == plain


@pytest.mark.usefixtures("nowhere")
def test_a_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = calibrate(tmp_path)
    assert {link.source for link in machine.links} == {"ram", "disk"}
    assert all(link.bandwidth_bytes_per_second > 0 for link in machine.links)
