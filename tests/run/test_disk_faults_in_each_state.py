"""Faults of the disk in the steps between the first and the planned ones: those that verify, audit and rehearse."""

from __future__ import annotations

from pathlib import Path

import pytest

import ebbtide
from ebbtide.errors import SpillError
from tests.run.faults import VERIFIED, Steps, survive
from tests.run.harness import FAST_DISK, SLOW_DISK
from tests.run.inside import latest_kind
from tests.run.test_disk_faults import DISK_FAULTS, patched

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


@pytest.mark.parametrize("fault", DISK_FAULTS)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_where_values_move(at: int, fault: str, limit_bytes: int, tmp_path: Path) -> None:
    """The second observed step, and those that count, rehearse, and are planned first."""
    patch, message = DISK_FAULTS[fault]
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        survive(memory, Steps(at), SpillError, message, lambda: patched(memory, patch))


@pytest.mark.parametrize("fault", DISK_FAULTS)
def test_in_the_step_that_verifies(fault: str, limit_bytes: int, tmp_path: Path) -> None:
    """True values go out and come back in it. That they do not is no reason to ban what is computed again."""
    patch, message = DISK_FAULTS[fault]
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=SLOW_DISK) as memory:
        survive(memory, Steps(VERIFIED), SpillError, message, lambda: patched(memory, patch))
        kind = latest_kind(memory)
        assert kind is not None
        assert not kind.banned, "what is computed again was taken to differ"


def test_wrong_bytes_in_the_step_that_verifies(limit_bytes: int, tmp_path: Path) -> None:
    def corrupt(tier: object) -> None:
        read = type(tier)._preadv  # type: ignore[attr-defined]

        def flip(fd: int, view: memoryview, offset_bytes: int) -> int:
            count = int(read(tier, fd, view, offset_bytes))
            view[0] ^= 1
            return count

        tier._preadv = flip  # type: ignore[attr-defined]

    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=SLOW_DISK, checksum=True) as memory:
        survive(memory, Steps(VERIFIED), SpillError, "other than they were written", lambda: patched(memory, corrupt))
