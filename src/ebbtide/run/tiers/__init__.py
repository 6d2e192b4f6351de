"""Slower memories: a file on a disk, or RAM."""

from ebbtide.run.tiers.base import Load, QueuedTier, Slot, SlowTier
from ebbtide.run.tiers.disk import DiskTier
from ebbtide.run.tiers.host import HostTier

__all__ = ["DiskTier", "HostTier", "Load", "QueuedTier", "Slot", "SlowTier"]
