"""A bar for long chains."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ebbtide.sequence.schedules import Advance, Record, Reverse

LONG_SECONDS = 5.0
"""Chains that are expected to take fewer seconds have no bar unless asked for."""
REFRESH_SECONDS = 0.1
"""The bar is drawn anew after this many seconds."""
PIECE_STEPS = 100
"""Long advances are split into pieces of this many steps, or the bar would stand still."""


def is_wanted(progress: bool | None, expected_seconds: float) -> bool:
    """Whether to show a bar: as asked for, else for long chains on a terminal."""
    return progress if progress is not None else expected_seconds > LONG_SECONDS and _is_terminal(sys.stderr)


def _is_terminal(stream: object) -> bool:
    """Whether somebody may be looking at ``stream``, which may be None, or one of the user's own."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # the latter of one that is closed
        return False


def watch(records: Iterable[Record], total: int | None) -> Iterator[Record]:
    """Pass ``records`` on and show how many of ``total`` steps, forward and reversed, are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("forward", total=total)
        done, turned, shown = 0, False, 0.0
        for record in itertools.chain.from_iterable(map(_pieces, records)):
            yield record
            # What was yielded is done by now.
            if isinstance(record, Advance):
                done += record.stop - record.start
            elif isinstance(record, Reverse):
                done += 1
                turned = True
            if (now := time.perf_counter()) - shown > REFRESH_SECONDS:
                shown = now
                if isinstance(record, Reverse):
                    bar.update(task, completed=done, description=f"reverse, {record.step} to go")
                else:
                    bar.update(task, completed=done)
        # What is shown last stays on the screen.
        bar.update(task, completed=done, description="forward and back" if turned else "forward")


def _pieces(record: Record) -> Iterable[Record]:
    if not isinstance(record, Advance) or record.tape or record.stop - record.start <= PIECE_STEPS:
        return (record,)
    starts = range(record.start, record.stop, PIECE_STEPS)
    return (Advance(start, min(start + PIECE_STEPS, record.stop)) for start in starts)
