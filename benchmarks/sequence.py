"""Time and memory of backpropagation through long chains: ebbtide, store-all, pyrevolve and H-Revolve side by side.

    python -m benchmarks.sequence --json FILE [--plot FILE.png] [--small] [--spill DIRECTORY]

The peers are in requirements/benchmarks.txt; those that are not installed are left out. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PEERS = {"pyrevolve": "pyrevolve", "h-revolve": "checkpoint_schedules"}
"""By method, the package that it needs."""
MAIN = ("ours", "pyrevolve")
OTHER_TURNS = 3
"""Other methods than these have a turn in one of so many, the first ones."""
SWEEP_SECONDS = 0.15
"""A sweep has so many steps that it takes about so long."""
SWEEP_REPEATS = 5
CHOSEN_STEPS = 10_000
"""Length of the chain for which an interval is chosen."""
COUNTS = (10, 50, 100)
"""States that fit in memory, the working state included."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain that methods reverse in turns.

    Attributes:
        cell: see `benchmarks.sequence_cells.make_cell`.
        n: number of steps.
        count: states that fit in memory, the working state included.
        methods: what to compare.
        repeats: how often.
    """

    cell: str
    n: int
    count: int
    methods: tuple[str, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class Record:
    """What one method took for one case. Times are medians; resident bytes are the most, above rest.

    Attributes:
        ratio: time of this method over that of ours, the median over turns.
        factor: forward steps per step of the chain.
        same: whether the adjoint is that of ours bit for bit; None where there is none to compare.
        predicted_seconds, predicted_factor, schedule: what ours expected, of the last turn.
        over_predicted: time over what was predicted in the same turn, the median over turns; None where nothing was.
        waited_seconds: how long compute has waited for the disk.
    """

    cell: str
    n: int
    count: int
    method: str
    seconds: float
    microseconds_per_step: float
    ratio: float
    factor: float | None
    rss_bytes: int
    same: bool | None
    predicted_seconds: float | None
    over_predicted: float | None
    predicted_factor: float | None
    waited_seconds: float | None
    schedule: str | None
    all_seconds: list[float]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A forward sweep that stores every ``interval``-th state, against one that stores nothing.

    Attributes:
        critical: ``interval`` times the seconds of a step over those of a transfer: from 1 on, transfers are hidden.
        slowdown: time over that of the plain loop, less 1; median over turns.
        states: that fit in memory: what is on its way to the disk takes its place there.
        chosen: whether ours chooses this interval for so many.
    """

    cell: str
    interval: int
    critical: float
    slowdown: float
    states: int
    chosen: bool


def cases(*, small: bool) -> list[Case]:
    """What is measured; ``small``: in a minute, to see that all works."""
    every = ("ours", "revolve", "store-all", "pyrevolve", "h-revolve")
    pair = ("ours", "pyrevolve")
    if small:
        return [Case(cell, n, 10, (*every, "scan"), 3) for cell in ("wave", "lstm") for n in (300, 1000)]
    found = []
    for count in COUNTS:
        wave, lstm = (every, (*every, "scan")) if count == 10 else (pair, pair)
        found += [
            *(Case("wave", n, count, pair, 9) for n in (100, 300)),
            Case("wave", 1_000, count, wave, 7),
            Case("wave", 10_000, count, wave, 3),
            Case("wave", 100_000, count, ("ours", "pyrevolve", "h-revolve") if count == 10 else pair, 1),
            Case("lstm", 1_000, count, lstm, 3),
            Case("lstm", 10_000, count, pair, 1),
        ]
    found.append(Case("lstm", 100_000, 10, ("ours",), 1))
    found += [Case("small-wave", n, 10, ("ours", "store-all"), 1) for n in (10_000, 100_000, 1_000_000)]
    return found


class Worker:
    """A `benchmarks.sequence_worker`; ends with the context."""

    def __init__(self, cell: str, method: str, spill: str) -> None:
        command = [sys.executable, "-m", "benchmarks.sequence_worker", "--cell", cell, "--method", method]
        self._name = f"{method} of {cell}"
        self._process = subprocess.Popen(
            [*command, "--spill", spill], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, n: int, count: int, **more: int) -> dict[str, Any] | None:
        """The answer for a chain, None if the method does not do it. Raises `RuntimeError` if the worker has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"n": n, "count": count, **more}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}: the worker ended with code {self._process.wait()}")
        answer: dict[str, Any] | None = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        with self._process:  # closes its input
            pass


@contextlib.contextmanager
def workers(cell: str, methods: Sequence[str], spill: str) -> Iterator[dict[str, Worker]]:
    """A worker for each method that can be had."""
    with contextlib.ExitStack() as stack:
        started = {}
        for method in methods:
            if method not in PEERS or importlib.util.find_spec(PEERS[method]) is not None:
                started[method] = stack.enter_context(contextlib.closing(Worker(cell, method, spill)))
        yield started


def run_case(case: Case, team: dict[str, Worker]) -> list[Record]:
    """All methods of a case, taking turns."""
    answers: dict[str, list[dict[str, Any]]] = {method: [] for method in case.methods if method in team}
    turn = list(answers)
    for number in range(case.repeats):
        for method in turn:
            if number * OTHER_TURNS >= case.repeats and method not in MAIN:
                continue
            answer = team[method].ask(case.n, case.count)
            if answer is not None:
                answers[method].append(answer)
        turn = [*turn[1:], turn[0]]  # nobody always runs after the same one
    own = answers["ours"]
    return [_record(case, method, given, own) for method, given in answers.items() if given]


def _record(case: Case, method: str, given: list[dict[str, Any]], own: list[dict[str, Any]]) -> Record:
    seconds = statistics.median(answer["seconds"] for answer in given)
    last = given[-1]
    over = [a["seconds"] / a["predicted_seconds"] for a in given if a.get("predicted_seconds") is not None]
    return Record(
        cell=case.cell,
        n=case.n,
        count=case.count,
        method=method,
        seconds=seconds,
        microseconds_per_step=seconds / case.n * 1e6,
        ratio=statistics.median(a["seconds"] / b["seconds"] for a, b in zip(given, own, strict=False)),
        factor=last.get("recompute_factor"),
        rss_bytes=max(answer["rss_bytes"] for answer in given),
        same=last["adjoint"] == own[-1]["adjoint"] if "adjoint" in last else None,
        predicted_seconds=last.get("predicted_seconds"),
        over_predicted=statistics.median(over) if over else None,
        predicted_factor=last.get("predicted_factor"),
        waited_seconds=last.get("waited_seconds"),
        schedule=last.get("schedule"),
        all_seconds=[answer["seconds"] for answer in given],
    )


def run_sweeps(cell: str, spill: str, repeats: int) -> list[Sweep]:
    """The founding experiment of Kukreja et al. 2018: slowdown of the forward sweep against the interval."""
    with workers(cell, ("sweep", "transfers", "interval"), spill) as team:
        costs = team["transfers"].ask(0, 0)
        assert costs is not None
        transfer_steps = costs["out_seconds"] / costs["seconds"]
        steps = max(round(SWEEP_SECONDS / costs["seconds"]), 100)
        answers = {count: team["interval"].ask(CHOSEN_STEPS, count) for count in COUNTS}
        chosen = {(answer["interval"], count) for count, answer in answers.items() if answer is not None}
        spread = (0.25, 0.5, 1, 1.5, 2, 4, 8, 16)
        every = sorted({*((max(round(transfer_steps * share), 1), COUNTS[0]) for share in spread), *chosen})
        plain: list[float] = []
        seconds: dict[tuple[int, int], list[float]] = {pair: [] for pair in every}
        for _ in range(repeats):
            for (interval, states), taken in (((0, COUNTS[0]), plain), *seconds.items()):
                answer = team["sweep"].ask(steps, interval, states=states)
                assert answer is not None
                taken.append(answer["seconds"])
    slowdowns = {
        pair: statistics.median(a / b for a, b in zip(seconds[pair], plain, strict=True)) - 1 for pair in every
    }
    return [
        Sweep(cell, pair[0], pair[0] / transfer_steps, slowdowns[pair], pair[1], chosen=pair in chosen)
        for pair in every
    ]


def tables(records: Sequence[Record], sweeps: Sequence[Sweep]) -> list[Table]:
    """What was found, for people."""
    chains = Table(title="Backpropagation through long chains")
    for heading in (
        "cell",
        "steps",
        "states",
        "method",
        "us/step",
        "ours is",
        "factor",
        "RSS MiB",
        "same",
        "predicted",
    ):
        chains.add_column(heading, justify="left" if heading in ("cell", "method") else "right")
    for record in records:
        chains.add_row(
            record.cell,
            f"{record.n:,}",
            str(record.count),
            record.method,
            f"{record.microseconds_per_step:.1f}",
            "" if record.method == "ours" else f"{record.ratio:.2f} x",
            "" if record.factor is None else f"{record.factor:.3f}",
            f"{record.rss_bytes / 2**20:.1f}",
            {True: "yes", False: "NO", None: ""}[record.same],
            "" if record.over_predicted is None else f"{record.over_predicted:.3f} of time",
        )
    slowdowns = Table(title="Forward sweep that stores every I-th state")
    for heading in ("cell", "I", "I / (transfer / step)", "states", "slowdown", "chosen"):
        slowdowns.add_column(heading, justify="left" if heading == "cell" else "right")
    for sweep in sweeps:
        chosen = "yes" if sweep.chosen else ""
        numbers = (str(sweep.interval), f"{sweep.critical:.2f}", str(sweep.states), f"{sweep.slowdown:+.1%}")
        slowdowns.add_row(sweep.cell, *numbers, chosen)
    return [chains, slowdowns]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the records go")
    parser.add_argument("--plot", type=Path, help="where the picture goes (PNG)")
    parser.add_argument("--small", action="store_true", help="a minute's worth, to see that all works")
    parser.add_argument("--spill", default=tempfile.gettempdir(), help="spill directory")
    arguments = parser.parse_args()
    console = Console(width=max(Console().width, 120))
    todo = cases(small=arguments.small)
    cells = list(dict.fromkeys(case.cell for case in todo))
    records: list[Record] = []
    sweeps: list[Sweep] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("cases", total=len(todo))
        for cell in cells:
            methods = list(dict.fromkeys(method for case in todo if case.cell == cell for method in case.methods))
            with workers(cell, methods, arguments.spill) as team:
                for case in (case for case in todo if case.cell == cell):
                    records += run_case(case, team)
                    bar.advance(task)
        for cell in ("wave",) if arguments.small else ("wave", "heavy-wave", "lstm"):
            sweeps += run_sweeps(cell, arguments.spill, 2 if arguments.small else SWEEP_REPEATS)
    for table in tables(records, sweeps):
        console.print(table)
    found = {"records": [dataclasses.asdict(r) for r in records], "sweeps": [dataclasses.asdict(s) for s in sweeps]}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.plot is not None:
        from benchmarks.sequence_plot import draw

        draw(records, sweeps, arguments.plot)


if __name__ == "__main__":
    main()
