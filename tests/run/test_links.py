"""Links of devices are measured as fast as they are."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch

from ebbtide.machine import check_machine
from ebbtide.run import links
from ebbtide.run.backends.threads import InlineBackend, QueuedBackend, Temper
from ebbtide.run.links import measure_links
from ebbtide.run.tiers import Arena, StagedTier, StreamTier

pytestmark = pytest.mark.usefixtures("nothing_left")
KIB = 1024


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SIZES_BYTES", tuple(kib * KIB for kib in (32, 64, 128)))
    monkeypatch.setattr(links, "REPEATS", 3)


class Slow(QueuedBackend):
    """A device whose copies take a known time: 1 ms, and 20 ms a MiB more; as fast out as back."""

    def copy(self, stream, target, source):  # type: ignore[no-untyped-def]
        stream.launch(functools.partial(time.sleep, 1e-3 + 20e-3 * target.nbytes() / 2**20))
        super().copy(stream, target, source)


def test_rate_and_latency() -> None:
    with Slow(memory_bytes=8 << 20, temper=Temper.PROMPT) as backend:
        tier = StreamTier(backend, Arena(torch.UntypedStorage, 1 << 20, 1 << 20))
        machine = measure_links(backend, {"host": tier}, {"host": 12345}, name="slow")
        tier.close()
    check_machine(machine)
    assert machine.tier("host").capacity_bytes == 12345
    for link in machine.links:
        assert 1e-3 < link.latency_seconds < 5e-3
        assert link.bandwidth_bytes_per_second == pytest.approx(2**20 / 20e-3, rel=0.5)
        assert link.duplex_bytes_per_second > 0.3 * link.bandwidth_bytes_per_second, "both ways at once"


def test_every_tier_has_its_links(tmp_path: Path) -> None:
    with InlineBackend(temper=Temper.PROMPT) as backend:
        disk = StagedTier(tmp_path, backend)
        host = StreamTier(backend, Arena(torch.UntypedStorage, 1 << 20, 1 << 20), overflow=disk)
        machine = measure_links(backend, {"host": host, "disk": disk}, {}, name="two")
        host.close()
    assert [(link.source, link.target) for link in machine.links] == [
        ("cpu", "host"), ("host", "cpu"), ("cpu", "disk"), ("disk", "cpu")
    ]  # fmt: skip
    assert [tier.kind for tier in machine.tiers] == ["device", "host", "disk"]
