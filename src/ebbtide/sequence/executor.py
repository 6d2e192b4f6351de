"""Runs a schedule's records, whatever the states are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Generic, Protocol, TypeVar

from ebbtide.errors import SequenceError
from ebbtide.sequence.blocks import Block
from ebbtide.sequence.schedules import MEMORY, Advance, Load, Record, Reverse, Store
from ebbtide.sequence.store import StateStore

State = TypeVar("State")


class Chain(Protocol[State]):
    """What an executor must know of a chain: its steps, and how a state lies in a block of memory."""

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps ``start`` to ``stop - 1`` forward. It may alter ``state`` and return it."""
        ...

    def reverse(self, state: State, step: int) -> None:
        """Reverse a step, given the state before it, which must stay as it is. The first one is the last step's."""
        ...

    def pack(self, state: State, block: Block, step: int) -> None:
        """Copy the state before ``step`` into a block."""
        ...

    def unpack(self, block: Block, step: int, *, own: bool) -> State:
        """The state before ``step``, without copying it from a block. Unless it is ``own``, it must not be altered."""
        ...

    def own(self, state: State) -> State:
        """A copy that may be altered. The one made before is not needed any more."""
        ...


class Executor(Generic[State]):
    """The working state and a store for all others.

    Args:
        chain: the steps.
        store: where states are put.
        state: state 0. It is copied before a step may alter it.

    Attributes:
        forward_steps: steps run by `Advance` so far.
    """

    def __init__(self, chain: Chain[State], store: StateStore, state: State) -> None:
        self.forward_steps = 0
        self._chain = chain
        self._store = store
        self._working: State | None = state
        self._borrowed: int | None = -1  # the step whose slot the working state lies in; -1: it is the user's

    @property
    def working(self) -> State:
        """The working state, to be looked at only."""
        if self._working is None:
            raise SequenceError("the schedule needs a working state after a reverse step")
        return self._working

    def run(self, records: Iterator[Record]) -> None:
        """Run ``records`` to their end. Whatever steps and tiers raise passes through."""
        with contextlib.ExitStack() as stack:
            if isinstance(records, Generator):
                stack.callback(records.close)  # a bar ends with an error, not when that is forgotten
            self._run(records)

    def _run(self, records: Iterator[Record]) -> None:
        chain, store = self._chain, self._store
        for record in records:
            if isinstance(record, Reverse):
                chain.reverse(self.working, record.step)
                self._working, self._borrowed = None, None
            elif record.tape:
                raise SequenceError(f"{record}: tapes cannot be stored here; take a schedule without them")
            elif isinstance(record, Advance):
                self._own()
                self._working = chain.advance(self._take(), record.start, record.stop)
                self.forward_steps += record.stop - record.start
            elif isinstance(record, Store):
                block = store.take(record.tier)
                chain.pack(self.working, block, record.step)
                store.put(record.step, record.tier, block)
            elif isinstance(record, Load):
                self._load(record)
            else:
                if record.tier == MEMORY and record.step == self._borrowed:
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
        self._borrowed = record.step if in_memory else None

    def _take(self) -> State:
        """The working state, which is not held here any more: each step lets go of the one before it."""
        state, self._working = self.working, None
        return state

    def _own(self) -> None:
        """Make the working state one that may be altered."""
        if self._borrowed is not None:
            self._working, self._borrowed = self._chain.own(self.working), None
