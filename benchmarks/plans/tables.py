"""What the cases say, together: figures that were promised, and tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.plans.cases import FAR, FORWARDS, SAME, SHARES, Case
from ebbtide.plan.published.registry import POLICIES

OP_COUNTS = (500, 1600, 5000, 75000)
"""Upper ends of the classes by number of ops for which planning times are told."""
BELOW = 0.7
"""Budgets below which the solver is wanted to be strictly faster than the best policy."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """A policy against the solver, over all cases.

    Attributes:
        policy: its name.
        met: cases in which it has a plan.
        overhead, solver_overhead: mean time beyond plain over those, its own and the solver's.
        worst: its greatest time beyond plain.
        faster: cases in which it is faster than the solver.
        took_seconds: median time to plan, in all cases.
    """

    policy: str
    met: int
    overhead: float | None
    solver_overhead: float | None
    worst: float | None
    faster: int
    took_seconds: float


def standings(cases: Sequence[Case]) -> list[Standing]:
    """Each policy against the solver, the one that meets most budgets first."""
    found = []
    for policy in POLICIES:
        met = [(case, seconds) for case in cases if (seconds := case.policy_seconds[policy]) is not None]
        theirs = [case.overhead(seconds) for case, seconds in met]
        ours = [case.overhead(case.solver_seconds) for case, _ in met]
        found.append(
            Standing(
                policy,
                len(met),
                statistics.fmean(theirs) if met else None,
                statistics.fmean(ours) if met else None,
                max(theirs, default=None),
                sum(_faster(seconds, case.solver_seconds) for case, seconds in met),
                statistics.median(case.policy_took_seconds[policy] for case in cases),
            )
        )
    return sorted(found, key=lambda standing: (-standing.met, standing.overhead or math.inf))


def _faster(seconds: float, than: float) -> bool:
    return seconds < than * (1 - SAME)


def figures(cases: Sequence[Case]) -> dict[str, float | int | str]:
    """The figures of the promise, by name."""
    gaps = [case.gap for case in cases]
    worst = max(cases, key=lambda case: case.gap)
    rivals = [(case, best) for case in cases if (best := case.best_policy_seconds) is not None]
    below = [(case, best) for case, best in rivals if case.share < BELOW]
    found: dict[str, float | int | str] = {
        "cases": len(cases),
        "solver over bound, median": statistics.median(gaps),
        "solver over bound, worst": worst.gap,
        "worst case": words(worst),
        f"cases above {FAR:g}": sum(gap > FAR for gap in gaps),
        **_figures_of_whole(cases),
        "cases with a policy that meets the budget": len(rivals),
        "cases in which a policy is faster than the solver": sum(
            _faster(best, case.solver_seconds) for case, best in rivals
        ),
        f"cases of those below {BELOW:.0%}": len(below),
        f"strictly faster than every policy, of those below {BELOW:.0%}": _share(
            _faster(case.solver_seconds, best) for case, best in below
        ),
    }
    low = 0
    for high in OP_COUNTS:
        took = [case.solver_took_seconds for case in cases if low < case.ops <= high]
        if took:
            name = f"planning seconds, {low + 1} to {high} ops"
            found |= {f"{name}, median": statistics.median(took), f"{name}, most": max(took)}
        low = high
    return found


def _figures_of_whole(cases: Sequence[Case]) -> dict[str, float | int | str]:
    """Those of branch and bound, if it was asked for."""
    gaps = [gap for case in cases if (gap := case.whole_gap) is not None]
    if not gaps:
        return {}
    name = "with whole recomputations in the bound"
    return {f"{name}, worst of those": max(gaps), f"{name}, cases above {FAR:g}": sum(gap > FAR for gap in gaps)}


def _share(outcomes: Iterable[bool]) -> float:
    found = list(outcomes)
    return sum(found) / len(found) if found else math.nan


def words(case: Case) -> str:
    """A case in words."""
    return f"{case.step}, link {case.forwards:g} forwards, budget {case.share:.0%}"


def figure_table(cases: Sequence[Case]) -> Table:
    """`figures` as a table."""
    table = Table(title="figures", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, figure in figures(cases).items():
        table.add_row(name, f"{figure:.5g}" if isinstance(figure, float) else str(figure))
    return table


def step_tables(cases: Sequence[Case]) -> list[Table]:
    """By link speed: for each step and budget the time beyond plain of solver, bound and fastest policy."""
    tables = []
    for forwards in FORWARDS:
        title = f"time beyond plain, link of {forwards:g} forward passes: solver (bound; fastest policy)"
        table = Table(title=title, title_justify="left")
        table.add_column("step")
        for share in SHARES:
            table.add_column(f"{share:.0%}" if share else "least", justify="right")
        own = [case for case in cases if case.forwards == forwards]
        for step in dict.fromkeys(case.step for case in own):
            table.add_row(step, *(_cell(case) for case in own if case.step == step))
        tables.append(table)
    return tables


def _cell(case: Case) -> str:
    best = case.best_policy_seconds
    numbers = [case.overhead(seconds) for seconds in (case.solver_seconds, case.bound_seconds)]
    rival = "-" if best is None else f"{100 * case.overhead(best):.2f}"
    return f"{100 * numbers[0]:.2f} ({100 * numbers[1]:.2f}; {rival})"


def policy_table(cases: Sequence[Case]) -> Table:
    """Each policy against the solver."""
    table = Table(title="policies against the solver, on the budgets that they meet", title_justify="left")
    table.add_column("policy")
    for name in ("budgets met", "mean overhead", "worst", "solver's mean there", "faster than solver", "planning"):
        table.add_column(name, justify="right")
    for standing in standings(cases):
        shares = [
            "-" if share is None else f"{share:.1%}"
            for share in (standing.overhead, standing.worst, standing.solver_overhead)
        ]
        took = f"{standing.took_seconds:.2f} s"
        table.add_row(standing.policy, f"{standing.met} of {len(cases)}", *shares, str(standing.faster), took)
    return table
