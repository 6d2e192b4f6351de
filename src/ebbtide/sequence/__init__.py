"""Backpropagation through chains of steps far longer than memory.

`scan` is a loop over a PyTorch cell, `run` the adjoint of user operators on NumPy arrays; `choose` says beforehand what
it will take. `schedules` has the schedules themselves.
"""

from ebbtide.sequence import schedules
from ebbtide.sequence.choose import Choice, SlowMemory, candidates, choose, slow_memories
from ebbtide.sequence.run import Outcome, run
from ebbtide.sequence.scan import scan

__all__ = ["Choice", "Outcome", "SlowMemory", "candidates", "choose", "run", "scan", "schedules", "slow_memories"]
