"""Execution of a schedule's records, whatever the states are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Generic, Protocol, TypeVar

from ebbtide.errors import SequenceError
from ebbtide.sequence.blocks import Block
from ebbtide.sequence.schedules import MEMORY, Advance, Load, Record, Reverse, Store
from ebbtide.sequence.store import StateStore

StateT = TypeVar("StateT")

_CALLER = -1
"""Stands for the step of a slot while the working state is the caller's state 0, which lies in no slot."""


class Chain(Protocol[StateT]):
    """What an executor must know of a chain: its steps, and how a state lies in a block of memory."""

    def advance(self, state: StateT, start: int, stop: int) -> StateT:
        """Run steps ``start`` to ``stop - 1`` forward. It may alter ``state`` and return it."""
        ...

    def reverse(self, state: StateT, step: int) -> None:
        """Reverse a step, given the state before it, which must stay as it is. The first one is the last step's."""
        ...

    def pack(self, state: StateT, block: Block, step: int) -> None:
        """Copy the state before ``step`` into a block."""
        ...

    def unpack(self, block: Block, step: int, *, own: bool) -> StateT:
        """The state before ``step``, without copying it from a block. Unless it is ``own``, it must not be altered."""
        ...

    def own(self, state: StateT) -> StateT:
        """A copy of ``state`` that may be altered. The copy made before is not needed any more."""
        ...


class Executor(Generic[StateT]):
    """The working state and a store for all others.

    Args:
        chain: the steps.
        store: where states are put.
        state: state 0. It is copied before a step may alter it.
        n: number of steps; None if only the schedule will know.

    Attributes:
        forward_steps: steps run by `Advance` so far.
    """

    def __init__(self, chain: Chain[StateT], store: StateStore, state: StateT, n: int | None) -> None:
        self.forward_steps = 0
        self._left = n  # steps not yet reversed
        self._step: int | None = 0  # the working state's number; None if there is none
        self._chain = chain
        self._store = store
        self._working: StateT | None = state
        self._borrowed_from: int | None = _CALLER  # the step whose slot that lies in; None: it is our own

    @property
    def working(self) -> StateT:
        """The working state, to be looked at only."""
        if self._working is None:
            raise SequenceError("the schedule needs a working state after a reverse step")
        return self._working

    def run(self, records: Iterator[Record]) -> None:
        """Run ``records`` to their end. Whatever steps and tiers raise passes through.

        Raises:
            SequenceError: at a record that takes another state for the working one, or reverses out of order: users
                write schedules too, and such a one would give a wrong adjoint.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(records, Generator):
                stack.callback(records.close)  # a bar ends with an error, not when that is forgotten
            self._run(records)

    def finish(self) -> None:
        """Raise `SequenceError` if steps are left that were not reversed."""
        if self._left:
            raise SequenceError(f"the schedule ends with step {self._left - 1} not yet reversed")

    def _run(self, records: Iterator[Record]) -> None:
        chain, store = self._chain, self._store
        for record in records:
            if isinstance(record, Reverse):
                self._expect(record, record.step)
                if self._left is None:
                    self._left = record.step + 1
                if record.step != self._left - 1:
                    raise _broken(record, f"the next step to reverse is {self._left - 1}")
                chain.reverse(self.working, record.step)
                self._working, self._borrowed_from, self._step = None, None, None
                self._left -= 1
            elif record.tape:
                raise SequenceError(f"{record}: tapes cannot be stored here; take a schedule without them")
            elif isinstance(record, Advance):
                self._expect(record, record.start)
                if record.stop <= record.start or (self._left is not None and record.stop >= self._left):
                    raise _broken(record, "it must run a step, and none from the next one to reverse on")
                self._own()
                self._working = chain.advance(self._take(), record.start, record.stop)
                self._step = record.stop
                self.forward_steps += record.stop - record.start
            elif isinstance(record, Store):
                self._expect(record, record.step)
                block = store.take(record.tier)
                chain.pack(self.working, block, record.step)
                store.put(record.step, record.tier, block)
            elif isinstance(record, Load):
                self._load(record)
            else:
                if record.tier == MEMORY and record.step == self._borrowed_from:
                    self._own()
                store.drop(record.step, record.tier)

    def _load(self, record: Load) -> None:
        if record.into == MEMORY:
            self._store.fetch(record.step, record.tier)
            return
        self._working = None  # before its successor takes memory
        in_memory = record.tier == MEMORY
        block = self._store.get(record.step, record.tier)
        self._working = self._chain.unpack(block, record.step, own=not in_memory)
        self._borrowed_from = record.step if in_memory else None
        self._step = record.step

    def _expect(self, record: Record, step: int) -> None:
        if step != self._step:
            why = "there is no working state" if self._step is None else f"the working state is {self._step}"
            raise _broken(record, why)

    def _take(self) -> StateT:
        """The working state, which is not held here any more: each step lets go of the one before it."""
        state, self._working = self.working, None
        return state

    def _own(self) -> None:
        """Make the working state a copy that may be altered."""
        if self._borrowed_from is not None:
            self._working, self._borrowed_from = self._chain.own(self.working), None


def _broken(record: Record, why: str) -> SequenceError:
    return SequenceError(f"the schedule is broken at {record}: {why}")
