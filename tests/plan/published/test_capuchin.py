"""Capuchin swaps what hides, recomputes what costs less than waiting, and learns when to start loads."""

from __future__ import annotations

from typing import Literal

import pytest

from ebbtide.decisions import Keep, Offload, Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.published.capuchin import capuchin
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, lone_machine, network_step

STEP = network_step(12, seed=3)


def test_with_a_quick_link_everything_is_swapped_and_hidden() -> None:
    plan = capuchin(STEP, disk_machine(5e9, 5e9), limit_at(STEP, 0.6))
    assert plan.binds
    assert not any(isinstance(decision, Recompute) for decision in plan.decisions)
    assert plan.seconds < 1.01 * plan.plain_seconds


def test_with_a_slow_link_the_rest_is_recomputed() -> None:
    slow = disk_machine(5e7, 5e7)
    plan = capuchin(STEP, slow, limit_at(STEP, 0.6))
    kinds = {type(decision) for decision in plan.decisions}
    assert kinds == {Keep, Offload, Recompute}
    swap_only = capuchin(STEP, slow, limit_at(STEP, 0.6), recompute=False)
    assert not any(isinstance(decision, Recompute) for decision in swap_only.decisions)
    assert plan.seconds < swap_only.seconds


def test_longest_free_time_first() -> None:
    """A byte too much: the one candidate of the longest free time goes."""
    machine = disk_machine(5e9, 5e9, latency=0.0)
    plan = capuchin(STEP, machine, plain_peak_bytes(STEP) - 1)
    (number,) = [number for number, decision in enumerate(plan.decisions) if isinstance(decision, Offload)]
    clock = simulate(STEP, machine, [Keep()] * len(STEP.absences)).start_seconds

    def free_seconds(number: int) -> float:
        absence = STEP.absences[number]
        transfers = 2 * STEP.values[absence.value].size_bytes / 5e9
        return clock[absence.closes] - clock[absence.opens] - transfers

    large = [n for n, absence in enumerate(STEP.absences) if STEP.values[absence.value].size_bytes >= MIB // 2]
    assert number == max(large, key=free_seconds)


def test_without_a_slow_tier_only_recomputation_is_left() -> None:
    plan = capuchin(STEP, lone_machine(), limit_at(STEP, 0.8))
    assert {type(decision) for decision in plan.decisions} == {Keep, Recompute}
    with pytest.raises(BudgetError):
        capuchin(STEP, lone_machine(), limit_at(STEP, 0.05))


def test_feedback_never_makes_it_slower() -> None:
    gained = 0
    for bandwidth in (2e8, 4e8, 8e8):
        for seed in range(4):
            step, machine = network_step(10, seed=seed), disk_machine(bandwidth, bandwidth, slowdown=0.1)
            limit_bytes = limit_at(step, 0.7)
            tuned, first = (capuchin(step, machine, limit_bytes, feedback=rounds) for rounds in (10, 0))
            assert tuned.peak_bytes <= limit_bytes
            assert tuned.seconds <= first.seconds
            gained += tuned.seconds < first.seconds
    assert gained > 0


def test_fewer_rounds_than_none_are_refused() -> None:
    with pytest.raises(PolicyError, match="feedback is -1; it must be 0 or more"):
        capuchin(STEP, disk_machine(), limit_at(STEP, 0.7), feedback=-1)


def two_values(sizes: tuple[int, int], seconds: tuple[float, float], peak_seconds: float = 1e-3) -> Step:
    """Two values, each made from what the step is given, that are away while two ops hold 8 MiB: the second is wanted
    first, the first 0.1 ms later."""
    tape = Tape()
    x = tape.external(KIB)
    made = [tape.op([x], [size], seconds=duration)[0] for size, duration in zip(sizes, seconds, strict=True)]
    saved = [tape.pack(value) for value in made]
    (small,) = tape.op(made, [KIB], seconds=1e-4, replay="opaque")
    tape.pack(x)
    (peak,) = tape.op([small], [8 * MIB], seconds=peak_seconds, replay="opaque")
    (gradient,) = tape.op([peak], [KIB], seconds=peak_seconds, replay="opaque")
    for number, value in zip(reversed(saved), reversed(made), strict=True):
        tape.unpack(number)
        inputs = [gradient, value]
        (gradient,) = tape.op(inputs, [KIB], seconds=1e-4, replay="opaque", phase="backward")
    return tape.step()


def test_most_memory_for_a_second_of_computation_first() -> None:
    """1 MiB takes 1 ms to compute again, 4 MiB take 2: twice as much for each second."""
    step = two_values((MIB, 4 * MIB), (1e-3, 2e-3))
    plan = capuchin(step, lone_machine(), plain_peak_bytes(step) - MIB)
    assert plan.decisions == (Keep(), Recompute((1,)))


def moving(out_seconds: float, in_seconds: float) -> Machine:
    """A disk to which 4 MiB take so long, and so long back."""
    return disk_machine(4 * MIB / out_seconds, 4 * MIB / in_seconds, latency=0.0)


@pytest.mark.parametrize(("out_share", "in_share"), [(0.0, 1.0), (1.0, 0.0)], ids=["back", "out"])
def test_copies_queue_behind_each_other(out_share: float, in_share: float) -> None:
    """12 ms pass while both are away. One takes 10 ms one way, which is hidden; another one beside it is not: it would
    have to be on its way back 7.6 ms before the step begins, or be out 8 ms after it is wanted. So it is computed
    again, in 0.1 ms. Where one takes 4 ms, both are hidden.
    """
    step = two_values((4 * MIB, 4 * MIB), (1e-4, 1e-4), peak_seconds=6e-3)
    limit_bytes = plain_peak_bytes(step) - 8 * MIB + 64 * KIB
    slow, quick = (moving(1e-6 + ms * 1e-3 * out_share, 1e-6 + ms * 1e-3 * in_share) for ms in (10, 4))
    first, second = capuchin(step, slow, limit_bytes).decisions
    assert isinstance(first, Offload)
    assert second == Recompute((1,))
    assert [type(decision) for decision in capuchin(step, quick, limit_bytes).decisions] == [Offload, Offload]


def test_a_value_whose_last_use_is_just_before_the_peak_is_a_candidate() -> None:
    """Nothing happens in between at which it could be released, but what is computed again is gone at once."""
    tape = Tape()
    (value,) = tape.op([tape.external(KIB)], [4 * MIB])
    saved = tape.pack(value)
    (small,) = tape.op([value], [KIB], replay="opaque")
    (peak,) = tape.op([small], [8 * MIB], replay="opaque")
    (gradient,) = tape.op([peak], [KIB], replay="opaque")
    tape.unpack(saved)
    tape.op([gradient, value], [KIB], replay="opaque", phase="backward")
    step = tape.step()
    assert capuchin(step, lone_machine(), plain_peak_bytes(step) - 4 * MIB).decisions == (Recompute((0,)),)


def around_a_peak(behind: tuple[float, ...], later_bytes: int = KIB) -> Step:
    """``w`` of 20 MiB, and ``v`` of 20 MiB whose last use is right before the peak: nothing happens in between at which
    it could be released. Behind the peak ops of these milliseconds run before ``w`` is wanted. Before ``v`` is, an op
    holds ``later_bytes``."""
    tape = Tape()
    x = tape.external(KIB)

    def op(inputs: list[int], size_bytes: int, ms: float, phase: Literal["forward", "backward"] = "forward") -> int:
        return tape.op(inputs, [size_bytes], seconds=ms * 1e-3, replay="opaque", phase=phase)[0]

    w = op([x], 20 * MIB, 1.0)
    saved = [tape.pack(w)]
    small = op([w], KIB, 0.1)
    tape.pack(x)
    small = op([small], KIB, 0.5)
    tape.pack(x)
    v = op([small], 20 * MIB, 0.5)
    saved.append(tape.pack(v))
    small = op([op([v], KIB, 0.1)], 40 * MIB, 0.2)
    for ms in behind:
        tape.pack(x)
        small = op([small], KIB, ms)
    tape.unpack(saved[0])
    later = op([op([small, w], KIB, 2.0, "backward")], later_bytes, 1e-3, "backward")
    small = op([later], KIB, 1e-3, "backward")
    tape.unpack(saved[1])
    op([small, v], KIB, 1.0, "backward")
    return tape.step()


def test_what_cannot_be_away_at_the_peak_is_not_swapped() -> None:
    """20 MiB take 5 ms back. ``v`` has more free time than ``w``, but lowers nothing, and would take the link from it:
    compute would wait for 2.4 ms of 13."""
    step, machine = around_a_peak((0.2, *[5.6 / 6] * 6)), disk_machine(4e11, 20 * MIB / 5e-3, latency=0.0)
    plan = capuchin(step, machine, plain_peak_bytes(step) - 16 * MIB)
    assert [type(decision) for decision in plan.decisions] == [Offload, Keep]
    assert plan.seconds == pytest.approx(plan.plain_seconds)


def test_what_cannot_be_away_at_the_peak_is_swapped_for_what_is_behind_it() -> None:
    step, machine = around_a_peak((0.2, 1.0), 50 * MIB), disk_machine(4e11, 4e11, latency=0.0)
    limit_bytes = plain_peak_bytes(step) - 16 * MIB
    plan = capuchin(step, machine, limit_bytes)
    assert [type(decision) for decision in plan.decisions] == [Offload, Offload]
    assert plan.peak_bytes <= limit_bytes
