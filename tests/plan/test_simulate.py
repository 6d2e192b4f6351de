"""`simulate` against an oracle that walks moment by moment, and each rule by a case made by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ebbtide.decisions import Decision, Keep, Offload, Recompute
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan import Outcome, find_recipes, simulate
from ebbtide.step import Absence, Step
from ebbtide.step_checks import check_step
from tests.plan.random_steps import KIB, Tape, disk_machine, lone_machine, random_step
from tests.plan.reference import Walk

MACHINE = dataclasses.replace(disk_machine(1e8, 5e7, slowdown=0.1, compute_seconds=2e-4), replay_seconds=3e-4)


def random_decisions(step: Step, seed: int) -> list[Decision]:
    """Any valid decision for each absence, by chance."""
    dice = random.Random(seed)
    recipes = find_recipes(step)
    slots = {event.tick: moment for event, moment in zip(step.events, step.event_moments(), strict=True)}
    packed: dict[int, int] = {}
    for event, moment in zip(step.events, step.event_moments(), strict=True):
        if event.kind == "pack":
            packed.setdefault(step.saved[event.saved].value, moment)
    decisions: list[Decision] = []
    for number, absence in enumerate(step.absences):
        before = [a.closes for a in step.absences if a.value == absence.value and a.closes <= absence.opens]
        trips = [
            Offload("disk", out, release, load)
            for out, release, load in ((dice.choice(list(slots)) for _ in range(3)) for _ in range(60))
            if max([packed[absence.value], *before]) <= slots[out] < slots[release]
            and absence.opens <= slots[release] < min(slots[load], absence.closes)
        ]
        recipe = recipes[number]
        options: list[Decision] = [Keep(), *trips[:2], *([Recompute(recipe)] * 2 if recipe else [])]
        decisions.append(dice.choice(options))
    return decisions


@pytest.mark.parametrize("seed", range(150))
def test_equals_oracle(seed: int) -> None:
    step = random_step(seed, length=4 + seed % 12)
    check_step(step)
    decisions = random_decisions(step, seed)
    outcome, walked = simulate(step, MACHINE, decisions), Walk(step, MACHINE, decisions).run()
    assert outcome.memory == walked.memory
    assert outcome.peak_bytes == max(walked.memory)
    assert outcome.peak_moment == walked.memory.index(max(walked.memory))
    assert outcome.physical_peak_bytes == max(walked.physical)
    assert outcome.seconds == pytest.approx(walked.seconds, rel=1e-9)
    assert outcome.start_seconds == pytest.approx(walked.starts, rel=1e-9, abs=1e-12)


def test_random_decisions_use_every_kind() -> None:
    kinds = [type(d) for seed in range(50) for d in random_decisions(random_step(seed, length=10), seed)]
    assert min(kinds.count(kind) for kind in (Keep, Offload, Recompute)) > 30


def test_plain_step_is_plain() -> None:
    step = random_step(3)
    outcome = simulate(step, lone_machine(), [Keep()] * len(step.absences))
    assert outcome.seconds == pytest.approx(step.plain_seconds)
    assert (outcome.transfers, outcome.stalls, outcome.recomputations) == ((), (), ())


def chain() -> Step:
    """Two ops of 1 s, each of which saves its result of 100 KiB; then 1 s that needs nothing; then both backward."""
    tape = Tape()
    x = tape.external(10 * KIB)
    (a,) = tape.op([x], [100 * KIB], seconds=1.0)  # moment 0
    saved_a = tape.pack(a)  # moment 1, tick 1
    (b,) = tape.op([a], [100 * KIB], seconds=1.0, workspace=7 * KIB)  # moment 2
    saved_b = tape.pack(b)  # moment 3, tick 2
    (c,) = tape.op([b], [20 * KIB], seconds=1.0, replay="opaque")  # moment 4
    tape.pack(c)  # moment 5, tick 3: a place to act
    (g,) = tape.op([c], [KIB], seconds=1.0, phase="backward")  # moment 6
    tape.unpack(saved_b)  # moment 7, tick 4
    (g,) = tape.op([g, b], [KIB], seconds=1.0, phase="backward")  # moment 8
    tape.unpack(saved_a)  # moment 9, tick 5
    tape.op([g, a], [KIB], seconds=1.0, phase="backward")  # moment 10
    return tape.step()


SECOND_A_TRANSFER = disk_machine(100 * KIB, 100 * KIB, latency=0.0)


def run(step: Step, *decisions: Decision, machine: Machine = SECOND_A_TRANSFER) -> Outcome:
    """Simulate by hand."""
    return simulate(step, machine, decisions)


def test_chain_is_as_drawn() -> None:
    step = chain()
    assert [(a.value, a.opens, a.closes) for a in step.absences] == [(1, 3, 9), (2, 5, 7)]
    plain = run(step, Keep(), Keep())
    assert [size // KIB for size in plain.memory] == [110, 110, 210, 210, 230, 230, 231, 211, 212, 111, 112]


def test_release_waits_for_the_copy_and_frees_after_it() -> None:
    outcome = run(chain(), Offload("disk", 1, 2, 5), Keep())
    # The copy runs from 1 s to 2 s, beside op 1: nothing waits. Bytes are gone from moment 4 on, until moment 9.
    assert [size // KIB for size in outcome.memory] == [110, 110, 210, 210, 130, 130, 131, 111, 112, 111, 112]
    assert [(s.moment, s.reason) for s in outcome.stalls] == [(9, "load")]
    assert outcome.seconds == pytest.approx(7.0)
    assert [(t.direction, t.start_seconds, t.end_seconds) for t in outcome.transfers] == [
        ("out", 1.0, 2.0),
        ("in", 5.0, 6.0),
    ]


def test_load_takes_its_bytes_at_once_and_comes_in_time() -> None:
    outcome = run(chain(), Offload("disk", 1, 2, 4), Keep())
    assert [size // KIB for size in outcome.memory][7:] == [211, 212, 111, 112]
    assert outcome.stalls == ()
    assert outcome.seconds == pytest.approx(6.0)


def test_load_waits_for_its_own_copy_out() -> None:
    slow_out = disk_machine(100 * KIB / 4, 100 * KIB, latency=0.0)
    outcome = run(chain(), Keep(), Offload("disk", 2, 3, 4), machine=slow_out)
    assert [(t.direction, t.start_seconds, t.end_seconds) for t in outcome.transfers] == [
        ("out", 2.0, 6.0),
        ("in", 7.0, 8.0),
    ]
    assert [(s.moment, s.reason, s.seconds) for s in outcome.stalls] == [(5, "release", 3.0), (7, "load", 1.0)]


def test_slowdown_is_charged_when_queued() -> None:
    machine = disk_machine(1e9, 1e9, slowdown=0.5, latency=1.0, compute_seconds=0.25)
    outcome = run(chain(), Offload("disk", 1, 2, 4), Keep(), machine=machine)
    share = 0.25 + 0.5 * (1.0 + 100 * KIB / 1e9)
    assert outcome.start_seconds[2] == pytest.approx(1.0 + share)
    assert outcome.start_seconds[8] == pytest.approx(4.0 + 2 * share)


def test_recompute_frees_at_opens_and_costs_its_ops() -> None:
    outcome = run(chain(), Keep(), Recompute((1,)))
    assert [size // KIB for size in outcome.memory] == [110, 110, 210, 210, 230, 130, 131, 211, 212, 111, 112]
    assert outcome.seconds == pytest.approx(7.0)
    assert [(r.absence, r.moment, r.start_seconds, r.seconds) for r in outcome.recomputations] == [(1, 7, 4.0, 1.0)]
    assert outcome.physical_peak_bytes == 230 * KIB


def test_recompute_brings_its_leaf_back_first() -> None:
    outcome = run(chain(), Offload("disk", 1, 2, 5), Recompute((1,)))
    # The load is queued on demand at moment 7, two moments before the value itself is asked for.
    assert [(t.direction, t.start_seconds) for t in outcome.transfers] == [("out", 1.0), ("in", 4.0)]
    assert [size // KIB for size in outcome.memory][4:] == [130, 30, 31, 211, 212, 111, 112]
    assert outcome.seconds == pytest.approx(6.0 + 1.0 + 1.0)


def test_recompute_of_a_leaf_recurses() -> None:
    outcome = run(chain(), Recompute((0,)), Recompute((1,)))
    assert [r.absence for r in outcome.recomputations] == [0, 1]
    assert [size // KIB for size in outcome.memory][3:8] == [110, 130, 30, 31, 211]


def test_in_place_copies_a_leaf_and_writes_its_own() -> None:
    tape = Tape()
    x = tape.external(100 * KIB)
    (a,) = tape.op([x], [100 * KIB, 30 * KIB], seconds=1.0)[:1]
    (b,) = tape.op([a], [], writes=a, seconds=1.0, replay="in_place")
    saved = tape.pack(b)
    tape.op([b], [KIB], seconds=1.0, replay="opaque")
    tape.pack(x)
    tape.unpack(saved)
    tape.op([b], [KIB], phase="backward")
    step = tape.step()
    assert find_recipes(step) == [(0, 1)]
    outcome = run(step, Recompute((0, 1)))
    # x, the first op's two results; the second is freed as nothing reads it; the in-place op needs nothing new.
    assert outcome.memory[step.absences[0].closes] == (100 + 100 + 30) * KIB


@pytest.mark.parametrize(
    "decision",
    [
        Offload("tape", 1, 2, 5),
        Offload("disk", 0, 2, 5),
        Offload("disk", 1, 1, 5),
        Offload("disk", 2, 2, 5),
        Offload("disk", 1, 5, 5),
        Offload("disk", 2, 3, 3),
        Recompute((1,)),
        Recompute(()),
        Recompute((0, 1)),
    ],
    ids=[
        "no tier",
        "no event",
        "before it opens",
        "release with out",
        "too late",
        "load before release",
        "other op",
        "nothing",
        "beyond",
    ],
)
def test_impossible_decisions_are_refused(decision: Decision) -> None:
    with pytest.raises(PlanError, match="absence 0"):
        run(chain(), decision, Keep())


def test_number_of_decisions_must_fit() -> None:
    with pytest.raises(PlanError, match="1 decisions"):
        run(chain(), Keep())


def test_recipe_may_not_read_what_was_overwritten() -> None:
    tape = Tape()
    x = tape.external(64 * KIB)
    (a,) = tape.op([x], [64 * KIB])
    saved = tape.pack(a)
    tape.op([x], [], writes=x, replay="in_place")
    tape.pack(x)
    tape.unpack(saved)
    tape.op([a], [KIB], phase="backward")
    step = tape.step()
    assert find_recipes(step) == [None]
    with pytest.raises(PlanError, match="absence 0"):
        run(step, Recompute((0,)))


def test_nothing_is_released_before_its_last_use() -> None:
    """It may be copied, and there is an event, between its save and its second use."""
    tape = Tape()
    x = tape.external(KIB)
    (a,) = tape.op([x], [100 * KIB])  # moment 0
    saved = tape.pack(a)  # moment 1, tick 1
    tape.op([a], [KIB])  # moment 2
    tape.pack(x)  # moment 3, tick 2
    (b,) = tape.op([a], [KIB])  # moment 4
    tape.pack(x)  # moment 5, tick 3
    (c,) = tape.op([b], [KIB])  # moment 6
    tape.pack(x)  # moment 7, tick 4
    (g,) = tape.op([c], [KIB])  # moment 8
    tape.unpack(saved)  # moment 9, tick 5
    tape.op([g, a], [KIB], phase="backward")
    step = tape.step()
    assert step.absences == (Absence(a, 5, 9),)
    with pytest.raises(PlanError, match=r"absence 0: copied out at moment 1, released at 3, .* from 5 on"):
        run(step, Offload("disk", 1, 2, 4))
    assert run(step, Offload("disk", 1, 3, 4)).memory[6] < run(step, Keep()).memory[6]


def asked_twice() -> Step:
    """A value of 100 KiB that is asked for at moments 5 and 13, and not needed from 3 and from 7 until then."""
    tape = Tape()
    x = tape.external(KIB)
    (a,) = tape.op([x], [100 * KIB])  # moment 0
    saved = tape.pack(a)  # moment 1, tick 1
    (g,) = tape.op([a], [KIB])  # moment 2
    tape.pack(x)  # moment 3, tick 2
    (g,) = tape.op([g], [KIB])  # moment 4
    tape.unpack(saved)  # moment 5, tick 3
    (g,) = tape.op([g, a], [KIB], phase="backward")  # moment 6
    tape.pack(x)  # moment 7, tick 4
    (g,) = tape.op([g], [KIB])  # moment 8
    tape.pack(x)  # moment 9, tick 5
    (g,) = tape.op([g], [KIB])  # moment 10
    tape.pack(x)  # moment 11, tick 6
    (g,) = tape.op([g], [KIB])  # moment 12
    tape.unpack(saved)  # moment 13, tick 7
    tape.op([g, a], [KIB], phase="backward")
    step = tape.step()
    assert step.absences == (Absence(a, 3, 5), Absence(a, 7, 13))
    return step


def test_a_second_absence_is_copied_out_after_the_first_one_has_ended() -> None:
    """Before that its storage may be away itself."""
    with pytest.raises(PlanError, match=r"absence 1: copied out at moment 3, .* it can be copied from 5,"):
        run(asked_twice(), Keep(), Offload("disk", 2, 4, 6))
    outcome = run(asked_twice(), Keep(), Offload("disk", 3, 4, 6))
    assert [transfer.direction for transfer in outcome.transfers] == ["out", "in"]


def test_a_storage_is_absent_once_at_a_time() -> None:
    """No observed step has absences that overlap, but one that somebody wrote may."""
    step = dataclasses.replace(chain(), absences=(Absence(1, 3, 9), Absence(1, 5, 9), Absence(2, 5, 7)))
    with pytest.raises(PlanError, match="absence 1: its storage is absent already at moment 5"):
        run(step, Recompute((0,)), Recompute((0,)), Keep())
    for decisions in ((Recompute((0,)), Keep(), Keep()), (Keep(), Recompute((0,)), Keep())):
        assert len(run(step, *decisions).recomputations) == 1


@pytest.mark.parametrize("ops", [(1, 1), (0, 0, 1), (1, 0, 1), (-6, 1)])
def test_a_recipe_is_ticks_in_order_each_once(ops: tuple[int, ...]) -> None:
    """Op -6 of six would be taken for op 0."""
    with pytest.raises(PlanError, match=r"absence 1: the recipe .* of value 2 must be ticks in order"):
        run(chain(), Keep(), Recompute(ops))
    assert run(chain(), Keep(), Recompute((0, 1))).seconds == pytest.approx(8.0)
