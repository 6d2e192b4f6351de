"""Runs a schedule's records, whatever the states are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from ebbtide.errors import SequenceError
from ebbtide.sequence.schedules import MEMORY, Advance, Drop, Load, Record, Reverse, Store
from ebbtide.sequence.store import Block, StateStore

State = TypeVar("State")


class Chain(Protocol[State]):
    """What an executor must know of a chain: its steps, and how a state lies in a block of memory."""

    def advance(self, state: State, step: int) -> State:
        """Run a step forward. It may alter ``state`` and return it."""
        ...

    def reverse(self, state: State, step: int) -> None:
        """Reverse a step, given the state before it, which must stay as it is. The first one is the last step's."""
        ...

    def pack(self, state: State, block: Block) -> None:
        """Copy a state into a block."""
        ...

    def unpack(self, block: Block, *, own: bool) -> State:
        """The state in a block, without copying. Unless it is the caller's ``own``, it must not be altered."""
        ...

    def copy(self, state: State) -> State:
        """A state of its own memory."""
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

    def run(self, records: Iterable[Record]) -> None:
        """Run ``records`` to their end. Whatever steps and tiers raise passes through."""
        for record in records:
            match record:
                case Advance(start, stop, tape=False):
                    self._advance(start, stop)
                case Store(step, tier, tape=False):
                    self._store.put(step, tier, functools.partial(self._chain.pack, self.working))
                case Load(step, tier, into=None, tape=False):
                    self._working = None  # before its successor takes memory
                    in_memory = tier == MEMORY
                    self._working = self._chain.unpack(self._store.get(step, tier), own=not in_memory)
                    self._borrowed = step if in_memory else None
                case Load(step, tier, into="memory", tape=False):
                    self._store.fetch(step, tier)
                case Drop(step, tier, tape=False):
                    if tier == MEMORY and step == self._borrowed:
                        self._own()
                    self._store.drop(step, tier)
                case Reverse(step):
                    self._chain.reverse(self.working, step)
                    self._working, self._borrowed = None, None
                case _:
                    raise SequenceError(f"{record}: tapes cannot be stored here; take a schedule without them")

    def _advance(self, start: int, stop: int) -> None:
        self._own()
        state = self.working
        self._working = None
        for step in range(start, stop):
            state = self._chain.advance(state, step)
        self._working = state
        self.forward_steps += stop - start

    def _own(self) -> None:
        """Make the working state one that may be altered."""
        if self._borrowed is not None:
            self._working, self._borrowed = self._chain.copy(self.working), None
