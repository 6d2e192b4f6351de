"""What random numbers a cell draws in its first run, which is no step, and its formulas in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ebbtide.errors import SequenceError
from ebbtide.sequence.surroundings import Surroundings, Watch, unseen


class FirstDraws:
    """Where a cell's first run has left the random generators, and step 0 must leave them, too.

    A cell that draws once, for a mask that it keeps, say, does so in the first run, after which the generators go back:
    all later steps would draw other numbers than in a plain loop.
    """

    def __init__(self) -> None:
        self._states: list[Tensor] | None = None
        self._own: dict[torch.Generator, Tensor] = {}

    def noted(self, cell: Callable[..., Any], surroundings: Surroundings, watch: Watch) -> Callable[..., Any]:
        """``cell``, whose first run under ``watch`` is the one that is noted."""

        def noting(state: Any, x: Any) -> Any:
            found = cell(state, x)
            if self._states is None:
                with unseen():
                    self._states = surroundings.generators()
                    self._own = {generator: generator.get_state() for generator in watch.generators()}
            return found

        return noting

    def check(self, surroundings: Surroundings) -> None:
        """Raise `SequenceError` if step 0, which has just run, left generators elsewhere."""
        expected = [*(self._states or ()), *(self._own.get(one) for one in surroundings.own_generators)]
        for before, now in zip(expected, surroundings.generators(), strict=True):
            if before is not None and not torch.equal(before, now):
                raise SequenceError(
                    "the cell draws random numbers in its first run that it does not draw when it runs again, such as "
                    "those of a mask that it keeps; call it once before the scan, or draw them in each step"
                )


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
