"""Machines that ebbtide knows by name: described from data sheets and published measurements, not measured here.

Memory is what a process can allocate, peaks are without sparsity, links are copies from and to pinned host memory. The
shares of the roofline that kernels reach are assumed, the same for all; `ebbtide.roofline.fit_efficiencies` finds those
of a machine that is at hand.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ebbtide.errors import RecordError
from ebbtide.machine import Machine


def machine_names() -> tuple[str, ...]:
    """Names that `load_machine` knows."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_machine(name: str | Path) -> Machine:
    """The machine called ``name``, in any case, or the one in the file of that path.

    Raises:
        RecordError: if there is no such machine, or the file does not hold one.
    """
    if str(name).lower() in machine_names():
        with resources.as_file(resources.files(__name__) / f"{str(name).lower()}.json") as path:
            return Machine.load(path)
    if str(name) and Path(name).exists():
        return Machine.load(name)
    raise RecordError(
        f"{str(name) or 'the empty name'}: neither a machine file nor one of the machines {', '.join(machine_names())}"
    )
