"""What random numbers the formulas of a cell draw in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ebbtide.sequence.surroundings import Surroundings, unseen


class CallersDraws:
    """What formulas of the backward pass draw: on from where its caller has the generators, step by step.

    A context for those of a step, after which the generators are to be set anew.

    Args:
        surroundings: whose generators they are, as they are now.
        around: gives contexts that formulas run within, besides.
    """

    def __init__(self, surroundings: Surroundings, around: Callable[[], AbstractContextManager[object]]) -> None:
        self._surroundings = surroundings
        self._around = around
        self._within: AbstractContextManager[object] = contextlib.nullcontext()
        self._states = surroundings.generators()

    def __enter__(self) -> None:
        self.put()
        self._within = self._around()
        self._within.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._within.__exit__(*exception)
        self._states = self._surroundings.generators()

    def put(self) -> None:
        """Leave the generators as all formulas so far have."""
        with unseen():
            self._surroundings.set_generators(self._states)
