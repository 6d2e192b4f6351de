"""What is said of a plan in a few words."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.plan.batch import LargestBatch
from ebbtide.report.sentences import batch_lines, verdict
from ebbtide.step import Step


@pytest.mark.parametrize(("share", "said"), [(-1e-16, " 0.0% more"), (0.0, " 0.0% more"), (0.0421, " 4.2% more")])
def test_a_plan_that_costs_nothing(share: float, said: str, step: Step, on: Machine, plan: Plan) -> None:
    """Its time may be a last digit below the plain one."""
    plan = dataclasses.replace(plan, seconds=(1 + share) * plan.plain_seconds)
    assert said in verdict(on, plan)[-1]
    assert said in " ".join(batch_lines(on, LargestBatch(8, step, plan, 4, step, (4, 8))))


def test_a_step_that_is_told_to_take_no_time(step: Step, on: Machine, plan: Plan) -> None:
    still = dataclasses.replace(step, ops=tuple(dataclasses.replace(op, duration_seconds=0.0) for op in step.ops))
    lines = batch_lines(on, LargestBatch(8, step, plan, 1, still, (4, 8)))
    assert lines[1] == "plain: batch 1, 0 us a step"
