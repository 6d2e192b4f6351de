"""What a budget costs: ebbtide and its peers against plain PyTorch, in memory and time.

    python -m benchmarks.overhead --models vgg19,resnet50 --fractions 0.5,0.25 --repeats 5 --json FILE

A fraction is of the bytes that a plain step needs above its resting ones. See benchmarks/README.md for the fields.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ebbtide.demo.run import MARGIN, TRIES
from ebbtide.demo.workloads import WORKLOADS
from ebbtide.units import format_bytes, format_seconds

NOT_BINDING = 1.1
"""A fraction at which a budget does not bind: what remains is what ebbtide costs when it has nothing to do."""
OURS, PEERS = "ebbtide", ("checkpoint", "disk-hook")
Describe = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Record:
    """One case. Bytes of peaks include resting ones, resident bytes are above rest, times are medians of steps.

    Attributes:
        model, method: names.
        compiled: whether the model's blocks are compiled, in plain steps, too.
        fraction: asked for; None for peers, which have no budget.
        limit_bytes: the budget that was used; above the one asked for if that cannot be met.
        least_reachable_bytes: the least peak that the planner can reach, if it had to say so.
        plain_peak_bytes, peak_bytes: counted bytes of live tensors.
        predicted_peak_bytes, predicted_physical_bytes: what the plan says of these, and of them with what ops take
            inside themselves, which the system sees.
        plain_rss_bytes, rss_bytes: the most over the timed steps, by the operating system.
        plain_default_seconds, plain_tuned_seconds: plain steps with glibc's own and with ebbtide's allocator settings.
        plain_seconds: the smaller of the two, of all rounds together: the smaller one of each round would often be the
            one whose process happened to be quick.
        ratio: ``seconds / plain_seconds``.
        turn_ratio: the median, over turns, of a step's seconds by those of a plain step of the same turn: the same
            thing, less moved by a machine whose speed drifts.
        own_ratio: the same against plain steps in its own process, none for peers. Two processes that both run plain
            steps differ by 2 to 3 % for as long as they live; this tells that from what ebbtide costs.
        bound: a ratio that no plan can beat, on the planner's own figures.
        all_seconds, all_default_seconds, all_tuned_seconds: medians of each turn's steps; those of the plain ones.
        all_own_ratios: of each turn, see ``own_ratio``.
        gradients_identical, buffers_identical: bit for bit those of a plain step from the same state.
    """

    model: str
    method: str
    compiled: bool
    fraction: float | None
    limit_bytes: int | None
    least_reachable_bytes: int | None
    resting_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int | None
    predicted_physical_bytes: int | None
    plain_rss_bytes: int
    rss_bytes: int
    plain_default_seconds: float
    plain_tuned_seconds: float
    plain_seconds: float
    seconds: float
    predicted_seconds: float | None
    ratio: float
    turn_ratio: float
    own_ratio: float | None
    bound: float | None
    gradients_identical: bool
    buffers_identical: bool
    all_seconds: list[float]
    all_default_seconds: list[float]
    all_tuned_seconds: list[float]
    all_own_ratios: list[float]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all workers of a model share: its name, the directory that they move to, whether its blocks are compiled."""

    model: str
    spill: str | None = None
    compiled: bool = False


class WorkerProcess:
    """A `benchmarks.worker` in a process of its own; a context manager."""

    def __init__(self, setting: Setting, method: str, *, limit_bytes: int | None = None) -> None:
        self._name = f"{setting.model} by {method}"
        command = [sys.executable, "-m", "benchmarks.worker", "--model", setting.model, "--method", method]
        command += [] if limit_bytes is None else ["--limit-bytes", str(limit_bytes)]
        command += [] if setting.spill is None else ["--spill", setting.spill]
        command += ["--compile"] if setting.compiled else []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command. Raises `RuntimeError` if the worker has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}: the worker ended with code {self._process.wait()} at {do!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._process:  # closes its input, which ends it
            pass


Takes = dict[WorkerProcess, list[dict[str, Any]]]
"""What each worker measured in its turns."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A settled worker of one method; `fraction`, `limit_bytes` and `least_bytes` are those of `Record`."""

    method: str
    fraction: float | None
    limit_bytes: int | None
    least_bytes: int | None
    worker: WorkerProcess


def settled(
    setting: Setting, method: str, fraction: float | None, limit_bytes: int | None, stack: ExitStack
) -> Contender:
    """A contender whose process lives as long as ``stack``; its limit is raised if it cannot be met."""
    least_bytes = None
    for _ in range(TRIES):
        worker = WorkerProcess(setting, method, limit_bytes=limit_bytes)
        unreachable = worker.ask("settle")["unreachable"]
        if unreachable is None:
            return Contender(method, fraction, limit_bytes, least_bytes, stack.enter_context(worker))
        with worker:
            least_bytes = int(unreachable)
        limit_bytes = int(max(least_bytes, limit_bytes or 0) * MARGIN)
    raise RuntimeError(f"{setting.model} by {method}: no plan even within {limit_bytes} bytes")


def run_model(
    setting: Setting, methods: Sequence[str], fractions: Sequence[float], repeats: int, describe: Describe
) -> list[Record]:
    """Measure ``methods``, all in turns of a few steps."""
    model = setting.model
    with ExitStack() as stack:
        plain = [settled(setting, method, None, None, stack) for method in ("plain", "plain-tuned")]
        needs = plain[0].worker.ask("count")
        peak_bytes, resting_bytes = needs["peak_bytes"], needs["resting_bytes"]
        contenders = []
        for fraction in (*fractions, NOT_BINDING) if OURS in methods else ():
            describe(f"{model}, planning within {fraction:.0%}")
            limit_bytes = resting_bytes + int(fraction * (peak_bytes - resting_bytes))
            contenders.append(settled(setting, OURS, fraction, limit_bytes, stack))
        contenders += [settled(setting, peer, None, None, stack) for peer in methods if peer != OURS]
        takes = _take_turns([*plain, *contenders], repeats, lambda turn: describe(f"{model}, turn {turn} of {repeats}"))
        return [
            _record(setting, contender, takes, plain, needs, _own_ratios(model, contender, repeats, describe))
            for contender in contenders
        ]


def _take_turns(contenders: Sequence[Contender], repeats: int, describe: Callable[[int], None]) -> Takes:
    takes: Takes = {contender.worker: [] for contender in contenders}
    turn, order = list(takes), random.Random(0)
    for number in range(repeats):
        describe(number + 1)
        order.shuffle(turn)  # nobody always runs after the same one, whose writes may still be on their way to the disk
        for worker in turn:
            takes[worker].append(worker.ask("turn", number=number))
    return takes


def _seconds(take: dict[str, Any]) -> float:
    """Of a step in a turn, the median."""
    seconds: list[float] = take["seconds"]
    return statistics.median(seconds)


def _own_ratios(model: str, contender: Contender, repeats: int, describe: Describe) -> list[float]:
    """See `Record.own_ratio`."""
    ratios: list[float] = []
    if contender.method != OURS:
        return ratios
    commands = ["plain", "turn"]
    for number in range(repeats):
        describe(f"{model}, turn {number + 1} of {repeats} in one process")
        commands.reverse()
        seconds = {command: _seconds(contender.worker.ask(command, number=number)) for command in commands}
        ratios.append(seconds["turn"] / seconds["plain"])
    return ratios


def _record(
    setting: Setting,
    contender: Contender,
    takes: Takes,
    plain: Sequence[Contender],
    needs: dict[str, Any],
    own_ratios: list[float],
) -> Record:
    worker = contender.worker
    rss_bytes = {each: max(take["rss_bytes"] for take in takes[each]) for each in takes}
    default, tuned = (each.worker for each in plain)
    all_seconds, all_default, all_tuned = (list(map(_seconds, takes[each])) for each in (worker, default, tuned))
    facts = worker.ask("facts")
    # Last, for both leave a heap that a training loop would not: one runs a plain step in the worker's process.
    counted = worker.ask("count")
    same = worker.ask("compare")
    bound_seconds = facts.get("bound_seconds")
    return Record(
        model=setting.model,
        method=contender.method,
        compiled=setting.compiled,
        fraction=contender.fraction,
        limit_bytes=contender.limit_bytes,
        least_reachable_bytes=contender.least_bytes,
        resting_bytes=needs["resting_bytes"],
        plain_peak_bytes=needs["peak_bytes"],
        peak_bytes=counted["peak_bytes"],
        predicted_peak_bytes=facts.get("predicted_peak_bytes"),
        predicted_physical_bytes=facts.get("predicted_physical_bytes"),
        plain_rss_bytes=rss_bytes[default],
        rss_bytes=rss_bytes[worker],
        predicted_seconds=facts.get("predicted_seconds"),
        bound=None if bound_seconds is None else bound_seconds / facts["predicted_plain_seconds"],
        gradients_identical=same["gradients_identical"],
        buffers_identical=same["buffers_identical"],
        **_times(all_seconds, all_default, all_tuned, own_ratios),
    )


def _times(
    all_seconds: list[float], all_default: list[float], all_tuned: list[float], own_ratios: list[float]
) -> dict[str, Any]:
    """The fields of `Record` that follow from what each turn took."""
    default, tuned = statistics.median(all_default), statistics.median(all_tuned)
    seconds, plain, all_plain = statistics.median(all_seconds), *min((default, all_default), (tuned, all_tuned))
    return {
        "plain_default_seconds": default,
        "plain_tuned_seconds": tuned,
        "plain_seconds": plain,
        "seconds": seconds,
        "ratio": seconds / plain,
        "turn_ratio": statistics.median(a / b for a, b in zip(all_seconds, all_plain, strict=True)),
        "own_ratio": statistics.median(own_ratios) if own_ratios else None,
        "all_seconds": all_seconds,
        "all_default_seconds": all_default,
        "all_tuned_seconds": all_tuned,
        "all_own_ratios": own_ratios,
    }


def pooled(rounds: Sequence[Record]) -> Record:
    """One record of a case that was run several times, in new processes: times of all, bytes of the last."""
    return dataclasses.replace(
        rounds[-1],
        gradients_identical=all(record.gradients_identical for record in rounds),
        buffers_identical=all(record.buffers_identical for record in rounds),
        **_times(
            [seconds for record in rounds for seconds in record.all_seconds],
            [seconds for record in rounds for seconds in record.all_default_seconds],
            [seconds for record in rounds for seconds in record.all_tuned_seconds],
            [ratio for record in rounds for ratio in record.all_own_ratios],
        ),
    )


def table_of(records: Sequence[Record]) -> Table:
    """The records, one a row; peaks as shares of what a plain step needs above rest."""
    table = Table(title="Peak and time of a training step against plain PyTorch", title_justify="left")
    table.add_column("model")
    table.add_column("method")
    for heading in (
        "asked",
        "limit",
        "peak",
        "share",
        "resident",
        "step",
        "x plain",
        "by turn",
        "own",
        "bound",
        "predicted",
    ):
        table.add_column(heading, justify="right")
    table.add_column("same")
    for index, record in enumerate(records):
        above = record.plain_peak_bytes - record.resting_bytes
        last = index + 1 == len(records) or records[index + 1].model != record.model
        table.add_row(
            record.model if index == 0 or records[index - 1].model != record.model else "",
            record.method,
            "" if record.fraction is None else f"{record.fraction:.0%}",
            "" if record.limit_bytes is None else format_bytes(record.limit_bytes),
            format_bytes(record.peak_bytes),
            f"{(record.peak_bytes - record.resting_bytes) / above:.0%}",
            f"{record.rss_bytes / record.plain_rss_bytes:.0%}",
            format_seconds(record.seconds),
            f"{record.ratio:.3f}",
            f"{record.turn_ratio:.3f}",
            "" if record.own_ratio is None else f"{record.own_ratio:.3f}",
            "" if record.bound is None else f"{record.bound:.3f}",
            "" if record.predicted_seconds is None else format_seconds(record.predicted_seconds),
            "yes"
            if record.gradients_identical and record.buffers_identical
            else "gradients"
            if record.gradients_identical
            else "NO",
            end_section=last,
        )
    return table


def run(
    settings: Sequence[Setting],
    methods: Sequence[str],
    fractions: Sequence[float],
    repeats: int,
    rounds: int,
    console: Console,
) -> Iterator[Record]:
    """All cases of all models, one model after the other, with a progress bar on ``console``."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(settings) * rounds)

        def one_round(setting: Setting) -> list[Record]:
            progress.update(task, description=f"{setting.model}, plain")
            records = run_model(
                setting, methods, fractions, repeats, lambda what: progress.update(task, description=what)
            )
            progress.advance(task)
            return records

        for setting in settings:
            yield from map(pooled, zip(*(one_round(setting) for _ in range(rounds)), strict=True))


def main() -> None:
    """Run what the command line asks for, print the table, and write the records if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(WORKLOADS), help="comma-separated; default: all")
    parser.add_argument("--methods", default=",".join((OURS, *PEERS)), help="comma-separated; default: all")
    parser.add_argument("--fractions", default="0.5,0.25", help="comma-separated; default: 0.5,0.25")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each case; default: 5")
    parser.add_argument("--rounds", type=int, default=1, help="how often that is done, in new processes; default: 1")
    parser.add_argument("--spill", help="directory for what is moved out; default: the system's temporary one")
    parser.add_argument("--compile", action="store_true", help="compile the models' blocks, in plain steps, too")
    parser.add_argument("--json", type=Path, help="file for the records")
    options = parser.parse_args()
    models = options.models.split(",")
    for model in models:
        if model not in WORKLOADS:
            parser.error(f"no model {model!r}; there are {', '.join(WORKLOADS)}")
    methods = options.methods.split(",")
    for method in methods:
        if method not in (OURS, *PEERS):
            parser.error(f"no method {method!r}; there are {', '.join((OURS, *PEERS))}")
    fractions = [float(fraction) for fraction in options.fractions.split(",")]
    console = Console(width=None if sys.stdout.isatty() else 132)
    records: list[Record] = []
    settings = [Setting(model, options.spill, options.compile) for model in models]
    for record in run(settings, methods, fractions, options.repeats, options.rounds, console):
        records.append(record)
        if options.json is not None:  # after each model, so that a run that is cut short leaves what it has measured
            options.json.write_text(json.dumps([dataclasses.asdict(each) for each in records], indent=1) + "\n")
    console.print(table_of(records))


if __name__ == "__main__":
    main()
