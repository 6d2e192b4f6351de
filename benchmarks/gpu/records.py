"""What the benchmark writes down: one record a case, the file that holds them, and the table at the end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ebbtide.units import format_bytes, format_seconds

Status = Literal["measured", "skipped", "error"]
Verdict = Literal["identical", "spread", "differs"]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One case. Bytes of peaks include resting ones: parameters, gradients, buffers, inputs. Times are medians.

    Attributes:
        model, method: names.
        fraction: of the plain step's bytes above its resting ones that a budget leaves; for ``compile-budget`` the
            fraction that `activation_memory_budget` is given; None for methods without one.
        status: ``measured``; or ``skipped`` or ``error``, and then ``reason`` says why and nothing else is known.
        resting_bytes, plain_peak_bytes, plain_reserved_bytes: of a plain step of the same model.
        peak_bytes: the most allocated in any measured step; on a CPU in the one that was counted.
        reserved_bytes: what the allocator took from the device for such steps, starting with nothing cached.
        limit_bytes: the budget in use; above the one asked for if that cannot be met.
        least_reachable_bytes: the least peak that the planner can reach, if it had to say so.
        predicted_peak_bytes, predicted_seconds, predicted_plain_seconds: of the plan.
        bound: ratio to the plain step that no plan can beat, on the planner's figures.
        moved_bytes: of the values that the plan sends away.
        remade_values: how many the plan computes again.
        left: why a step left its plan, if one did; then times and peaks are not those of the plan.
        seconds, plain_seconds: of steps of the method and of plain ones, taken in turns; ``ratio`` is their quotient.
        all_seconds, all_plain_seconds: of each step.
        gradients: ``identical`` to a plain step's from the same state bit for bit, within the ``spread`` of plain steps
            among themselves (`cases.SPREAD_MARGIN`), or neither.
        gradient_difference: the largest over the parameters of the norm of the difference over the norm.
        plain_spread: the same among plain steps; 0 where kernels are deterministic.
        buffers_identical: running statistics too.
        settling_seconds: until all steps are alike: observing, planning, compiling, pinning.
        case_seconds: of the whole case.
    """

    model: str
    method: str
    fraction: float | None
    status: Status
    reason: str = ""
    resting_bytes: int | None = None
    plain_peak_bytes: int | None = None
    plain_reserved_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    least_reachable_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    seconds: float | None = None
    plain_seconds: float | None = None
    ratio: float | None = None
    predicted_seconds: float | None = None
    predicted_plain_seconds: float | None = None
    bound: float | None = None
    moved_bytes: int | None = None
    remade_values: int | None = None
    left: str = ""
    all_seconds: tuple[float, ...] = ()
    all_plain_seconds: tuple[float, ...] = ()
    gradients: Verdict | None = None
    gradient_difference: float | None = None
    plain_spread: float | None = None
    buffers_identical: bool | None = None
    settling_seconds: float | None = None
    case_seconds: float | None = None

    @property
    def share(self) -> float | None:
        """Measured peak above rest, as a share of the plain step's."""
        if self.peak_bytes is None or self.plain_peak_bytes is None or self.resting_bytes is None:
            return None
        return (self.peak_bytes - self.resting_bytes) / (self.plain_peak_bytes - self.resting_bytes)


class Journal:
    """The JSON file, written anew after each case, so that a run which is cut short leaves what it has.

    Args:
        path: of the file; None to write none.
        head: what is known when the run begins.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self.records: list[Record] = []
        self._path = path
        self._head = dict(head)
        self._write()

    def note(self, **facts: Any) -> None:
        """Add facts about the run."""
        self._head.update(facts)
        self._write()

    def add(self, record: Record) -> None:
        """Add a record."""
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        document = self._head | {"records": [dataclasses.asdict(record) for record in self.records]}
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(part, self._path)


COLUMNS = ("asked", "limit", "peak", "predicted", "share", "reserved", "step", "x plain", "predicted", "bound", "moved")


def table_of(records: Sequence[Record]) -> Table:
    """The records, one a row."""
    table = Table(title="Peak and time of a training step against plain PyTorch", title_justify="left")
    table.add_column("model")
    table.add_column("method")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("gradients")
    for model, group in itertools.groupby(records, lambda record: record.model):
        cases = list(group)
        plain = next((record for record in cases if record.status == "measured"), None)
        table.add_row(model, "plain", *(_plain_cells(plain) if plain is not None else ()))
        for record in cases:
            table.add_row("", record.method, *_cells(record), end_section=record is cases[-1])
    return table


def _plain_cells(record: Record) -> tuple[str, ...]:
    known = {
        "peak": _bytes(record.plain_peak_bytes),
        "share": "100%",
        "reserved": _bytes(record.plain_reserved_bytes),
        "step": _seconds(record.plain_seconds),
    }
    return tuple(known.get(heading, "") for heading in COLUMNS)


def _cells(record: Record) -> tuple[str, ...]:
    asked = "" if record.fraction is None else f"{record.fraction:.0%}"
    if record.status != "measured":
        return (asked, *[""] * (len(COLUMNS) - 1), f"{record.status}: {record.reason.splitlines()[0][:40]}")
    return (
        asked,
        _bytes(record.limit_bytes),
        _bytes(record.peak_bytes),
        _bytes(record.predicted_peak_bytes),
        "" if record.share is None else f"{record.share:.0%}",
        _bytes(record.reserved_bytes),
        _seconds(record.seconds),
        _ratio(record.ratio),
        _seconds(record.predicted_seconds),
        _ratio(record.bound),
        _bytes(record.moved_bytes),
        _same(record),
    )


def _bytes(count: int | None) -> str:
    return "" if count is None else format_bytes(count)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _same(record: Record) -> str:
    if record.left:
        return f"{record.gradients}; left its plan"
    if record.gradients == "identical":
        return "identical" if record.buffers_identical else "identical, not buffers"
    return f"{record.gradients}, {record.gradient_difference:.0e} (plain {record.plain_spread:.0e})"
