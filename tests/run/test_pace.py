"""Durations measured in planned steps, and what transfers add to them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from ebbtide import Budget, Plan
from ebbtide.decisions import Keep
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan import Caution, plain_peak_bytes, simulate
from ebbtide.plan import solve as solver
from ebbtide.plan.published.registry import POLICIES
from ebbtide.run import kinds, solving
from ebbtide.run.kinds import WORTH_SECONDS, Kind
from ebbtide.run.pace import LOOKS, SETTLED, WARM_UP, Pace, without_slowdown
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import disk_machine, network_step
from tests.run.harness import FAST_DISK, SLOW_DISK, compare
from tests.run.programs import Chain


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


def test_ops_that_are_held_up_now_and_then_count() -> None:
    """Each step is held up somewhere else: no median shows it, and every step takes that much longer."""
    step = network_step(6)
    ticks = [0, *(event.tick for event in step.events), len(step.ops)]
    spans = [sum(op.duration_seconds for op in step.ops[a:b]) for a, b in itertools.pairwise(ticks)]
    held_up = sum(spans) / 10
    pace = Pace()
    for run in range(WARM_UP + LOOKS[0]):
        pace.add([seconds + (held_up if place == run else 0.0) for place, seconds in enumerate(spans)])
    assert pace.refine(step).plain_seconds == pytest.approx(1.1 * sum(spans), rel=1e-6)


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


def watched(kind: Kind, machine: Machine, longer: float, steps: int) -> None:
    """Planned steps of ``kind`` that take so many times as long as their ops are known to take now."""
    ops = kind.step.ops
    ticks = [0, *(event.tick for event in kind.step.events), len(ops)]
    between = [longer * sum(op.duration_seconds for op in ops[a:b]) for a, b in itertools.pairwise(ticks)]
    for _ in range(steps):
        kind.watch(machine, between)


def planned_kind(machine: Machine) -> Kind:
    """A kind whose steps are planned for, at half of what they need, as if all checks were done."""
    step = network_step(24)
    kind = Kind(step, verify=False)
    kind.make_plan(machine, limit_at(step, 0.5))
    kind.state = "planned"
    return kind


def test_steps_that_are_shorter_than_observed_are_planned_for_anew() -> None:
    """What compute hid when it was observed it does not hide any more."""
    machine = disk_machine(4e8, 2e8)
    kind = planned_kind(machine)
    first = kind.plan
    assert first is not None
    watched(kind, machine, 0.2, WARM_UP + SETTLED - 1)
    assert kind.plan is not None
    assert (kind.plan.decisions, kind.state, kind.settled) == (first.decisions, "planned", False)
    watched(kind, machine, 1.0, 1)
    assert kind.plan.decisions != first.decisions
    assert kind.plan.seconds < simulate(kind.step, machine, first.decisions).seconds - WORTH_SECONDS
    assert kind.plan.peak_bytes <= first.limit_bytes
    assert kind.state == "audit"
    kind.state, again = "planned", kind.plan
    assert kind.settled
    watched(kind, machine, 1.0, LOOKS[-1])  # that was once and for all
    assert kind.plan.decisions == again.decisions


@pytest.mark.parametrize("worth", [{"WORTH_SHARE": 1e3}, {"WORTH_SECONDS": 1e3}], ids=["share", "seconds"])
def test_what_gains_too_little_is_not_planned_for_anew(
    worth: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worth.items():
        monkeypatch.setattr(kinds, name, value)
    machine = disk_machine(4e8, 2e8)
    kind = planned_kind(machine)
    first = kind.plan
    assert first is not None
    watched(kind, machine, 0.2, WARM_UP + SETTLED)
    assert kind.plan is not None
    assert (kind.plan.decisions, kind.state, kind.settled) == (first.decisions, "planned", True)


def test_a_plan_is_kept_where_none_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = disk_machine(4e8, 2e8)
    kind = planned_kind(machine)
    first = kind.plan
    assert first is not None

    def solve(*_: object, **__: object) -> Plan:
        raise BudgetError("none found", limit_bytes=1, reachable_bytes=2, tick=0, op="", module="")

    monkeypatch.setattr(solving, "solve", solve)
    watched(kind, machine, 0.2, WARM_UP + SETTLED)
    assert kind.plan is not None
    assert (kind.plan.decisions, kind.settled) == (first.decisions, True)


@pytest.mark.usefixtures("nothing_left")
def test_the_numbers_stay_when_steps_are_planned_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First everything moves; anew, everything is computed again, which is said to take no time."""
    made: list[Plan] = []
    cautions: list[Caution | None] = []

    def solve(step: Step, machine: Machine, limit_bytes: int, *, caution: Caution | None = None, **given: Any) -> Plan:
        cautions.append(caution)
        plan = solver(step, SLOW_DISK if made else machine, limit_bytes, caution=caution, **given)
        made.append(plan if not made else dataclasses.replace(plan, seconds=0.0))
        return made[-1]

    monkeypatch.setattr(solving, "solve", solve)
    monkeypatch.setattr(kinds, "WORTH_SHARE", -1.0)
    monkeypatch.setattr(kinds, "WORTH_SECONDS", -1.0)
    plain, program = Chain(), Chain()
    states = []
    with Budget("80%", spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(24):
            states.append(memory.state)
            expected = plain.run(index, contextlib.nullcontext)
            compare(expected, program.run(index, memory.step), f"step {index} ({memory.state})")
        assert memory.settled
        assert memory.plan is not None
        assert memory.plan.decisions == made[1].decisions != made[0].decisions
        assert cautions == [None, Caution.of(FAST_DISK, timed=True)]
    assert states[states.index("planned") :].count("verify") == 1
