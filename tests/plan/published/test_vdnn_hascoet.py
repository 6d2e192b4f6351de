"""vDNN's and Hascoet's static policies, step by step on small nets; what each switch changes."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from ebbtide.decisions import Keep, Offload, Plan
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.judged import Planner
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.layers import BackwardLayer, is_checkpoint, is_convolution
from ebbtide.plan.published.offload_all import offload_all
from ebbtide.plan.published.vdnn import prefetches, vdnn
from ebbtide.step import Step
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine, network_step

UNLIMITED = 1 << 60
SIZES = [4 * MIB, 2 * MIB, 8 * MIB, MIB, 4 * MIB]
SECONDS = [1e-3, 8e-3, 1e-3, 3e-3, 2e-3]
MACHINE = disk_machine(2e9, 4e9, latency=1e-4)


def convolutions(op: str = "convolution") -> Step:
    """Op 0 makes z_0; op i, a convolution, saves z_{i-1} of `SIZES` and makes z_i; backward op 12 - i follows it."""
    tape = Tape()
    value = tape.op([tape.external(KIB)], [SIZES[0]], seconds=1e-3, replay="opaque", name="aten.data.default")[0]
    numbers = []
    for place, seconds in enumerate(SECONDS):
        numbers.append(tape.pack(value))
        size = SIZES[place + 1] if place + 1 < len(SIZES) else KIB
        value = tape.op([value], [size], seconds=seconds, replay="opaque", name=f"aten.{op}.default")[0]
    last = tape.pack(value)
    gradient = tape.op([value], [KIB], seconds=1e-3, replay="opaque", name="aten.loss.default")[0]
    tape.unpack(last)
    for number, seconds in zip(reversed(numbers), reversed(SECONDS), strict=True):
        gradient = tape.op([gradient], [KIB], seconds=1e-4, phase="backward", name="aten.view_backward")[0]
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        name = f"aten.{op}_backward.default"
        gradient = tape.op(inputs, [KIB], seconds=2 * seconds, replay="opaque", phase="backward", name=name)[0]
    return tape.step()


def offloads(plan: Plan) -> list[tuple[int, int, int]]:
    """Ticks of each trip: out, release, load."""
    trips = [decision for decision in plan.decisions if isinstance(decision, Offload)]
    assert len(trips) == len(SIZES)
    return [(trip.out, trip.release, trip.load) for trip in trips]


def test_hascoet_step_by_step() -> None:
    plan = hascoet(convolutions(), MACHINE, UNLIMITED, helper_thread=False)
    # z_{i-1} leaves while op i runs, and its fetch starts with the backward pass of op i + 1, at ticks 16, 14, 12, 10;
    # of the last one, when it is asked for.
    assert offloads(plan) == [(1, 2, 14), (2, 3, 12), (3, 4, 10), (4, 5, 8), (5, 6, 8)]


def test_hascoet_without_a_helper_waits_at_the_end_of_each_layer() -> None:
    """Idle of a layer: max(0, |z| / beta - uF), the window of one layer."""
    step = convolutions()
    plan = hascoet(step, MACHINE, UNLIMITED, helper_thread=False)
    stalls = [stall for stall in simulate(step, MACHINE, plan.decisions).stalls if stall.reason == "release"]
    expected = [1e-4 + size / 2e9 - seconds for size, seconds in zip(SIZES, SECONDS, strict=True)]
    assert {stall.absence: stall.seconds for stall in stalls} == pytest.approx(
        {place: seconds for place, seconds in enumerate(expected) if seconds > 0}
    )


def test_each_trick_of_hascoet_is_worth_something() -> None:
    step = convolutions()
    whole = hascoet(step, MACHINE, UNLIMITED)
    for switched_off in ("copy_stream", "helper_thread", "prefetch"):
        assert hascoet(step, MACHINE, UNLIMITED, **{switched_off: False}).seconds > whole.seconds  # type: ignore[arg-type]
    # Releasing without waiting holds more memory for longer.
    assert whole.peak_bytes >= hascoet(step, MACHINE, UNLIMITED, helper_thread=False).peak_bytes
    on_demand = hascoet(step, MACHINE, UNLIMITED, prefetch=False, helper_thread=False)
    assert [load for _, _, load in offloads(on_demand)] == [16, 14, 12, 10, 8]


def test_vdnn_waits_and_fetches_one_layer_ahead() -> None:
    step = convolutions()
    plan = vdnn(step, MACHINE, UNLIMITED, offload="conv")
    assert offloads(plan) == [(1, 2, 14), (2, 3, 12), (3, 4, 10), (4, 5, 8), (5, 6, 7)]
    assert offloads(vdnn(step, MACHINE, UNLIMITED, offload="all")) == offloads(plan)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.convolution.default", True),
        ("aten.convolution_backward.default", True),
        ("aten._slow_conv2d_forward.default", True),
        ("aten.conv_transpose2d.input", True),
        ("prims.convert_element_type.default", False),
        ("aten._convert_indices_from_csr_to_coo.default", False),
    ],
)
def test_what_is_a_convolution(name: str, expected: bool) -> None:
    step = convolutions()
    op = dataclasses.replace(step.ops[1], name=name)
    assert is_convolution(op) == is_checkpoint(step, op) == expected


def layer(slot: int, *closing: int, convolution: bool = False) -> BackwardLayer:
    """A layer of the backward pass."""
    return BackwardLayer(slot, closing, convolution)


def test_vdnn_looks_as_far_as_the_next_convolution() -> None:
    # Backward: relu (nothing out), conv 5 needs value 2, pool needs 1, bn nothing, conv 3 needs value 0.
    layers = [layer(10), layer(20, 2, convolution=True), layer(30, 1), layer(40), layer(50, 0, convolution=True)]
    released = {0: 1, 1: 2, 2: 3}
    assert prefetches(layers, released) == {2: 10, 1: 20, 0: 30}
    # With the convolutions' inputs alone: while conv 5 runs, conv 3's is the next, behind pool and bn.
    assert prefetches(layers, {0: 1, 2: 3}) == {2: 10, 0: 20}
    # A convolution that needs nothing ends the search: the layers before it fetch nothing beyond.
    layers = [layer(10), layer(20, convolution=True), layer(30), layer(40, 0, convolution=True)]
    assert prefetches(layers, {0: 1}) == {0: 20}
    assert prefetches(layers, {0: 25}) == {0: 30}


def test_vdnn_dyn_moves_no_more_than_it_must() -> None:
    step = convolutions()
    assert not vdnn(step, MACHINE, plain_peak_bytes(step), offload="dyn").binds
    conv = vdnn(step, MACHINE, UNLIMITED, offload="conv")
    assert vdnn(step, MACHINE, conv.peak_bytes, offload="dyn").decisions == conv.decisions
    with pytest.raises(BudgetError) as caught:
        vdnn(step, MACHINE, conv.peak_bytes - 1, offload="dyn")
    assert caught.value.reachable_bytes == conv.peak_bytes


def test_without_convolutions_there_is_nothing_to_do() -> None:
    step = convolutions(op="addmm")
    refused: tuple[Planner, ...] = (functools.partial(vdnn, offload="conv"), hascoet)
    for policy in refused:
        with pytest.raises(PolicyError, match="saves no input of a convolution"):
            policy(step, MACHINE, UNLIMITED)
    for plan in (vdnn(step, MACHINE, UNLIMITED), hascoet(step, MACHINE, UNLIMITED, layers="all")):
        assert len(offloads(plan)) == len(SIZES)


def test_offload_all_moves_everything_and_waits_only_for_memory() -> None:
    step = convolutions()
    free = offload_all(step, MACHINE, UNLIMITED)
    assert not any(isinstance(decision, Keep) for decision in free.decisions)
    # All but the value at the turn, which is needed back before its copy is out.
    waits = [stall for stall in simulate(step, MACHINE, free.decisions).stalls if stall.reason == "release"]
    assert {stall.absence for stall in waits} == {len(SIZES) - 1}
    tight = offload_all(step, MACHINE, step.resting_bytes + 13 * MIB)
    assert tight.peak_bytes < free.peak_bytes
    assert tight.seconds > free.seconds


def test_vdnn_dyn_takes_convolutions_alone_where_that_suffices() -> None:
    """Batch norms save their inputs, too; those are left where they are."""
    step = network_step(8, size_bytes=MIB)
    conv, everything = (vdnn(step, MACHINE, UNLIMITED, offload=offload) for offload in ("conv", "all"))
    assert conv.decisions != everything.decisions
    assert conv.peak_bytes < plain_peak_bytes(step)
    assert vdnn(step, MACHINE, conv.peak_bytes, offload="dyn").decisions == conv.decisions


def test_vdnn_fetches_nothing_where_it_is_released() -> None:
    """A trip's load comes behind its release: the next layer's is the first that may fetch it."""
    layers = [layer(10), layer(20, convolution=True), layer(30), layer(40, 0, convolution=True)]
    assert prefetches(layers, {0: 19}) == {0: 20}
    assert prefetches(layers, {0: 20}) == {0: 30}


def test_a_value_comes_back_in_time_where_there_is_just_room() -> None:
    """Beside the 4 MiB of moments 7 and 8 it fills the limit to the last byte, as 8 MiB did without it."""
    tape = Tape()
    x = tape.external(KIB)
    (value,) = tape.op([x], [4 * MIB], replay="opaque")
    saved = tape.pack(value)  # tick 1
    (small,) = tape.op([value], [KIB], replay="opaque")
    tape.pack(x)  # tick 2
    (big,) = tape.op([small], [8 * MIB], replay="opaque")
    (small,) = tape.op([big], [KIB], replay="opaque")
    tape.pack(x)  # tick 4
    (half,) = tape.op([small], [4 * MIB], replay="opaque")
    (gradient,) = tape.op([half], [KIB], replay="opaque")
    tape.unpack(saved)  # tick 6, after 6 ms
    tape.op([gradient, value], [KIB], replay="opaque", phase="backward")
    step, limit_bytes = tape.step(), 8 * MIB + 2 * KIB
    machine = disk_machine(4 * MIB / 0.5e-3, 4 * MIB / 1.5e-3, latency=0.0)
    assert offload_all(step, machine, limit_bytes).decisions == (Offload("disk", 1, 2, 4),)
