"""A frontier's curves are in order: no plan below the bound, the solver never rises, policies where they fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ebbtide.decisions import Plan
from ebbtide.errors import RecordError
from ebbtide.machine import Machine
from ebbtide.plan import least_peak_bytes, plain_peak_bytes, solve
from ebbtide.plan.frontier import frontier
from ebbtide.plan.published.registry import policies_named
from ebbtide.step import Step
from tests.plan.published.chain_steps import chain_step
from tests.plan.random_steps import Tape, disk_machine, lone_machine, network_step

MACHINE = disk_machine(3e9, 1.5e9, slowdown=0.1)


def test_curves_are_in_order() -> None:
    step = chain_step(10)
    heard: list[tuple[float, str]] = []
    found = frontier(
        step,
        MACHINE,
        points=4,
        policies=policies_named(["offload-all", "rotor", "every-block", "vdnn-conv"]),
        seconds=0.02,
        progress=lambda done, what: heard.append((done, what)),
    )
    limits = [point.limit_bytes for point in found.solver.points]
    assert (limits[0], limits[-1]) == (least_peak_bytes(step, MACHINE), plain_peak_bytes(step))
    assert [point.limit_bytes for point in found.bound.points] == limits
    times = [point.seconds for point in found.solver.points]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(step.plain_seconds)
    for point, bound in zip(found.solver.points, found.bound.points, strict=True):
        assert point.peak_bytes <= point.limit_bytes
        assert bound.seconds <= point.seconds
    bounds = {point.limit_bytes: point.seconds for point in found.bound.points}
    offload, rotor, block, vdnn = found.policies
    for curve in (offload, rotor, block):
        assert curve.points
        assert not curve.refused
        for point in curve.points:
            assert point.peak_bytes <= point.limit_bytes
            assert point.seconds >= bounds.get(point.limit_bytes, 0.0)
    assert not vdnn.points
    assert "no input of a convolution" in vdnn.refused
    shares = [done for done, _ in heard]
    assert shares == sorted(shares)
    assert shares[-1] < 1
    assert {what for _, what in heard} == {"least peak", "solver", "offload-all", "rotor", "every-block", "vdnn-conv"}


def test_a_static_policy_begins_at_the_least_peak_that_it_reaches() -> None:
    """Its plan is the same everywhere; its first point is no point of the grid."""
    found = frontier(chain_step(10), MACHINE, points=3, policies=policies_named(["every-block"]), seconds=0.01)
    (curve,) = found.policies
    assert curve.points[0].peak_bytes == curve.points[0].limit_bytes
    assert curve.points[0].limit_bytes not in {point.limit_bytes for point in found.solver.points}
    assert len({point.seconds for point in curve.points}) == 1


def test_the_least_peak_can_be_planned_for() -> None:
    for step, machine in ((network_step(6), MACHINE), (network_step(6), lone_machine()), (chain_step(8), MACHINE)):
        least = least_peak_bytes(step, machine)
        assert least < plain_peak_bytes(step)
        assert solve(step, machine, least, seconds=0.01).peak_bytes <= least


@pytest.mark.parametrize("layers", [5, 12])
def test_the_least_peak_without_a_slow_tier(layers: int) -> None:
    """Shortest recipes alone bring back what they read for too long; deeper ones reach what a disk does."""
    step = network_step(layers)
    least = least_peak_bytes(step, lone_machine())
    assert least == pytest.approx(least_peak_bytes(step, disk_machine()), rel=1e-3)
    for limit in (least, (least + plain_peak_bytes(step)) // 2):
        assert solve(step, lone_machine(), limit, seconds=0.02).peak_bytes <= limit


def test_a_step_with_nothing_to_move_has_one_budget() -> None:
    tape = Tape()
    tape.op([tape.external(1024)], [1024], phase="backward")
    found = frontier(tape.step(), MACHINE, points=5)
    assert found.least_peak_bytes == found.plain_peak_bytes
    assert len(found.solver.points) == len(found.bound.points) == 1


def test_what_has_no_frontier() -> None:
    with pytest.raises(RecordError, match="the step has no ops"):
        frontier(Step((), (), (), (), ()), MACHINE)
    tape = Tape()
    tape.op([tape.external(8)], [8])
    with pytest.raises(RecordError, match="has no backward pass"):
        frontier(tape.step(), MACHINE)
    tape.op([tape.external(8)], [8], phase="backward")
    timeless = tape.step()
    timeless = dataclasses.replace(
        timeless, ops=tuple(dataclasses.replace(op, duration_seconds=0.0) for op in timeless.ops)
    )
    with pytest.raises(RecordError, match="takes no time"):
        frontier(timeless, MACHINE)
    with pytest.raises(ValueError, match="two points at least, not 1"):
        frontier(chain_step(4), MACHINE, points=1)


def test_where_a_plan_for_more_memory_is_slower_that_for_less_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    step, machine = chain_step(6), disk_machine()
    least, plain = least_peak_bytes(step, machine), plain_peak_bytes(step)

    def slower_with_more(step: Step, machine: Machine, limit_bytes: int, **more: Any) -> Plan:
        return dataclasses.replace(solve(step, machine, limit_bytes, **more), seconds=float(limit_bytes))

    monkeypatch.setattr("ebbtide.plan.frontier.solve", slower_with_more)
    points = frontier(step, machine, points=3, seconds=0.01).solver.points
    assert [point.limit_bytes for point in points] == [least, least + (plain - least) // 2, plain]
    assert [point.seconds for point in points] == [float(least)] * 3
    assert max(point.peak_bytes for point in points) <= least
