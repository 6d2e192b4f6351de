"""What a plan does to a step, in numbers: peaks, times, and what happens to the saved values of each type of op."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.machine import Machine
from ebbtide.measured import Measured
from ebbtide.plan.finals import ADVICE
from ebbtide.step import EXTERNAL, Step
from ebbtide.units import format_bytes, format_seconds

Fate = Literal["kept", "moved", "recomputed"]

OTHERS = "others"
"""Name of the row that gathers the op types with few bytes."""
LATE = 1.1
"""A step that takes so many times what is predicted of the device has waited for the host."""
_MOST_ROWS = 8
_WIDTH = 100


@dataclasses.dataclass(frozen=True, slots=True)
class SavedValue:
    """One storage that the step made and autograd saved.

    Attributes:
        value: the saved version; the last one if several were saved.
        op: short name of the op that made it.
        module: path of the module that this op belongs to.
        size_bytes: bytes of the storage.
        absence: index of the absence that decides its fate, or None if it has no absence.
        fate: what the plan does with it.
    """

    value: int
    op: str
    module: str
    size_bytes: int
    absence: int | None
    fate: Fate


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The saved values that ops of one type made: bytes and number by fate."""

    op: str
    kept_bytes: int = 0
    moved_bytes: int = 0
    recomputed_bytes: int = 0
    kept_count: int = 0
    moved_count: int = 0
    recomputed_count: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all values of the row."""
        return self.kept_bytes + self.moved_bytes + self.recomputed_bytes

    @property
    def total_count(self) -> int:
        """Number of values of the row."""
        return self.kept_count + self.moved_count + self.recomputed_count

    def __add__(self, other: Row) -> Row:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTERS}
        return dataclasses.replace(self, **sums)


_COUNTERS = tuple(field.name for field in dataclasses.fields(Row) if field.name != "op")


@dataclasses.dataclass(frozen=True, slots=True)
class TierUse:
    """What goes to one slow tier and back: bytes out, those of them that nothing asks for again, and how long each link
    is busy."""

    name: str
    size_bytes: int
    idle_bytes: int
    out_seconds: float
    in_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A planned step in numbers. Prints as a table of at most 100 columns.

    Attributes:
        limit_bytes: the budget.
        resting_bytes: bytes that the step touches but did not make; part of every peak.
        plain_peak_bytes, plain_seconds: the step without a plan.
        predicted_peak_bytes, predicted_seconds: the planned step in the simulator.
        measured: the planned step as it ran.
        bound_seconds: a time that no plan can beat, or None if not computed.
        rows: saved values by op type, most bytes first, small ones together as `OTHERS`.
        tiers: what is moved, by slow tier.
        device: what the step runs on, as in `Step.device`.
    """

    limit_bytes: int
    resting_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    predicted_peak_bytes: int
    predicted_seconds: float
    measured: Measured
    bound_seconds: float | None
    rows: tuple[Row, ...]
    tiers: tuple[TierUse, ...]
    device: str

    @property
    def total(self) -> Row:
        """The sum of all rows."""
        return sum(self.rows, Row("total"))

    def __rich__(self) -> Group:
        lines = [Text(line, style="dim") for line in (*tier_lines(self), *host_lines(self))]
        return Group(_headline(self), "", _peaks(self), "", _fates(self), *lines)

    def __str__(self) -> str:
        # Lines of tables are drawn by what standard output can show.
        target = io.TextIOWrapper(io.BytesIO(), getattr(sys.stdout, "encoding", None) or "utf-8", errors="replace")
        Console(file=target, width=_WIDTH, color_system=None, highlight=False).print(self)
        target.seek(0)
        return "\n".join(line.rstrip() for line in target.read().splitlines())

    __repr__ = __str__


def summarise(step: Step, machine: Machine, plan: Plan, measured: Measured | None = None) -> Summary:
    """Put ``plan`` for ``step`` in numbers.

    Args:
        step: the observed step.
        machine: what the plan was made for.
        plan: its decisions must be those of the absences of ``step``.
        measured: what a planned step really took; nothing if it has not run yet.

    Raises:
        RecordError: if the plan names a tier that the machine has not.
    """
    return Summary(
        limit_bytes=plan.limit_bytes,
        resting_bytes=plan.resting_bytes,
        plain_peak_bytes=plan.plain_peak_bytes,
        plain_seconds=plan.plain_seconds,
        predicted_peak_bytes=plan.peak_bytes,
        predicted_seconds=plan.seconds,
        measured=measured or Measured(),
        bound_seconds=plan.bound_seconds,
        rows=_rows(saved_values(step, plan.decisions)),
        tiers=tuple(_tier_uses(step, machine, plan.decisions)),
        device=step.device,
    )


def saved_values(step: Step, decisions: tuple[Decision, ...]) -> tuple[SavedValue, ...]:
    """Every storage that the step made and autograd saved, most bytes first.

    A storage with several absences has the fate of the longest one in which it is not kept.
    """
    deciding: dict[int, int] = {}
    for index, absence in enumerate(step.absences):
        storage = step.values[absence.value].storage
        rank = _rank(step, decisions, index)
        if storage not in deciding or rank > _rank(step, decisions, deciding[storage]):
            deciding[storage] = index
    newest = {step.values[saved.value].storage: saved.value for saved in step.saved}
    external = {value.storage for value in step.values if value.maker == EXTERNAL}
    found = []
    for storage, number in newest.items():
        if storage not in external:
            absence_index = deciding.get(storage)
            fate: Fate = "kept" if absence_index is None else fate_of(decisions[absence_index])
            op = step.ops[step.values[number].maker]
            size_bytes = step.values[number].size_bytes
            found.append(SavedValue(number, short_name(op.name), op.module, size_bytes, absence_index, fate))
    return tuple(sorted(found, key=lambda saved: (-saved.size_bytes, saved.value)))


def fate_of(decision: Decision) -> Fate:
    """What becomes of a value under ``decision``."""
    match decision:
        case Keep():
            return "kept"
        case Offload():
            return "moved"
        case Recompute():
            return "recomputed"


def short_name(name: str) -> str:
    """The name of an op for people: ``aten.convolution.default`` is ``convolution``; other libraries keep theirs."""
    parts = name.split(".")
    if len(parts) == 3:
        parts = parts[:2]
    return ".".join(parts[1:] if parts[0] == "aten" and len(parts) > 1 else parts)


def _rank(step: Step, decisions: tuple[Decision, ...], index: int) -> tuple[bool, int]:
    absence = step.absences[index]
    return not isinstance(decisions[index], Keep), absence.closes - absence.opens


def _rows(values: Iterable[SavedValue]) -> tuple[Row, ...]:
    by_op: dict[str, Row] = {}
    for saved in values:
        row = by_op.get(saved.op, Row(saved.op))
        by_op[saved.op] = row + _row_of(saved)
    rows = sorted(by_op.values(), key=lambda row: (-row.total_bytes, row.op))
    if len(rows) <= _MOST_ROWS:
        return tuple(rows)
    return (*rows[: _MOST_ROWS - 1], sum(rows[_MOST_ROWS - 1 :], Row(OTHERS)))


def _row_of(saved: SavedValue) -> Row:
    match saved.fate:
        case "kept":
            return Row(saved.op, kept_bytes=saved.size_bytes, kept_count=1)
        case "moved":
            return Row(saved.op, moved_bytes=saved.size_bytes, moved_count=1)
        case "recomputed":
            return Row(saved.op, recomputed_bytes=saved.size_bytes, recomputed_count=1)


def _tier_uses(step: Step, machine: Machine, decisions: tuple[Decision, ...]) -> Iterator[TierUse]:
    sizes: dict[str, tuple[list[int], list[int]]] = {}
    for absence, decision in zip(step.absences, decisions, strict=True):
        if isinstance(decision, Offload):
            stay_out = step.is_final(absence)
            sizes.setdefault(decision.tier, ([], []))[stay_out].append(step.values[absence.value].size_bytes)
    for name, (moved, idle) in sizes.items():
        out, back = machine.link(machine.fast, name), machine.link(name, machine.fast)
        out_seconds, in_seconds = sum(map(out.seconds, moved + idle)), sum(map(back.seconds, moved))
        yield TierUse(name, sum(moved + idle), sum(idle), out_seconds, in_seconds)


def tier_lines(summary: Summary) -> list[str]:
    """One sentence for each slow tier in use, and what to do where much goes to them for nothing."""
    lines = [
        f"to {use.name} and back: {format_bytes(use.size_bytes)}, "
        f"link busy {format_seconds(use.out_seconds)} out, {format_seconds(use.in_seconds)} in"
        for use in summary.tiers
    ]
    idle_bytes = sum(use.idle_bytes for use in summary.tiers)
    if idle_bytes:
        lines.append(f"{format_bytes(idle_bytes)} of it stay there, as no backward pass asks for them: {ADVICE}")
    return lines


def host_lines(summary: Summary) -> list[str]:
    """One sentence where a device had to wait for its host: what is predicted is the device's time."""
    measured, predicted = summary.measured, summary.predicted_seconds
    is_planned = measured.state == "planned" and not measured.left
    if summary.device == "cpu" or not is_planned or measured.seconds is None or predicted <= 0:
        return []
    times = measured.seconds / predicted
    if times < LATE:
        return []
    line = (
        f"the step took {times:.2f} times as long as the device needs: the host, which runs your code and the plan, is "
        "late. Larger batches mend that."
    )
    return [line]


def _headline(summary: Summary) -> Text:
    limit, plain = format_bytes(summary.limit_bytes), format_bytes(summary.plain_peak_bytes)
    text = Text.assemble(("ebbtide", "bold"), f"  limit {limit}, plain peak {plain}")
    peak = summary.measured.peak_bytes
    if peak is not None and peak > summary.limit_bytes:
        text.append(f"  over the limit by {format_bytes(peak - summary.limit_bytes)}", style="bold red")
    return text


def _peaks(summary: Summary) -> Table:
    table = _table("", "plain", "predicted", "measured", "bound")
    measured = summary.measured
    resting = summary.resting_bytes
    peaks = (summary.plain_peak_bytes, summary.predicted_peak_bytes, measured.peak_bytes)
    table.add_row("peak", *map(_bytes, peaks), "")
    above = [None if peak is None else peak - resting for peak in peaks]
    table.add_row(f"  above the resting {format_bytes(resting)}", *(_share(part, above[0]) for part in above), "")
    times = (summary.plain_seconds, summary.predicted_seconds, measured.seconds, summary.bound_seconds)
    table.add_row("step time", *map(_seconds, times))
    table.add_row("  against plain", *(_ratio(time, summary.plain_seconds) for time in times))
    return table


def _fates(summary: Summary) -> Table:
    table = _table("saved values by op", "number", "kept", "moved", "recomputed")
    for row in summary.rows:
        table.add_row(*_cells(row))
    table.add_section()
    table.add_row(*_cells(summary.total), style="bold")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", width=_WIDTH - 10)
    for index, column in enumerate(columns):
        # Equal widths line the two tables up under each other.
        justify: Literal["left", "right"] = "right" if index else "left"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis", ratio=1 if index else 3)
    return table


def _cells(row: Row) -> tuple[Text | str, ...]:
    parts = (row.kept_bytes, row.moved_bytes, row.recomputed_bytes)
    # Text, not str: a bracket in an op's name is no markup.
    return Text(row.op), str(row.total_count), *(format_bytes(part) if part else "-" for part in parts)


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _share(part: int | None, whole: int | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _ratio(seconds: float | None, plain: float) -> str:
    return "-" if seconds is None or plain <= 0 else f"{seconds / plain:.3f} x"
