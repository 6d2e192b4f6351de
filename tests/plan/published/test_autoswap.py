"""AutoSwap's scores as the paper defines them, its two modes, its search for the least limit without overhead."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.decisions import Keep, Offload
from ebbtide.errors import BudgetError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.published.autoswap import Scores, autoswap, least_zero_overhead_limit
from ebbtide.plan.published.transfers import Ground
from ebbtide.plan.published.weights import best_weights
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, network_step

PCIE = Machine(
    "pcie",
    "gpu",
    (Tier("gpu", "device"), Tier("host", "host")),
    (
        Link("gpu", "host", 47.2e-6, 1e9 / 0.0756, 1e9 / 0.0756),
        Link("host", "gpu", 9.7e-6, 1e9 / 0.0823, 1e9 / 0.0823),
    ),
)
"""The authors' measured transfers: 47.2 us + 0.0756 ns a byte out, 9.7 us + 0.0823 ns a byte in."""
SCORES = ("doa", "aoa", "wdoa", "swdoa", "voting", "weighted")


def chain(sizes: list[int], seconds: float = 1e-3) -> Step:
    """Values of ``sizes``, each made from the one before and saved; backward in the opposite order."""
    tape = Tape()
    value = tape.external(KIB)
    numbers = []
    for size in sizes:
        value = tape.op([value], [size], seconds=seconds, replay="opaque")[0]
        numbers.append(tape.pack(value))
    value = tape.op([value], [KIB], seconds=seconds, replay="opaque")[0]
    value = tape.op([value], [KIB], seconds=seconds, replay="opaque")[0]
    for number in reversed(numbers):
        tape.unpack(number)
        inputs = [value, tape.saved[number][0]]
        value = tape.op(inputs, [KIB], seconds=2 * seconds, replay="opaque", phase="backward")[0]
    return tape.step()


def test_scores_are_the_papers() -> None:
    step = chain([4 * MIB, 8 * MIB, 2 * MIB, 64 * MIB], seconds=1e-3)
    ground = Ground.of(step, PCIE, "autoswap")
    candidates, problem = ground.candidates, ground.problem
    places = np.arange(3)
    scores = Scores(candidates, places, problem.clock)
    # Value 0 is read last by op 1, which ends at 2 ms, and asked for at 12 ms: 6 ops forward, 3 backward ops of 2 ms.
    gap = [12e-3 - 2e-3, 10e-3 - 3e-3, 8e-3 - 4e-3]
    out = [47.2e-6 + 0.0756e-9 * size for size in (4 * MIB, 8 * MIB, 2 * MIB)]
    back = [9.7e-6 + 0.0823e-9 * size for size in (4 * MIB, 8 * MIB, 2 * MIB)]
    doa = [gap[i] - out[i] - back[i] for i in range(3)]
    assert scores.doa() == pytest.approx(doa)
    assert scores.aoa() == pytest.approx([doa[0] * 4 * MIB, doa[1] * 8 * MIB, doa[2] * 2 * MIB])
    limit_bytes = plain_peak_bytes(step) - 6 * MIB
    load = np.array(simulate(step, PCIE, [Keep()] * len(step.absences)).memory)
    for weights in (load, load - 3 * MIB):
        expected = [
            sum(
                max(0, int(weights[moment]) - limit_bytes)
                for moment in range(int(candidates.release[place]) + 1, int(candidates.closes[place]))
            )
            for place in places
        ]
        assert scores.wdoa(weights, limit_bytes) == pytest.approx(expected)


def test_a_negative_area_is_divided() -> None:
    step = chain([64 * MIB, 8 * MIB], seconds=1e-6)
    ground = Ground.of(step, PCIE, "autoswap")
    scores = Scores(ground.candidates, np.arange(2), ground.problem.clock)
    assert (scores.doa() < 0).all()
    assert scores.aoa() == pytest.approx(scores.doa() / np.array([64 * MIB, 8 * MIB]))


def swapped(step: Step, limit_bytes: int, score: str) -> list[int]:
    """Absences that a plan swaps."""
    plan = autoswap(step, PCIE, limit_bytes, score=score)  # type: ignore[arg-type]
    return [number for number, decision in enumerate(plan.decisions) if isinstance(decision, Offload)]


def test_scores_choose_differently() -> None:
    step = chain([4 * MIB, 8 * MIB, 2 * MIB, 64 * MIB])
    limit_bytes = plain_peak_bytes(step) - 4 * MIB
    # The longest absence is the first value's, the largest area the second's.
    assert swapped(step, limit_bytes, "doa") == [0]
    assert swapped(step, limit_bytes, "aoa") == [1]
    assert swapped(step, plain_peak_bytes(step) - 1, "doa") == [0]
    assert swapped(step, plain_peak_bytes(step), "doa") == []


def test_blocks_below_the_threshold_are_no_candidates() -> None:
    step = chain([MIB - 1, 8 * MIB, MIB // 2, 64 * MIB])
    assert swapped(step, plain_peak_bytes(step) - 4 * MIB, "doa") == [1]
    with pytest.raises(BudgetError) as caught:
        autoswap(step, PCIE, plain_peak_bytes(step) - 9 * MIB, score="doa")
    assert caught.value.reachable_bytes == plain_peak_bytes(step) - 8 * MIB


def test_nothing_comes_back_before_the_peak() -> None:
    # With both values away there is room for the small one at the peak, and it is wanted soon after, by a slow link.
    tape = Tape()
    value, saved = tape.external(KIB), []
    for size in (8 * MIB, MIB, KIB, KIB, KIB, KIB):
        value = tape.op([value], [size], seconds=1e-2, replay="opaque")[0]
        saved.append(tape.pack(value))
    peak = len(tape.ops)
    for size in (16 * MIB, KIB, KIB):
        value = tape.op([value], [size], seconds=1e-2, replay="opaque")[0]
        tape.pack(tape.external(KIB))
    for number in reversed(saved[:2]):
        tape.unpack(number)
        inputs = [value, tape.saved[number][0]]
        value = tape.op(inputs, [KIB], seconds=1e-2, replay="opaque", phase="backward")[0]
    step, machine = tape.step(), disk_machine(1e9, 2e7)
    plan = autoswap(step, machine, plain_peak_bytes(step) - 2 * MIB, score="doa")
    moved = [decision for decision in plan.decisions if isinstance(decision, Offload)]
    assert len(moved) == 2
    assert all(decision.release <= peak < decision.load for decision in moved)


@pytest.mark.parametrize("score", SCORES)
def test_sticking_to_the_limit_costs_time_and_not_sticking_costs_memory(score: str) -> None:
    step, slow = network_step(10, seed=1), disk_machine(4e8, 4e8)
    least = least_zero_overhead_limit(step, slow, score=score)  # type: ignore[arg-type]
    assert least < plain_peak_bytes(step)
    plan = autoswap(step, slow, least, score=score, mode="zero overhead", trials=6)  # type: ignore[arg-type]
    assert plan.peak_bytes <= least
    assert not simulate(step, slow, plan.decisions).stalls
    assert plan.seconds == pytest.approx(plan.plain_seconds)
    lower = step.resting_bytes + (least - step.resting_bytes) * 9 // 10
    stuck = autoswap(step, slow, lower, score=score, trials=6)  # type: ignore[arg-type]
    assert stuck.peak_bytes <= lower
    assert stuck.seconds > stuck.plain_seconds
    if score != "weighted":
        with pytest.raises(BudgetError) as caught:
            autoswap(step, slow, least - 1, score=score, mode="zero overhead")  # type: ignore[arg-type]
        assert caught.value.reachable_bytes == least


def test_found_weights_are_no_worse_than_each_score_alone() -> None:
    step, slow = network_step(12, seed=5), disk_machine(5e8, 5e8)
    limit_bytes = limit_at(step, 0.6)
    found = autoswap(step, slow, limit_bytes, score="weighted")
    for score in ("doa", "aoa", "wdoa", "swdoa"):
        assert found.seconds <= autoswap(step, slow, limit_bytes, score=score).seconds + 1e-9


def test_weights_are_found_where_the_cost_is_least() -> None:
    aim = np.array([0.15, 0.55, 0.3])

    def cost(weights: np.ndarray) -> float:
        return float(((weights - aim) ** 2).sum())

    few, many = (best_weights(cost, 3, trials=trials, seed=0) for trials in (4, 24))
    assert few is not None
    assert many is not None
    assert cost(many) < 0.01 < cost(few)
    assert best_weights(lambda weights: float("inf"), 3, trials=6, seed=0) is None


SLACK_BYTES = 64 * KIB
"""More than all that is small in these steps."""


def two_regions() -> Step:
    """``a`` and ``b`` are away before the peak and in it, ``c`` in it and behind it.

    Load in MiB: 13 for two ops, 12 for two, 18 at the peak for two, 12 for one, 8 for one, 12 for two. The limit is 10.
    """
    tape = Tape()
    x = tape.external(KIB)
    (a,) = tape.op([x], [4 * MIB], replay="opaque")
    saved = [tape.pack(a)]
    (b,) = tape.op([a], [4 * MIB], replay="opaque")
    saved.append(tape.pack(b))
    (small,) = tape.op([b], [KIB], replay="opaque")
    tape.pack(x)
    (before,) = tape.op([small], [5 * MIB], replay="opaque")
    (small,) = tape.op([before], [KIB], replay="opaque")
    (c,) = tape.op([small], [4 * MIB], replay="opaque")
    saved.append(tape.pack(c))
    (small,) = tape.op([c], [KIB], replay="opaque")
    tape.pack(x)
    (peak,) = tape.op([small], [6 * MIB], replay="opaque")
    (gradient,) = tape.op([peak], [KIB], replay="opaque")
    for number, value in ((saved[1], b), (saved[0], a)):
        tape.unpack(number)
        (gradient,) = tape.op([gradient, value], [KIB], replay="opaque", phase="backward")
    (behind,) = tape.op([gradient], [8 * MIB], replay="opaque", phase="backward")
    (gradient,) = tape.op([behind], [KIB], replay="opaque", phase="backward")
    tape.unpack(saved[2])
    tape.op([gradient, c], [KIB], replay="opaque", phase="backward")
    return tape.step()


def test_the_submodular_score_leaves_what_gains_nothing_more() -> None:
    """Excess above 10 MiB, per moment: 3, 3; four times 2; 8, 8; 2, 2; 0, 0; 2, 2. Summed over the absences it is 34
    for ``a``, 30 for ``b`` and 24 for ``c``. With ``a`` away it is 4, 4 at the peak and 2, 2 in the end: 8 for ``b``,
    12 for ``c``; with these two everything fits. By the score that is not looked at again ``b`` goes, too, in between.
    """
    step = two_regions()
    limit_bytes = 10 * MIB + SLACK_BYTES
    assert 18 * MIB < plain_peak_bytes(step) < 18 * MIB + SLACK_BYTES
    assert swapped(step, limit_bytes, "swdoa") == [0, 2]
    assert swapped(step, limit_bytes, "wdoa") == [0, 1, 2]


def test_the_vote_counts_the_weighted_duration_too() -> None:
    """The first value is away longer, the second is larger in area, and alone reaches over the load behind the peak.

    First 7 ms less 0.4 of transfers, times 2 MiB; then 5 ms less 0.7, times 4 MiB. Above 12 MiB the load is 14 in the
    two ops of the peak, which both leave out, and 13 in two behind it. Ranks: 0, 1, 1 and 1, 0, 0.
    """
    tape = Tape()
    x = tape.external(KIB)
    (first,) = tape.op([x], [2 * MIB], replay="opaque")
    saved = [tape.pack(first)]
    (small,) = tape.op([first], [KIB], replay="opaque")
    tape.pack(x)
    (small,) = tape.op([small], [KIB], seconds=3e-3, replay="opaque")
    (second,) = tape.op([small], [4 * MIB], replay="opaque")
    saved.append(tape.pack(second))
    (small,) = tape.op([second], [KIB], replay="opaque")
    tape.pack(x)
    (peak,) = tape.op([small], [8 * MIB], replay="opaque")
    (gradient,) = tape.op([peak], [KIB], replay="opaque")
    tape.unpack(saved[0])
    (gradient,) = tape.op([gradient, first], [KIB], replay="opaque", phase="backward")
    (behind,) = tape.op([gradient], [9 * MIB], replay="opaque", phase="backward")
    (gradient,) = tape.op([behind], [KIB], replay="opaque", phase="backward")
    tape.unpack(saved[1])
    tape.op([gradient, second], [KIB], replay="opaque", phase="backward")
    step = tape.step()
    limit_bytes = 12 * MIB + SLACK_BYTES
    assert swapped(step, limit_bytes, "voting") == [1]
    assert swapped(step, limit_bytes, "doa") == [0, 1]
    assert swapped(step, limit_bytes, "aoa") == swapped(step, limit_bytes, "wdoa") == [1]


@pytest.mark.parametrize("behind", [2, 10], ids=["out", "back"])
@pytest.mark.parametrize("score", SCORES)
def test_what_stays_leaves_the_link_to_the_others(score: str, behind: int) -> None:
    """64 MiB take 16 ms each way. They are away for 12, less than their way out, or for 20, and would be late: they
    stay. The 4 MiB behind them, for which 1 ms each way is time enough, go as if they were alone."""
    tape = Tape()
    x = tape.external(KIB)
    (first,) = tape.op([x], [64 * MIB], replay="opaque")
    saved = [tape.pack(first)]
    (second,) = tape.op([first], [4 * MIB], replay="opaque")
    saved.append(tape.pack(second))
    value = second
    for size_bytes in (*[KIB] * 7, 8 * MIB, *[KIB] * (1 + behind)):
        (value,) = tape.op([value], [size_bytes], replay="opaque")
        tape.pack(x)
    for number, held in ((saved[1], second), (saved[0], first)):
        tape.unpack(number)
        (value,) = tape.op([value, held], [KIB], replay="opaque", phase="backward")
    step, machine = tape.step(), disk_machine(4 * MIB / 1e-3, 4 * MIB / 1e-3, latency=0.0)
    limit_bytes = plain_peak_bytes(step) - 4 * MIB + SLACK_BYTES
    assert least_zero_overhead_limit(step, machine, score=score) <= limit_bytes  # type: ignore[arg-type]
    plan = autoswap(step, machine, limit_bytes, score=score, mode="zero overhead", trials=2)  # type: ignore[arg-type]
    assert [type(decision) for decision in plan.decisions] == [Keep, Offload]
    assert plan.seconds == pytest.approx(plan.plain_seconds)
