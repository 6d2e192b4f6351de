"""Plans that a runtime follows: what a planner must know of it besides the step and the machine's links.

NOTE [Plans for devices]
1. The host runs ahead of a device, and what it does for a replay (to capture the op, above all) and for a transfer is
   hidden as long as it stays ahead. A plan that does much with few of them costs the device little more and keeps it
   so: they are taken to cost compute something.
2. The host waits for disks, and for no stream. They are left out where the other memories take what the plan moves, as
   their little bandwidth beside that of a stream is not worth it. A memory takes what lies there at once, which is far
   less than all that may leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Set

from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan import Caution, simulate, solve
from ebbtide.run.allocator import trim_heap
from ebbtide.run.tiers.layouts import planned_places
from ebbtide.step import Step
from ebbtide.units import format_bytes

REPLAY_HOST_SECONDS = 1e-4
"""Seconds of the host for an op that runs again."""
TRANSFER_HOST_SECONDS = 5e-5
"""Seconds of the host for a transfer."""
GARBAGE_SHARE = 0.05
"""Share of the least reachable peak from which on it is worth a word that it is garbage."""


def plan_for(
    step: Step, machine: Machine, limit_bytes: int, *, banned: Set[int], caution: Caution | None = None
) -> Plan:
    """A plan to run ``step`` by. See NOTE [Plans for devices]. Raises `BudgetError` as `solve` does.

    Its time is the simulator's on ``machine``, without what rule 1 adds; a bound comes with it on CPUs alone.

    Args:
        step: as observed.
        machine: where it runs.
        limit_bytes, banned, caution: see `solve`.
    """
    try:
        if step.device == "cpu":
            return solve(step, machine, limit_bytes, banned=banned, caution=caution)
        plan = _plan_for_device(step, machine, limit_bytes, banned=banned, caution=caution)
    finally:
        trim_heap()  # the search takes some 25 MiB that no step may need again, and few planned steps begin with a trim
    seconds = simulate(step, machine, plan.decisions).seconds
    return dataclasses.replace(plan, seconds=seconds, bound_seconds=None)


def _plan_for_device(
    step: Step, machine: Machine, limit_bytes: int, *, banned: Set[int], caution: Caution | None
) -> Plan:
    burdened = _burdened(machine)
    if any(tier.kind != "disk" for tier in machine.slow_tiers()):
        with contextlib.suppress(BudgetError):
            plan = solve(step, _without_disks(burdened), limit_bytes, banned=banned, caution=caution)
            if _has_room(machine, step, plan):
                return plan
    return solve(step, burdened, limit_bytes, banned=banned, caution=caution)


def _burdened(machine: Machine) -> Machine:
    """``machine`` with what its host does: see rule 1."""
    links = tuple(
        dataclasses.replace(link, compute_seconds=link.compute_seconds + TRANSFER_HOST_SECONDS)
        for link in machine.links
    )
    return dataclasses.replace(machine, links=links, replay_seconds=machine.replay_seconds + REPLAY_HOST_SECONDS)


def _without_disks(machine: Machine) -> Machine:
    """``machine`` without its disks, and with room for anything in its other memories."""
    disks = {tier.name for tier in machine.slow_tiers() if tier.kind == "disk"}
    left = machine.without(disks)
    return dataclasses.replace(left, tiers=tuple(dataclasses.replace(tier, capacity_bytes=None) for tier in left.tiers))


def _has_room(machine: Machine, step: Step, plan: Plan) -> bool:
    """Whether each memory takes what the plan moves there."""
    return all(
        tier.capacity_bytes is None
        or planned_places(step, plan.decisions, tier.name).footprint_bytes <= tier.capacity_bytes
        for tier in machine.slow_tiers()
    )


def tell_of_garbage(error: BudgetError, garbage_bytes: int) -> None:
    """Say so where much of what the step holds is garbage."""
    if garbage_bytes > GARBAGE_SHARE * error.reachable_bytes:
        error.add_note(
            f"This step left {format_bytes(garbage_bytes)} in reference cycles, which only Python's garbage collector"
            " gives back, nobody knows when: break them, or call gc.collect() within each step."
        )
