"""Final absences: what a graph holds to the end of a step may move out, and never comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys

import numpy as np
import pytest

from ebbtide.decisions import Keep, Offload, Recompute
from ebbtide.errors import BudgetError, PlanError, PolicyError, RecordError
from ebbtide.plan import NO_CAUTION, least_peak_bytes, lower_bound, plain_peak_bytes, simulate, solve
from ebbtide.plan.course import OUT_WAY
from ebbtide.plan.finals import final_absences, with_finals_kept, without_finals
from ebbtide.plan.finish import spend_unused_memory
from ebbtide.plan.follow import Moves
from ebbtide.plan.frontier import frontier
from ebbtide.plan.published.registry import POLICIES
from ebbtide.plan.search import Search
from ebbtide.step import Step
from ebbtide.step_checks import check_step
from tests.plan.exhaustive import best_plans
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, lone_machine, random_step
from tests.plan.reference import Walk
from tests.plan.test_simulate import MACHINE, random_decisions


def retained_step(layers: int = 8, *, asked: bool = True) -> Step:
    """A chain whose graph is kept after its backward pass, or which has none, beside one that has."""
    tape = Tape()
    value, saved = tape.external(64 * KIB), []
    for _ in range(layers):
        value = tape.op([value], [1024 * KIB], seconds=1e-2)[0]
        saved.append(tape.pack(value))
        tape.retain(saved[-1])
    if not asked:
        value = tape.op([value], [64 * KIB], seconds=1e-3)[0]
        saved = [tape.pack(value)]
    return turned(tape, value, saved, seconds=1e-2)


def turned(tape: Tape, value: int, saved: list[int], *, seconds: float) -> Step:
    """The step of ``tape`` with a backward pass that asks for what was ``saved``, in ops of so many seconds."""
    gradient = tape.op([value], [KIB], seconds=1e-3, replay="opaque")[0]
    for number in reversed(saved):
        tape.unpack(number)
        gradient = tape.op([gradient, tape.saved[number][0]], [64 * KIB], seconds=seconds, phase="backward")[0]
    return tape.step()


@pytest.mark.parametrize("seed", range(100))
def test_equals_oracle(seed: int) -> None:
    step = random_step(seed, length=4 + seed % 12, retained=0.5)
    check_step(step)
    decisions = random_decisions(step, seed)
    outcome, walked = simulate(step, MACHINE, decisions), Walk(step, MACHINE, decisions).run()
    assert outcome.memory == walked.memory
    assert outcome.physical_peak_bytes == max(walked.physical)
    assert outcome.seconds == pytest.approx(walked.seconds, rel=1e-9)
    assert outcome.start_seconds == pytest.approx(walked.starts, rel=1e-9, abs=1e-12)


def test_random_steps_have_them_moved() -> None:
    moved = [
        isinstance(random_decisions(step, seed)[number], Offload)
        for seed, step in ((seed, random_step(seed, length=10, retained=0.5)) for seed in range(30))
        for number in final_absences(step)
    ]
    assert 10 < sum(moved) < len(moved) - 10


def test_to_compute_again_what_nothing_asks_for_is_no_plan() -> None:
    step = retained_step()
    number = final_absences(step)[0]
    decisions = [Recompute((0,)) if place == number else Keep() for place in range(len(step.absences))]
    with pytest.raises(PlanError, match=f"absence {number}: nothing asks for value"):
        simulate(step, disk_machine(), decisions)


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
def test_they_leave_where_no_plan_meets_the_limit_without_them(asked: bool) -> None:
    step, machine = retained_step(asked=asked), disk_machine()
    without = without_finals(step)
    assert len(final_absences(step)) == (7 if asked else 8)  # what is asked for last is needed to the end
    assert least_peak_bytes(step, machine) < 0.55 * least_peak_bytes(without, machine)
    limit_bytes = limit_at(step, 0.4)
    with pytest.raises(BudgetError):
        solve(without, machine, limit_bytes)
    plan = solve(step, machine, limit_bytes)
    outcome = simulate(step, machine, plan.decisions)
    assert outcome.peak_bytes == plan.peak_bytes <= limit_bytes
    assert outcome.seconds == pytest.approx(plan.seconds)
    assert plan.bound_seconds is not None
    assert step.plain_seconds <= plan.bound_seconds <= plan.seconds
    assert all(isinstance(plan.decisions[number], (Keep, Offload)) for number in final_absences(step))
    assert any(isinstance(plan.decisions[number], Offload) for number in final_absences(step))


def test_they_stay_where_a_plan_meets_the_limit_without_them() -> None:
    tape = Tape()
    value = tape.external(64 * KIB)
    (early,) = tape.op([value], [1024 * KIB], seconds=1e-2)
    tape.retain(tape.pack(early))
    (value,) = tape.op([early], [1024 * KIB], seconds=1e-2)
    saved = tape.pack(value)
    (gradient,) = tape.op([value], [2048 * KIB], seconds=1e-2)
    tape.pack(gradient)
    (gradient,) = tape.op([gradient], [KIB], seconds=1e-2)
    tape.unpack(saved)
    tape.op([gradient, value], [KIB], seconds=1e-2, phase="backward")
    step, machine = tape.step(), disk_machine()
    least = least_peak_bytes(without_finals(step), machine)
    assert len(final_absences(step)) == 1
    assert least_peak_bytes(step, machine) < least < plain_peak_bytes(step)
    for limit_bytes in (plain_peak_bytes(step), plain_peak_bytes(step) - 1, least):
        plan = solve(step, machine, limit_bytes)
        assert plan.decisions == with_finals_kept(step, solve(without_finals(step), machine, limit_bytes).decisions)
        assert simulate(step, machine, plan.decisions).peak_bytes == plan.peak_bytes <= limit_bytes
        assert plan.bound_seconds == lower_bound(step, machine, limit_bytes).seconds


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_random_steps(seed: int) -> None:
    step, machine = random_step(seed, length=6 + seed % 8, retained=0.5), disk_machine(1e8, 5e7)
    least = least_peak_bytes(step, machine)
    assert least <= least_peak_bytes(without_finals(step), machine)
    for limit_bytes in {least, (least + plain_peak_bytes(step)) // 2}:
        plan = solve(step, machine, limit_bytes, seconds=0.02)
        walked = Walk(step, machine, plan.decisions).run()
        assert plan.peak_bytes == max(walked.memory) <= limit_bytes
        assert plan.seconds == pytest.approx(walked.seconds, rel=1e-9)
        assert lower_bound(step, machine, limit_bytes).seconds <= plan.seconds * (1 + 1e-9)


def small_retained(seed: int) -> Step:
    """Two or three values, of some of which a graph is kept."""
    tape = Tape()
    value, saved = tape.external(64 * KIB), []
    for place in range(2 + seed % 2):
        value = tape.op([value], [64 * KIB * (1 + (seed + place) % 3)], seconds=1e-3 * (1 + (seed * 3 + place) % 4))[0]
        saved.append(tape.pack(value))
        if place == 1 or seed % 2:
            tape.retain(saved[-1])
    return turned(tape, value, saved, seconds=2e-3)


@pytest.mark.parametrize("seed", range(8))
def test_bounds_and_plans_beside_the_best_of_all_plans(seed: int) -> None:
    step, machine = small_retained(seed), disk_machine(1.5e8, 1e8)
    plans = best_plans(step, machine)
    assert final_absences(step)
    assert plans
    assert least_peak_bytes(step, machine) == plans[0][0]
    for peak, seconds in plans:
        assert lower_bound(step, machine, peak).seconds <= seconds * (1 + 1e-9)
        within = [kept for kept, _ in best_plans(without_finals(step), machine) if kept <= peak]
        if not within:
            assert solve(step, machine, peak, caution=NO_CAUTION).seconds == pytest.approx(seconds, rel=1e-6)


def dying_step(dying: int) -> Step:
    """A graph that nothing asks for, freed in the middle of the backward pass through another one."""
    tape = Tape()
    value = tape.external(KIB)
    unasked: list[int] = []
    saved: list[int] = []
    for numbers, count in ((unasked, 6), (saved, 8)):
        for _ in range(count):
            value = tape.op([value], [4 * MIB], seconds=1e-2, replay="opaque")[0]
            numbers.append(tape.pack(value))
    gradient = tape.op([value], [KIB], seconds=1e-2, replay="opaque")[0]
    for place, number in enumerate(reversed(saved)):
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        gradient = tape.op(inputs, [KIB], seconds=1e-2, phase="backward", replay="opaque")[0]
        if place == dying:
            for other in unasked:
                tape.retain(other, tape.moment)
    return tape.step()


@pytest.mark.parametrize(
    ("dying", "bandwidth", "share", "seconds"),
    [(2, 7e7, 0.55, 0.5295), (4, 2e8, 0.5, 0.2678), (4, 2e8, 0.4, math.inf), (6, 1e8, 0.4, math.inf)],
)
def test_none_that_dies_within_the_step_is_loaded(
    dying: int, bandwidth: float, share: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search knows it as `simulate` does, and chooses what else moves accordingly."""
    step, machine = dying_step(dying), disk_machine(bandwidth, bandwidth, latency=0.0)
    searches: list[Search] = []

    def looked_at(search: Search) -> Moves:
        searches.append(search)
        return spend_unused_memory(search)

    monkeypatch.setattr(sys.modules["ebbtide.plan.solve"], "spend_unused_memory", looked_at)
    plan = solve(step, machine, int(share * plain_peak_bytes(step)), caution=NO_CAUTION)
    best, final = searches[-1].best, final_absences(step)
    assert best is not None
    assert all(isinstance(plan.decisions[number], Offload) for number in final)
    closes = [step.absences[number].closes for number in final]
    assert best.moves.load[final].tolist() == closes
    sent = best.course.sent
    assert (sent.way[np.isin(sent.absence, final)] == OUT_WAY).all()
    assert plan.seconds == pytest.approx(best.course.seconds)
    assert plan.seconds <= seconds


def test_without_a_slow_tier_the_error_says_what_to_do() -> None:
    step = retained_step()
    with pytest.raises(BudgetError, match=r"Graphs hold 7.00 MiB that no .* leave out retain_graph=True") as caught:
        solve(step, lone_machine(), limit_at(step, 0.4))
    assert caught.value.reachable_bytes == least_peak_bytes(step, lone_machine())
    with pytest.raises(BudgetError) as other:
        solve(without_finals(step), lone_machine(), limit_at(step, 0.4))
    assert "retain_graph" not in str(other.value)


def test_published_policies_leave_them_alone() -> None:
    step, machine = retained_step(), disk_machine()
    limit_bytes = plain_peak_bytes(step)
    planned = 0
    for policy in POLICIES.values():
        with contextlib.suppress(PolicyError):
            plan = policy(step, machine, limit_bytes)
            assert simulate(step, machine, plan.decisions).peak_bytes <= limit_bytes
            assert all(plan.decisions[number] == Keep() for number in final_absences(step))
            planned += 1
    assert planned > 10


def test_frontier() -> None:
    step, machine = retained_step(), disk_machine()
    found = frontier(step, machine, points=4, seconds=0.02)
    assert found.least_peak_bytes == least_peak_bytes(step, machine)
    assert all(math.isfinite(point.seconds) for point in found.solver.points)


def test_they_are_written_and_read() -> None:
    step = retained_step()
    assert Step.from_document(step.document(), "step") == step
    beyond = dataclasses.replace(step.absences[-1], closes=step.moments - 1)
    with pytest.raises(RecordError, match=r"absence \d+ is impossible"):
        check_step(dataclasses.replace(step, absences=(*step.absences[:-1], beyond)))


def test_what_is_banned_is_so_where_final_absences_are_left_out() -> None:
    """Absence 1 is the first of those that remain."""
    tape = Tape()
    (early,) = tape.op([tape.external(64 * KIB)], [MIB], seconds=1e-2)
    tape.retain(tape.pack(early))
    (value,) = tape.op([early], [MIB], seconds=1e-2)
    saved = tape.pack(value)
    (small,) = tape.op([value], [KIB], seconds=1e-2, replay="opaque")
    tape.pack(small)
    (big,) = tape.op([small], [2 * MIB], seconds=1e-2, replay="opaque")
    (gradient,) = tape.op([big], [KIB], seconds=1e-2, replay="opaque")
    tape.unpack(saved)
    tape.op([gradient, value], [KIB], seconds=1e-2, phase="backward")
    step = tape.step()
    assert final_absences(step) == [0]
    limit_bytes = plain_peak_bytes(step) - MIB
    plan = solve(step, lone_machine(), limit_bytes, seconds=0.01, caution=NO_CAUTION)
    assert plan.decisions == (Keep(), Recompute((1,)))
    with pytest.raises(BudgetError):
        solve(step, lone_machine(), limit_bytes, seconds=0.01, banned={1}, caution=NO_CAUTION)
