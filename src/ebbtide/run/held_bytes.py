"""How many bytes steps hold that their thread takes from the CPU arena: some steps hold more than others of their kind.

Kinds are told by what autograd saves and asks for. A step may hold more besides: activations that are looked at now and
then, say.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable

import torch.distributed as dist

from ebbtide.decisions import Plan
from ebbtide.observe.ledger import StorageRecord
from ebbtide.run.native import arena_library
from ebbtide.run.recurrence import Allowance, Recurrence
from ebbtide.step import EXTERNAL, Step, Value

RECOUNTS = 4
"""How many steps in a row are counted: of gradients that steps add to, there may be none yet in every second one."""
MORE_SHARE = 0.01
"""Share of what a step holds above rest by which others may hold more before it is looked whether they fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a step held.

    Attributes:
        most_bytes: the most at once, what its thread had before included.
        taken_bytes: the most at once of what it has taken itself.
    """

    most_bytes: int
    taken_bytes: int

    def above(self, other: Held) -> int:
        """Bytes more than ``other`` held: what was there before does not count, nor what only took its place."""
        return min(self.most_bytes - other.most_bytes, self.taken_bytes - other.taken_bytes)

    def above_at_most(self, other: Held) -> int:
        """Bytes more than ``other`` held, if what was there before that has gone since was none of its own."""
        return max(self.most_bytes - other.most_bytes, self.taken_bytes - other.taken_bytes)


class Rest:
    """What an audited step used and did not make, as far as it lives. A later step may make what is gone anew, as it
    does gradients that were cleared, and holds no more for that."""

    def __init__(self, records: Iterable[StorageRecord]) -> None:
        self._records = list(records)

    @property
    def gone_bytes(self) -> int:
        """What has died since `forget_gone`."""
        return sum(record.size_bytes for record in self._records if not record.is_alive)

    def forget_gone(self) -> None:
        """A step held no more than the audited one: what was gone by then, such as its input, explains nothing."""
        self._records = [record for record in self._records if record.is_alive]


@dataclasses.dataclass(frozen=True, slots=True)
class Audited:
    """A planned step that was counted: its peak, as budgets count, what it held, and what it used besides."""

    peak_bytes: int
    held: Held
    rest: Rest


class Recounts:
    """When to count steps of a kind once more, as one has begun with more than the audited one, or made what that had.

    What was there may be the step's own, as the gradients that it adds to, or somebody else's: who counts is to tell.
    """

    def __init__(self) -> None:
        self._left = self._next = 0
        self._like = Recurrence(latest=0)
        self._allowance = Allowance()  # those that seemed to pass the limit may not have, each time anew
        self._is_second_claimed = False

    @property
    def are_due(self) -> bool:
        """Whether to count the next step."""
        return self._left > 0

    def ask(self, number: int) -> None:
        """The step of this number may have held more. It is asked for again and again while that stays in vain, which
        is to cost ever less."""
        if number >= self._next:
            self._left, self._next = RECOUNTS, 2 * number

    def ask_for_next_like(self, number: int) -> None:
        """Count the next steps, and the one that is due to be like the step of this number, which seems to have passed
        the limit, if it did not take the more within its ops. See NOTE [When the next one is due] in
        `ebbtide.run.recurrence`."""
        self.ask(number)
        self._like.note(number)

    def awaits(self, number: int) -> bool:
        """Whether the step of this number is due to be like the last one that seemed to pass the limit."""
        return number == self._like.due

    def claim_count(self, number: int) -> bool:
        """Claim a count, if one is left, for the step of this number, which begins now. Returns whether to count it."""
        due = self.are_due
        self._left -= due
        return due or (self.awaits(number) and self._allowance.claim(number))

    def take_another(self) -> None:
        """Nothing came of the last one: count the next step."""
        self._left = max(self._left, 1)

    def claim_second_count(self) -> bool:
        """Claim another count as a counted step held more than any plan allows. Returns whether to count another one
        before such steps are refused.

        That is so once, where processes train together. Their threads may let go of a buffer a little late, and where
        one process refuses a step, the others wait for it.
        """
        is_claimed, self._is_second_claimed = self._is_second_claimed, True
        return not is_claimed and dist.is_available() and dist.is_initialized()


def begin() -> int | None:
    """A step begins in the calling thread: count what it takes from the arena, instead of what was counted before.

    Returns:
        A number by which `end` knows whether nobody else has begun to count meanwhile; None if there is no arena.
    """
    arena = arena_library()
    return arena.ebbtide_arena_count() if arena is not None else None


def end(turn: int | None) -> Held | None:
    """The step ends that began as ``turn``: what it held; None where that was not counted to its end."""
    arena = arena_library()
    if arena is None or turn is None:
        return None
    most, taken = ctypes.c_size_t(), ctypes.c_size_t()
    if not arena.ebbtide_arena_most_counted(turn, ctypes.byref(most), ctypes.byref(taken)):
        return None  # of another Budget's step, in another thread, or within this one
    return Held(most.value, taken.value)


def holding_more(step: Step, size_bytes: int) -> Step:
    """The step, if so many bytes that it did not hold were there all the time."""
    more = Value(size_bytes, step.next_storage, EXTERNAL, (), step.moments)
    return dataclasses.replace(step, values=(*step.values, more))


def held_besides(step: Step, observed: Step) -> int:
    """Bytes that ``step`` holds by `holding_more`, and ``observed``, which is of the same structure, does not."""
    return sum(value.size_bytes for value in step.values[len(observed.values) :])


def is_trifle(more_bytes: int, plan: Plan) -> bool:
    """Whether so many bytes are a negligible share of what the plan holds above rest."""
    return more_bytes <= MORE_SHARE * (plan.peak_bytes - plan.resting_bytes)
