"""Devices with streams: what tiers need of one, on CUDA and, with threads for streams, on a CPU."""

from ebbtide.run.backends.base import Backend, ComputeStreams, Event, Stream, seen_on

__all__ = ["Backend", "ComputeStreams", "Event", "Stream", "seen_on"]
