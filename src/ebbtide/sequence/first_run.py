"""What a cell does in its first run, which is no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ebbtide.errors import SequenceError
from ebbtide.sequence.hooks import FirstHooks, PutHooks
from ebbtide.sequence.surroundings import Surroundings, Watch, unseen


class FirstRun:
    """Where a cell's first run has left the random generators, and step 0 must leave them, too; and hooks that it put.

    A cell that draws once, for a mask that it keeps, say, does so in the first run, after which the generators go back:
    all later steps would draw other numbers than in a plain loop. One that puts a hook once may do so.
    """

    def __init__(self) -> None:
        self._states: list[Tensor] | None = None
        self._own: dict[torch.Generator, Tensor] = {}
        self._hooks = FirstHooks()

    def noted(self, cell: Callable[..., Any], surroundings: Surroundings, watch: Watch) -> Callable[..., Any]:
        """``cell``, whose first run under ``watch`` is the one that is noted; hooks that it puts are gone then."""

        def noting(state: Any, x: Any) -> Any:
            with PutHooks() as put:
                try:
                    found = cell(state, x)
                    if self._states is None:
                        self._hooks.note(put)
                        with unseen():
                            self._states = surroundings.generators()
                            self._own = {generator: generator.get_state() for generator in watch.generators()}
                finally:
                    put.undo()
            return found

        return noting

    def compare(self, surroundings: Surroundings, put: PutHooks) -> None:
        """Step 0 has just run, and ``put`` hooks. Raises `SequenceError` if it left generators elsewhere."""
        self._hooks.put_back(put)
        expected = [*(self._states or ()), *(self._own.get(one) for one in surroundings.own_generators)]
        with unseen():
            pairs = zip(expected, surroundings.generators(), strict=True)
            is_elsewhere = any(before is not None and not torch.equal(before, now) for before, now in pairs)
        if is_elsewhere:
            raise SequenceError(
                "the cell draws random numbers in its first run that it does not draw when it runs again, such as "
                "those of a mask that it keeps, or another thread draws meanwhile; call it once before the scan, "
                "or draw them in each step"
            )
