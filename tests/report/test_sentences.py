"""What is said of a plan in a few words."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.machines import load_machine
from ebbtide.plan.batch import LargestBatch
from ebbtide.report.sentences import batch_lines, foreign_times, links_table, verdict
from ebbtide.step import Step


@pytest.mark.parametrize(("share", "said"), [(-1e-16, " 0 % more"), (0.0, " 0 % more"), (0.0421, " 4.2 % more")])
def test_a_plan_that_costs_nothing(share: float, said: str, step: Step, on: Machine, plan: Plan) -> None:
    """Its time may be a last digit below the plain one."""
    plan = dataclasses.replace(plan, seconds=(1 + share) * plan.plain_seconds)
    assert said in verdict(on, plan)[-1]
    assert said in " ".join(batch_lines(on, LargestBatch(8, step, plan, 4, step, (4, 8))))


def test_a_step_that_is_told_to_take_no_time(step: Step, on: Machine, plan: Plan) -> None:
    still = dataclasses.replace(step, ops=tuple(dataclasses.replace(op, duration_seconds=0.0) for op in step.ops))
    lines = batch_lines(on, LargestBatch(8, step, plan, 1, still, (4, 8)))
    assert lines[1] == "plain: batch 1, 0 us a step"


def test_a_limit_of_the_plain_peak_fits(on: Machine, plan: Plan) -> None:
    for limit, said in ((plan.plain_peak_bytes, "plain: fits"), (plan.plain_peak_bytes - 1, "plain: does not fit")):
        assert verdict(on, dataclasses.replace(plan, limit_bytes=limit))[1].startswith(said)


def test_times_of_another_sort_of_device_are_told_of(step: Step, on: Machine) -> None:
    h200 = load_machine("h200")
    (line,) = foreign_times(step, h200)
    assert line.startswith("the step was observed on cpu")
    assert foreign_times(dataclasses.replace(step, device="cuda"), h200) == ()
    assert foreign_times(step, on) == ()


def test_links_have_both_of_their_speeds(on: Machine) -> None:
    columns = {str(column.header): list(column.cells) for column in links_table(on).columns}
    assert columns["one way"] == ["2.33 GiB/s", "1.49 GiB/s"]
    assert columns["both ways"] == ["1.86 GiB/s", "1.12 GiB/s"]


def test_rates_are_samples_a_second(step: Step, on: Machine, plan: Plan) -> None:
    plan = dataclasses.replace(plan, seconds=0.5)
    lines = batch_lines(on, LargestBatch(8, step, plan, 4, step, (4, 8)))
    assert any("batch 8, 500.0 ms a step, 16 samples a second" in line for line in lines), lines
