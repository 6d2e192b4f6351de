"""Durations measured in planned steps, and what transfers add to them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ebbtide.decisions import Keep
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.published.registry import POLICIES
from ebbtide.run.pace import LOOKS, WARM_UP, Pace, without_slowdown
from tests.plan.random_steps import disk_machine, network_step


def test_medians_are_shared_out_over_the_ops_between_two_events() -> None:
    step = network_step(4)
    ticks = [0, *(event.tick for event in step.events), len(step.ops)]
    spans = [[op.duration_seconds for op in step.ops[a:b]] for a, b in itertools.pairwise(ticks)]
    pace = Pace()
    for run in range(WARM_UP + LOOKS[0]):
        noise = 50.0 if run in (0, 1, 3) else 2.0  # two are left out, one is the odd one among three
        pace.add([noise * sum(span) for span in spans])
        assert pace.due == (run + 1 == WARM_UP + LOOKS[0])
    refined = pace.refine(step)
    assert refined.plain_seconds == pytest.approx(2 * step.plain_seconds, rel=1e-6)


def test_what_transfers_cost_compute_counts_once() -> None:
    """A step is measured beside the transfers of its plan; predicted from that, it takes as long as it took."""
    step = network_step(8)
    machine = disk_machine(slowdown=0.4)
    plan = POLICIES["offload-all"](step, machine, plain_peak_bytes(step))
    took = simulate(step, machine, plan.decisions).seconds
    cost = took - simulate(step, disk_machine(), plan.decisions).seconds
    assert cost > 0.01 * took
    longer = 1 + cost / step.plain_seconds
    ops = tuple(dataclasses.replace(op, duration_seconds=longer * op.duration_seconds) for op in step.ops)
    measured = dataclasses.replace(step, ops=ops)
    mended = without_slowdown(measured, machine, plan.decisions)
    assert simulate(mended, machine, plan.decisions).seconds == pytest.approx(took, rel=0.02)
    assert mended.plain_seconds == pytest.approx(step.plain_seconds, rel=0.02)


def test_where_nothing_moves_nothing_is_taken_off() -> None:
    step = network_step(3)
    assert without_slowdown(step, disk_machine(), [Keep()] * len(step.absences)) is step
