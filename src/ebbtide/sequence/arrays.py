"""A chain of user operators on NumPy arrays, as an executor sees it."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ebbtide.errors import SequenceError
from ebbtide.sequence.blocks import Block
from ebbtide.sequence.checksums import Checksums
from ebbtide.sequence.executor import Executor
from ebbtide.sequence.layout import ArrayLayout, Orders, value_bytes
from ebbtide.sequence.overlaps import Array, may_share

ForwardOperator = Callable[[Any, int], Any]
ReverseOperator = Callable[[Any, Any, int], Any]
Condition = Callable[[Any, int], bool]


def _most_references(parts: list[Array]) -> int:
    """References to the one of ``parts`` that has the most, those made by looking included."""
    return max(map(sys.getrefcount, parts), default=0)


KEPT_BYTES = 1 << 20
"""Memory for copies of states of up to this many bytes stays, so that it need not be asked for again."""
CLOSE_LOOKS = 2
"""Checksums of the state are made before this many steps that are run only to ask a condition about their result, and
wherever the operator has just used memory of a state for the next one: they take long where states are large."""
_UNSEEN_REFERENCES = _most_references([np.empty(0)])
"""References to an array that the list alone holds. How many looking makes is the interpreter's own affair."""


class OwnCopies:
    """Copies of states that may be altered, one at a time.

    Of small states the same memory serves again and again, unless somebody still has the copy made before. That of
    large ones goes with the copy: there would be one state more in memory, while steps that return new arrays run.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self._layout = layout
        self._parts: list[Array] = []
        self._orders: Orders = ()

    def copy(self, state: Any) -> Any:
        """A copy of a state."""
        orders = self._layout.orders(state)
        parts = self._parts
        if not parts or orders != self._orders or _most_references(parts) > _UNSEEN_REFERENCES:
            parts = self._layout.new_parts(state, orders)
            if self._layout.size_bytes <= KEPT_BYTES:
                self._parts, self._orders = parts, orders
        return self._layout.copy_into(parts, state)


class ArrayChain:
    """A `Chain` of NumPy arrays.

    Args:
        forward, reverse, turn: see `ebbtide.sequence.run`.
        layout: how a state lies in a block.
        steps_took: told how many steps of the first sweep have been run, and in how many seconds.
        check: whether to compare states that are computed again.

    Attributes:
        final: the last state, once it is there.
        adjoint: the adjoint of the state before the step reversed last.
        steps: number of steps of the chain, once it is known.
        first_step: the first one that was run.
    """

    def __init__(
        self,
        forward: ForwardOperator,
        reverse: ReverseOperator,
        turn: Callable[[Any], Any],
        layout: ArrayLayout,
        *,
        steps_took: Callable[[int, float], None],
        check: bool,
    ) -> None:
        self.final: Any = None
        self.adjoint: Any = None
        self.steps: int | None = None
        self.first_step: int | None = None
        self._forward = forward
        self._reverse = reverse
        self._turn = turn
        self._layout = layout
        self._steps_took = steps_took
        self._checksums = Checksums("forward operator") if check else None
        self._own_copies = OwnCopies(layout)
        # How elements lie in stored states: in those after step 0, and by step where that is another way.
        self._usual: Orders | None = None
        self._orders: dict[int, Orders] = {}
        # A step that was run to see whether there is another, and its result.
        self._ahead: tuple[int, Any] | None = None
        self._close_looks = CLOSE_LOOKS

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """See `Chain.advance`."""
        if self._ahead is not None and self._ahead[0] == start:
            state, self._ahead = self._ahead[1], None
            start += 1
        if self.first_step is None:
            self.first_step = start
        forward, is_alike, checksums = self._forward, self._layout.is_alike, self._checksums
        began = time.perf_counter()
        for step in range(start, stop):
            state = forward(state, step)
            if not is_alike(state):
                state = self._layout.checked(state, step + 1)
            if checksums is not None:
                checksums.compare(map(value_bytes, self._layout.arrays(state, step + 1)), step)
        if self.steps is None and start < stop:
            self._steps_took(stop - start, time.perf_counter() - began)
        return state

    def look_ahead(self, state: Any, step: int) -> Any:
        """The state after ``step``, which `advance` will give, too."""
        following, shared = self._after(state, step, closely=self._close_looks > 0)
        self._close_looks = max(self._close_looks - 1, int(shared))
        self._ahead = (step, following)
        return following

    def _after(self, state: Any, step: int, *, closely: bool) -> tuple[Any, bool]:
        """The state after ``step``, made without altering ``state``, which is wanted still.

        And whether they may share memory, which is the operator's own then. Unless looked at ``closely``, a state that
        has changed is noticed only where they do, and where the copy that the operator was given has not changed alike.
        """
        given = self._layout.arrays(state, step)
        before = _checksums(given) if closely else None
        copied = self._layout.new_parts(state, self._layout.orders(state))
        following = self.advance(self._layout.copy_into(copied, state), step, step + 1)
        shared = may_share(given, self._layout.arrays(following, step + 1))
        if (closely or shared) and _checksums(given) != (before or _checksums(copied)):
            raise SequenceError(
                f"the forward operator has put state {step + 1} where it had put state {step}; it must return new "
                "arrays, or those of the state that it was given"
            )
        return following, shared

    def reverse(self, state: Any, step: int) -> None:
        """See `Chain.reverse`."""
        if self.steps is None:
            final, _ = self._after(state, step, closely=True)
            self.steps = step + 1
            # `turn` may alter or return it, `reverse` may alter what `turn` has returned, and `forward` use it again.
            copied = self._layout.new_parts(final, self._layout.orders(final))
            self.final = self._layout.copy_into(copied, final)
            self.adjoint = self._turn(final)
        self.adjoint = self._reverse(state, self.adjoint, step)
        self._orders.pop(step, None)

    def pack(self, state: Any, block: Block, step: int) -> None:
        """See `Chain.pack`."""
        orders = self._layout.pack(state, block)
        if self._usual is None and step > 0:
            self._usual = orders
        if orders != self._usual:
            self._orders[step] = orders
        else:
            self._orders.pop(step, None)

    def unpack(self, block: Block, step: int, *, own: bool) -> Any:
        """See `Chain.unpack`."""
        return self._layout.unpack(block, self.orders(step), writeable=own)

    def orders(self, step: int) -> Orders:
        """How the elements of a stored state lie."""
        orders = self._orders.get(step, self._usual)
        return self._layout.first_orders if orders is None else orders

    def adopt(self, step: int, orders: Orders) -> None:
        """Know of a state that was stored before how its elements lie."""
        self._orders[step] = orders

    def own(self, state: Any) -> Any:
        """See `Chain.own`."""
        return self._own_copies.copy(state)


def _checksums(arrays: Sequence[Array]) -> list[int]:
    return [zlib.crc32(value_bytes(array)) for array in arrays]


class Lookahead:
    """Tells an on-line schedule whether there is a further step, from the user's condition on the state before it."""

    def __init__(self, chain: ArrayChain, executor: Executor[Any], condition: Condition) -> None:
        self._chain = chain
        self._executor = executor
        self._condition = condition

    def __call__(self, step: int) -> bool:
        return bool(self._condition(self._chain.look_ahead(self._executor.working, step - 1), step))
