"""Plans that really run leave free time around their transfers; plans on paper do not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from ebbtide.decisions import Offload
from ebbtide.machine import Machine
from ebbtide.machines import load_machine
from ebbtide.plan import NO_CAUTION, Caution, lower_bound, simulate, solve
from ebbtide.plan.caution import DISK_SHARE, EXPECTED
from ebbtide.plan.follow import Follower, Moves, Trip
from ebbtide.plan.problem import Problem
from ebbtide.plan.schedule import place_releases
from ebbtide.plan.select import Room
from ebbtide.plan.simulate import moves_of
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, disk_machine, network_step, tiny_step

MACHINE = disk_machine(8e8, 4e8)
FIXTURES = Path(__file__).parents[1] / "fixtures"


def late(machine: Machine, caution: Caution) -> Machine:
    """The same machine with transfers that take as much longer as ``caution`` allows for."""
    out, back = machine.links
    longer = ((out, caution.out_share, caution.out_seconds), (back, caution.in_share, caution.in_seconds))
    links = tuple(
        dataclasses.replace(
            link,
            latency_seconds=link.latency_seconds * (1 + share) + seconds,
            bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / (1 + share),
        )
        for link, share, seconds in longer
    )
    return dataclasses.replace(machine, links=links)


def test_compute_waits_for_late_transfers() -> None:
    """The load is on demand, so all of it is waited for; the copy out is waited for in its release."""
    step, machine = tiny_step(1, 1, gradients=((128 * KIB, 2e-3),)), disk_machine(5e7, 1e8)
    problem, caution = Problem.of(step, machine), Caution(0.5, 1e-3, 0.25, 3e-3)
    move = moves_of(problem, [Offload("disk", *(event.tick for event in step.events))])[0]
    assert isinstance(move, Trip)
    moves = Moves(*(np.array([moment]) for moment in (0, -1, move.out, move.release, move.load)))
    exact, careful = (Follower(problem, [], who).follow(moves) for who in (NO_CAUTION, caution))
    out, back = (link.seconds(step.values[step.absences[0].value].size_bytes) for link in machine.links)
    assert careful.memory.tolist() == exact.memory.tolist()
    assert [stall.reason for stall in exact.stalls] == ["release", "load"]
    assert careful.seconds - exact.seconds == pytest.approx(EXPECTED * (0.5 * out + 1e-3 + 0.25 * back + 3e-3))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_careful_plan_loses_little_when_transfers_are_late(share: float) -> None:
    step, caution = network_step(12), Caution()
    limit_bytes, slow = limit_at(step, share), late(MACHINE, caution)
    careful = solve(
        step, MACHINE, limit_bytes, seconds=0.2, caution=dataclasses.replace(caution, physical_share=math.inf)
    )
    exact = solve(step, MACHINE, limit_bytes, seconds=0.2, caution=NO_CAUTION)
    assert exact.seconds <= careful.seconds * (1 + 1e-3)
    assert simulate(step, slow, careful.decisions).seconds <= simulate(step, slow, exact.decisions).seconds * (1 + 1e-3)
    for plan in (careful, exact):
        assert plan.seconds == pytest.approx(simulate(step, MACHINE, plan.decisions).seconds, rel=1e-12)
        assert lower_bound(step, MACHINE, limit_bytes).seconds <= plan.seconds


def test_without_caution_workspaces_do_not_count() -> None:
    """Workspaces within a share of the budget are allowed for; on paper they are nobody's business."""
    step = network_step(8, size_bytes=8 * MIB)
    problem, limit_bytes = Problem.of(step, MACHINE), limit_at(step, 0.3)
    ceiling = Caution().ceiling_bytes(limit_bytes, step.resting_bytes)
    assert ceiling - step.resting_bytes == int(Caution().physical_share * (limit_bytes - step.resting_bytes))
    careful = Room.of(problem, limit_bytes, ceiling)
    assert ((careful.cap + problem.workspace <= ceiling) & (careful.cap <= limit_bytes)).all()
    assert (careful.cap < limit_bytes).any()
    exact = Room.of(problem, limit_bytes, NO_CAUTION.ceiling_bytes(limit_bytes, step.resting_bytes))
    assert (exact.cap == limit_bytes).all()


def test_late_copies_make_those_behind_them_late() -> None:
    """Where memory allows it, a release comes after its copy even if all copies before it took longer, too."""
    count, tick, seconds, share, extra = 5, 1e-3, 0.02, 0.2, 0.003
    slots = np.arange(400)
    releases = place_releases(
        slots,
        (slots * tick).astype(np.float64),
        np.zeros(400, dtype=np.bool_),
        np.zeros(400, dtype=np.int64),
        np.full(400, 10),
        np.arange(count),
        np.zeros(count, dtype=np.int64),
        np.ones(count, dtype=np.int64),
        np.full(count, 2),
        np.full(count, 399),
        np.full(count, seconds),
        np.zeros(count),
        share,
        extra,
    )
    assert releases is not None
    late_seconds = (1 + share) * seconds * np.arange(1, count + 1) + extra
    assert releases * tick == pytest.approx(late_seconds, abs=tick)
    assert (releases * tick >= late_seconds - 1e-12).all()


def test_plans_for_disks_leave_more_free() -> None:
    disk, host = disk_machine(), load_machine("a100-80gb")
    assert (Caution.of(disk).out_share, Caution.of(disk).in_share) == (DISK_SHARE, DISK_SHARE)
    assert Caution().out_share < Caution.of(disk, timed=True).out_share < Caution.of(disk).out_share
    assert Caution.of(host) == Caution.of(host, timed=True) == Caution()
    step = network_step(24)
    limit_bytes = limit_at(step, 0.5)
    assert solve(step, disk, limit_bytes, seconds=0.05) == solve(
        step, disk, limit_bytes, seconds=0.05, caution=Caution.of(disk)
    )


@pytest.mark.parametrize("share", [0.45, 0.6])
def test_what_is_planned_from_long_durations_bears_a_slow_disk(share: float) -> None:
    """Observed durations are too long, and the disk is slower than when it was measured."""
    step = Step.load(FIXTURES / "resnet50.json.gz")
    longer = tuple(dataclasses.replace(op, duration_seconds=1.25 * op.duration_seconds) for op in step.ops)
    observed, disk = dataclasses.replace(step, ops=longer), disk_machine(5e8, 4e8)
    slow = late(disk, Caution(0.5, 0.0, 0.5, 0.0))
    plans = [
        solve(observed, disk, limit_at(step, share), seconds=0.3, caution=caution) for caution in (None, Caution())
    ]
    careful, usual = ([simulate(step, on, plan.decisions).seconds for on in (disk, slow)] for plan in plans)
    beyond = [[seconds - step.plain_seconds for seconds in times] for times in (careful, usual)]
    assert beyond[0][0] <= 1.1 * beyond[1][0]
    assert beyond[0][1] <= 0.8 * beyond[1][1]
