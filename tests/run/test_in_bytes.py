"""No step behind the observed ones passes a limit in bytes, nor do those that verify, audit and rehearse."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.run.meter import PeakMeter
from ebbtide.run.verify import PART_BYTES
from tests.run.harness import FAST_DISK, SLOW_DISK, STEPS, Program, plain_peak_bytes
from tests.run.programs import PROGRAMS, SAID_BY_PYTORCH

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

CASES = {"fast-60": (0.6, FAST_DISK), "slow-60": (0.6, SLOW_DISK)}
NAMES = ("ConvolutionalNet", "Transformer", "UNet", "Recurrent", "Checkpointed", "Accumulation")


@contextlib.contextmanager
def counted(memory: ebbtide.Budget, found: list[tuple[str, int]]) -> Iterator[None]:
    """A step; notes its state and what it held."""
    state = memory.state
    with PeakMeter() as meter, memory.step():
        yield
    found.append((state, meter.peak_bytes))


def counts(kind: type[Program], limit_bytes: int, machine: Machine, spill: Path) -> list[tuple[str, int]]:
    """State and peak of each step."""
    found: list[tuple[str, int]] = []
    program = kind()
    with ebbtide.Budget(limit_bytes, spill=spill, machine=machine) as memory:
        for index in range(STEPS + 4):
            program.run(index, lambda: counted(memory, found))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_no_step_behind_the_observed_ones_passes_the_limit(name: str, case: str, tmp_path: Path) -> None:
    """Not only two of the planned ones: also those that verify, audit and rehearse, each of them."""
    kind, (share, machine) = PROGRAMS[name], CASES[case]
    limit_bytes = int(share * plain_peak_bytes(kind))
    refused: BudgetError | None = None
    try:
        found = counts(kind, limit_bytes, machine, tmp_path)
    except BudgetError as error:
        refused = error.with_traceback(None)
    if refused is not None:
        gc.collect()
        limit_bytes = int(1.02 * refused.reachable_bytes)
        found = counts(kind, limit_bytes, machine, tmp_path)
    assert sum(state in ("planned", "idle") for state, _ in found) >= 4, found
    above = [
        (index, state, held - limit_bytes)
        for index, (state, held) in enumerate(found)
        if state != "observe" and held > limit_bytes + (PART_BYTES if state == "verify" else 0)
    ]
    assert not above, f"(step, state, bytes above {limit_bytes}): {above}"


class _Residual(nn.Module):
    """Blocks whose weights are touched one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (256, 1024, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(*widths[:2]), nn.GELU(), nn.Linear(*widths[1:])) for _ in range(8)
        )

    def step(self, number: int) -> None:
        h = torch.randn(512, 256, requires_grad=True)
        for block in self.blocks:
            h = h + block(h)
        h.square().mean().backward()


class _Rivals(nn.Module):
    """Two networks, of which one is trained in each third step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = (
            nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(depth))) for depth in (6, 2)
        )

    def step(self, number: int) -> None:
        is_both = number % 3 == 2
        with torch.set_grad_enabled(is_both):
            made = self.maker(torch.randn(512, 256))
        F.softplus(self.judge(made.detach())).mean().backward()
        if is_both:
            F.softplus(-self.judge(made)).mean().backward()


@pytest.mark.parametrize(("kind", "share"), [(_Residual, 0.7), (_Rivals, 0.7)], ids=["residual", "rivals"])
def test_observed_steps_behind_the_first_know_what_is_at_rest(
    kind: type[_Residual | _Rivals], share: float, tmp_path: Path
) -> None:
    """It is touched bit by bit, when others' steps are known, and room is left for it from the beginning on."""
    peaks = list[int]()
    for limit_bytes in (1 << 40, 0):
        model, most = kind(), max(peaks, default=0)
        peaks.clear()
        with ebbtide.Budget(limit_bytes or int(share * most), spill=tmp_path, machine=FAST_DISK) as memory:
            for number in range(12):
                with PeakMeter() as meter, memory.step():
                    model.step(number)
                model.zero_grad()
                peaks.append(meter.peak_bytes)
    within = [peak <= share * most for peak in peaks]
    assert within[1:] == [True] * 11, [round(peak / (share * most), 3) for peak in peaks]


@pytest.mark.parametrize("inside", [False, True], ids=["gradients", "and moments of Adam"])
def test_observed_steps_know_what_steps_leave_behind(inside: bool, tmp_path: Path) -> None:
    """Gradients to add to, and an optimizer's state, are touched late in the next step, and room is left from its
    beginning on."""
    peaks = list[int]()
    for limit_bytes in (1 << 40, 0):
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
        model, most = nn.Sequential(*layers), max(peaks, default=0)
        optimizer = torch.optim.Adam(model.parameters())
        peaks.clear()
        with ebbtide.Budget(limit_bytes or int(0.75 * most), spill=tmp_path, machine=FAST_DISK) as memory:
            for number in range(9):
                with PeakMeter() as meter, memory.step():
                    model(torch.randn(512, 256)).square().mean().backward()
                    if inside:
                        optimizer.step()
                        optimizer.zero_grad()
                if not inside and number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
                peaks.append(meter.peak_bytes)
    within = [peak <= 0.75 * most for peak in peaks]
    assert within[1:] == [True] * 8, [round(peak / (0.75 * most), 3) for peak in peaks]


def test_small_tensors_move_without_a_plan_too(tmp_path: Path) -> None:
    """Those of 48 KiB, which plans move: in observed steps behind the first, and in one that leaves its plan."""
    torch.manual_seed(0)
    layer, x = nn.Linear(192, 192), torch.randn(64, 192)

    def step(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        h = x
        for _ in range(60):
            h = function(layer(h)) + x
        h.square().mean().backward()
        layer.zero_grad()

    with PeakMeter() as meter:
        step(torch.tanh)
    limit_bytes = int(0.45 * meter.peak_bytes)
    found: list[tuple[str, int]] = []
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        for function in (*[torch.tanh] * 5, lambda h: h.sigmoid().sin(), torch.tanh):
            with counted(memory, found):
                step(function)
        assert [bool(measured.left) for measured in memory.measured] == [False] * 5 + [True, False]
    assert (found[1][0], found[5][0]) == ("observe", "planned")
    above = [(state, held - limit_bytes) for state, held in found[1:] if state != "verify" and held > limit_bytes]
    assert not above, f"(state, bytes above {limit_bytes}): {above}"
