"""The cases of the comparison: a step, a link, a budget; and what solver, bound and policies make of it.

Definitions, which the JSON repeats:

* A *link speed* is how many forward passes it takes to move all that autograd saved, once out or once back. Saved bytes
  are those of the storages that have an absence, each once. Everything else of the machine stays as it is.
* A *budget* is how far it lies on the way from the least peak that the solver reaches on that machine to the peak of
  the plain step: 0 is the least, 1 needs no plan.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

from benchmarks.networks import step_on
from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.machines import load_machine
from ebbtide.plan import NO_CAUTION, least_peak_bytes, plain_peak_bytes, solve, whole_bound
from ebbtide.plan.published.registry import POLICIES
from ebbtide.step import Step

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"
RECORDED = ("gpt2", "lstm", "resnet50")
NETWORKS = (
    "resnet1001",
    "resnet152",
    "densenet121",
    "llama1b",
    "gpt2",
    "bert",
    "vit",
    "resnet50",
    "mobilenetv2",
    "googlenet",
    "unet",
    "vgg19",
    "lstm",
)
"""The longest to plan for first: it decides when two processes are ready."""
MACHINE = "a100-80gb"
FORWARDS = (0.5, 1.0, 2.0, 4.0)
"""Link speeds."""
SHARES = (0.0, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Budgets."""
FAR = 1.05
"""The promise: how many times the bound a plan takes at most."""
SAME = 1e-9
"""Share by which times of equal plans may differ: sums of floating-point numbers."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step, link and budget. Times are in seconds; None where a policy has no plan.

    Attributes:
        step: the network, or the recorded step.
        ops, absences: how many it has.
        forwards: link speed: forward passes that it takes to move all saved bytes one way.
        share: budget: of the way from the least reachable peak to the plain one.
        limit_bytes: the budget.
        least_peak_bytes, plain_peak_bytes, resting_bytes, saved_bytes: of the step on this machine.
        plain_seconds, forward_seconds: of the step without a plan.
        bound_seconds: what no plan can beat.
        solver_seconds, solver_peak_bytes: of the solver's plan.
        solver_took_seconds: how long it took to plan: seconds of one processor.
        policy_seconds, policy_took_seconds: of each policy's plan, and to plan, by name.
        refusals: why a policy has no plan, by name.
        whole_bound_seconds: what no plan can beat by branch and bound, where that was looked for: in cases farther from
            the bound than `FAR`.
    """

    step: str
    ops: int
    absences: int
    forwards: float
    share: float
    limit_bytes: int
    least_peak_bytes: int
    plain_peak_bytes: int
    resting_bytes: int
    saved_bytes: int
    plain_seconds: float
    forward_seconds: float
    bound_seconds: float
    solver_seconds: float
    solver_peak_bytes: int
    solver_took_seconds: float
    policy_seconds: dict[str, float | None]
    policy_took_seconds: dict[str, float]
    refusals: dict[str, str]
    whole_bound_seconds: float | None = None

    @property
    def gap(self) -> float:
        """The solver's time over the bound."""
        return self.solver_seconds / self.bound_seconds

    @property
    def whole_gap(self) -> float | None:
        """The solver's time over what branch and bound proves, where that was looked for."""
        return None if self.whole_bound_seconds is None else self.solver_seconds / self.whole_bound_seconds

    @property
    def best_policy_seconds(self) -> float | None:
        """The fastest policy's time, or None if none meets the budget."""
        return min((seconds for seconds in self.policy_seconds.values() if seconds is not None), default=None)

    def overhead(self, seconds: float) -> float:
        """``seconds`` beyond the plain step's, as a share of those."""
        return seconds / self.plain_seconds - 1


def step_names() -> list[str]:
    """All steps, the longest to plan for first."""
    return [*NETWORKS, *(f"{name}, recorded" for name in RECORDED)]


def source(name: str) -> tuple[Step, Machine]:
    """A step of `step_names` and the machine whose links are still to be replaced."""
    recorded = name.removesuffix(", recorded")
    if recorded != name:
        return Step.load(FIXTURES / f"{recorded}.json.gz"), disk_machine()
    machine = load_machine(MACHINE)
    return step_on(name, machine), machine


def disk_machine() -> Machine:
    """A computer with an NVMe disk, for the recorded steps: they ran on two cores."""
    links = (Link("ram", "disk", 1e-4, 2.5e9, 2e9, 0.05), Link("disk", "ram", 1e-4, 1.6e9, 1.2e9, 0.05))
    return Machine("disk", "ram", (Tier("ram", "device"), Tier("disk", "disk")), links)


def with_speed(step: Step, machine: Machine, forwards: float) -> Machine:
    """``machine`` with links that move all saved bytes one way in the time of ``forwards`` forward passes.

    Latencies, slowdown of compute, and the share of bandwidth that is left while both directions are busy stay.
    """
    rate = saved_bytes(step) / (forwards * forward_seconds(step))
    links = (
        dataclasses.replace(
            link,
            bandwidth_bytes_per_second=rate,
            duplex_bytes_per_second=rate * link.duplex_bytes_per_second / link.bandwidth_bytes_per_second,
        )
        for link in machine.links
    )
    return dataclasses.replace(machine, links=tuple(links))


def saved_bytes(step: Step) -> int:
    """Bytes of the storages that a plan decides about."""
    values = [step.values[absence.value] for absence in step.absences]
    return sum({value.storage: value.size_bytes for value in values}.values())


def forward_seconds(step: Step) -> float:
    """Duration of the forward pass."""
    return math.fsum(op.duration_seconds for op in step.ops if op.phase == "forward")


def solved(step: Step, machine: Machine, limit_bytes: int, seconds: float | None) -> Plan:
    """The solver's plan, by the same rules as the policies'."""
    return solve(step, machine, limit_bytes, seconds=seconds, caution=NO_CAUTION)


def cases_of(
    name: str, step: Step, machine: Machine, forwards: float, seconds: float | None, whole_seconds: float = 0.0
) -> list[Case]:
    """A step with a link speed, for each budget. A first solve, which may have to compile, is not timed.

    Branch and bound takes about ``whole_seconds`` where it is looked for; with 0 it is not.
    """
    machine = with_speed(step, machine, forwards)
    least, plain = least_peak_bytes(step, machine), plain_peak_bytes(step)
    cases = []
    for share in SHARES:
        limit_bytes = least + int(share * (plain - least))
        started = time.process_time()
        plan = solved(step, machine, limit_bytes, seconds)
        took = time.process_time() - started
        assert plan.bound_seconds is not None
        policies = {policy: _judged(policy, step, machine, limit_bytes) for policy in POLICIES}
        case = Case(
            step=name,
            ops=len(step.ops),
            absences=len(step.absences),
            forwards=forwards,
            share=share,
            limit_bytes=limit_bytes,
            least_peak_bytes=least,
            plain_peak_bytes=plain,
            resting_bytes=step.resting_bytes,
            saved_bytes=saved_bytes(step),
            plain_seconds=plan.plain_seconds,
            forward_seconds=forward_seconds(step),
            bound_seconds=plan.bound_seconds,
            solver_seconds=plan.seconds,
            solver_peak_bytes=plan.peak_bytes,
            solver_took_seconds=took,
            policy_seconds={policy: found for policy, (found, _, _) in policies.items()},
            policy_took_seconds={policy: spent for policy, (_, spent, _) in policies.items()},
            refusals={policy: why for policy, (_, _, why) in policies.items() if why},
        )
        if whole_seconds and case.gap > FAR:
            whole = whole_bound(step, machine, limit_bytes, whole_seconds)
            case = dataclasses.replace(case, whole_bound_seconds=whole)
        cases.append(case)
    return cases


def _judged(policy: str, step: Step, machine: Machine, limit_bytes: int) -> tuple[float | None, float, str]:
    """A policy's time, how long it took to plan, and why it has no plan."""
    started, seconds, why = time.process_time(), None, ""
    try:
        seconds = POLICIES[policy](step, machine, limit_bytes).seconds
    except (BudgetError, PolicyError) as error:
        why = str(error)
    return seconds, time.process_time() - started, why
