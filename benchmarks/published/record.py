"""One comparison with a paper: what it claims, what its policy does here, what our planner does on the same step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from rich.table import Table

from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan import least_peak_bytes, plain_peak_bytes
from ebbtide.plan.judged import Planner
from ebbtide.step import Step

PRECISION = 0.005
"""Share of what lies between the least and the plain peak within which a least budget is looked for."""

Unit = Literal["share", "bytes", "layers", "factor", "count"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. A number that there is not, or that cannot be found by simulation, is None; the note says why.

    Attributes:
        paper: short name.
        instance: network, batch, machine.
        quantity: what is compared.
        unit: ``share`` is relative to the plain step; ``bytes``; ``layers`` of a network; ``factor``; ``count``.
        claim: by the paper.
        published: by the paper's policy in our simulator.
        ebbtide: by our planner, given what the policy takes of the other resource.
        bound: what no plan can beat.
        note: what differs from the paper's set-up.
    """

    paper: str
    instance: str
    quantity: str
    unit: Unit
    claim: float | None
    published: float | None
    ebbtide: float | None
    bound: float | None = None
    note: str = ""


def table_of(rows: Sequence[Row]) -> Table:
    """The rows for a terminal; notes by number under it."""
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    table = Table(title="published claims, by simulation", title_justify="left")
    for name in ("paper", "instance", "quantity"):
        table.add_column(name)
    for name in ("claim", "its policy here", "ebbtide", "bound", "note"):
        table.add_column(name, justify="right")
    last = ""
    for row in rows:
        if last and row.paper != last:
            table.add_section()
        numbers = (row.claim, row.published, row.ebbtide, row.bound)
        words = [words_for(number, row.unit) for number in numbers]
        mark = str(notes.index(row.note) + 1) if row.note else ""
        table.add_row(row.paper if row.paper != last else "", row.instance, row.quantity, *words, mark)
        last = row.paper
    table.caption = "\n".join(f"{number}: {note}" for number, note in enumerate(notes, 1))
    table.caption_justify = "left"
    return table


def words_for(number: float | None, unit: Unit) -> str:
    """A number as a reader wants it."""
    if number is None:
        return "-"
    match unit:
        case "share":
            return f"{round(number, 3) + 0.0:+.1%}"  # no -0.0%
        case "bytes":
            return f"{number / 2**20:,.0f} MiB"
        case "factor":
            return f"{number:.2f}x"
        case "layers" | "count":
            return f"{number:.0f}"


def least_limit(
    step: Step, machine: Machine, planner: Planner, most_seconds: float, guess_bytes: int | None = None
) -> int:
    """About the least budget for which ``planner`` has a plan that takes no more than ``most_seconds``. Bisection.

    With a guess, such as another planner's answer, no more than that if it can be met.
    """

    def within(limit_bytes: int) -> bool:
        try:
            return planner(step, machine, limit_bytes).seconds <= most_seconds
        except BudgetError:
            return False

    low, high = least_peak_bytes(step, machine), plain_peak_bytes(step)
    if within(low):
        return low
    if guess_bytes is not None and low < guess_bytes < high:
        low, high = (low, guess_bytes) if within(guess_bytes) else (guess_bytes, high)
    smallest = max(1, int(PRECISION * (high - low)))
    while high - low > smallest:
        middle = (low + high) // 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high
