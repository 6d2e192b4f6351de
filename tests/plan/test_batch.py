"""The largest batch: steps in between are told from two, and the answer holds where it is observed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ebbtide.errors import BudgetError, RecordError
from ebbtide.plan import plain_peak_bytes, solve
from ebbtide.plan.batch import largest_batch, step_at
from ebbtide.step import Step
from ebbtide.step_checks import check_step
from tests.plan.random_steps import KIB, Tape, disk_machine, lone_machine

MACHINE = disk_machine(2e8, 1e8)


def network(
    batch: int, *, seconds: Callable[[int], float] = lambda batch: 1e-3 + 1e-3 * batch, layers: int = 6
) -> Step:
    """A chain of dear and cheap ops whose sizes, and by default times, grow evenly with the batch."""
    tape, spent = Tape(), seconds(batch)
    weight = tape.external(64 * KIB)
    saved, value = [], tape.external(40 * KIB * batch)
    for layer in range(layers):
        cheap = layer % 2 == 1
        name, time = ("aten.relu.default", spent / 10) if cheap else ("aten.mm.default", spent)
        value = tape.op([value] if cheap else [value, weight], [40 * KIB * batch], name=name, seconds=time)[0]
        saved.append(tape.pack(value))
    gradient = tape.op([value], [40 * KIB * batch], phase="backward", seconds=spent / 10)[0]
    for number in reversed(saved):
        tape.unpack(number)
        gradient = tape.op([gradient, tape.saved[number][0]], [40 * KIB * batch], phase="backward", seconds=spent)[0]
    return tape.step()


def test_a_step_in_between() -> None:
    """Where everything grows evenly, the step that is told is the one that would be observed."""
    steps = {4: network(4), 10: network(10)}
    for batch in (1, 3, 4, 7, 10, 23):
        told, real = step_at(steps, batch), network(batch)
        check_step(told)
        assert told.values == real.values
        assert told.events == real.events
        assert plain_peak_bytes(told) == plain_peak_bytes(real)
        assert told.plain_seconds == pytest.approx(real.plain_seconds)
        assert [saved.shape for saved in told.saved] == [saved.shape for saved in real.saved]


def test_sizes_are_rounded_up() -> None:
    small, large = network(4), network(7)
    odd = dataclasses.replace(
        large, values=tuple(dataclasses.replace(v, size_bytes=v.size_bytes + 1) for v in large.values)
    )
    told = step_at({4: small, 7: odd}, 5)
    for value, real in zip(told.values, network(5).values, strict=True):
        assert value.size_bytes == real.size_bytes + 1


@pytest.mark.parametrize("overhead", [0.0, 0.02, 0.3])
def test_the_answer_holds_and_the_next_one_does_not(overhead: float) -> None:
    limit_bytes = plain_peak_bytes(network(12))
    found = largest_batch(network, MACHINE, limit_bytes, overhead=overhead, between=(2, 4), seconds=0.05)
    assert found.plain_batch == 12
    assert plain_peak_bytes(found.step) == plain_peak_bytes(network(found.batch))
    assert found.plan.peak_bytes <= limit_bytes
    assert found.overhead <= overhead
    assert found.observed == ((2, 4, found.batch))
    beyond = solve(network(found.batch + 1), MACHINE, 10**12).plain_seconds
    try:
        plan = solve(network(found.batch + 1), MACHINE, limit_bytes, seconds=0.05)
    except BudgetError:
        return
    assert plan.seconds > (1 + overhead) * beyond


def test_more_time_gives_a_larger_batch() -> None:
    slow = disk_machine(3e7, 2e7)
    limit_bytes = plain_peak_bytes(network(12))
    batches = [
        largest_batch(network, slow, limit_bytes, overhead=overhead, between=(2, 4), seconds=0.02).batch
        for overhead in (0.0, 0.2, 2.0)
    ]
    assert 12 <= batches[0] < batches[1] < batches[2]


def test_an_answer_that_does_not_hold_is_taken_back() -> None:
    """From 20 samples on each layer needs more memory than two small batches foretell; nothing can be offloaded."""

    def uneven(batch: int) -> Step:
        return network(batch if batch < 20 else batch + 10)

    limit_bytes = plain_peak_bytes(network(24))
    found = largest_batch(uneven, lone_machine(), limit_bytes, overhead=0.0, between=(2, 4), seconds=0.02)
    assert found.batch == 19
    assert found.observed[:3] == (2, 4, 24)
    assert 19 in found.observed


def test_an_answer_that_is_too_small_is_raised() -> None:
    """From 10 samples on no layer needs more memory than two small batches foretell for 10."""
    limit_bytes = plain_peak_bytes(network(12))
    found = largest_batch(
        lambda batch: network(batch if batch < 10 else (batch + 10) // 2),
        lone_machine(),
        limit_bytes,
        overhead=0.0,
        between=(2, 4),
    )
    assert 12 < found.batch <= 15
    assert found.observed[:3] == (2, 4, 12)


def test_steps_of_two_kinds() -> None:
    steps = {2: network(2), 4: network(4)}
    steps[4] = dataclasses.replace(steps[4], absences=steps[4].absences[:-1])
    with pytest.raises(RecordError, match=r"batch of 2 has 5 absences, one of 4 has 4, so batches between") as caught:
        largest_batch(steps.__getitem__, MACHINE, 10**9, between=(2, 4))
    assert len(str(caught.value).splitlines()) == 1

    def renamed(batch: int) -> Step:
        step = network(batch)
        ops = (*step.ops[:3], dataclasses.replace(step.ops[3], name=f"aten.relu{batch}"), *step.ops[4:])
        return dataclasses.replace(step, ops=ops)

    with pytest.raises(RecordError, match=r"from op 3 \(aten.relu2 with 2 samples, aten.relu4 with 4\) on"):
        largest_batch(renamed, MACHINE, 10**9, between=(2, 4))


def test_a_batch_that_stops_growing() -> None:
    """As of a data set with 20 samples: any batch would fit, and none is the largest."""
    limit_bytes = plain_peak_bytes(network(24))
    with pytest.raises(RecordError, match=r"no more memory .* \(28 and 57 were observed\): is its batch fixed"):
        largest_batch(lambda batch: network(min(batch, 20)), lone_machine(), limit_bytes, overhead=0.0, between=(2, 4))


def ever_slower(batch: int) -> Step:
    """So much slower with each sample that from two batches a single one is told to take no time."""
    step = network(batch, seconds=lambda size: 1e-3 * size**3)
    return dataclasses.replace(step, ops=tuple(dataclasses.replace(op, replay="opaque") for op in step.ops))


def test_a_budget_without_end() -> None:
    with pytest.raises(ValueError, match="has no end: name what a machine has"):
        largest_batch(lambda _: pytest.fail("observed"), disk_machine(), 1 << 60)


def test_what_has_no_largest_batch() -> None:
    with pytest.raises(BudgetError, match="least reachable peak"):
        largest_batch(network, MACHINE, 50 * KIB, between=(2, 4))
    tight = plain_peak_bytes(network(1)) - 60 * KIB
    with pytest.raises(BudgetError, match=r"with one sample a plan .* takes .* more time, and 0.0% are allowed"):
        largest_batch(network, disk_machine(1e6, 1e6), tight, overhead=0.0, between=(2, 4), seconds=0.02)
    with pytest.raises(BudgetError, match=r"takes inf% more time, and 5.0% are allowed"):
        largest_batch(ever_slower, disk_machine(1e6, 1e6), tight, seconds=0.02)
    with pytest.raises(RecordError, match="no more memory for more samples"):
        largest_batch(lambda batch: network(3), MACHINE, 10**9, between=(2, 4))
    forward = Tape()
    forward.op([forward.external(8)], [8])
    with pytest.raises(RecordError, match="no backward pass"):
        largest_batch(lambda batch: forward.step(), MACHINE, 10**9)
    for between in ((4, 4), (0, 3), (8, 2)):
        with pytest.raises(ValueError, match="two batch sizes"):
            largest_batch(network, MACHINE, 10**9, between=between)
    with pytest.raises(ValueError, match="0 or more"):
        largest_batch(network, MACHINE, 10**9, overhead=-0.1)


def test_of_millions_the_answer_is_one_within_a_thousandth() -> None:
    planned: list[str] = []
    limit_bytes = plain_peak_bytes(network(3_000_000, layers=2))
    found = largest_batch(
        lambda batch: network(batch, layers=2),
        lone_machine(),
        limit_bytes,
        overhead=0.0,
        seconds=0.0,
        progress=planned.append,
    )
    assert 2_997_000 <= found.batch <= 3_000_000
    assert len(planned) < 40


def with_workspaces(batch: int, workspace_bytes: int) -> Step:
    """A step whose ops take so much, and whose saved tensors lie one sample behind the other in rows of a batch."""
    step = network(batch)
    ops = tuple(dataclasses.replace(op, workspace_bytes=workspace_bytes) for op in step.ops)
    saved = tuple(
        dataclasses.replace(one, shape=(40 * KIB, batch), stride=(batch, 1), offset=3 * batch) for one in step.saved
    )
    return dataclasses.replace(step, ops=ops, saved=saved)


@pytest.mark.parametrize("batch", [1, 7, 23])
def test_workspaces_strides_and_offsets_of_a_step_in_between(batch: int) -> None:
    steps = {size: with_workspaces(size, 7 * KIB * size) for size in (4, 10)}
    told, real = step_at(steps, batch), with_workspaces(batch, 7 * KIB * batch)
    assert told.saved == real.saved
    assert [op.workspace_bytes for op in told.ops] == [op.workspace_bytes for op in real.ops]
    assert [op.duration_seconds for op in told.ops] == pytest.approx([op.duration_seconds for op in real.ops])


def test_workspaces_are_rounded_up() -> None:
    """A third of the way from 10 to 12 bytes."""
    told = step_at({4: with_workspaces(4, 10), 7: with_workspaces(7, 12)}, 5)
    assert {op.workspace_bytes for op in told.ops} == {11}
