"""Tiers to test: of each kind, and a disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.run.tiers import Arena, DiskTier, QueuedTier, StagedTier, StreamTier, pinned_memory
from tests.run.backends.threads import InlineBackend
from tests.run.tiers.stand_ins import MIB


@pytest.fixture(params=["disk", "disk-checksum", "disk-ram", "stream", "staged"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueuedTier | StreamTier]:
    backend = InlineBackend()
    made: QueuedTier | StreamTier
    match request.param:
        case "disk":
            made = DiskTier(tmp_path)
        case "disk-checksum":
            made = DiskTier(tmp_path, checksum=True)
        case "disk-ram":
            with pytest.warns(UserWarning, match="is in RAM"):
                made = DiskTier("/dev/shm")
        case "stream":
            made = StreamTier(backend, Arena(pinned_memory(backend), 128 * MIB, 128 * MIB))
        case _:
            made = StagedTier(tmp_path, backend)
    yield made
    made.close()
    backend.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with contextlib.closing(DiskTier(tmp_path)) as made:
        yield made
