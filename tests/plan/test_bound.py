"""The lower bound is below every plan there is, and near the best one where that is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ebbtide.decisions import Decision, Keep, Offload, Recompute
from ebbtide.errors import ArgumentError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import (
    NO_CAUTION,
    bound_program,
    find_recipes,
    least_peak_bytes,
    linear,
    lower_bound,
    plain_peak_bytes,
    solve,
    whole_bound,
)
from ebbtide.plan.follow import Move, follow
from ebbtide.plan.linear import Program, solve_program, solve_whole
from ebbtide.plan.problem import Facts, Problem
from ebbtide.plan.recipes import deeper_recipes
from ebbtide.plan.simulate import moves_of
from ebbtide.step import Step
from tests.plan.limits import limit_at, solve_or_least
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, lone_machine, network_step, random_step, tiny_step

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("*.json.gz"))
MACHINES = {
    "quick": disk_machine(5e8, 3e8, latency=1e-4),
    "slow": disk_machine(6e7, 4e7, latency=0.0),
    "slowing": disk_machine(2e8, 1e8, slowdown=0.2, latency=2e-4, compute_seconds=1e-4),
    "lone": lone_machine(),
    "replaying": dataclasses.replace(disk_machine(6e7, 4e7, latency=0.0), replay_seconds=4e-4),
}
LEAST = 1 - 1e-9


def every_decision(step: Step, number: int, *, deeper: bool = True) -> Iterator[Decision]:
    """All that may be done with an absence: every choice of ticks, its shortest recipe and perhaps the deeper ones."""
    absence = step.absences[number]
    slots = {event.tick: moment for event, moment in zip(step.events, step.event_moments(), strict=True)}
    never = len(step.ops)
    if step.is_final(absence):
        slots[never] = step.moments
    packed = min(
        moment
        for moment, event in zip(step.event_moments(), step.events, strict=True)
        if step.saved[event.saved].value == absence.value
    )
    packed = max([packed, *(a.closes for a in step.absences if a.value == absence.value and a.closes <= absence.opens)])
    yield Keep()
    for out, release, load in itertools.permutations(slots, 3):
        left = packed <= slots[out] < slots[release] >= absence.opens
        if left and slots[release] < slots[load] <= absence.closes and (load == never or not step.is_final(absence)):
            yield Offload("disk", out, release, load)
    recipe = find_recipes(step)[number]
    if recipe is not None:
        yield Recompute(recipe)
    if recipe is not None and deeper:
        yield from map(Recompute, deeper_recipes(Facts.of(step), absence, recipe))


def all_plans(step: Step, machine: Machine) -> Iterator[tuple[int, float]]:
    """Peak and time of every plan."""
    problem = Problem.of(step, machine)
    moves: list[Sequence[Move]] = []
    for number in range(len(step.absences)):
        kept: list[Decision] = [Keep()] * len(step.absences)
        choices = []
        for decision in every_decision(step, number):
            if isinstance(decision, Offload) and not machine.slow_tiers():
                continue
            choices.append(moves_of(problem, [*kept[:number], decision, *kept[number + 1 :]])[number])
        moves.append(choices)
    for choice in itertools.product(*moves):
        course = follow(problem, choice)
        yield int(course.memory.max()), course.seconds


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_below_the_best_of_all_plans(seed: int, machine: Machine) -> None:
    step = tiny_step(seed, 3, gradients=((128 * KIB, 2e-3),))
    plans = list(all_plans(step, machine))
    for limit_bytes in sorted({peak for peak, _ in plans}):
        best = min(seconds for peak, seconds in plans if peak <= limit_bytes)
        bound = lower_bound(step, machine, limit_bytes).seconds
        assert step.plain_seconds * LEAST <= bound <= whole_bound(step, machine, limit_bytes, 9.0) <= best
    assert min(peak for peak, _ in plans) > 0


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("seed", range(10))
def test_below_plans_of_random_steps(seed: int, machine: Machine) -> None:
    step = random_step(seed, length=6 + seed)
    for fraction in (0.85, 0.6, 0.4):
        plan = solve_or_least(step, machine, limit_at(step, fraction))
        for most_groups in (1000, 7, 2):
            assert lower_bound(step, machine, plan.limit_bytes, most_groups=most_groups).seconds <= plan.seconds
        assert whole_bound(step, machine, plan.limit_bytes, 9.0) <= plan.seconds


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_below_plans_of_recorded_steps_and_near_them(path: Path) -> None:
    step, machine = Step.load(path), disk_machine(3.5e9, 1.6e9)
    for fraction in (0.7, 0.5):
        plan = solve_or_least(step, machine, limit_at(step, fraction))
        assert plan.bound_seconds is not None
        assert plan.bound_seconds <= plan.seconds <= 1.1 * plan.bound_seconds


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_merging_weakens_the_bound_and_nothing_else(machine: Machine) -> None:
    step = network_step(8, size_bytes=MIB, seed=5)
    limit_bytes = limit_at(step, 0.45)
    fine = lower_bound(step, machine, limit_bytes)
    assert not fine.merged
    for most_groups in (30, 11, 4, 1):
        coarse = lower_bound(step, machine, limit_bytes, most_groups=most_groups)
        assert coarse.merged
        assert coarse.rows < fine.rows
        assert step.plain_seconds <= coarse.seconds <= fine.seconds * (1 + 1e-7)


def test_falls_with_the_limit_and_with_bandwidth() -> None:
    step = network_step(8, size_bytes=MIB, seed=2)
    machines = [disk_machine(bandwidth, bandwidth, latency=0.0) for bandwidth in (3e7, 1e8, 1e9)]
    rows = [
        [lower_bound(step, machine, limit_at(step, fraction)).seconds for fraction in (0.3, 0.45, 0.6, 0.8, 1.0)]
        for machine in machines
    ]
    table = np.array(rows)
    assert (np.diff(table, axis=1) <= 1e-7).all()
    assert (np.diff(table, axis=0) <= 1e-7).all()
    assert table[0, 0] > table[0, 2] > table[0, -1] == pytest.approx(step.plain_seconds)


def test_no_limit_no_delay_and_no_prices() -> None:
    step = network_step(4)
    bound = lower_bound(step, MACHINES["slow"], plain_peak_bytes(step))
    assert bound.seconds == pytest.approx(step.plain_seconds)
    assert not bound.prices.any()


def test_infinite_where_no_plan_is_possible() -> None:
    step = network_step(4)
    assert lower_bound(step, MACHINES["slow"], step.resting_bytes).seconds == math.inf
    assert lower_bound(random_step(3, length=1), MACHINES["slow"], 1).seconds == math.inf


@pytest.mark.parametrize("duration", [0.0, 1e-9])
@pytest.mark.parametrize("bandwidth", [1e9, 1e8, 1e6])
def test_finite_where_transfers_take_far_longer_than_compute(duration: float, bandwidth: float) -> None:
    tape = Tape()
    value, saved = tape.external(KIB), []
    for _ in range(6):
        value = tape.op([value], [MIB], seconds=duration, replay="opaque")[0]
        saved.append(tape.pack(value))
    gradient = tape.op([value], [KIB], seconds=duration, replay="opaque")[0]
    for number in reversed(saved):
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        gradient = tape.op(inputs, [KIB], seconds=duration, phase="backward", replay="opaque")[0]
    step, machine = tape.step(), disk_machine(bandwidth, bandwidth, latency=0.0)
    for share in (0.99, 0.8, 0.6, 0.4):
        plan = solve(step, machine, limit_at(step, share), seconds=0.01, caution=NO_CAUTION)
        bound_seconds = lower_bound(step, machine, limit_at(step, share)).seconds
        assert MIB / bandwidth <= bound_seconds / LEAST
        assert bound_seconds <= plan.seconds / LEAST


def test_prices_say_what_a_byte_is_worth() -> None:
    step, machine = network_step(8, size_bytes=MIB, seed=2), disk_machine(1e8, 1e8, latency=0.0)
    limit_bytes = limit_at(step, 0.5)
    bound = lower_bound(step, machine, limit_bytes)
    more = lower_bound(step, machine, limit_bytes + KIB)
    assert bound.prices.sum() * KIB == pytest.approx(bound.seconds - more.seconds, rel=0.05)
    assert bound.prices.min() >= 0.0


def test_what_must_be_waited_for_is_waited_for() -> None:
    # One value of 100 KiB has to be away in the third of four seconds; out and back take 3 s each, 1 s is free before.
    tape = Tape()
    x = tape.external(KIB)
    (a,) = tape.op([x], [100 * KIB], seconds=1.0, replay="opaque")
    saved = tape.pack(a)
    tape.op([a], [KIB], seconds=1.0, replay="opaque")
    tape.pack(x)
    tape.op([x], [200 * KIB], seconds=1.0, replay="opaque")
    tape.unpack(saved)
    tape.op([a], [KIB], seconds=1.0, phase="backward")
    step, machine = tape.step(), disk_machine(100 * KIB / 2, 100 * KIB / 2, latency=1.0)
    limit_bytes = plain_peak_bytes(step) - 100 * KIB
    best = min(seconds for peak, seconds in all_plans(step, machine) if peak <= limit_bytes)
    # 2 s of the copy out and all 3 s of the load are waited for, the load not during the third op: no room.
    assert best == pytest.approx(4.0 + 2.0 + 3.0)
    bound = lower_bound(step, machine, limit_bytes)
    assert bound.seconds == pytest.approx(best)


def test_no_recomputation_of_banned_values() -> None:
    step = network_step(6, size_bytes=MIB)
    limit_bytes = limit_at(step, 0.6)
    free = lower_bound(step, lone_machine(), limit_bytes).seconds
    assert free < math.inf
    every = frozenset(range(len(step.absences)))
    assert lower_bound(step, lone_machine(), limit_bytes, banned=every).seconds == math.inf


def test_a_second_tier_can_only_help() -> None:
    step = network_step(6, size_bytes=MIB, seed=1)
    tiers = (Tier("ram", "device"), Tier("host", "host"), Tier("disk", "disk"))
    links = (Link("ram", "disk", 0.0, 3e7, 3e7), Link("disk", "ram", 0.0, 3e7, 3e7))
    more = (Link("ram", "host", 0.0, 1e9, 1e9), Link("host", "ram", 0.0, 1e9, 1e9))
    one, both = Machine("one", "ram", tiers, links), Machine("both", "ram", tiers, (*links, *more))
    limit_bytes = limit_at(step, 0.6)
    assert lower_bound(step, both, limit_bytes).seconds < lower_bound(step, one, limit_bytes).seconds


def test_a_program_stopped_early_still_gives_a_bound() -> None:
    program = Program()
    x = program.columns(2, np.array([4.0, 4.0]), cost=1.0)
    row = program.rows(3.0, np.inf, 1)
    program.put(np.repeat(row, 2), x, np.array([1.0, 2.0]))
    whole = program.assemble()
    assert solve_program(whole, 1.0).value == pytest.approx(1.5)
    for multiplier in (-1.0, 0.0, 0.2, 0.5, 0.7, 5.0):
        assert whole.certify(np.array([multiplier])) <= 1.5


def test_branch_and_bound() -> None:
    program = Program()
    x, y = program.columns(1, 1.0, cost=1.0), program.columns(1, 1.0, cost=3.0)
    both = np.concatenate((x, y))
    program.put(np.repeat(program.rows(1.5, np.inf, 1), 2), both, 1.0)
    once = program.assemble()
    assert solve_program(once, 1.0).value == pytest.approx(2.5)
    assert solve_whole(once, y, 9.0) == pytest.approx(3.5)
    assert solve_whole(once, both, 9.0) == pytest.approx(4.0)
    assert solve_whole(once, both, 0.0) <= 4.0
    program.put(program.rows(2.5, np.inf, 1), x, 1.0)
    assert solve_whole(program.assemble(), both, 9.0) == math.inf


def test_what_is_computed_again_is_so_whole() -> None:
    """With all recomputations whole, the bound is as far as the plan goes here: it is the best one."""
    step, machine = network_step(8, size_bytes=MIB, seed=2), lone_machine()
    limit_bytes = limit_at(step, 0.7)
    plan, seconds = solve(step, machine, limit_bytes, caution=NO_CAUTION), whole_bound(step, machine, limit_bytes, 9.0)
    assert seconds <= plan.seconds == pytest.approx(seconds, rel=1e-6)
    assert plan.bound_seconds is not None
    assert plan.bound_seconds == lower_bound(step, machine, limit_bytes).seconds < 0.9995 * seconds


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_seconds_that_are_none(seconds: float) -> None:
    with pytest.raises(ArgumentError, match=r"^seconds=.*: it must be a number of seconds, 0 or more, and finite"):
        whole_bound(network_step(3), lone_machine(), 0, seconds)


def test_the_solver_prints_nothing(tmp_path: Path) -> None:
    """Some versions of HiGHS print who they are, once in a process."""
    program = (
        "import numpy as np; from ebbtide.plan.linear import Program, solve_program; p = Program(); "
        "p.put(p.rows(1.0, np.inf, 1), p.columns(1, 2.0, cost=1.0), 1.0); print(solve_program(p.assemble(), 1.0).value)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_near_plans_within_the_least_peak() -> None:
    """Where hardly any memory is left, the bound sees which values have to be away, and that they move whole."""
    (path,) = [path for path in FIXTURES if path.name == "lstm.json.gz"]
    step, machine = Step.load(path), disk_machine(2.5e9, 1.6e9, slowdown=0.05)
    limit_bytes = least_peak_bytes(step, machine)
    plan = solve(step, machine, limit_bytes, seconds=0.5, caution=NO_CAUTION)
    assert plan.bound_seconds is not None
    assert 1.1 * plan.plain_seconds < plan.bound_seconds <= plan.seconds <= 1.05 * plan.bound_seconds


def test_of_two_values_that_cannot_both_be_held_one_has_left() -> None:
    # Either a or b has to leave before the last op, within 1.5 s since a was made. Until then c can be copied, as
    # it is saved long before, but it is read again later: its copy makes no room.
    tape = Tape()
    x = tape.external(KIB)
    saved, made = [], []
    for before in (0.0, 3.0, 0.0):
        if before:
            tape.op([x], [KIB], seconds=before, replay="opaque")
        (value,) = tape.op([x], [100 * KIB], seconds=1.0, replay="opaque")
        made.append(value)
        saved.append(tape.pack(value))
    tape.op([x], [KIB], seconds=0.5, replay="opaque")
    tape.pack(x)
    (last,) = tape.op([x], [100 * KIB], seconds=1.0, replay="opaque")
    tape.op([made[0], last], [KIB], seconds=1.0, replay="opaque")
    for number in reversed(saved):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [KIB], seconds=4.0, phase="backward")
    step, machine = tape.step(), disk_machine(100 * KIB / 3, 100 * KIB / 3, latency=0.0)
    limit_bytes = plain_peak_bytes(step) - 100 * KIB
    plan = solve(step, machine, limit_bytes, seconds=0.1, caution=NO_CAUTION)
    # It takes 3 s to copy a, and 1.5 s of these have passed.
    assert plan.seconds == pytest.approx(step.plain_seconds + 1.5)
    assert plan.bound_seconds == pytest.approx(plan.seconds)


def test_what_a_recipe_reads_is_there_or_comes_back_or_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two of a, b and c have to be away in the fifth op; b is made from a in no time, but a is read again 9 s later.
    tape = Tape()
    x = tape.external(KIB)
    saved = []
    (a,) = tape.op([x], [100 * KIB], seconds=5.0)
    saved.append(tape.pack(a))
    (b,) = tape.op([a], [100 * KIB], seconds=0.0)
    saved.append(tape.pack(b))
    (c,) = tape.op([x], [100 * KIB], seconds=4.0, replay="opaque")
    saved.append(tape.pack(c))
    tape.op([x], [KIB], seconds=6.0, replay="opaque")
    tape.pack(x)
    tape.op([x], [300 * KIB], seconds=1.0, replay="opaque")
    for number, seconds in zip(reversed(saved), (0.0, 9.0, 1.0), strict=True):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [KIB], seconds=seconds, phase="backward")
    step, machine = tape.step(), disk_machine(100 * KIB / 3, 100 * KIB / 3, latency=0.0)
    limit_bytes = plain_peak_bytes(step) - 200 * KIB
    best = min(seconds for peak, seconds in all_plans(step, machine) if peak <= limit_bytes)
    # Whichever two are away, one of them is loaded while compute waits: 3 s.
    assert best == pytest.approx(step.plain_seconds + 3.0)
    bound = lower_bound(step, machine, limit_bytes).seconds
    monkeypatch.setattr(bound_program, "reads_of", lambda *_: [])
    weaker = lower_bound(step, machine, limit_bytes).seconds
    assert weaker == pytest.approx(step.plain_seconds)
    assert step.plain_seconds + 1.8 < bound <= best


def test_none_is_sought_for_a_plan_as_fast_as_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a program was solved")

    step, machine = network_step(12, size_bytes=MIB), disk_machine(1e13, 1e13, latency=1e-9)
    limit_bytes = limit_at(step, 0.8)
    expected = lower_bound(step, machine, limit_bytes).seconds
    monkeypatch.setattr("ebbtide.plan.bound.solve_program", refuse)
    plan = solve(step, machine, limit_bytes)
    assert plan.binds
    assert plan.bound_seconds is not None
    assert plan.bound_seconds <= expected <= plan.seconds <= (1 + 1e-4) * plan.bound_seconds


@pytest.mark.parametrize("seed", range(6))
def test_both_methods_prove_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, machine = network_step(10, size_bytes=MIB, seed=seed), disk_machine(5e8, 2.5e8)
    limit_bytes = limit_at(step, 0.4)
    found = lower_bound(step, machine, limit_bytes)
    assert 0 < found.columns <= linear.SMALL
    monkeypatch.setattr(linear, "SMALL", 0)
    assert lower_bound(step, machine, limit_bytes).seconds == pytest.approx(found.seconds, rel=1e-9)


def test_branch_and_bound_recomputes_nothing_that_is_banned() -> None:
    step, machine = network_step(8, size_bytes=MIB, seed=2), lone_machine()
    limit_bytes, every = limit_at(step, 0.7), frozenset(range(len(step.absences)))
    assert lower_bound(step, machine, limit_bytes).seconds < math.inf
    assert whole_bound(step, machine, limit_bytes, 1.0, banned=every) == math.inf
