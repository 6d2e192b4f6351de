"""A step on fake tensors is the real one, op by op; what it cannot know is said, and nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from ebbtide.demo.models import GPT, LSTMLanguageModel, ResNet, ViT
from ebbtide.errors import RecordError, StepError
from ebbtide.machines import load_machine
from ebbtide.observe.fake import observe_fake, record_fake
from ebbtide.plan import solve
from ebbtide.plan.problem import plain_peak_bytes
from ebbtide.run.observing import observe_step
from ebbtide.step import Step
from tests.run import programs, programs_rare

Build = Callable[[], Callable[[], None]]
pytestmark = pytest.mark.usefixtures("nothing_left")

SAME = (
    "Accumulation",
    "CheckpointedReentrant",
    "ConvolutionalNet",
    "CustomFunction",
    "Expanded",
    "GradientPenalty",
    "MixedPrecision",
    "OptimizerInBackward",
    "Picking",
    "RandomOps",
    "SparseEmbedding",
    "StashingFunction",
    "ThrownAway",
    "Transformer",
    "UNet",
    "Wrapping",
)
"""Programs with in-place ops, views, several backwards, custom Functions, checkpoints, random ops, wrappers, ..."""

READ_BY: tuple[tuple[type, str], ...] = (
    (FakeTensor, "numpy"),
    (FakeTensor, "__dlpack__"),
    (FakeTensor, "__format__"),
    (torch.UntypedStorage, "__getitem__"),
    (torch.TypedStorage, "__getitem__"),
)
"""What reads tensors without an op."""


def program(name: str) -> Build:
    """A step of one of the programs that tests train."""
    assert programs_rare

    def build() -> Callable[[], None]:
        made = programs.PROGRAMS[name]()

        def run() -> None:
            made.optimizer.zero_grad()
            made.compute(0, contextlib.nullcontext)

        return run

    return build


def demo(name: str) -> Build:
    """A step of a small one of the demo's models."""

    def build() -> Callable[[], None]:
        torch.manual_seed(0)
        images, tokens = torch.randn(2, 3, 64, 64), torch.randint(64, (2, 32))
        make: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
            "resnet": lambda: (ResNet(8, (1, 1, 1, 1)).to(memory_format=torch.channels_last), images),  # type: ignore[call-overload]
            "gpt": lambda: (GPT(64, width=64, layers=2, heads=4, context=32), tokens),
            "vit": lambda: (ViT(8, image=64, patch=16, width=64, layers=2, heads=4), images),
            "lstm": lambda: (LSTMLanguageModel(64, width=32, layers=2), tokens),
        }
        model, inputs = make[name]()

        def run() -> None:
            model.zero_grad()
            model(inputs).square().mean().backward()

        return run

    return build


def observed(build: Build) -> Step:
    """The step on real tensors."""
    run = build()
    run()
    return observe_step(run)


def timeless(step: Step) -> Step:
    """The step without what only real hardware knows."""
    ops = tuple(dataclasses.replace(op, duration_seconds=0.0, workspace_bytes=0) for op in step.ops)
    return dataclasses.replace(step, ops=ops)


def assert_same(real: Step, fake: Step) -> None:
    """The two steps have the same records; says which is the first that differs."""
    real, fake = timeless(real), timeless(fake)
    for part in ("ops", "values", "saved", "events", "absences"):
        for number, (expected, found) in enumerate(zip(getattr(real, part), getattr(fake, part), strict=True)):
            assert found == expected, f"{part} {number}"
    assert fake == real


@pytest.mark.parametrize("name", SAME)
def test_programs_are_the_same_op_by_op(name: str) -> None:
    assert_same(observed(program(name)), record_fake(program(name))[0])


@pytest.mark.parametrize("name", ["resnet", "gpt", "vit"])
def test_models_are_the_same_op_by_op(name: str) -> None:
    real = observed(demo(name))
    fake, works = record_fake(demo(name))
    assert_same(real, fake)
    assert plain_peak_bytes(fake) == plain_peak_bytes(real)
    assert len(works) == len(real.ops)


def test_an_lstm_differs_in_the_scratch_memory_of_its_kernel_alone() -> None:
    """oneDNN sizes the fourth result of its LSTM layer at run time; the fake kernel says 0 bytes."""
    real, (fake, _) = timeless(observed(demo("lstm"))), record_fake(demo("lstm"))
    layers = [op for op in real.ops if op.name == "aten.mkldnn_rnn_layer.default"]
    assert layers, "PyTorch runs LSTMs of this size with another op now: this test needs another model"
    scratch = {op.outputs[-1] for op in layers}
    assert real.ops == timeless(fake).ops
    for number, (expected, found) in enumerate(zip(real.values, fake.values, strict=True)):
        assert found == (dataclasses.replace(expected, size_bytes=0) if number in scratch else expected)
    shown = [(saved.value, saved.unpacked) for saved in real.saved]
    assert shown == [(saved.value, saved.unpacked) for saved in fake.saved]
    assert fake.events == real.events
    assert fake.absences == real.absences


def test_in_place_writes_through_views_only_show_views_again() -> None:
    """Autograd makes the views of a written fake tensor anew, each step by step: more view ops, the same values."""
    real, fake = observed(program("InPlace")), record_fake(program("InPlace"))[0]

    def working(step: Step) -> list[tuple[str, tuple[int, ...]]]:
        return [(op.name, op.outputs) for op in step.ops if op.replay != "view"]

    assert working(fake) == working(real)
    assert [value.size_bytes for value in fake.values] == [value.size_bytes for value in real.values]
    assert plain_peak_bytes(fake) == plain_peak_bytes(real)


def test_a_step_of_no_memory_is_planned_like_the_real_one() -> None:
    machine = load_machine("h200")
    step = observe_fake(demo("gpt"), machine)
    assert step.device == "cuda"
    assert all(op.duration_seconds > 0 for op in step.ops if op.outputs)
    plan = solve(step, machine, int(0.9 * plain_peak_bytes(step)), seconds=0.05)
    assert plan.peak_bytes <= plan.limit_bytes < plan.plain_peak_bytes


def test_a_model_larger_than_memory() -> None:
    """A layer of 4 TiB is made, converted, trained with Adam and clipped."""

    def build() -> Callable[[], None]:
        layer = nn.Linear(2**20, 2**20).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)

        def run() -> None:
            optimizer.zero_grad()
            layer(torch.ones(1, 2**20, dtype=torch.bfloat16)).sum().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

        return run

    step, works = record_fake(build)
    matrix = 2 * 2**40
    assert step.resting_bytes > 3 * matrix  # the weights, and Adam's two states
    assert max(work.flops for work in works) == 2 * 2**40


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("peek", "expected"),
    [
        (lambda h: h.sum().item(), "looks into a tensor"),
        (lambda h: bool((h > 0).all()), "looks into a tensor"),
        (lambda h: h[h > 0], "depends on values"),
        (lambda h: h.detach().numpy(), "looks into a tensor"),
        (lambda h: h.numpy(force=True), "looks into a tensor"),
        (lambda h: np.asarray(h.detach().cpu()), "looks into a tensor"),
        (lambda h: np.from_dlpack(h.detach()), "looks into a tensor"),
        (lambda h: f"{h.mean():.3f}", "looks into a tensor"),
        (lambda h: torch.save({"h": h.detach()}, io.BytesIO()), "looks into a tensor"),
        (lambda h: pickle.dumps(h.detach()), "looks into a tensor"),
        (lambda h: h.untyped_storage().tolist(), "looks into a tensor"),
        (lambda h: h.storage()[0], "looks into a tensor"),
    ],
)
def test_a_step_that_needs_values_is_refused(peek: Callable[[torch.Tensor], object], expected: str) -> None:
    layer = nn.Linear(8, 8)

    def run() -> None:
        peek(layer(torch.ones(4, 8)))

    with pytest.raises(StepError, match=expected):
        record_fake(lambda: run, modules=[layer])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_only_what_needs_values_is_refused() -> None:
    """Fake tensors are copied and printed, known values formatted, and nothing is left replaced."""

    def run() -> None:
        layer = copy.deepcopy(nn.Linear(8, 8))
        h = layer(torch.ones(4, 8))
        assert f"{h.mean()}" == f"{copy.copy(h).mean()}"
        assert f"{torch.ones(()):.3f}" == "1.000"
        h.sum().backward()

    kept = [getattr(kind, name) for kind, name in READ_BY]
    with pytest.raises(ZeroDivisionError):
        record_fake(lambda: lambda: 1 / 0)
    record_fake(lambda: run)
    assert [getattr(kind, name) for kind, name in READ_BY] == kept


def test_fake_tensors_of_others_are_left_alone() -> None:
    """Others may have some meanwhile, as `torch.compile` has: they hear nothing of a step."""

    def run() -> None:
        with unset_fake_temporarily(), FakeTensorMode():
            other = torch.ones(())
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            other.numpy()
        nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()

    record_fake(lambda: run)


def test_an_initialiser_that_looks_at_what_it_drew() -> None:
    def build() -> Callable[[], None]:
        layer = nn.Linear(8, 8)
        nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.01, b=0.01)
        return lambda: layer(torch.ones(4, 8)).sum().backward()

    assert_same(observed(build), record_fake(build)[0])
    weight = nn.init.trunc_normal_(torch.empty(1000), a=-0.1, b=0.1)
    assert weight.abs().max() <= 0.1


def test_a_real_model_comes_back_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    model[2].weight = model[0].weight  # shared: the fake ones must be too
    inputs = torch.randn(4, 16)

    def run() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    run()
    before = [*model.parameters(), *model.buffers()]
    values = [tensor.clone() for tensor in before]
    gradient, state = model[0].weight.grad, torch.get_rng_state()
    fake, _ = record_fake(lambda: run, modules=[model])
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b and torch.equal(a, value) for a, b, value in zip(after, before, values, strict=True))
    assert model[0].weight is model[2].weight
    assert model[0].weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(observe_step(run), fake)


def test_a_real_parameter_gets_no_fake_gradient() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(StepError, match="modules="):
        record_fake(lambda: lambda: layer(torch.ones(2, 4)).sum().backward())
    assert layer.weight.grad is None


def test_a_tensor_changed_before_its_backward_is_refused() -> None:
    def run() -> None:
        h = torch.ones(8, requires_grad=True).exp()
        loss = h.sum()
        h.add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        record_fake(lambda: run)


def test_a_machine_that_says_no_speed_is_refused() -> None:
    machine = dataclasses.replace(load_machine("h200"), compute=None)
    with pytest.raises(RecordError, match="does not say how fast"):
        observe_fake(demo("gpt"), machine)


def attention_step(dtype: torch.dtype, width: int, masked: bool) -> Build:
    """A layer, dropout and attention, written for CUDA as users do."""

    def build() -> Callable[[], None]:
        layer = nn.Linear(3 * width, 3 * width).cuda().to(dtype=dtype)
        inputs = torch.randn(2, 4, 16, 3 * width, dtype=dtype, device="cuda:0")
        mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril() if masked else None

        def run() -> None:
            layer.zero_grad()
            query, key, value = F.dropout(layer(inputs), 0.1).chunk(3, -1)
            F.scaled_dot_product_attention(query, key, value, mask, is_causal=not masked).sum().backward()

        return run

    return build


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "expected"),
    [
        (torch.bfloat16, 64, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 60, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 64, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 64, False, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_cuda_chooses_fused_ops(dtype: torch.dtype, width: int, masked: bool, expected: str) -> None:
    step, works = record_fake(attention_step(dtype, width, masked), kernels="cuda")
    names = [op.name for op in step.ops]
    assert f"aten.{expected}.default" in names
    assert f"aten.{expected}_backward.default" in names
    mask = next(step.values[op.outputs[1]] for op in step.ops if op.name == "aten.native_dropout.default")
    assert mask.size_bytes == 2 * 4 * 16 * 3 * width  # one byte an element
    flops = next(work.flops for work, name in zip(works, names, strict=True) if expected in name)
    assert flops == 2 * 2 * 2 * 4 * 16 * 16 * (width + -width % 8)


def test_the_choices_of_cuda_end_with_the_step() -> None:
    record_fake(attention_step(torch.float32, 64, False), kernels="cuda")
    real = observe_step(lambda: F.dropout(torch.ones(8, requires_grad=True), 0.5).sum().backward())
    assert not any("native_dropout" in op.name for op in real.ops)


def test_cuda_autocast_without_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA autocast works here")

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            torch.ones(4, 4).matmul(torch.ones(4, 4))

    with pytest.raises(StepError, match="leaves CUDA autocast out"):
        record_fake(lambda: run, kernels="cuda")
