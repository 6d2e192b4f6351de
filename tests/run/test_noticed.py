"""Steps that hold more than others of their kind, where little tells of it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.plan import plain_peak_bytes
from ebbtide.run import allocator
from ebbtide.run.meter import PeakMeter
from ebbtide.run.native import arena_library
from tests.run.harness import FAST_DISK, Guard
from tests.run.test_gone_over import same
from tests.run.test_kinds import gradients

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")
needs_arena = pytest.mark.skipif(arena_library() is None, reason="without the arena nobody notices")
WIDTH, BATCH = 160, 512


def _layers(count: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())))


@contextlib.contextmanager
def steps_beside(directory: Path) -> Iterator[Callable[..., None]]:
    """What takes a step of another budget in another thread, and waits for it."""
    model, data = nn.Linear(64, 64), torch.randn(512, 64)
    with ebbtide.Budget("1GiB", spill=directory, machine=FAST_DISK) as memory:

        def step() -> None:
            with memory.step():
                model(data).square().mean().backward()
            model.zero_grad()

        def beside(*_: object) -> None:
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()

        for _ in range(6):
            step()
        yield beside


@needs_arena
def test_gradients_that_are_added_to_though_something_lay_beside_before(tmp_path: Path) -> None:
    """Where nothing binds, steps that are hardly looked at count as well, so that others are counted once more."""
    model, data = _layers(8), torch.randn(512, WIDTH)
    alone = plain_peak_bytes(ebbtide.observe_step(lambda: model(data).square().mean().backward()))
    model.zero_grad()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ebbtide.Budget(int(1.05 * alone), spill=tmp_path, machine=FAST_DISK) as memory:
            beside = None
            for number in range(100):
                if number == 30:
                    beside = torch.ones(10 << 20)  # the user's, which no step touches
                with memory.step():
                    model(data).square().mean().backward()
                if number < 42:
                    model.zero_grad()
            assert beside is not None
            assert memory.limit_bytes is not None
            with PeakMeter() as meter, memory.step():
                model(data).square().mean().backward()
            told = any("than is planned for" in str(one.message) for one in said)
            assert told or meter.peak_bytes <= memory.limit_bytes


@needs_arena
def test_what_lay_beside_the_audited_step_and_has_gone_hides_nothing(tmp_path: Path) -> None:
    """Steps that hold more have still less in all than their thread had then."""
    model, data = _layers(10, 64), torch.randn(1024, 64)
    alone = plain_peak_bytes(ebbtide.observe_step(lambda: model(data).square().mean().backward()))
    model.zero_grad()
    limit_bytes, above = int(0.8 * alone), list[bool]()
    with allocator.tuned():
        beside = torch.ones(4 << 20)  # the user's, which no step touches
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(36):
            if number == 8:
                del beside
            with PeakMeter() as meter, memory.step():
                kept = [torch.zeros(1 << 16) for _ in range(4 if number >= 16 else 0)]
                model(data).square().mean().backward()
                del kept
            model.zero_grad()
            above.append(meter.peak_bytes > limit_bytes)
    assert above[16], "it does not hold more than was planned for"
    assert not any(above[-10:]), above


def test_kinds_in_turns_in_which_nothing_binds(tmp_path: Path) -> None:
    """The one that comes is expected: none is observed again and again."""
    one, other = _layers(2, 64), nn.Conv1d(8, 8, 3)
    inputs: list[tuple[nn.Module, Tensor]] = [(one, torch.randn(256, 64)), (other, torch.randn(64, 8, 32))]
    with ebbtide.Budget("1GiB", spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(120):
            model, data = inputs[number % 2]
            with memory.step():
                model(data).square().mean().backward()
            model.zero_grad()
        late = memory.measured[-60:]
        assert {measured.state for measured in late} == {"idle"}
        assert not any(measured.left for measured in late)


class Branching(nn.Module):
    """Some steps end in another head, and may keep copies of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = _layers(8)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def step(self, data: Tensor, other: bool, copies: int, guard: Guard) -> tuple[list[Tensor | None], int]:
        with PeakMeter() as meter, guard():
            h = self.trunk(data)
            kept = [h.detach().clone() for _ in range(copies)]
            h = h.view(16, 32, WIDTH) if other else h
            torch.tanh(self.heads[other](h)).square().mean().backward()
            del kept
        return gradients(self), meter.peak_bytes


@needs_arena
def test_a_kind_that_no_step_begins_as(tmp_path: Path) -> None:
    """It comes eight, then nine steps after the last one, so that each goes over to its plan."""
    plain, model, data = Branching(), Branching(), torch.randn(BATCH, WIDTH)
    limit_bytes = int(0.8 * plain.step(data, False, 0, contextlib.nullcontext)[1])
    above, gaps, come = list[bool](), itertools.cycle([8, 9]), 7
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(130):
            other = index == come
            come += next(gaps) if other else 0
            copies = 3 if other and index >= 40 else 0
            expected, _ = plain.step(data, other, copies, contextlib.nullcontext)
            found, peak_bytes = model.step(data, other, copies, memory.step)
            assert same(expected, found)
            if copies:
                above.append(peak_bytes > limit_bytes)
    assert len(above) >= 8
    assert sum(above) <= 3
    assert not any(above[-4:])


@pytest.mark.parametrize(("tunes", "is_alone"), [(True, True), (False, True), (True, False)])
def test_layers_that_are_unfrozen(tunes: bool, is_alone: bool, tmp_path: Path) -> None:
    """Nothing binds before that, and the first saved tensor stays the same. Without the arena, and where another
    budget's steps begin meanwhile, each sixteenth step is looked at."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "trunk": _layers(8)})
    data, above = torch.randn(BATCH, WIDTH), list[bool]()

    def peak(live: bool, guard: Guard) -> int:
        model["trunk"].requires_grad_(live)
        with PeakMeter() as meter, guard():
            (model["first"](data).square().mean() + model["trunk"](data).square().mean()).backward()
        model.zero_grad()
        return meter.peak_bytes

    limit_bytes = sum(peak(live, contextlib.nullcontext) for live in (False, True)) // 2
    with contextlib.ExitStack() as stack:
        if not is_alone:
            model["first"].register_forward_hook(stack.enter_context(steps_beside(tmp_path)))
        memory = ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK, tune_allocator=tunes)
        stack.enter_context(memory)
        above += [peak(index >= 40, memory.step) > limit_bytes for index in range(80)]
    assert sum(above) <= 18
    assert not any(above[-16:])
