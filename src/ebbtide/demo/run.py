"""Runs the demo's cases, those of a model in turns, each in its own process, and shows what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ebbtide.demo.case import WARM_UP_STEPS, CaseResult
from ebbtide.demo.process import CaseProcess
from ebbtide.errors import EbbtideError
from ebbtide.run.tiers.disk import check_directory
from ebbtide.units import format_bytes, format_seconds

BATCH_SIZES = {"vgg19": 8, "resnet50": 12, "gpt2": 4}
"""Models of the demo and their batches: smaller than the benchmarks' (`WORKLOADS`), so that all of it takes minutes."""
FRACTIONS = (0.5, 0.25)
STEPS = 10
MARGIN = 1.01
"""Where a budget cannot be met, the least reachable peak times this is used instead."""
TRIES = 3
"""How often; what the planner calls reachable may still be a little too little for another observation."""

UNTIMED_STEPS = 6
"""Steps of a budget until it is settled, as a rule, and its last."""

Advance = Callable[[], None]
Describe = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of one model.

    Attributes:
        model: its name.
        fraction: of the plain activation bytes that was asked for, or None for plain PyTorch.
        limit_bytes: the budget that was used.
        reachable: whether the budget that was asked for can be met; if not, `limit_bytes` is the least that can.
        result: what was measured.
    """

    model: str
    fraction: float | None
    limit_bytes: int | None
    reachable: bool
    result: CaseResult


def limit_for(plain: CaseResult, fraction: float) -> int:
    """The budget that leaves ``fraction`` of what plain PyTorch needs above the resting bytes."""
    return plain.resting_bytes + int(fraction * (plain.peak_bytes - plain.resting_bytes))


def run_demo(
    console: Console, *, models: Sequence[str] = (), steps: int = STEPS, spill: str | None = None
) -> list[Row]:
    """Train each model plain and within each of `FRACTIONS`, with a progress bar on ``console``.

    Args:
        console: where progress is shown.
        models: names out of `BATCH_SIZES`; all of them if empty.
        steps: of each case.
        spill: directory for what is moved out.

    Raises:
        EbbtideError: if a model is unknown, a case fails, or ``spill`` is no directory that can be written to.
    """
    if spill is not None:
        check_directory(Path(spill))  # before the plain steps, which need none
    names = list(models) or list(BATCH_SIZES)
    for name in names:
        if name not in BATCH_SIZES:
            raise EbbtideError(f"the demo has no model {name!r}; it has {', '.join(BATCH_SIZES)}")
    columns = (TextColumn("{task.description:26}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        in_turns = max(0, steps - UNTIMED_STEPS)
        total = len(names) * ((1 + len(FRACTIONS)) * steps + WARM_UP_STEPS + in_turns)
        task = progress.add_task("starting", total=total)
        describe = functools.partial(_describe, progress, task)
        advance = functools.partial(progress.advance, task)
        return [row for name in names for row in _run_model(name, steps, spill, describe, advance)]


def _describe(progress: Progress, task: TaskID, description: str) -> None:
    """Say what is being done; where there is no terminal, and so no bar, on a line of its own."""
    progress.update(task, description=description)
    if not progress.console.is_terminal:
        progress.console.print(description, markup=False, highlight=False)


def _run_model(name: str, steps: int, spill: str | None, describe: Describe, advance: Advance) -> list[Row]:
    """Plain steps first; then plain steps and those of all budgets in turns."""
    with contextlib.ExitStack() as stack:
        describe(description=f"{name}, plain")
        # All start together: that takes some seconds of one core each.
        cases = _Cases(
            stack, functools.partial(CaseProcess, name, BATCH_SIZES[name], spill, advance), 1 + len(FRACTIONS)
        )
        plain = cases.begin(None)
        for _ in range(steps - 1):
            plain.step()
        plain.count()
        outcome = plain.result()
        settled: list[tuple[CaseProcess, bool]] = []
        for fraction in FRACTIONS:
            describe(description=f"{name}, within {fraction:.0%}")
            # What an earlier budget knows saves this one from trying what cannot be.
            least_bytes = settled[0][0].least_bytes() if settled else 0
            settled.append(_settled(cases, limit_for(outcome, fraction), least_bytes, steps))
        describe(description=f"{name}, in turns")
        processes = [process for process, _ in settled]
        _take_turns(plain, processes, steps)
        outcome = dataclasses.replace(outcome, seconds=min(outcome.seconds, plain.result().seconds))
        rows = [Row(name, None, None, True, outcome)]
        for fraction, (process, reachable) in zip(FRACTIONS, settled, strict=True):
            rows.append(Row(name, fraction, process.limit_bytes, reachable, process.result()))
        return rows


class _Cases:
    """Processes of one model, ``count`` of them started beforehand and at the same time, and more when they are needed.

    They end with ``stack``, at the same time as well.
    """

    def __init__(self, stack: contextlib.ExitStack, start: Callable[[], CaseProcess], count: int) -> None:
        self._stack, self._start = stack, start
        self._waiting = [stack.enter_context(start()) for _ in range(count)]
        self._begun: list[CaseProcess] = []
        for process in self._waiting:
            process.wait()
        stack.callback(self._dismiss)

    def begin(self, limit_bytes: int | None) -> CaseProcess:
        """A process that trains within ``limit_bytes``, or as plain PyTorch."""
        if self._waiting:
            process = self._waiting.pop()
        else:
            process = self._stack.enter_context(self._start())
            process.wait()
        process.begin(limit_bytes)
        self._begun.append(process)
        return process

    def _dismiss(self) -> None:
        for process in self._begun:
            process.dismiss()


def _take_turns(plain: CaseProcess, processes: Sequence[CaseProcess], steps: int) -> None:
    """Bring settled budgets to ``steps`` steps, with a plain step in every round."""
    plain.tune()
    for _ in range(WARM_UP_STEPS):
        plain.step()
    while any(process.steps < steps - 1 for process in processes):
        for process in (plain, *processes):
            if process is plain or process.steps < steps - 1:
                process.step()
    for process in processes:
        process.count()


def _settled(cases: _Cases, limit_bytes: int, least_bytes: int, steps: int) -> tuple[CaseProcess, bool]:
    """A case from whose next step on all are timed, and whether that is within ``limit_bytes``; ``least_bytes`` is the
    least peak, as far as it is known."""
    reachable = limit_bytes >= least_bytes
    if not reachable:
        limit_bytes = int(least_bytes * MARGIN)
    for _ in range(TRIES):
        process = cases.begin(limit_bytes)
        unreachable = process.settle(steps)
        if unreachable is None:
            return process, reachable
        process.close()
        reachable = False
        limit_bytes = int(max(unreachable, limit_bytes) * MARGIN)
    raise EbbtideError(f"{process.name}: no plan even within the {format_bytes(limit_bytes)} said to be reachable")


def faults(rows: Sequence[Row]) -> list[str]:
    """What must not be: a peak above its budget, or numbers that differ from plain PyTorch's. Empty if all is well."""
    plain = {row.model: row.result for row in rows if row.fraction is None}
    found = []
    for row in rows:
        if row.limit_bytes is not None and row.result.peak_bytes > row.limit_bytes:
            peak, limit = format_bytes(row.result.peak_bytes), format_bytes(row.limit_bytes)
            found.append(f"{row.model} within {row.fraction:.0%}: peak {peak} is above the budget {limit}")
        if row.result.digest != plain[row.model].digest:
            found.append(f"{row.model} within {row.fraction:.0%}: parameters or gradients differ from plain PyTorch's")
    return found


def demo_table(rows: Sequence[Row]) -> Table:
    """The demo's outcome as a table of at most 100 columns."""
    table = Table(title="One training run, plain and within a budget", title_justify="left")
    table.add_column("model")
    for heading in ("budget", "limit", "live\ntensors", "RSS above\nrest", "step", "against\nplain", "loss"):
        table.add_column(heading, justify="right")
    table.add_column("same\nnumbers")
    plain: CaseResult | None = None
    for row in rows:
        result = row.result
        if row.fraction is None:
            plain = result
        assert plain is not None
        same = "" if row.fraction is None else "yes" if result.digest == plain.digest else "NO"
        table.add_row(
            row.model if row.fraction is None else "",
            _budget_name(row, plain),
            "" if row.limit_bytes is None else format_bytes(row.limit_bytes),
            format_bytes(result.peak_bytes),
            format_bytes(result.rss_bytes),
            format_seconds(result.seconds),
            f"{result.seconds / plain.seconds:.2f}",
            f"{result.loss:.4f}",
            same,
            end_section=row is rows[-1] or row.fraction == FRACTIONS[-1],
        )
    return table


def _budget_name(row: Row, plain: CaseResult) -> str:
    if row.fraction is None or row.limit_bytes is None:
        return "plain"
    if row.reachable:
        return f"{row.fraction:.0%}"
    used = (row.limit_bytes - plain.resting_bytes) / (plain.peak_bytes - plain.resting_bytes)
    return f"{used:.0%}*"


def demo_notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know."""
    return [
        "budget: percentages are of what plain PyTorch needs above parameters, buffers and inputs.",
        "live tensors: the most bytes alive at once, those included. RSS: by the operating system.",
        "step: median; plain PyTorch with the better of glibc's own and ebbtide's allocator settings.",
        "same numbers: parameters, gradients and buffers after the last step, bit for bit.",
        *(
            f"* {row.model} cannot run within {row.fraction:.0%}, because of one op; this is the least it can."
            for row in rows
            if not row.reachable
        ),
    ]
