"""The memory that an op takes and gives back inside itself."""

from __future__ import annotations

from typing import Protocol


class WorkspaceProbe(Protocol):
    """Measures how much memory is taken while an op runs. What nobody writes to may be left out: it is not resident."""

    def before(self, made_bytes: int, /) -> None:
        """Call right before the op, with the bytes that the step has made so far and that are alive."""
        ...

    def after(self) -> int:
        """Call right after the op: the most bytes that were alive above those before it, its outputs included."""
        ...
