"""What a budget keeps to itself and tests look at: the kinds of steps that it knows."""

from __future__ import annotations

from ebbtide import Budget
from ebbtide.run.kinds import Kind


def kinds_of(memory: Budget) -> list[Kind]:
    """The kinds of steps that the budget knows, in the order in which it met them."""
    return list(memory._loop.kinds.values())


def latest_kind(memory: Budget) -> Kind | None:
    """The kind of the latest step; None before the first was observed."""
    return memory._loop.kinds.current


def expected_kind(memory: Budget) -> Kind | None:
    """The kind by whose plan the next step begins; None if there is none."""
    return memory._loop.expected
