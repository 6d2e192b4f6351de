"""Interrupts that come while a finalizer runs, where Python prints them and goes on.

While a step is observed, finalizers of ours run for each tensor that dies, as a rule at the end of an op. A signal that
comes during the op is handled in the first Python code after it: there. What its handler raises is kept, to be raised
again where it can be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Hook = Callable[[Any], Any]


class Interrupts:
    """Keeps what is raised in ebbtide's finalizers between `enter` and `leave`.

    Attributes:
        kept: what was raised last; None if nothing was, or it was raised again.
    """

    def __init__(self) -> None:
        self.kept: BaseException | None = None
        self._hook: Hook | None = None
        self._former: Hook = sys.__unraisablehook__

    def enter(self) -> None:
        """Begin to look at what is raised in finalizers."""
        self._former = sys.unraisablehook
        self._hook = sys.unraisablehook = self._see

    def leave(self) -> None:
        """Look at it no more; what is kept stays."""
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._former
        self._hook = None

    def take(self) -> BaseException | None:
        """What is kept, for whoever raises it."""
        fault, self.kept = self.kept, None
        return fault

    def raise_kept(self) -> None:
        """Raise what is kept, if anything is."""
        if self.kept is None:
            return
        fault = self.take()
        assert fault is not None
        try:
            raise fault
        finally:
            del fault  # it and this frame would keep each other

    def _see(self, lost: sys.UnraisableHookArgs, /) -> None:
        module = getattr(lost.object, "__module__", None)
        if (
            self._hook is not None
            and lost.exc_value is not None
            and isinstance(module, str)
            and module.startswith("ebbtide.")
        ):
            self.kept = lost.exc_value
        else:
            self._former(lost)
