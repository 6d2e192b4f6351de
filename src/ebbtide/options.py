"""What the options of the ``ebbtide`` command mean."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbtide.bundle import load_step
from ebbtide.machine import Machine
from ebbtide.machines import load_machine, machine_names
from ebbtide.named_steps import STEP_FUNCTION, is_file
from ebbtide.step import Step
from ebbtide.units import parse_budget, parse_bytes

DEVICE_SHARE = 0.9
"""Default budget, as a share of the device's memory. The rest is for its context, for workspaces of kernels, which are
not known before they run, and for holes that the allocator leaves."""


def _directory(text: str) -> Path:
    if not text:  # as of a variable that is not set: `Path` would take it for the working directory
        raise typer.BadParameter("it is empty; name a directory")
    return Path(text)


Spill = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=_directory,
        help="Directory on a disk for what moves out (default: the one for temporary files).",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME|FILE",
        help=f"One of {', '.join(machine_names())}, or a file. One of `calibrate -o` says how fast ops are, as fake "
        "steps need, if that has timed steps.",
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Images or passages in a step of a demo model.")]
STEP_HELP = (
    "A step from `ebbtide observe`, or a plan from `ebbtide plan`: its step, for its machine if neither --machine nor "
    "--spill is named."
)
WHAT_HELP = f"A demo model, or a function of yours in a file (default: {STEP_FUNCTION})."
WHAT_FORM = "MODEL|FILE[:FUNCTION]"


def with_whole_lines(app: typer.Typer) -> None:
    """Let the help of each command break lines where the terminal does, not where its source does."""
    for command in app.registered_commands:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))


def writable(value: Any) -> Any:
    """A path, several or none. Those that no file can be written to are refused before the work, not after it."""
    for path in value if isinstance(value, list) else [] if value is None else [value]:
        folder = path.parent
        if str(path) == "-":
            raise typer.BadParameter("- means no file: name one, or /dev/stdout")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a directory; name a file in it")
        if not folder.is_dir():
            raise typer.BadParameter(f"{path} cannot be written: there is no directory {folder}; make it first")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written: permission denied")
    return value


def script_of(what: str | None) -> str | None:
    """The script that is read for ``what``; None for a demo model."""
    return what if what is not None and is_file(what) else None


def machine_file_of(name: str | None) -> str | None:
    """The file that is read for a machine; None for one that ebbtide comes with."""
    return None if name is None or name.lower() in machine_names() else name


def check_apart(outputs: Iterable[Path | None], *inputs: str | Path | None) -> None:
    """Refuse to write over a file that is read: a step, a plan, a machine, or a script, maybe with a function.

    Raises `typer.BadParameter` if an output is one of them.
    """
    for given in (str(name) for name in inputs if name is not None):
        for output in outputs:
            if output is not None and any(_are_one_file(output, name) for name in (given, given.rpartition(":")[0])):
                raise typer.BadParameter(f"{output} is what is read; name another file", param_hint="-o")


def _are_one_file(output: Path, name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # there may be none of that name
        return output.is_file() and output.samefile(name)
    return False


PlanFile = Annotated[
    Path | None,
    typer.Option("-o", metavar="FILE", callback=writable, help="Where to write the plan; .gz compresses it."),
]


def machine_of(name: str | None, spill: Path | None) -> Machine:
    """The machine of that name or file; without one, this machine with a disk where ``spill`` is."""
    _check_one_named(name, spill)
    if name is not None:
        return load_machine(name)
    from ebbtide.run.calibrate import machine_for

    return machine_for(spill_or_default(spill))


def _check_one_named(name: str | None, spill: Path | None) -> None:
    if name is not None and spill is not None:
        raise typer.BadParameter("--machine and --spill each say what to plan for; name one of the two")


def step_and_machine(path: Path, name: str | None, spill: Path | None) -> tuple[Step, Machine]:
    """The step in a file, and the machine of `machine_of`; that of the file if it is a plan's, and nothing is named."""
    _check_one_named(name, spill)
    step, machine = load_step(path)
    if machine is None or name is not None or spill is not None:
        machine = machine_of(name, spill)
    return step, machine


def limit_bytes_of(budget: str | None, step: Step | None, machine: Machine) -> int:
    """The bytes meant by ``budget``; percentages are of the plain peak of ``step``, if there is one."""
    from ebbtide.plan import plain_peak_bytes

    if budget is None:
        capacity = machine.tier(machine.fast).capacity_bytes
        if capacity is None:
            raise typer.BadParameter("needed: the machine does not say how much memory it has", param_hint="--budget")
        return int(DEVICE_SHARE * capacity)
    try:
        if step is None:
            return parse_bytes(budget)
        amount = parse_budget(budget)
        return amount if isinstance(amount, int) else int(amount * plain_peak_bytes(step))
    except ValueError as fault:
        raise typer.BadParameter(str(fault), param_hint="--budget") from fault


def share_of(text: str, option: str) -> float:
    """The share meant by ``"5%"`` or ``"0"``: unlike a budget it may be nothing."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not (0 <= share < math.inf and (share == 0 or "%" in text)):
        raise typer.BadParameter(f'cannot read {text!r} as a share; write "5%"', param_hint=option)
    return share


def pair_of(text: str, option: str) -> tuple[int, int]:
    """Two sizes of a batch, the smaller first, as in ``"8,16"``."""
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        first, second = 0, 0
    if not 0 < first < second:
        raise typer.BadParameter(f'cannot read {text!r}; write two sizes, the smaller first: "8,16"', param_hint=option)
    return first, second


def spill_or_default(spill: Path | None) -> Path:
    """The directory of ``--spill``, or the one for temporary files."""
    from ebbtide.arguments import spill_directory

    return spill_directory(spill, "--spill DIR")
