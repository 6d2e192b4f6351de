"""Which budgets have the allocator of RAM set for their steps: its settings are the process's, and many may share them.

The last budget to give it back restores PyTorch's own, see NOTE [The allocator decides] in `ebbtide.run.allocator`.
"""

from __future__ import annotations

import threading
import weakref

from ebbtide.run import allocator

_leases: weakref.WeakSet[AllocatorLease] = weakref.WeakSet()
_lock = threading.RLock()  # a lease may die, and be seen to, while its own thread has it


class AllocatorLease:
    """One budget's part in the settings of the allocator: from `take` to `give_back`, or as long as this lives."""

    def __init__(self) -> None:
        self._restore: weakref.finalize[[], AllocatorLease] | None = None
        with _lock:
            _leases.add(self)

    @property
    def is_taken(self) -> bool:
        """Whether the allocator's settings are, among others, this one's."""
        return self._restore is not None

    def take(self, *, exact: bool) -> None:
        """Set the allocator for steps or, if ``exact``, for the first of all: see `allocator.set_exact`."""
        if self._restore is None:
            self._restore = weakref.finalize(self, _restore)
            self._restore.atexit = False
        allocator.set_exact() if exact else allocator.set_tuned()

    def retake(self) -> None:
        """Let other budgets' steps have the arena again, as a step was observed: the first of all runs without it."""
        with _lock:
            is_shared = any(other is not self and other.is_taken for other in _leases)
        if is_shared and self.is_taken:
            allocator.set_tuned()

    def give_back(self) -> None:
        """Give back the allocator's settings, if they were taken."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


def _restore() -> None:
    """Restore the allocator's own settings, unless another budget has set it still."""
    with _lock:
        is_left = not any(lease.is_taken for lease in _leases)
    if is_left:
        allocator.set_default()
        allocator.leave_regions()
    allocator.trim()
