"""Durations by a roofline, the fit of its shares, and the counts it stands on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import RecordError
from ebbtide.machine import Compute
from ebbtide.observe.work import kind_of, work_of
from ebbtide.roofline import OpClass, Work, fit_efficiencies, ideal_seconds, op_seconds, with_durations
from ebbtide.step import Op, Step

aten = torch.ops.aten
PLAIN = Compute("cpu", (("float32", 1e9), ("bfloat16", 4e9)), memory_bytes_per_second=1e8, launch_seconds=1e-3)


def step_of(*seconds: float) -> Step:
    """A step of ops that take these times and touch nothing."""
    return Step(tuple(Op("aten.relu.default", (), (), duration_seconds=each) for each in seconds), (), (), (), ())


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work("matmul", 5 * 10**9, 10**8, "float32"), 5.0),  # bound by arithmetic
        (Work("matmul", 5 * 10**9, 10**8, "bfloat16"), 1.25),
        (Work("matmul", 5 * 10**9, 10**8, "tfloat32"), 5.0),  # a type the device does not have
        (Work("matmul", 10**8, 10**8, "float32"), 1.0),  # bound by memory
        (Work("elementwise", 0, 2 * 10**8, "float32"), 2.0),
    ],
)
def test_the_longer_of_two_times(work: Work, expected: float) -> None:
    assert ideal_seconds(work, PLAIN) == pytest.approx(expected)
    assert op_seconds(work, PLAIN) == pytest.approx(expected + 1e-3)
    halved = dataclasses.replace(PLAIN, efficiencies=((work.kind, 0.5),))
    assert op_seconds(work, halved) == pytest.approx(2 * expected + 1e-3)


def test_ops_without_work_take_no_time() -> None:
    assert op_seconds(Work("none", 0, 0, "float32"), PLAIN) == 0.0


@given(
    st.dictionaries(st.sampled_from(["matmul", "copy", "index"]), st.floats(0.05, 2.0), min_size=1),
    st.lists(st.integers(10**7, 10**10), min_size=1, max_size=8),
)
def test_the_fit_finds_the_shares_that_made_the_times(shares: dict[OpClass, float], sizes: list[int]) -> None:
    works = [Work(kind, size, size // 3, "float32") for kind in shares for size in sizes]
    true = dataclasses.replace(PLAIN, efficiencies=tuple(shares.items()))
    timed = with_durations(step_of(*[0.0] * len(works)), works, true)
    fitted = fit_efficiencies(timed, works, PLAIN)
    assert dict(fitted.efficiencies) == pytest.approx(dict(shares))


def test_ops_shorter_than_a_launch_fit_nothing() -> None:
    before = dataclasses.replace(PLAIN, efficiencies=(("copy", 0.3),))
    assert fit_efficiencies(step_of(0.5), [Work("copy", 0, 8, "float32")], before) == before


@pytest.mark.parametrize("rate", [1e-9, 1e-320])
def test_ops_that_would_take_for_ever(rate: float) -> None:
    slow = dataclasses.replace(PLAIN, memory_bytes_per_second=rate)
    with pytest.raises(RecordError, match=r"aten\.relu\.default would take .* seconds on that machine: are the rates"):
        with_durations(step_of(1.0), [Work("copy", 0, 10**6, "float32")], slow)


def test_works_of_another_step_are_refused() -> None:
    with pytest.raises(RecordError, match="of another step"):
        with_durations(step_of(1.0, 1.0), [Work("copy", 0, 8, "float32")], PLAIN)


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.addmm.default, "matmul"),
        (aten.mm.default, "matmul"),
        (aten.convolution.default, "convolution"),
        (aten.convolution_backward.default, "convolution_backward"),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, "attention"),
        (aten.mkldnn_rnn_layer.default, "recurrent"),
        (aten.native_layer_norm_backward.default, "normalization"),
        (aten._log_softmax.default, "transcendental"),
        (aten.max_pool2d_with_indices_backward.default, "pooling"),
        (aten.embedding_dense_backward.default, "index"),
        (aten.native_dropout.default, "random"),
        (aten.bernoulli_.float, "random"),
        (aten.sum.dim_IntList, "reduction"),
        (aten.clone.default, "copy"),
        (aten.cat.default, "copy"),
        (aten.add.Tensor, "elementwise"),
        (aten._foreach_add_.List, "elementwise"),
        (aten.threshold_backward.default, "elementwise"),
        (aten.t.default, "none"),
        (aten._unsafe_view.default, "none"),
        (aten.empty.memory_format, "none"),
    ],
)
def test_class_of_an_op(func: object, expected: OpClass) -> None:
    assert kind_of(func) == expected


def called(func: object, *args: object) -> Work:
    """The work of a call on real tensors."""
    return work_of(func, args, {}, func(*args))  # type: ignore[operator]


def test_counts_of_a_product() -> None:
    work = called(aten.mm.default, torch.ones(3, 5), torch.ones(5, 7))
    assert work == Work("matmul", 2 * 3 * 5 * 7, 4 * (15 + 35 + 21), "float32")
    assert called(aten.mm.default, *[torch.ones(4, 4, dtype=torch.bfloat16)] * 2).dtype == "bfloat16"


def test_convolutions_may_use_tensorfloat32() -> None:
    arguments = (torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    work = called(aten.convolution.default, *arguments)
    assert work.flops == 2 * 9 * (3 * 3) * 2 * 3
    assert work.dtype == ("tfloat32" if torch.backends.cudnn.allow_tf32 else "float32")


def test_counts_of_the_cpus_own_attention() -> None:
    query = torch.ones(2, 3, 8, 4)
    work = called(aten._scaled_dot_product_flash_attention_for_cpu.default, query, query, query)
    assert work.flops == 2 * (2 * 2 * 3 * 8 * 8 * 4)


def test_counts_of_a_recurrent_layer() -> None:
    inputs, state = torch.ones(6, 2, 5), torch.zeros(2, 7)
    weights = (torch.ones(28, 5), torch.ones(28, 7), torch.ones(28), torch.ones(28))
    settings: tuple[object, ...] = (False, [], 2, 7, 1, True, False, False, True)
    work = called(aten.mkldnn_rnn_layer.default, inputs, *weights, state, state, *settings)
    assert work.flops == 2 * 6 * 2 * 28 * (5 + 7)


def test_bytes_that_are_not_moved() -> None:
    wide = torch.ones(1, 1).expand(64, 64)
    assert called(aten.neg.default, wide).moved_bytes == 4 + 4 * 64 * 64
    table, rows = torch.ones(1000, 8), torch.tensor([1, 2])
    assert called(aten.embedding.default, table, rows).moved_bytes == 2 * 4 * 16 + 16
    states = [torch.ones(8), torch.ones(8)]
    assert called(aten._foreach_neg_.default, states).moved_bytes == 3 * 32
    assert called(aten.view.default, table, [8000]).kind == "none"
