"""What the summary counts, and how it prints."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest
from rich.console import Console

from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.errors import RecordError
from ebbtide.machine import Machine
from ebbtide.plan import solve
from ebbtide.report import Measured, summarise, timeline_data
from ebbtide.report.summary import OTHERS, saved_values, short_name, tier_lines
from ebbtide.step import EXTERNAL, Op, Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import MIB, disk_machine
from tests.plan.test_finals import retained_step


def test_every_saved_storage_is_counted_once(step: Step, on: Machine, plan: Plan) -> None:
    made = {}
    external = {value.storage for value in step.values if value.maker == EXTERNAL}
    for saved in step.saved:
        value = step.values[saved.value]
        if value.storage not in external:
            made[value.storage] = value.size_bytes
    total = summarise(step, on, plan).total
    assert (total.total_bytes, total.total_count) == (sum(made.values()), len(made))


def test_fates_are_those_of_the_plan(step: Step, on: Machine, plan: Plan) -> None:
    total = summarise(step, on, plan).total
    for kind, size_bytes, count in (
        (Offload, total.moved_bytes, total.moved_count),
        (Recompute, total.recomputed_bytes, total.recomputed_count),
    ):
        pairs = zip(step.absences, plan.decisions, strict=True)
        sizes = [step.values[absence.value].size_bytes for absence, decision in pairs if isinstance(decision, kind)]
        assert (size_bytes, count) == (sum(sizes), len(sizes))
        assert sizes


def test_rows_are_named_after_the_op_that_made_the_saved_version(step: Step, on: Machine, plan: Plan) -> None:
    rows = {row.op: row for row in summarise(step, on, plan).rows}
    # Batch norm makes the storage and relu_ the version that is saved; only the small statistics stay batch norm's.
    assert rows["relu_"].total_count == 32
    assert rows["native_batch_norm"].total_bytes < MIB
    assert rows["convolution"].recomputed_count > 0


def test_rows_are_ordered_and_small_ones_gathered(step: Step, on: Machine, plan: Plan) -> None:
    ops = tuple(dataclasses.replace(op, name=f"aten.op{tick % 20}.default") for tick, op in enumerate(step.ops))
    summary = summarise(dataclasses.replace(step, ops=ops), on, plan)
    sizes = [row.total_bytes for row in summary.rows[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(summary.rows) == 8
    assert summary.rows[-1].op == OTHERS
    assert summary.total.total_bytes == summarise(step, on, plan).total.total_bytes


def test_a_storage_with_two_absences_has_the_fate_of_the_longest_one_away(step: Step) -> None:
    first = step.absences[0]
    second = dataclasses.replace(first, opens=first.opens, closes=first.opens + 1)
    twice = dataclasses.replace(step, absences=(first, second))
    (op, *_) = step.values[first.value].uses
    fates: dict[tuple[Decision, ...], str] = {
        (Keep(), Keep()): "kept",
        (Keep(), Recompute((op,))): "recomputed",
        (Offload("disk", 1, 2, 3), Recompute((op,))): "moved",
    }
    for decisions, fate in fates.items():
        found = {saved.value: saved.fate for saved in saved_values(twice, decisions)}
        assert found[first.value] == fate


def test_link_times_are_the_sums_of_the_transfers(step: Step, on: Machine, plan: Plan) -> None:
    (use,) = summarise(step, on, plan).tiers
    link = on.link("memory", "disk")
    moved = [
        step.values[absence.value].size_bytes
        for absence, decision in zip(step.absences, plan.decisions, strict=True)
        if isinstance(decision, Offload)
    ]
    assert use.size_bytes == sum(moved)
    assert use.out_seconds == pytest.approx(sum(link.seconds(size) for size in moved))
    assert use.in_seconds > use.out_seconds


def test_what_stays_out_is_told_of_and_comes_back_in_no_time() -> None:
    step, machine = retained_step(), disk_machine()
    plan = solve(step, machine, limit_at(step, 0.4))
    pairs = list(zip(step.absences, plan.decisions, strict=True))
    moved = [(step.values[a.value].size_bytes, step.is_final(a)) for a, d in pairs if isinstance(d, Offload)]
    idle = [size for size, is_final in moved if is_final]
    back = [size for size, is_final in moved if not is_final]
    assert idle
    assert back
    summary = summarise(step, machine, plan)
    (use,) = summary.tiers
    assert (use.size_bytes, use.idle_bytes) == (sum(idle + back), sum(idle))
    assert use.in_seconds == pytest.approx(sum(machine.link("disk", "ram").seconds(size) for size in back))
    assert use.out_seconds == pytest.approx(sum(machine.link("ram", "disk").seconds(size) for size in idle + back))
    assert "of it stay there" in tier_lines(summary)[-1]
    data = timeline_data(step, machine, plan)
    for index, (absence, decision) in enumerate(pairs):
        if step.is_final(absence) and isinstance(decision, Offload):
            assert data["absent"][index]["back"] == pytest.approx(data["planned"]["times"][absence.closes])


def test_a_plan_for_another_machine_is_an_error(step: Step, on: Machine, plan: Plan) -> None:
    with pytest.raises(RecordError, match="no link from 'memory' to 'disk'"):
        summarise(step, dataclasses.replace(on, links=()), plan)


def test_text_fits_100_columns_and_has_the_figures(step: Step, on: Machine, plan: Plan) -> None:
    text = str(summarise(step, on, plan, Measured("planned", plan.seconds * 1.01, plan.peak_bytes)))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    for figure in (
        f"{1.01 * plan.seconds / plan.plain_seconds:.3f} x",
        "1.004 x",
        "relu_",
        "to disk and back",
    ):
        assert figure in text


def test_shares_are_of_what_the_plain_step_has_above_rest(step: Step, on: Machine, plan: Plan) -> None:
    text = str(summarise(step, on, plan, Measured("planned", plan.seconds * 1.01, plan.peak_bytes)))
    (line,) = [line for line in text.splitlines() if "above the resting" in line]
    share = (plan.peak_bytes - plan.resting_bytes) / (plan.plain_peak_bytes - plan.resting_bytes)
    assert line.split()[-3:] == ["100%", f"{share:.0%}", f"{share:.0%}"]
    (line,) = [line for line in text.splitlines() if "against plain" in line]
    planned = plan.seconds / plan.plain_seconds
    assert line.split()[2:] == ["1.000", "x", f"{planned:.3f}", "x", f"{1.01 * planned:.3f}", "x", "1.004", "x"]


def test_what_was_not_measured_is_a_dash(step: Step, on: Machine, plan: Plan) -> None:
    text = str(summarise(step, on, dataclasses.replace(plan, bound_seconds=None)))
    (times,) = [line for line in text.splitlines() if line.lstrip().startswith("step time")]
    assert times.split()[-2:] == ["-", "-"]
    assert "resident memory" not in text


def test_a_peak_over_the_limit_is_said(step: Step, on: Machine, plan: Plan) -> None:
    over = Measured(peak_bytes=plan.limit_bytes + 5 * MIB)
    assert "over the limit by 5.00 MiB" in str(summarise(step, on, plan, over))


def test_names_are_no_markup(step: Step, on: Machine, plan: Plan) -> None:
    ops = tuple(dataclasses.replace(op, name="custom.[red]op.default") for op in step.ops)
    assert "custom.[red]op" in str(summarise(dataclasses.replace(step, ops=ops), on, plan))


def test_prints_with_rich(step: Step, on: Machine, plan: Plan) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(summarise(step, on, plan))
    assert "saved values by op" in console.export_text()


def test_a_step_without_ops_is_summed_up(on: Machine) -> None:
    empty = Step((), (), (), (), ())
    plan = Plan((), 1, 0, 0.0, 0, 0, 0.0, 0)
    assert "saved values" in str(summarise(empty, on, plan))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten.convolution.default", "convolution"),
        ("aten.add.Tensor", "add"),
        ("mylib.fused.default", "mylib.fused"),
        ("compiled", "compiled"),
        ("a.b.c.d", "a.b.c.d"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(Op(name, (), ()).name) == short


@pytest.mark.parametrize(
    ("device", "times", "left", "is_said"),
    [("cuda", 1.5, "", True), ("cuda", 1.05, "", False), ("cpu", 1.5, "", False), ("cuda", 1.5, "another op", False)],
)
def test_a_late_host_is_named(
    step: Step, on: Machine, plan: Plan, device: str, times: float, left: str, is_said: bool
) -> None:
    measured = Measured("planned", times * plan.seconds, left=left)
    summary = summarise(dataclasses.replace(step, device=device), on, plan, measured)
    said = " ".join(str(summary).split())
    assert (f"{times:.2f} times as long as the device needs" in said) == is_said


def test_nothing_is_said_of_the_host_before_a_step_was_measured(step: Step, on: Machine, plan: Plan) -> None:
    assert "the host" not in str(summarise(dataclasses.replace(step, device="cuda"), on, plan))


def test_a_terminal_that_knows_no_lines(step: Step, on: Machine, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(step, on, plan)
    assert "─" in str(summary)
    assert repr(summary) == str(summary)  # what a notebook shows
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    print(summary)
    assert "---" in str(summary)
    assert str(summary).isascii()


def test_a_step_shows_itself_in_a_line(step: Step) -> None:
    assert repr(step) == f"<Step on cpu: {len(step.ops)} ops, {len(step.values)} values, {len(step.absences)} absences>"
