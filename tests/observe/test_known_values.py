"""Small tensors made of numbers alone have the same values under fake tensors as without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ebbtide.errors import StepError
from ebbtide.observe.fake import record_fake
from ebbtide.observe.known_values import MOST_BYTES
from ebbtide.run.observing import observe_step
from tests.observe.test_fake import assert_same

pytestmark = pytest.mark.usefixtures("nothing_left")

Op = Callable[[Sequence[Tensor], int], Tensor]

OPS: dict[str, Op] = {
    "arange": lambda pool, k: torch.arange(6.0).view(2, 3) + k,
    "tensor": lambda pool, k: torch.tensor([[1.0, 2.0, k], [3.0, k, 5.0]]),
    "zeros": lambda pool, k: torch.zeros(2, 3),
    "full like": lambda pool, k: torch.full_like(pool[k], k),
    "add": lambda pool, k: pool[k] + pool[0],
    "add in place": lambda pool, k: pool[k].add_(1),
    "write a row": lambda pool, k: (pool[k][1].fill_(k), pool[k])[1],
    "write through a transposed view": lambda pool, k: (pool[k].t()[0].mul_(2), pool[k])[1],
    "copy": lambda pool, k: pool[k].copy_(pool[0]),
    "view": lambda pool, k: pool[k].view(6).view(2, 3) if pool[k].is_contiguous() else pool[k],
    "flip": lambda pool, k: pool[k].flip(0).t().contiguous().t(),
    "sort": lambda pool, k: pool[k].sort(descending=True)[0],
    "several in place": lambda pool, k: torch._foreach_add_([pool[k], torch.ones(2)], 1.0)[0],  # type: ignore[index]
    "half": lambda pool, k: pool[k].half().float(),
    "where": lambda pool, k: torch.where(pool[k] > 1, pool[k], pool[0]),
    "out": lambda pool, k: torch.add(pool[0], pool[k], out=torch.zeros(2, 3)),
}


def values(program: Sequence[tuple[str, int]]) -> list[object]:
    """What a program finds in each new tensor, looked at in several ways, and in all of them in the end."""
    pool, seen = [torch.linspace(0, 1, 6).view(2, 3)], list[object]()
    for name, number in program:
        last = OPS[name](pool, number % len(pool))
        pool.append(last)
        seen += [int(last.argmax()), bool((last > 1).any()), last.nonzero().tolist(), len(torch.unique(last))]
    return seen + [tensor.tolist() for tensor in pool]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 8)), min_size=1, max_size=8))
def test_programs_find_what_they_would_find_without_fake_tensors(program: list[tuple[str, int]]) -> None:
    found: list[list[object]] = []

    def build() -> Callable[[], None]:
        found.append(values(program))
        return lambda: found.append(values(program))

    record_fake(build)
    assert found == [values(program)] * 3


def test_a_model_whose_shape_is_read_from_tensors() -> None:
    """Shares of dropped paths from `linspace`, widths without doubles, a counter of steps that decides what runs."""

    def build() -> Callable[[], None]:
        torch.manual_seed(0)
        shares = [part.tolist() for part in torch.linspace(0, 0.5, 5).split([2, 3])]
        widths = torch.unique(torch.tensor([8, 16, 8, 8])).tolist()
        assert widths == [8, 16]
        layers = [nn.Linear(8, 8) for _ in range(sum(len(part) for part in shares))]
        steps = torch.zeros((), dtype=torch.long)

        def run() -> None:
            steps.add_(1)
            h = torch.ones(4, 8)
            for layer in layers[: int(steps)]:
                h = layer(h).relu()
            h.sum().backward()
            for layer in layers:
                layer.zero_grad()

        return run

    real = build()
    real()
    assert_same(observe_step(real), record_fake(build)[0])


@pytest.mark.parametrize(
    "unknown",
    [
        lambda: torch.rand(3),
        lambda: torch.empty(3),
        lambda: torch.zeros(3).uniform_(),
        lambda: torch.zeros(3).copy_(nn.Linear(3, 3).bias.detach()),
        lambda: torch.zeros(3) + torch.rand(3),
        lambda: torch.zeros(MOST_BYTES),
    ],
    ids=["random", "unset", "random in place", "of a parameter", "of random numbers", "large"],
)
def test_what_something_else_decides_is_not_known(unknown: Callable[[], Tensor]) -> None:
    def build() -> Callable[[], None]:
        tensor = unknown()
        return lambda: print(tensor.max().item())

    with pytest.raises(StepError, match="looks into a tensor"):
        record_fake(build)


def test_what_is_moved_to_another_storage_or_resized_is_not_mistaken() -> None:
    def build() -> Callable[[], None]:
        first, second = torch.ones(2), torch.full((2,), 2.0)
        first.set_(second)  # type: ignore[call-overload]
        assert first.tolist() == [2.0, 2.0]
        second.fill_(3)
        assert first.tolist() == [3.0, 3.0]
        return lambda: print(torch.ones(2).resize_(4).sum().item())

    with pytest.raises(StepError, match="looks into a tensor"):
        record_fake(build)
