"""Which slower memories a machine offers, by the device that values are on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ebbtide.errors import SpillError
from ebbtide.run.backends.base import ComputeStreams
from ebbtide.run.backends.cuda import CudaBackend
from ebbtide.run.tiers.devices import DeviceTiers
from ebbtide.run.tiers.disk import DiskTier
from ebbtide.run.tiers.pinned import Arena, PlannedPlaces, peer_memory, pinned_memory, spare_bytes
from ebbtide.run.tiers.staged import StagedTier
from ebbtide.run.tiers.stream import StreamTier
from ebbtide.run.tiers.transfers import SlowTier

START_BYTES = 1 << 30
"""Pinned memory for the first step, which nothing is known about."""
PIECE_BYTES = 1 << 30
"""Pinned memory to add at once in such a step."""
PEER_SHARE = 0.9
"""Share of a peer's free memory that may be taken."""


def tiers_for(spill: Path, *, checksum: bool, host_bytes: int | None = None) -> dict[str, SlowTier]:
    """The tiers by name, the one to use without a plan first.

    Without CUDA there is a disk. With it, there are host memory, the disk, and each device as a peer of the others.
    What has no place on a peer goes to host memory, and what has none there to the disk. Each device gets its own
    of each when it first moves something; values in RAM go to the disk all the same. All devices together pin at most
    ``host_bytes``, by default `spare_bytes` when the first of them moves something: as steps run on one device, it may
    have all of that. If another one comes, that one gets what the others have not taken by then.

    Raises:
        SpillError: if the directory cannot be used.
    """
    disk = DiskTier(spill, checksum=checksum)
    if not torch.cuda.is_available():
        return {"disk": disk}
    backends = [CudaBackend(index) for index in range(torch.cuda.device_count())]

    def expect(device: torch.device) -> ComputeStreams | None:
        if device.type != "cuda":
            return None
        streams = backends[device.index].streams
        streams.note()
        return streams

    def make_disk(device: torch.device) -> SlowTier:
        return disk if device.type == "cpu" else StagedTier(spill, backends[device.index], checksum=checksum)

    disks = DeviceTiers("disk", "disk", make_disk, expect)
    disks.of(torch.device("cpu"))

    arenas: list[Arena] = []

    def make_host(device: torch.device) -> SlowTier:
        nonlocal host_bytes
        if device.type == "cpu":
            return disk
        backend, overflow = backends[device.index], disks.of(device)
        if host_bytes is None:
            host_bytes = spare_bytes(len(backends))
        for other in arenas:
            other.stop_growing()
        limit = host_bytes - sum(other.limit_bytes for other in arenas)
        arenas.append(Arena(pinned_memory(backend), limit, START_BYTES, PIECE_BYTES))
        return StreamTier(backend, arenas[-1], overflow=overflow)

    hosts = DeviceTiers("host", "host", make_host, expect)
    tiers: dict[str, SlowTier] = {"host": hosts, "disk": disks}
    for backend in backends:
        name = str(backend.device)
        tiers[name] = DeviceTiers(name, "device", _peer_maker(backend, backends, hosts), expect)
    return tiers


def _peer_maker(
    peer: CudaBackend, backends: list[CudaBackend], hosts: DeviceTiers
) -> Callable[[torch.device], SlowTier]:
    def make(device: torch.device) -> SlowTier:
        if device.type != "cuda" or not torch.cuda.can_device_access_peer(device, peer.device):
            raise SpillError(f"{device} has no access to the memory of {peer.device}; use a machine without that tier")
        free = int(PEER_SHARE * torch.cuda.mem_get_info(peer.device)[0])
        arena = Arena(peer_memory(peer), free)
        return StreamTier(
            backends[device.index], arena, name=str(peer.device), kind="device", overflow=hosts.of(device)
        )

    return make


def settle(
    tiers: Mapping[str, SlowTier],
    planned: Callable[[str], PlannedPlaces | None] | None,
    device: torch.device,
    *,
    grows: bool = True,
) -> None:
    """Between two steps on ``device``: make the tiers that a plan wants, let arenas grow, and follow the plan.

    Args:
        tiers: by name.
        planned: where values lie in the tier of a name; None where no plan says. Where several devices share a tier,
            the order in which their values come is not planned for each of them.
        device: where the steps run.
        grows: whether arenas grow by what had no place in the last step.

    Raises:
        SpillError: if a tier cannot be made.
    """
    for name, tier in tiers.items():
        places = planned(name) if planned is not None else None
        if isinstance(tier, DeviceTiers) and places is not None and places.sizes_bytes:
            tier.of(device)  # in the step itself it would be late, and too small for what the plan moves
        made = tier.made if isinstance(tier, DeviceTiers) else (tier,)
        arenas = [one for one in made if isinstance(one, StreamTier)]
        for one in arenas:
            one.settle(places if len(arenas) == 1 else None, grows=grows)
