"""Budgets in which something goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ebbtide
from ebbtide.run.meter import PeakMeter
from tests.conftest import runtime_threads
from tests.run.faults import Steps
from tests.run.harness import FAST_DISK, SLOW_DISK


@pytest.fixture(scope="session")
def limit_bytes() -> int:
    """As many as 60% of what a program's steps hold, in which something goes wrong."""
    program = Steps(at=-1)
    with PeakMeter() as meter:
        program.compute(0, contextlib.nullcontext)
    return int(0.6 * meter.peak_bytes)


@pytest.fixture(params=["fast", "slow"])
def memory(request: pytest.FixtureRequest, limit_bytes: int, tmp_path: Path) -> Iterator[ebbtide.Budget]:
    """A budget whose plans offload, and one whose plans recompute.

    It is in bytes: of a percentage nothing is known in the first two steps, and nothing moves in them.
    """
    machine = FAST_DISK if request.param == "fast" else SLOW_DISK
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=machine) as budget:
        yield budget
    assert runtime_threads() == []


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[ebbtide.Budget]:
    """A budget whose plans offload."""
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as budget:
        yield budget
