"""Budgets in which something goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ebbtide
from tests.conftest import runtime_threads
from tests.run.harness import FAST_DISK, SLOW_DISK


@pytest.fixture(params=["fast", "slow"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ebbtide.Budget]:
    """A budget whose plans offload, and one whose plans recompute."""
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK if request.param == "fast" else SLOW_DISK) as budget:
        yield budget
    assert runtime_threads() == []


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[ebbtide.Budget]:
    """A budget whose plans offload."""
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as budget:
        yield budget
