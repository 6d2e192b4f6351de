"""What ebbtide costs beside the work itself: ``python -m benchmarks.conductor --json FILE``.

A chain of small ops, whose own time hardly counts, runs under a step's hooks and modes; what comes on top of the plain
chain is divided by the ops, or by the saved tensors, that cause it. The variants take turns, run by run, so that a busy
moment of the machine hits all alike. Figures are microseconds: medians, and those of the quickest runs, which hardly
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import ebbtide
from ebbtide.machine import Link, Machine, Tier
from ebbtide.observe.mode import DispatchMode
from ebbtide.plan import plain_peak_bytes, solve
from ebbtide.run.capture import CaptureMode
from ebbtide.run.conductor import Conductor
from ebbtide.run.forks import KnownScripts
from ebbtide.run.observing import observe_step
from ebbtide.run.safe import SafePolicy
from ebbtide.run.script import Script, write_script
from ebbtide.run.tiers import DeviceTiers, SlowTier

LENGTH = 2000
"""Ops of the chain; each saves one tensor."""
WIDTH = 16
"""Numbers in each tensor that is timed."""
WIDE = 1 << 14
"""Numbers in each tensor for which plans are made: smaller ones are not worth a decision."""
SETTLING = 12
"""Steps of a budget before it is timed: it observes, verifies, audits, rehearses, and refines its durations."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """One figure.

    Attributes:
        what: what was done.
        unit: what the time is divided by.
        microseconds: the median.
        quartiles: of the same.
        least_microseconds: by the quickest run of each variant: what it is where nothing else disturbs it.
        limit: what it must not exceed, if that was promised.
    """

    what: str
    unit: str
    microseconds: float
    quartiles: tuple[float, float]
    least_microseconds: float
    limit: float | None


class Bare(DispatchMode):
    """Does nothing with any op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def chain(start: Tensor) -> Tensor:
    """Two kinds of ops in turn; all save a tensor of their own, and each can be computed again."""
    x = start
    for _ in range(LENGTH // 2):
        x = x.sin()
        x = x.tanh()
    return x


def train(start: Tensor) -> None:
    """One step: forward and backward."""
    chain(start).sum().backward()
    start.grad = None


def seconds_of(act: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def under(context: Callable[[], AbstractContextManager[object]], start: Tensor) -> Callable[[], None]:
    """A step within a context."""

    def act() -> None:
        with context():
            train(start)

    return act


def paper_machine() -> Machine:
    """A machine on which moving takes for ever, so that plans compute again."""
    links = tuple(Link(a, b, 1.0, 1e6, 1e6) for a, b in (("ram", "disk"), ("disk", "ram")))
    return Machine("paper", "ram", (Tier("ram", "device"), Tier("disk", "disk")), links)


def idle_budget(start: Tensor, spill: str) -> ebbtide.Budget:
    """A budget that does not bind and has settled."""
    memory = ebbtide.Budget("150%", spill=spill, machine=paper_machine())
    for _ in range(SETTLING):
        with memory.step():
            train(start)
    return memory


def script_of(start: Tensor, share: float) -> Script:
    """A script for the chain within a share of its plain peak."""
    step = observe_step(lambda: train(start))
    plan = solve(step, paper_machine(), int(share * plain_peak_bytes(step)))
    return write_script(step, plan, [0] * step.moments)


def under_script(script: Script, start: Tensor) -> Callable[[], None]:
    """A step that a conductor conducts."""

    def no_tier(_: torch.device) -> SlowTier:
        raise AssertionError("nothing moves in this chain")

    def tier(_: str = "") -> SlowTier:
        return DeviceTiers("nowhere", "disk", no_tier, lambda _: None)

    def act() -> None:
        conductor = Conductor(script, KnownScripts([]), tier, SafePolicy(None, tier))
        with torch.autograd.graph.saved_tensors_hooks(conductor.pack, conductor.unpack):
            conductor.start()
            train(start)
            conductor.stop()
        assert conductor.finished, conductor.left

    return act


def only_forward(start: Tensor) -> None:
    """The ops of a step's forward pass, of which nothing is saved."""
    with torch.no_grad():
        chain(start)


def with_hooks(start: Tensor) -> None:
    """A step with hooks that do nothing."""
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        train(start)


def _same(tensor: Tensor) -> Tensor:
    return tensor.detach()


def measure(repeats: int, console: Console) -> list[Cost]:
    """All figures, from ``repeats`` runs of each variant."""
    torch.set_num_threads(1)
    start = torch.randn(WIDTH, requires_grad=True)
    wide = torch.randn(WIDE, requires_grad=True)
    half = script_of(wide, 0.7)
    kept = script_of(start, 1.0)

    def captured() -> None:
        mode = CaptureMode(half.known, half.names, lambda _: None)
        mode.begin(0, between_ops=True)
        chain(start)
        mode.end()

    def bare() -> None:
        with Bare():
            chain(start)

    with tempfile.TemporaryDirectory() as spill, idle_budget(start, spill) as idle:
        variants: dict[str, Callable[[], None]] = {
            "plain": lambda: train(start),
            "idle": under(idle.step, start),
            "hooks": lambda: with_hooks(start),
            "kept": under_script(kept, start),
            "forward": lambda: forget(chain(start)),
            "bare": bare,
            "captured": captured,
            "plain, wide": lambda: train(wide),
            "forward, wide": lambda: only_forward(wide),
            "again": under_script(half, wide),
        }
        takes: dict[str, list[float]] = {name: [] for name in variants}
        names = list(variants)
        for _ in track(range(repeats), "taking turns", console=console, transient=True):
            for name in names:
                takes[name].append(seconds_of(variants[name]))
            names = [*names[1:], names[0]]
    again = len(half.known)
    share = again / LENGTH
    # The ops that run again take their own time, besides: as long as others of the forward pass.
    expected = [a + share * b for a, b in zip(takes["plain, wide"], takes["forward, wide"], strict=True)]
    return [
        cost("budget that does not bind", "saved tensor", takes["idle"], takes["plain"], None),
        cost("hooks that detach, no more", "saved tensor", takes["hooks"], takes["plain"], None),
        cost("conductor, all kept", "saved tensor above those hooks", takes["kept"], takes["hooks"], 1.5),
        cost("bare dispatch mode", "op", takes["bare"], takes["forward"], None),
        cost(f"capture of {share:.0%} of the ops", "op above the bare mode", takes["captured"], takes["bare"], 3.0),
        cost("plan that does so", "op that runs again, besides its time", takes["again"], expected, None, again),
    ]


def forget(_: object) -> None:
    """Let a result go."""


def cost(
    what: str, unit: str, takes: Sequence[float], base: Sequence[float], limit: float | None, count: int | None = None
) -> Cost:
    """A figure from runs with something and runs without, taken in turn: for each of ``count``, or of all ops."""
    count = count or LENGTH
    each = sorted((a - b) / count * 1e6 for a, b in zip(takes, base, strict=True))
    low, middle, high = statistics.quantiles(each, n=4)
    least = (min(takes) - min(base)) / count * 1e6
    return Cost(what, unit, middle, (low, high), least, limit)


def table_of(costs: Sequence[Cost]) -> Table:
    """The figures, one a row."""
    table = Table(title=f"What ebbtide costs on a chain of {LENGTH} small ops", title_justify="left")
    for heading in ("what", "microseconds per"):
        table.add_column(heading)
    for heading in ("median", "quartiles", "least", "promised"):
        table.add_column(heading, justify="right")
    for each in costs:
        low, high = each.quartiles
        promised = "" if each.limit is None else f"{each.limit:.1f}"
        table.add_row(
            each.what,
            each.unit,
            f"{each.microseconds:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{each.least_microseconds:.2f}",
            promised,
        )
    return table


def main() -> None:
    """Measure, print the table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40, help="runs of each variant; default: 40")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    costs = measure(options.repeats, console)
    console.print(table_of(costs))
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(each) for each in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
