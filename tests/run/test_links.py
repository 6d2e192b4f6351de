"""Links of devices are measured as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.machine import check_machine
from ebbtide.observe.clock import HostClock
from ebbtide.run import fits
from ebbtide.run.links import measure_links
from ebbtide.run.tiers import Arena, StagedTier, StreamTier
from tests.run.backends.threads import InlineBackend, Temper

pytestmark = pytest.mark.usefixtures("nothing_left")
KIB = 1024


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "SIZES_BYTES", tuple(kib * KIB for kib in (32, 64, 128)))
    monkeypatch.setattr(fits, "REPEATS", 3)


class PaperTier:
    """Transfers take what `LINKS` say, by a clock of their own; one after the other."""

    kind = "host"

    def __init__(self) -> None:
        self.seconds = 0.0

    def mark(self) -> float:
        return self.seconds

    def write(self, storage: torch.UntypedStorage) -> PaperTier:
        self._move(storage.nbytes(), *OUT)
        self.size_bytes = storage.nbytes()
        return self

    def read(self, slot: PaperTier) -> PaperTier:
        self._move(slot.size_bytes, *BACK)
        return self

    def free(self, slot: PaperTier) -> None: ...
    def wait(self) -> None: ...

    def _move(self, size_bytes: int, latency_seconds: float, rate: float) -> None:
        self.seconds += latency_seconds + size_bytes / rate


class PaperClock(HostClock):
    """Tells the time of a `PaperTier`."""

    def __init__(self, tier: PaperTier) -> None:
        self.mark = tier.mark


OUT, BACK = (1e-4, 2e9), (3e-4, 1e9)


def test_rate_and_latency() -> None:
    tier = PaperTier()
    clock, tiers, capacities = PaperClock(tier), {"host": tier}, {"host": 123456789}
    machine = measure_links(InlineBackend(), clock, tiers, capacities, name="paper")  # type: ignore[arg-type]
    check_machine(machine)
    assert machine.tier("host").capacity_bytes == 123456789
    size = fits.SIZES_BYTES[-1]
    both = OUT[0] + BACK[0] + size / OUT[1] + size / BACK[1]
    for link, (latency, rate) in zip(machine.links, (OUT, BACK), strict=True):
        small = fits.LATENCY_BYTES / rate
        assert link.latency_seconds == pytest.approx(latency + small)
        assert link.bandwidth_bytes_per_second == pytest.approx(rate, rel=0.15)
        assert link.duplex_bytes_per_second == pytest.approx(size / both)


def test_every_tier_has_its_links(tmp_path: Path) -> None:
    with InlineBackend(temper=Temper.PROMPT) as backend:
        disk = StagedTier(tmp_path, backend)
        host = StreamTier(backend, Arena(torch.UntypedStorage, 1 << 20, 1 << 20), overflow=disk)
        machine = measure_links(backend, HostClock(), {"host": host, "disk": disk}, {}, name="two")
        host.close()
    assert [(link.source, link.target) for link in machine.links] == [
        ("cpu", "host"), ("host", "cpu"), ("cpu", "disk"), ("disk", "cpu")
    ]  # fmt: skip
    assert [tier.kind for tier in machine.tiers] == ["device", "host", "disk"]


@pytest.mark.parametrize(("free_kib", "capacity_kib", "largest_kib"), [(10**6, 300, 64), (150, 10**6, 32), (1, 1, 32)])
def test_no_more_is_moved_than_there_is_room_for(free_kib: int, capacity_kib: int, largest_kib: int) -> None:
    """Two of the largest are there at once, on either side."""
    tier, sizes = PaperTier(), list[int]()
    write = tier.write

    def noted(storage: torch.UntypedStorage) -> PaperTier:
        sizes.append(storage.nbytes())
        return write(storage)

    tier.write = noted  # type: ignore[method-assign]
    with InlineBackend() as backend:
        tiers, capacities = {"host": tier}, {"host": capacity_kib * KIB}
        clock, free = PaperClock(tier), free_kib * KIB
        measured = measure_links(backend, clock, tiers, capacities, name="paper", free_bytes=free)  # type: ignore[arg-type]
    assert max(sizes) == largest_kib * KIB
    check_machine(measured)
