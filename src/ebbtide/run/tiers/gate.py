"""Something that happens once, for which threads may wait."""

from __future__ import annotations

import threading

_LOOK_AGAIN_SECONDS = 1.0
"""Whoever passes a gate may be interrupted before it lets the next one through."""


class Gate:
    """Shut until it is opened, by one thread, for good. Any number of threads may wait at it.

    As a `threading.Event`, but a wait in the main thread may be interrupted anywhere: an `Event` waits on a
    `threading.Condition`, which takes its lock again on the way out, and where Ctrl-C strikes there raises
    ``RuntimeError: release unlocked lock``. It is also quicker to make and to ask.

    Attributes:
        is_open: whether it has been opened.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let everybody through, now and later. Opening twice does nothing."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self) -> None:
        """Wait until it is open."""
        while not self.is_open:
            if self._lock.acquire(timeout=_LOOK_AGAIN_SECONDS):
                self._lock.release()
