"""Backpropagation through chains of steps far longer than memory."""

from ebbtide.sequence import schedules
from ebbtide.sequence.choose import Choice, SlowMemory, candidates, choose, slow_memories

__all__ = ["Choice", "SlowMemory", "candidates", "choose", "schedules", "slow_memories"]
