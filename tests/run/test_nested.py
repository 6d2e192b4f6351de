"""Steps of one budget within steps of another, such as a teacher's within its student's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.observe.loads import note_memory
from ebbtide.plan import plain_peak_bytes
from ebbtide.run.meter import PeakMeter
from ebbtide.step import EXTERNAL
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard, Program, Record, compare, run_plain

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

WIDTH, ROWS = 64, 512
INNER_SHARE, OUTER_SHARE = 0.6, 0.7
LOADED_BYTES = 3 << 20
MACHINES = {"offloads": FAST_DISK, "recomputes": SLOW_DISK}


class Distilled(Program):
    """A student that learns from a teacher which learns itself, in the middle of the student's step.

    Attributes:
        teaching: what is around the teacher's passes.
    """

    teaching: Guard = staticmethod(contextlib.nullcontext)

    def build(self) -> nn.Module:
        return nn.ModuleDict(
            {
                name: nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), kind())))
                for name, kind in (("student", nn.GELU), ("teacher", nn.Tanh))
            }
        )

    def compute(self, index: int, guard: Guard) -> Record:
        x = self.data(index, ROWS, WIDTH)
        with guard():
            learnt = self.model["student"](x)
            with self.teaching():
                taught = self.model["teacher"](x)
                taught.square().mean().backward()
            loss = (learnt - taught.detach()).square().mean()
            loss.backward()
        return {"loss": loss}


@contextlib.contextmanager
def counted(guard: Guard, peaks: list[int]) -> Iterator[None]:
    with PeakMeter() as meter, guard():
        yield
    peaks.append(meter.peak_bytes)


def plain_peaks() -> tuple[int, int]:
    """What the plain step holds, and what the teacher's part of it takes."""
    outer, inner = list[int](), list[int]()
    Distilled().compute(0, lambda: counted(contextlib.nullcontext, outer))
    program = Distilled()
    program.teaching = lambda: counted(contextlib.nullcontext, inner)
    program.compute(0, contextlib.nullcontext)
    return outer[0], inner[0]


@pytest.mark.parametrize(
    ("outer", "inner", "in_bytes"),
    [
        ("offloads", "offloads", True),
        ("offloads", "recomputes", False),
        ("recomputes", "offloads", False),
        ("recomputes", "recomputes", True),
    ],
)
def test_both_keep_to_their_limits(outer: str, inner: str, in_bytes: bool, tmp_path: Path) -> None:
    """Bit for bit; and the outer one sees of what the inner one moves, or computes again, neither more nor less."""
    outer_bytes, inner_bytes = plain_peaks()
    limit = int(OUTER_SHARE * outer_bytes) if in_bytes else f"{OUTER_SHARE:.0%}"
    peaks, inner_peaks, states = list[int](), list[int](), list[tuple[str, str]]()
    program = Distilled()
    with (
        ebbtide.Budget(int(INNER_SHARE * inner_bytes), spill=tmp_path, machine=MACHINES[inner]) as within,
        ebbtide.Budget(limit, spill=tmp_path, machine=MACHINES[outer]) as memory,
    ):
        program.teaching = lambda: counted(within.step, inner_peaks)
        for index, record in enumerate(run_plain(Distilled)):
            states.append((memory.state, within.state))
            compare(record, program.run(index, lambda: counted(memory.step, peaks)), f"step {index} {states[-1]}")
        for budget, name in ((memory, outer), (within, inner)):
            assert budget.plan is not None
            assert any(isinstance(each, Offload if name == "offloads" else Recompute) for each in budget.plan.decisions)
            assert not [measured.left for measured in budget.measured if measured.left]
        saved_bytes, seen_bytes = inner_bytes - int(INNER_SHARE * inner_bytes), memory.plain_peak_bytes
        assert seen_bytes is not None
        assert outer_bytes - saved_bytes <= seen_bytes <= outer_bytes
        assert memory.limit_bytes is not None
        assert max(peaks[1 if in_bytes else 2 :]) <= memory.limit_bytes, [*zip(states, peaks, strict=True)]
        assert max(inner_peaks[1:]) <= int(INNER_SHARE * inner_bytes), [*zip(states, inner_peaks, strict=True)]


def test_what_is_loaded_within_an_observed_step_is_made_there() -> None:
    """It counts from then on until it is let go of; what another thread loads meanwhile is another's."""
    w = torch.randn(WIDTH, requires_grad=True)

    def run() -> None:
        h = w * 2
        memory = torch.UntypedStorage(LOADED_BYTES)
        note_memory(memory, object())
        torch.empty(0, dtype=torch.uint8).set_(memory, 0, (LOADED_BYTES,), (1,)).sum()
        del memory
        elsewhere = torch.UntypedStorage(2 * LOADED_BYTES)
        thread = threading.Thread(target=note_memory, args=(elsewhere, object()))
        thread.start()
        thread.join()
        h.sum().backward()

    step = ebbtide.observe_step(run)
    loaded, *versions = [value for value in step.values if value.size_bytes == LOADED_BYTES]
    assert loaded.maker == 0 != EXTERNAL
    assert step.ops[0].replay == "opaque", "what has made it cannot be run again"
    assert {value.storage for value in versions} <= {loaded.storage}
    assert loaded.dies < step.moments
    assert LOADED_BYTES <= plain_peak_bytes(step) < 2 * LOADED_BYTES
    assert step.resting_bytes < LOADED_BYTES
