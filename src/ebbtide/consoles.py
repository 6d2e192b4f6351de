"""Where the ``ebbtide`` command prints: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from ebbtide.files import is_standard_output

_WIDTH = 100
"""Columns of a table that does not go to a terminal."""


def console_beside(*files: Path | None) -> Console:
    """Standard output; standard error if one of ``files`` goes to the former, whose reader wants nothing else."""
    stderr = any(file is not None and is_standard_output(file) for file in files)
    stream = sys.stderr if stderr else sys.stdout
    shown = stream is not None and stream.isatty()  # there is none where it was closed: nobody wants to know
    return Console(stderr=stderr) if shown else Console(stderr=stderr, width=_WIDTH)


def say(*lines: str, beside: Sequence[Path | None] = ()) -> None:
    """Print lines as they are, on `console_beside`: a bracket in a name is no markup, and a long path is not broken."""
    console_beside(*beside).print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def progress_bar(*more: ProgressColumn) -> Progress:
    """A bar, where there is a terminal: elsewhere Rich would leave an empty line of it."""
    console = errors_console()
    columns = (TextColumn("{task.description:24}"), BarColumn(), *more)
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


def errors_console() -> Console:
    """Standard error."""
    return Console(stderr=True)
