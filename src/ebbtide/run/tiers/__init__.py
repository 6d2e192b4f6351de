"""Slower memories: a file on a disk, RAM, or whatever streams of a device reach."""

from ebbtide.run.tiers.devices import DeviceTiers
from ebbtide.run.tiers.disk import DiskTier
from ebbtide.run.tiers.pinned import Arena, peer_memory, pinned_memory
from ebbtide.run.tiers.queued import QueuedTier
from ebbtide.run.tiers.staged import StagedTier
from ebbtide.run.tiers.stream import StreamTier
from ebbtide.run.tiers.transfers import Load, Slot, SlowTier

__all__ = [
    "Arena",
    "DeviceTiers",
    "DiskTier",
    "Load",
    "QueuedTier",
    "Slot",
    "SlowTier",
    "StagedTier",
    "StreamTier",
    "peer_memory",
    "pinned_memory",
]
