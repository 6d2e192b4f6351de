"""Interrupts that come while a finalizer runs, where Python prints them and goes on.

While a step is observed, finalizers of ours run for each tensor that dies, as a rule at the end of an op. A signal that
comes during the op is handled in the first Python code after it: there. What its handler raises is kept, to be raised
again where it can be.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()  # a finalizer may run while it is held
_looking: list[Interrupts] = []
_former: Callable[[Any], Any] = sys.__unraisablehook__
"""The hook that was there before ours: there is one of ours, however many look, in whatever order they end."""


class Interrupts:
    """Keeps what is raised in ebbtide's finalizers between `enter` and `leave`.

    Attributes:
        kept: what was raised last; None if nothing was, or it was raised again.
    """

    def __init__(self) -> None:
        self.kept: BaseException | None = None

    def enter(self) -> None:
        """Begin to look at what is raised in finalizers."""
        global _former
        with _lock:
            _looking.append(self)
            if sys.unraisablehook is not _see:
                _former, sys.unraisablehook = sys.unraisablehook, _see

    def leave(self) -> None:
        """Look at it no more; what is kept stays."""
        with _lock:
            _looking[:] = [other for other in _looking if other is not self]
            if not _looking and sys.unraisablehook is _see:
                sys.unraisablehook = _former

    def take(self) -> BaseException | None:
        """What is kept, for whoever raises it."""
        fault, self.kept = self.kept, None
        return fault

    def raise_kept(self) -> None:
        """Raise what is kept, if anything is."""
        fault = self.take()
        if fault is None:
            return
        try:
            raise fault
        finally:
            del fault  # it and this frame would keep each other


def _see(lost: sys.UnraisableHookArgs, /) -> None:
    module = getattr(lost.object, "__module__", None)
    looking = _looking[-1:]  # the latest: signals come to one thread, whoever's step is under way there
    if looking and lost.exc_value is not None and isinstance(module, str) and module.startswith("ebbtide."):
        looking[0].kept = lost.exc_value
    else:
        _former(lost)
