"""What a schedule is made of: five plain records, read one after another. No torch.

NOTE [What the records mean]
A chain has states ``0..n``; step ``k`` takes state ``k`` to state ``k + 1``. There is one *working state*, besides the
slots of the tiers.
1. A schedule begins with state 0 as the working state and ends when steps ``n - 1, ..., 0`` are reversed, each once.
2. To reverse a step takes its *input* as the working state: the reverse runs the step again itself, keeping what it
   needs. Or it takes the step's *tape*: what an ``Advance(..., tape=True)`` kept of it.
3. After a `Reverse` there is no working state.
4. A schedule never asks for state ``n``. Whoever runs it does the last step once more before the first `Reverse`.
5. A slot is taken by `Store`, or by a `Load` into a tier, and given back by `Drop`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping

from ebbtide.arguments import as_seconds, as_whole
from ebbtide.errors import ArgumentError, SequenceError

MEMORY = "memory"
DISK = "disk"


@dataclasses.dataclass(frozen=True, slots=True)
class Advance:
    """Run forward steps. ``Advance(3, 7)`` is read as: the working state is state 3; run steps 3 to 6, it is then 7.

    ``Advance(3, 4, tape=True)`` also keeps, beside the working state, what the reverse of step 3 needs.
    """

    start: int
    stop: int
    tape: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """Copy the working state to a tier. ``Store(3, "disk")`` is read as: it is state 3; put a copy of it on the disk.

    Nobody waits for the copy. ``Store(3, "memory", tape=True)`` stores the tape of step 3, which was just made.
    """

    step: int
    tier: str
    tape: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Bring a copy back. ``Load(3, "disk")`` is read as: wait for state 3 from the disk, it is then the working state.

    ``Load(3, "disk", into="memory")`` takes a slot in memory now and queues the copy, and does not wait: whoever loads
    state 3 from memory later does. The slot that it comes from stays as it is. ``tape=True`` loads a tape.
    """

    step: int
    tier: str
    into: str | None = None
    tape: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Give a slot back. ``Drop(3, "disk")`` is read as: the copy of state 3 on the disk is not needed any more."""

    step: int
    tier: str
    tape: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reverse:
    """Reverse a step. ``Reverse(3)`` is read as: from the adjoint of state 4, make that of state 3; see rule 2."""

    step: int


Record = Advance | Store | Load | Drop | Reverse


class Schedule(abc.ABC):
    """How to reverse a chain of ``n`` steps.

    Attributes:
        n: number of steps.
    """

    n: int

    @abc.abstractmethod
    def records(self) -> Iterator[Record]:
        """The records, made as they are asked for: see NOTE [What the records mean]."""

    @property
    @abc.abstractmethod
    def slots(self) -> Mapping[str, int]:
        """The most slots in use at once, by tier. The working state is not among them."""

    @property
    def forward_steps(self) -> int:
        """Steps that all `Advance` records run. Counted, unless a subclass has a closed form."""
        return sum(record.stop - record.start for record in self.records() if isinstance(record, Advance))


def take_whole(schedule: object, *names: str) -> None:
    """Make the attributes of these names each an ``int``: whole numbers of NumPy wrap around where they are too small.
    Raises `ArgumentError` if one is no whole number."""
    for name in names:
        object.__setattr__(schedule, name, as_whole(name, getattr(schedule, name)))


def check_length(n: int) -> None:
    """Raise `SequenceError` unless a chain can have ``n`` steps, or `ArgumentError` if that is no whole number."""
    if as_whole("n", n) < 1:
        raise SequenceError(f"a chain of {n} steps cannot be reversed; it needs at least 1")


def check_slots(n: int, slots: int) -> None:
    """Raise `SequenceError` unless a chain of ``n`` steps can be reversed with ``slots`` slots, or `ArgumentError`."""
    check_length(n)
    if as_whole("states", slots) < (n > 1):
        raise SequenceError(f"a chain of {n} steps needs at least 1 slot besides the working state, not {slots}")


def check_times(**times: float) -> None:
    """Raise `ArgumentError` unless all are times, in whichever unit."""
    for name, time in times.items():
        if as_seconds(time) is None:
            raise ArgumentError(f"{name}={time!r}: it must be a time, 0 or more")
