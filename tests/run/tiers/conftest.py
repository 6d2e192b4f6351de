"""Tiers to test: of each kind, and a disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.run.tiers import DiskTier, HostTier, QueuedTier


@pytest.fixture(params=["disk", "disk-checksum", "disk-ram", "host"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueuedTier]:
    made: QueuedTier
    match request.param:
        case "disk":
            made = DiskTier(tmp_path)
        case "disk-checksum":
            made = DiskTier(tmp_path, checksum=True)
        case "disk-ram":
            with pytest.warns(UserWarning, match="is in RAM"):
                made = DiskTier("/dev/shm")
        case _:
            made = HostTier()
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with contextlib.closing(DiskTier(tmp_path)) as made:
        yield made
