"""How good plans are: our solver, the bound and every published policy: ``python -m benchmarks.plans --json FILE``.

On recorded steps with a disk, and on networks of fake tensors on described GPUs, each within budgets that lie some part
of the way from the least reachable peak to the plain one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.networks import step_on
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.machines import load_machine
from ebbtide.plan import least_peak_bytes, plain_peak_bytes, solve
from ebbtide.plan.published.registry import POLICIES
from ebbtide.step import Step

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"
RECORDED = ("gpt2", "lstm", "resnet50")
NETWORKS = ("vgg19", "resnet50", "gpt2", "vit", "lstm")
MACHINES = ("v100-16gb-pcie", "h100")
SHARES = (0.7, 0.5, 0.35, 0.25)
"""Of the way from the least reachable peak to the plain one."""
SAME = 1e-9
"""Share by which times of equal plans may differ: sums of floating-point numbers."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step, machine and budget. Times are in seconds; None where a policy has no plan.

    Attributes:
        step, machine: names.
        share: of the way from the least reachable peak to the plain one.
        limit_bytes: the budget.
        plain_seconds, bound_seconds, solver_seconds: of the step.
        policy_seconds: by name.
        took_seconds: how long the solver took.
    """

    step: str
    machine: str
    share: float
    limit_bytes: int
    plain_seconds: float
    bound_seconds: float
    solver_seconds: float
    policy_seconds: dict[str, float | None]
    took_seconds: float


@dataclasses.dataclass(frozen=True)
class Standing:
    """A policy against the solver, over all cases.

    Attributes:
        policy: its name.
        met: cases in which it has a plan.
        overhead, solver_overhead: mean time beyond plain over those, its own and the solver's.
        faster: cases in which it is faster than the solver.
    """

    policy: str
    met: int
    overhead: float | None
    solver_overhead: float | None
    faster: int


def disk_machine() -> Machine:
    """A computer with an NVMe disk, for the recorded steps: they ran on two cores."""
    links = (Link("ram", "disk", 1e-4, 2.5e9, 2e9, 0.05), Link("disk", "ram", 1e-4, 1.6e9, 1.2e9, 0.05))
    return Machine("disk", "ram", (Tier("ram", "device"), Tier("disk", "disk")), links)


def sources() -> list[tuple[str, str, Callable[[], tuple[Step, Machine]]]]:
    """Names of step and machine, and what makes them."""

    def recorded(name: str) -> Callable[[], tuple[Step, Machine]]:
        return lambda: (Step.load(FIXTURES / f"{name}.json.gz"), disk_machine())

    def fake(name: str, machine_name: str) -> Callable[[], tuple[Step, Machine]]:
        machine = load_machine(machine_name)
        return lambda: (step_on(name, machine), machine)

    found = [(f"{name}, recorded", "disk", recorded(name)) for name in RECORDED]
    return found + [(name, machine, fake(name, machine)) for name in NETWORKS for machine in MACHINES]


def cases_of(step: Step, machine: Machine, name: str, machine_name: str, seconds: float) -> Iterator[Case]:
    """A step on a machine, for each budget."""
    least, plain = least_peak_bytes(step, machine), plain_peak_bytes(step)
    for share in SHARES:
        limit_bytes = least + int(share * (plain - least))
        started = time.perf_counter()
        plan = solve(step, machine, limit_bytes, seconds=seconds)
        took = time.perf_counter() - started
        assert plan.bound_seconds is not None
        yield Case(
            step=name,
            machine=machine_name,
            share=share,
            limit_bytes=limit_bytes,
            plain_seconds=plan.plain_seconds,
            bound_seconds=plan.bound_seconds,
            solver_seconds=plan.seconds,
            policy_seconds={policy: _seconds(policy, step, machine, limit_bytes) for policy in POLICIES},
            took_seconds=took,
        )


def _seconds(policy: str, step: Step, machine: Machine, limit_bytes: int) -> float | None:
    try:
        return POLICIES[policy](step, machine, limit_bytes).seconds
    except (BudgetError, PolicyError):
        return None


def standings(cases: Sequence[Case]) -> list[Standing]:
    """Each policy against the solver, the one that meets most budgets first."""
    found = []
    for policy in POLICIES:
        met = [(case, seconds) for case in cases if (seconds := case.policy_seconds[policy]) is not None]
        theirs = [seconds / case.plain_seconds - 1 for case, seconds in met]
        ours = [case.solver_seconds / case.plain_seconds - 1 for case, _ in met]
        faster = sum(seconds < case.solver_seconds * (1 - SAME) for case, seconds in met)
        means = [statistics.fmean(shares) if met else None for shares in (theirs, ours)]
        found.append(Standing(policy, len(met), means[0], means[1], faster))
    return sorted(found, key=lambda standing: (-standing.met, standing.overhead or math.inf))


def step_table(cases: Sequence[Case]) -> Table:
    """By step and machine: solver and bound by budget, and the best policy's time."""
    table = Table(title="time beyond plain: solver (bound; fastest policy)", title_justify="left")
    table.add_column("step")
    table.add_column("machine")
    for share in SHARES:
        table.add_column(f"{share:.0%}", justify="right")
    for step, machine in dict.fromkeys((case.step, case.machine) for case in cases):
        own = [case for case in cases if (case.step, case.machine) == (step, machine)]
        table.add_row(step, machine, *(_cell(case) for case in own))
    return table


def _cell(case: Case) -> str:
    times = [seconds for seconds in case.policy_seconds.values() if seconds is not None]
    solver, bound = (seconds / case.plain_seconds - 1 for seconds in (case.solver_seconds, case.bound_seconds))
    best = f"{min(times) / case.plain_seconds - 1:.1%}" if times else "-"
    return f"{solver:.2%} ({bound:.2%}; {best})"


def policy_table(cases: Sequence[Case]) -> Table:
    """Each policy against the solver."""
    table = Table(title="policies against the solver", title_justify="left")
    table.add_column("policy")
    for name in ("budgets met", "mean overhead", "solver's there", "faster than solver"):
        table.add_column(name, justify="right")
    for standing in standings(cases):
        shares = ["-" if share is None else f"{share:.1%}" for share in (standing.overhead, standing.solver_overhead)]
        table.add_row(standing.policy, f"{standing.met} of {len(cases)}", *shares, str(standing.faster))
    return table


def verdict(cases: Sequence[Case]) -> str:
    """The solver's distance to the bound, and how often it is beaten."""
    ratios = [case.solver_seconds / case.bound_seconds for case in cases]
    worst = max(cases, key=lambda case: case.solver_seconds / case.bound_seconds)
    beaten = sum(standing.faster for standing in standings(cases))
    took = [case.took_seconds for case in cases]
    return (
        f"solver / bound over {len(cases)} cases: median {statistics.median(ratios):.5f}, worst {max(ratios):.4f}"
        f" ({worst.step} on {worst.machine} at {worst.share:.0%}); a policy was faster than the solver {beaten} times;"
        f" a plan took {statistics.median(took):.2f} s, {max(took):.2f} s at most"
    )


def main() -> None:
    """Plan every case, print the tables, write the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the cases as JSON")
    parser.add_argument("--seconds", type=float, default=0.5, help="search of the solver for a budget")
    arguments = parser.parse_args()
    found: list[Case] = []
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        whole = sources()
        task = progress.add_task("", total=len(whole) * len(SHARES))
        for name, machine_name, make in whole:
            progress.update(task, description=f"{name} on {machine_name}")
            for case in cases_of(*make(), name, machine_name, arguments.seconds):
                found.append(case)
                progress.advance(task)
    console = Console(width=None if Console().is_terminal else 150)
    console.print(step_table(found), policy_table(found), verdict(found), highlight=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(case) for case in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
