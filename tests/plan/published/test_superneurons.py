"""SuperNeurons on AlexNet: the paper's working set and its counts of recomputed layers; the cache moves little."""

from __future__ import annotations

import pytest

from benchmarks.published.alexnet import BATCH, FLOAT_BYTES, LAYERS, alexnet
from ebbtide.decisions import Keep, Offload, Recompute
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machines import load_machine
from ebbtide.plan import plain_peak_bytes, simulate
from ebbtide.plan.published.layers import is_checkpoint
from ebbtide.plan.published.superneurons import superneurons
from ebbtide.step import Op, Step
from tests.plan.random_steps import KIB, MIB, Tape, disk_machine

QUICK = disk_machine(1e12, 1e12, latency=0.0)
UNLIMITED = 1 << 60
CONV1_BYTES = BATCH * LAYERS[0].elements * FLOAT_BYTES


def alexnet_step(*, as_autograd: bool) -> Step:
    """AlexNet on the paper's GPU."""
    compute = load_machine("k40c").compute
    assert compute is not None
    return alexnet(compute, as_autograd=as_autograd)


def test_liveness_alone() -> None:
    """1489.355 MB in the paper: all forward tensors up to pool5, its gradient, and the gradient it makes.

    The paper's formula, sum l_f + l_N_b, takes the turn for the peak, which holds for the even net only.
    """
    step = alexnet_step(as_autograd=False)
    forward_bytes = sum(BATCH * layer.elements * FLOAT_BYTES for layer in LAYERS)
    assert forward_bytes / MIB == pytest.approx(1469.6, abs=0.1)
    assert (plain_peak_bytes(step) - step.resting_bytes) / MIB == pytest.approx(1489.355, abs=0.01)
    step = even_net(10, MIB)
    assert plain_peak_bytes(step) - step.resting_bytes == (1 + 20) * MIB + MIB


def test_alexnet_comes_down_to_its_largest_working_set() -> None:
    """886.23 MiB, four tensors of conv1's shape in the backward pass of the first normalisation.

    With the saves of PyTorch. With those of cuDNN (the next test's) conv1's output, fetched for the recipe of relu1,
    is a fifth: the paper frees it again and fetches it once more, but a value has one decision for its absence.
    """
    step = alexnet_step(as_autograd=True)
    limit_bytes = step.resting_bytes + 4 * CONV1_BYTES
    plan = superneurons(step, QUICK, limit_bytes, offload="checkpoints", recompute="cost")
    assert plan.peak_bytes == limit_bytes
    assert (plan.peak_bytes - step.resting_bytes) / MIB == pytest.approx(886.23, abs=0.005)
    outcome = simulate(step, QUICK, plan.decisions)
    peak_op = step.ops[step.op_moments().index(outcome.peak_moment)]
    assert peak_op.name == "aten.lrn_backward.default"
    largest = max(working_set(step, op) for op in step.ops)
    assert plan.peak_bytes - step.resting_bytes == largest
    with pytest.raises(BudgetError):
        superneurons(step, QUICK, limit_bytes - 1, offload="checkpoints", recompute="cost")


def working_set(step: Step, op: Op) -> int:
    """Bytes that an op reads and makes, what the step was given not counted."""
    touched = {*op.inputs, *op.outputs}
    return sum(step.values[value].size_bytes for value in touched if step.values[value].maker >= 0)


@pytest.mark.parametrize(("recompute", "layers"), [("speed", 14), ("memory", 23), ("cost", 17)])
def test_alexnet_recomputes_as_many_layers_as_the_paper_says(recompute: str, layers: int) -> None:
    step = alexnet_step(as_autograd=False)
    plan = superneurons(step, QUICK, UNLIMITED, offload="checkpoints", recompute=recompute)  # type: ignore[arg-type]
    recipes = [decision.ops for decision in plan.decisions if isinstance(decision, Recompute)]
    assert len(recipes) == 14
    assert sum(len(recipe) for recipe in recipes) == layers
    assert {step.ops[tick].name.split(".")[1] for recipe in recipes for tick in recipe} == {
        "relu",
        "lrn",
        "max_pool2d",
        "dropout",
    }


def test_cost_aware_keeps_the_peak_of_memory_centric() -> None:
    step = alexnet_step(as_autograd=False)
    peaks = {
        recompute: superneurons(step, QUICK, UNLIMITED, offload="checkpoints", recompute=recompute)
        for recompute in ("none", "speed", "memory", "cost")
    }
    assert peaks["cost"].peak_bytes == peaks["memory"].peak_bytes <= peaks["speed"].peak_bytes
    assert peaks["speed"].peak_bytes < peaks["none"].peak_bytes < plain_peak_bytes(step)
    assert (peaks["cost"].peak_bytes - step.resting_bytes) / MIB == pytest.approx(5 * CONV1_BYTES / MIB)
    assert peaks["speed"].seconds < peaks["cost"].seconds < peaks["memory"].seconds


def even_net(layers: int, size_bytes: int) -> Step:
    """Convolutions and relus in turn, all of one size, each saving what cuDNN takes."""
    tape = Tape()
    value = tape.op([tape.external(KIB)], [size_bytes], seconds=1e-3, replay="opaque", name="aten.data.default")[0]
    nodes = []
    for layer in range(2 * layers):
        op, before = ("relu" if layer % 2 else "convolution"), value
        node = [tape.pack(before)]
        value = tape.op([before], [size_bytes], seconds=1e-2, name=f"aten.{op}.default")[0]
        if op == "relu":
            node.append(tape.pack(value))
        nodes.append((op, node))
    gradient = tape.op([value], [0], seconds=1e-5, replay="opaque", name="aten.loss.default")[0]
    for op, node in reversed(nodes):
        for number in node:
            tape.unpack(number)
        inputs = [gradient, *(tape.saved[number][0] for number in node)]
        gradient = tape.op(inputs, [size_bytes], seconds=2e-2, phase="backward", name=f"aten.{op}_backward.default")[0]
    return tape.step()


def test_offloaded_checkpoints_leave_the_sum_of_the_others() -> None:
    """Sum of l_f over all but checkpoints, plus l_N_b, plus a checkpoint on its way out and one on its way back."""
    step = even_net(10, MIB)
    plan = superneurons(step, QUICK, UNLIMITED, offload="checkpoints", recompute="none")
    others, gradients = 10 * MIB, 2 * MIB
    assert others < plan.peak_bytes - step.resting_bytes <= others + gradients + 2 * MIB


def test_recomputation_leaves_what_one_layer_needs() -> None:
    """The largest working set, and a checkpoint fetched ahead, however deep the net is."""
    peaks = [
        superneurons(even_net(depth, MIB), QUICK, UNLIMITED, offload="checkpoints").peak_bytes for depth in (6, 12, 24)
    ]
    assert len(set(peaks)) == 1
    assert peaks[0] <= KIB + 4 * MIB + 2 * MIB


def test_the_cache_moves_the_oldest_and_only_under_pressure() -> None:
    step = even_net(10, MIB)
    plain = plain_peak_bytes(step)
    assert not superneurons(step, QUICK, plain, recompute="none").binds
    plan = superneurons(step, QUICK, plain - 3 * MIB, recompute="none")
    moved = [number for number, decision in enumerate(plan.decisions) if isinstance(decision, Offload)]
    assert moved == [0, 1, 2]
    for number in moved:
        decision = plan.decisions[number]
        assert isinstance(decision, Offload)
        asked = step.events[step.event_moments().index(step.absences[number].closes)]
        assert decision.load == asked.tick
    eager = superneurons(step, QUICK, plain - 3 * MIB, offload="checkpoints", recompute="none")
    assert sum(isinstance(decision, Keep) for decision in eager.decisions) < sum(
        isinstance(decision, Keep) for decision in plan.decisions
    )


def test_cheap_values_without_end_are_refused() -> None:
    tape = Tape()
    value = tape.external(64 * KIB)
    numbers = []
    for _ in range(150):
        value = tape.op([value], [64 * KIB], seconds=1e-3, name="aten.relu.default")[0]
        numbers.append(tape.pack(value))
    tape.op(tape.op([value], [KIB], replay="opaque"), [KIB], replay="opaque")
    for number in reversed(numbers):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [KIB], seconds=2e-3, phase="backward")
    step = tape.step()
    with pytest.raises(PolicyError, match="follow one another without a checkpoint"):
        superneurons(step, QUICK, UNLIMITED, recompute="speed")
    assert superneurons(step, QUICK, UNLIMITED, recompute="memory").peak_bytes < plain_peak_bytes(step)


def test_a_join_adds_two_values_of_the_step() -> None:
    tape = Tape()
    x = tape.external(KIB)
    (a,), (b,) = tape.op([x], [KIB]), tape.op([x], [KIB])
    for inputs in ([a, b], [a, x], [a]):
        tape.op(inputs, [KIB], name="aten.add.Tensor")
    tape.op([a, b], [], writes=a, name="aten.add_.Tensor", replay="in_place")
    tape.op([b, x], [KIB], name="aten.addcmul.default")
    step = tape.step()
    assert [is_checkpoint(step, op) for op in step.ops[2:]] == [True, False, False, True, False]


def test_what_two_layers_read_is_a_fork_and_not_computed_again() -> None:
    """A convolution and a relu that goes two ways; then one cheap layer on each of these."""
    tape = Tape()
    (conv,) = tape.op([tape.external(64 * KIB)], [MIB], name="aten.convolution.default")
    saved = [tape.pack(conv)]
    (fork,) = tape.op([conv], [MIB], name="aten.relu.default")
    saved.append(tape.pack(fork))
    (left,) = tape.op([fork], [MIB], name="aten.relu.default")
    saved.append(tape.pack(left))
    (right,) = tape.op([fork], [MIB], name="aten.tanh.default")
    saved.append(tape.pack(right))
    (gradient,) = tape.op([left, right], [KIB], name="aten.cat.default", replay="opaque")
    (gradient,) = tape.op([gradient], [KIB], replay="opaque", phase="backward")
    for number in reversed(saved):
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        (gradient,) = tape.op(inputs, [KIB], replay="opaque", phase="backward")
    plan = superneurons(tape.step(), QUICK, UNLIMITED, offload="checkpoints", recompute="speed")
    assert [type(decision) for decision in plan.decisions] == [Offload, Offload, Recompute, Recompute]
    assert plan.decisions[2:] == (Recompute((2,)), Recompute((3,)))


def segment_step(widest_bytes: int) -> Step:
    """A convolution, two relus of 1 MiB, another convolution of 1 MiB, and one of ``widest_bytes``.

    The relus and the gradients of a layer of them, one that comes and one that goes, take 4 MiB together. The largest
    working set is that of the last convolution: 1 MiB and ``widest_bytes``.
    """
    tape = Tape()
    value, saved = tape.external(64 * KIB), []
    for op in ("convolution", "relu", "relu", "convolution"):
        (value,) = tape.op([value], [MIB], name=f"aten.{op}.default")
        saved.append(tape.pack(value))
    (value,) = tape.op([value], [widest_bytes], name="aten.convolution.default")
    (value,) = tape.op([value], [KIB], replay="opaque")
    (gradient,) = tape.op([value], [KIB], replay="opaque", phase="backward")
    for number in reversed(saved):
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        (gradient,) = tape.op(inputs, [MIB], replay="opaque", phase="backward")
    return tape.step()


@pytest.mark.parametrize(("spare_bytes", "recipes"), [(0, [(1,), (2,)]), (-KIB, [(1,), (1, 2)])])
def test_a_segment_that_just_fits_is_computed_again_once(spare_bytes: int, recipes: list[tuple[int, ...]]) -> None:
    """The paper's rule: speed-centric where the segment's bytes are l_peak or less."""
    step = segment_step(3 * MIB + spare_bytes)
    plan = superneurons(step, QUICK, UNLIMITED, offload="none", recompute="cost")
    assert [decision.ops for decision in plan.decisions if isinstance(decision, Recompute)] == recipes
