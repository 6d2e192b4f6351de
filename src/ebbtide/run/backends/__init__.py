"""Devices with streams: what tiers need of one, and CUDA."""

from ebbtide.run.backends.base import Backend, ComputeStreams, Event, Stream, seen_on

__all__ = ["Backend", "ComputeStreams", "Event", "Stream", "seen_on"]
