"""What papers claim, and what their policies and our planner do: ``python -m benchmarks.published --json FILE``.

Everything is simulated, on machines as their data sheets describe them; benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.published.offloading import autoswap_rows, beaumont_rows, hascoet_rows
from benchmarks.published.recomputing import alexnet_rows, depth_rows, pofo_rows
from benchmarks.published.record import Row, table_of

CLAIMS: dict[str, Callable[[float], Iterator[Row]]] = {
    "hascoet": hascoet_rows,
    "autoswap": autoswap_rows,
    "alexnet": alexnet_rows,
    "depth": depth_rows,
    "pofo": pofo_rows,
    "beaumont": beaumont_rows,
}


def main() -> None:
    """Compute the rows that were asked for, print them, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--claims", default=",".join(CLAIMS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.5, help="search of our solver for a budget")
    arguments = parser.parse_args()
    names = arguments.claims.split(",")
    if unknown := [name for name in names if name not in CLAIMS]:
        parser.error(f"there are no claims {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    rows: list[Row] = []
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            for row in CLAIMS[name](arguments.seconds):
                rows.append(row)
                progress.update(task, description=f"{row.paper}: {row.quantity}"[:40])
            progress.advance(task)
    Console(width=None if Console().is_terminal else 150).print(table_of(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
