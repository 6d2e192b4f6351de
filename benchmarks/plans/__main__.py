"""How good plans are: our solver, the bound and every published policy: ``python -m benchmarks.plans --json FILE``.

On steps of 13 networks of fake tensors on a described GPU and on three recorded ones, each with links of four speeds,
within six budgets. benchmarks/plans/cases.py defines them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.plans.cases import FAR, FORWARDS, MACHINE, SHARES, Case, cases_of, source, step_names
from benchmarks.plans.picture import draw
from benchmarks.plans.tables import figure_table, figures, policy_table, step_tables
from ebbtide.arguments import as_seconds

DEFINITIONS = {
    "machine": f"{MACHINE} for networks of fake tensors, a disk's for recorded steps; its links replaced",
    "forwards": "link speed: forward passes that it takes to move all saved bytes one way; saved bytes are those of the"
    " storages that have an absence, each once",
    "share": "budget: limit_bytes = least_peak_bytes + share * (plain_peak_bytes - least_peak_bytes); the least peak is"
    " the solver's",
    "gap": "solver_seconds / bound_seconds",
    "whole_bound_seconds": "what branch and bound proves where recomputations are whole; looked for with --whole, in"
    f" cases above {FAR:g} times the bound",
    "whole_gap": "solver_seconds / whole_bound_seconds",
    "search_seconds": "null where the solver chose itself: half a second, more where a step has more than 1,700 ops",
}


def main() -> None:
    """Plan every case, print the tables, write cases and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the cases as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw time beyond plain against the budget")
    parser.add_argument("--seconds", type=float, help="search of the solver for a budget; default: the solver's own")
    parser.add_argument(
        "--whole",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help=f"raise the bound by branch and bound for so long where plans take more than {FAR:g} times it; default: 0",
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    parser.add_argument("--steps", default=";".join(step_names()), metavar="NAMES", help="default: %(default)s")
    arguments = parser.parse_args()
    names = arguments.steps.split(";")
    if unknown := set(names) - set(step_names()):
        parser.error(f"there are no steps {', '.join(sorted(unknown))}")
    if as_seconds(arguments.whole) is None:
        parser.error(f"--whole takes a number of seconds, 0 or more, not {arguments.whole}")
    started = time.perf_counter()
    cases = _all_cases(names, arguments.seconds, arguments.whole, arguments.processes)
    took = time.perf_counter() - started
    console = Console(width=None if Console().is_terminal else 150)
    console.print(*step_tables(cases), policy_table(cases), figure_table(cases), highlight=False)
    console.print(f"{took:.0f} s in {arguments.processes} processes", highlight=False)
    if arguments.json is not None:
        document = {
            "definitions": DEFINITIONS,
            "search_seconds": arguments.seconds,
            "took_seconds": took,
            "figures": figures(cases),
            "cases": [dataclasses.asdict(case) | {"gap": case.gap, "whole_gap": case.whole_gap} for case in cases],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.png is not None:
        draw(cases, arguments.png)


def _all_cases(names: list[str], seconds: float | None, whole_seconds: float, processes: int) -> list[Case]:
    """All cases of the steps called ``names``, in order; each step is recorded once."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(processes, get_context("spawn")) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("", total=len(names) * len(FORWARDS) * len(SHARES))
        jobs: dict[Future[list[Case]], tuple[int, float]] = {}
        for place, name in enumerate(names):
            progress.update(task, description=f"recording {name}")
            step, machine = source(name)
            for forwards in FORWARDS:
                jobs[pool.submit(cases_of, name, step, machine, forwards, seconds, whole_seconds)] = place, forwards
        found: dict[tuple[int, float], list[Case]] = {}
        for done in as_completed(jobs):
            place, forwards = jobs[done]
            found[place, forwards] = done.result()
            progress.update(task, description=f"{names[place]}, {forwards:g} forwards", advance=len(SHARES))
    return [case for key in sorted(found) for case in found[key]]


if __name__ == "__main__":
    main()
