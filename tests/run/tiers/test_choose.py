"""Which tiers a budget has: with CUDA, every device has its own, and values in RAM go to the disk as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.run.backends.cuda import CudaBackend
from ebbtide.run.tiers import Arena, DeviceTiers, DiskTier, StreamTier
from ebbtide.run.tiers.choose import settle, tiers_for
from ebbtide.run.tiers.pinned import PlannedPlaces
from tests.run.backends.threads import InlineBackend
from tests.run.tiers.stand_ins import MIB, bytes_of, storage_of

pytestmark = pytest.mark.usefixtures("nothing_left")
CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)


def test_a_disk_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (disk,) = tiers_for(tmp_path, checksum=True).values()
    assert isinstance(disk, DiskTier)
    assert disk.checksum
    disk.close()


@pytest.mark.usefixtures("two_gpus")
def test_with_cuda_values_in_ram_go_to_the_disk(tmp_path: Path) -> None:
    tiers = tiers_for(tmp_path, checksum=False)
    assert [(name, tier.kind) for name, tier in tiers.items()] == [
        ("host", "host"), ("disk", "disk"), ("cuda:0", "device"), ("cuda:1", "device")
    ]  # fmt: skip
    for name in ("host", "disk"):
        slot = tiers[name].write(storage := storage_of(10_000))
        assert bytes_of(tiers[name].read(slot).wait()) == bytes_of(storage)
        tiers[name].free(slot)
    host, disk = tiers["host"], tiers["disk"]
    assert isinstance(host, DeviceTiers)
    assert isinstance(disk, DeviceTiers)
    assert host.of(CPU) is disk.of(CPU)
    for tier in tiers.values():
        tier.drain()
        tier.close()


@pytest.mark.usefixtures("two_gpus")
def test_a_peer_out_of_reach_is_one_clear_error(tmp_path: Path) -> None:
    tiers = tiers_for(tmp_path, checksum=False)
    peer = tiers["cuda:1"]
    assert isinstance(peer, DeviceTiers)
    with pytest.raises(SpillError, match="cuda:0 has no access to the memory of cuda:1"):
        peer.of(torch.device("cuda", 0))
    for tier in tiers.values():
        tier.close()


def test_one_of_several_devices_may_have_all_of_the_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many others the process sees does not matter. If one of them comes, both stay within it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("ebbtide.run.tiers.choose.START_BYTES", MIB)
    monkeypatch.setattr("ebbtide.run.tiers.pinned.available_bytes", lambda: 1024 * MIB)
    for name, result in (("new_stream", None), ("near_cpus", frozenset())):
        monkeypatch.setattr(CudaBackend, name, lambda self, *_, result=result: result)
    for name in ("pin", "unpin", "finish"):
        monkeypatch.setattr(CudaBackend, name, lambda self, *_: None)
    for host_bytes, processes in ((64 * MIB, "8"), (None, "8"), (None, "")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        tiers = tiers_for(tmp_path, checksum=False, host_bytes=host_bytes)
        hosts = tiers["host"]
        assert isinstance(hosts, DeviceTiers)
        first = hosts.of(torch.device("cuda", 3))
        assert isinstance(first, StreamTier)
        assert first.capacity_bytes == 64 * MIB
        first._arena.settle(PlannedPlaces((), (), 20 * MIB), lambda: None)
        second = hosts.of(torch.device("cuda", 5))
        assert isinstance(second, StreamTier)
        assert (first.capacity_bytes, second.capacity_bytes) == (20 * MIB, 44 * MIB)
        for tier in tiers.values():
            tier.close()


def test_arenas_follow_the_plan_of_their_tier() -> None:
    planned = {"one": PlannedPlaces((10,), (0,), 3 * MIB), "several": PlannedPlaces((10,), (0,), 5 * MIB)}
    nothing = PlannedPlaces((), (), 0)
    with InlineBackend() as backend:
        arenas = [Arena(torch.UntypedStorage, 100 * MIB) for _ in range(3)]
        tiers = [StreamTier(backend, arena) for arena in arenas]
        remaining = iter(tiers[1:])
        several = DeviceTiers("several", "host", lambda device: next(remaining), lambda device: None)
        settle({"one": tiers[0], "several": several}, lambda _: nothing, CPU)
        assert not several.made, "nothing goes there"
        settle({"one": tiers[0], "several": several}, planned.get, CPU)
        assert [arena.size_bytes for arena in arenas] == [4 * MIB, 6 * MIB, 0], "made before values come"
        several.of(torch.device("meta"))
        settle({"one": tiers[0], "several": several}, planned.get, CPU)
        assert [arena.size_bytes for arena in arenas] == [4 * MIB, 6 * MIB, 0], "whose values come in which order?"
        for tier in tiers:
            tier.close()
