"""What the command line says of machines and plans in a few lines."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from ebbtide.decisions import Plan
from ebbtide.machine import Compute, Machine
from ebbtide.plan.batch import LargestBatch
from ebbtide.step import Step
from ebbtide.units import format_bytes, format_seconds, format_share


def verdict(machine: Machine, plan: Plan) -> tuple[str, ...]:
    """Whether a step fits a machine that was described, plain and planned, and how fast it is."""
    capacity = machine.tier(machine.fast).capacity_bytes
    memory = "" if capacity is None else f", {format_bytes(capacity)} of memory"
    fits = "fits" if plan.plain_peak_bytes <= plan.limit_bytes else "does not fit"
    limit = format_bytes(plan.limit_bytes)
    lines = [
        f"{machine.name}{memory}; times are estimates",
        f"plain: {fits} {limit}: peak {format_bytes(plan.plain_peak_bytes)}, {format_seconds(plan.plain_seconds)}",
    ]
    if plan.binds:
        slower = format_share(plan.seconds / plan.plain_seconds - 1)
        peak, seconds = format_bytes(plan.peak_bytes), format_seconds(plan.seconds)
        lines.append(f"planned: fits {limit}: peak {peak}, {seconds}, {slower} more than plain")
    return tuple(lines)


def foreign_times(step: Step, machine: Machine) -> tuple[str, ...]:
    """A warning where the ops of ``step`` were timed on another sort of device than ``machine`` has."""
    if machine.compute is None or machine.compute.kernels == step.device:
        return ()
    line = (
        f"the step was observed on {step.device}, and its ops count with the times they took there, not on "
        f"{machine.name}: `ebbtide observe --fake --machine` has them for that"
    )
    return (line,)


def batch_lines(machine: Machine, found: LargestBatch) -> tuple[str, ...]:
    """The largest batch, its plan, and the largest without one."""
    plan, plain = found.plan, found.plain_step
    lines = [
        f"{machine.name}, within {format_bytes(plan.limit_bytes)}; times are estimates",
        f"plain: {_rate(found.plain_batch, plain.plain_seconds)}"
        if plain is not None
        else "plain: not one sample fits",
        f"planned: {_rate(found.batch, plan.seconds)}, {format_share(found.overhead)} more than plain would take",
        f"peak {format_bytes(plan.peak_bytes)}; plain it would be {format_bytes(plan.plain_peak_bytes)}",
        f"observed with {', '.join(map(str, found.observed))} samples",
    ]
    return tuple(lines)


def _rate(batch: int, seconds: float) -> str:
    rate = f", {batch / seconds:.4g} samples a second" if seconds else ""  # one told from larger ones may take none
    return f"batch {batch}, {format_seconds(seconds)} a step{rate}"


def links_table(machine: Machine) -> Table:
    """How fast a machine's links are, and what computing again costs."""
    # Text, not str: a bracket in a name is no markup.
    table = Table(title=Text(machine.name), title_justify="left")
    table.add_column("transfer")
    for heading in ("latency", "one way", "both ways", "slows compute", "per transfer"):
        table.add_column(heading, justify="right")
    for link in machine.links:
        table.add_row(
            Text(f"{link.source} to {link.target}"),
            format_seconds(link.latency_seconds),
            f"{format_bytes(link.bandwidth_bytes_per_second)}/s",
            f"{format_bytes(link.duplex_bytes_per_second)}/s",
            f"{link.compute_slowdown:.0%}",
            format_seconds(link.compute_seconds),
        )
    if machine.replay_seconds:
        table.caption = f"an op that runs again takes {format_seconds(machine.replay_seconds)} besides its time"
    return table


def compute_lines(compute: Compute, seconds: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """How fast a machine computes, and how well that tells the steps it was fitted on.

    Args:
        compute: peaks and shares.
        seconds: by name of a step, what it took and what it would take by ``compute``.
    """
    rates = ", ".join(f"{rate / 1e9:.3g} GFLOP/s in {name}" for name, rate in compute.peak_flops_per_second)
    memory = f"{format_bytes(compute.memory_bytes_per_second)}/s of memory"
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in compute.efficiencies) or "none was fitted"
    told = (
        f"{name}: took {format_seconds(took)}, told {format_seconds(by_it)}" for name, (took, by_it) in seconds.items()
    )
    return (
        f"{rates}; {memory}; an op takes {format_seconds(compute.launch_seconds)} at least",
        f"shares of that which ops reach: {shares}; others count with all of it",
        *told,
    )
