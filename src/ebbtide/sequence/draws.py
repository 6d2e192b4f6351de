"""What random numbers a cell draws in the backward pass, in steps that run again and in its formulas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ebbtide.sequence.steps import other_draws
from ebbtide.sequence.surroundings import Surroundings, unseen


class StepDraws:
    """What steps draw that run again, last one first: it must be what they drew the first time.

    So each must leave the generators as the step after it has found them.

    Args:
        surroundings: whose generators they are.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._end: tuple[int, list[bytes]] = 0, []
        self._next = self._end

    def end(self, steps: int) -> None:
        """The first run of the last of so many ``steps`` has ended."""
        self._end = steps, self._surroundings.drawn()

    def begin(self) -> list[bytes]:
        """How a step finds the generators, for `check`."""
        return self._surroundings.drawn()

    def check(self, step: int, before: list[bytes]) -> None:
        """Raise `SequenceError` if ``step``, which has just run, has left them elsewhere than the first time."""
        following, expected = self._end if step + 1 == self._end[0] else self._next
        if following == step + 1 and self._surroundings.drawn() != expected:
            raise other_draws(step)
        self._next = step, before


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
