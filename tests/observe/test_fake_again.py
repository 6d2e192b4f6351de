"""Fake steps of programs that do something less usual, beside the same on real tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ebbtide.errors import StepError
from ebbtide.machines import load_machine
from ebbtide.observe.fake import observe_fake, record_fake
from ebbtide.run.observing import observe_step
from tests.run.test_leaves import Gathering

pytestmark = pytest.mark.filterwarnings("ignore:.*Full backward hook:UserWarning")


def assert_same_ops(build: Callable[[], Callable[[], Any]], **options: Any) -> None:
    """A fake step runs the ops of the real one, whose values die when those do."""
    torch.manual_seed(0)
    run = build()
    run()
    real = observe_step(run)
    step, works = record_fake(build, **options)
    assert [(op.name, op.outputs) for op in step.ops] == [(op.name, op.outputs) for op in real.ops]
    assert [value.dies for value in step.values] == [value.dies for value in real.values]
    assert len(works) == len(step.ops)


def test_an_op_that_fails() -> None:
    """The program goes on."""

    def build() -> Callable[[], None]:
        model, inputs = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.randn(16, 8, 32)

        def run() -> None:
            model.zero_grad()
            made = model(inputs).transpose(0, 1)
            with contextlib.suppress(RuntimeError, ValueError):
                made.view(-1, 32)  # it is not contiguous
            made.reshape(-1, 32).square().mean().backward()

        return run

    torch.manual_seed(0)
    run = build()
    run()
    real = observe_step(run)
    step, works = record_fake(build)
    assert [op.name for op in step.ops] == [op.name for op in real.ops]
    assert len(works) == len(step.ops)
    assert observe_fake(build, load_machine("h200")).ops


@pytest.mark.parametrize("has_main", [True, False])
def test_functions_get_their_weights_back(has_main: bool) -> None:
    """With what was set on them, and with their gradients."""

    def build() -> Callable[[], None]:
        weight: Any = nn.Parameter(torch.randn(64, 64))
        if has_main:
            weight.main_grad = torch.zeros(64, 64)
        data = torch.randn(128, 64)

        def run() -> None:
            weight.grad = None
            hidden = data.clone().requires_grad_()
            Gathering.apply(hidden * 2, weight).square().mean().backward()  # type: ignore[no-untyped-call]

        return run

    assert_same_ops(build)


def _observed(model: nn.Module) -> Callable[[], None]:
    data = torch.randn(32, 64)

    def run() -> None:
        model.zero_grad()
        model(data).square().mean().backward()

    return run


def test_hooks_of_real_parameters() -> None:
    """An optimizer in the backward pass, and a mask of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def descend(parameter: Any) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
        parameter.register_post_accumulate_grad_hook(descend)
    run = _observed(model)
    run()
    real = observe_step(run)
    step, _ = record_fake(lambda: _observed(model), modules=[model])
    assert [op.name for op in step.ops] == [op.name for op in real.ops]
    assert sum("add_" in op.name for op in real.ops) >= 4


@pytest.mark.parametrize("op", [torch.stack, torch.cat], ids=["stack", "cat"])
def test_real_parameters_in_a_list_are_refused(op: Callable[[list[Tensor]], Tensor]) -> None:
    parts = [nn.Parameter(torch.randn(8)) for _ in range(3)]
    with pytest.raises(StepError, match="uses a real parameter"):
        record_fake(lambda: lambda: op(list(parts)).sum().backward())
    assert all(part.grad is None for part in parts)


def test_statistics_that_are_written_to_are_not_known() -> None:
    def build() -> Callable[[], None]:
        norm = nn.BatchNorm1d(8)

        def run() -> None:
            norm(torch.randn(16, 8)).sum().backward()
            assert norm.running_mean is not None
            float(norm.running_mean.abs().max())

        return run

    with pytest.raises(StepError, match="looks into a tensor"):
        record_fake(build)


@contextlib.contextmanager
def _fp32_precision(where: Any, precision: str) -> Iterator[None]:
    former = where.fp32_precision
    where.fp32_precision = precision
    try:
        yield
    finally:
        where.fp32_precision = former


def test_tf32_as_it_is_set_by_now() -> None:
    """The older setting cannot be asked for then."""
    with _fp32_precision(torch.backends.cuda.matmul, "tf32"):
        _, works = record_fake(lambda: _observed(nn.Linear(64, 64)))
    assert {work.dtype for work in works if work.flops} == {"tfloat32"}


@pytest.mark.parametrize(
    ("batch", "heads", "kernels"),
    [(1, 4, contextlib.nullcontext), (2, 1, contextlib.nullcontext), (2, 4, lambda: sdpa_kernel(SDPBackend.MATH))],
    ids=["one batch of keys", "one head of keys", "arithmetic asked for"],
)
def test_attention_that_no_fused_kernel_of_cuda_takes(
    batch: int, heads: int, kernels: Callable[[], AbstractContextManager[object]]
) -> None:
    def build() -> Callable[[], None]:
        layer = nn.Linear(64, 64).to(torch.bfloat16)
        query = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)
        keys = torch.randn(batch, heads, 128, 64, dtype=torch.bfloat16)

        def run() -> None:
            layer.zero_grad()
            with kernels():
                F.scaled_dot_product_attention(layer(query), layer(keys), layer(keys)).sum().backward()

        return run

    step, _ = record_fake(build, kernels="cuda")
    assert not any("flash" in op.name or "efficient" in op.name for op in step.ops)
