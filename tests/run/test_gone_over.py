"""Steps that turn out to be of another kind than expected, in ways that ask for more than another script."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import OutOfMemoryError
from ebbtide.machine import Machine
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from ebbtide.run.parts import Parts
from ebbtide.run.usage import Usage
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard
from tests.run.inside import expected_kind, kinds_of, latest_kind
from tests.run.test_kinds import BATCH, BLOCKS, EVERY, WIDTH, Dropped, gradients, plain_peak

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")

MIB = 1 << 20


class Refilled:
    """Steps of two kinds that differ from the first tensor on; those of one make numbers of a NumPy buffer that is
    filled anew before their backward pass, which nobody is told of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(512, 8), nn.Linear(256, 8)
        self.data = torch.randn(1024, 512)
        self.buffer = np.zeros((4096, 256), np.uint8)
        self.refill(0)

    def refill(self, index: int) -> None:
        self.buffer[...] = np.random.default_rng(index).integers(0, 255, self.buffer.shape, dtype=np.uint8)

    def step(self, index: int, refills: bool, guard: Guard) -> list[Tensor | None]:
        with guard():
            if refills:
                h = self.other(torch.from_numpy(self.buffer).float()).tanh().tanh()
                more = torch.zeros(2 * MIB).sum()
                self.refill(index + 1)
                loss = h.square().mean() + more
            else:
                loss = self.one(self.data).tanh().square().mean()
            loss.backward()
        return [loss.detach(), *gradients(self.one), *gradients(self.other)]


def same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


def test_what_was_not_compared_is_never_computed_again(tmp_path: Path) -> None:
    """A step that goes over at its first tensor has not captured what came before it."""
    plain, loop = Refilled(), Refilled()
    with ebbtide.Budget(11 * MIB, spill=tmp_path, machine=SLOW_DISK) as memory:
        for index, sort in enumerate("aaabbabbbbbbabbb"):
            expected = plain.step(index, sort == "b", contextlib.nullcontext)
            assert same(expected, loop.step(index, sort == "b", memory.step)), index


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_steps_that_leave_out_some_and_end_early_are_evidence(machine: Machine, tmp_path: Path) -> None:
    """Only the first two steps have a pass more, and all blocks."""
    dice, limit_bytes = random.Random(0), int(0.6 * plain_peak(EVERY))
    plain, model, states = Dropped(), Dropped(), list[str]()
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(net: Dropped, blocks: Sequence[int], has_more: bool) -> None:
        loss = net(data, blocks, 0)
        if has_more:
            torch.autograd.grad(loss, net.get_parameter("blocks.0.0.weight"), retain_graph=True)
        loss.backward()

    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=machine) as memory:
        for number in range(44):
            left_out = {BLOCKS - 1, *(block for block in EVERY[1:] if dice.random() < 0.2)} if number > 1 else set()
            blocks = [block for block in EVERY if block not in left_out]
            step(plain, blocks, number < 2)
            states.append(memory.state)
            with PeakMeter() as meter, memory.step():
                step(model, blocks, number < 2)
            assert same(gradients(plain), gradients(model))
            assert number < 2 or meter.peak_bytes <= limit_bytes
        assert not {"verify", "audit"} & set(states[-16:]), "they are evidence, and are counted"


class Heads(nn.Module):
    """Steps ``L`` and ``S`` are alike up to their heads, but for what is kept in ``S``; ``C`` is another model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))
        self.heads = nn.ModuleDict({"L": nn.Linear(64, 64), "S": nn.Linear(64, 96)})
        self.other = nn.Sequential(nn.Linear(96, 32), *(m for _ in range(14) for m in (nn.Linear(32, 32), nn.GELU())))

    def forward(self, x: Tensor, sort: str) -> Tensor:
        if sort == "C":
            loss: Tensor = self.other(torch.cat([x, x[:, :32]], 1)).square().mean()
            return loss
        h, kept = x, []
        for place, block in enumerate(self.blocks):
            h = block(h)
            if sort == "S" and place < 4:
                kept.append(h.detach().clone())
        loss = self.heads[sort](h).square().mean()
        del kept
        return loss


def test_of_several_kinds_that_agree_one_is_taken_with_room_for_the_others(tmp_path: Path) -> None:
    """Whichever was known first: a step that was begun as one of a third kind goes over at its first tensor."""
    plain, model, data = Heads(), Heads(), torch.randn(1024, 64)
    with PeakMeter() as meter:
        plain(data, "L").backward()
    plain.zero_grad()
    limit_bytes, dice = int(0.65 * meter.peak_bytes), random.Random(0)
    order = [*(sort for sort in "LSC" for _ in range(6)), *(sort for sort in "LSC" for _ in range(6))]
    order += [dice.choice("LSC") for _ in range(60)]
    above = []
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        for number, sort in enumerate(order):
            plain(data, sort).backward()
            state = memory.state
            with PeakMeter() as meter, memory.step():
                model(data, sort).backward()
            assert same(gradients(plain), gradients(model))
            if number >= len(order) - 40 and state not in ("observe", "verify") and meter.peak_bytes > limit_bytes:
                above.append((number, sort, meter.peak_bytes / limit_bytes))
    assert len(above) <= 2


def _chain(width: int, act: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), *(m for _ in range(6) for m in (nn.Linear(width, width), act())))


def test_the_plan_that_ran_out_of_memory_is_forgotten(tmp_path: Path) -> None:
    """Not the one that the step began by."""
    torch.manual_seed(0)
    one, other = _chain(64, nn.GELU), _chain(96, nn.Tanh)
    data = {one: torch.randn(1024, 64), other: torch.randn(1536, 96)}
    with PeakMeter() as meter:
        other(data[other]).square().mean().backward()
    with ebbtide.Budget(int(0.7 * meter.peak_bytes), spill=tmp_path, machine=FAST_DISK) as memory:

        def kind_of(model: nn.Module) -> Kind:
            rows = data[model].shape
            return next(kind for kind in kinds_of(memory) if kind.step.saved[0].shape == rows)

        def step(model: nn.Module, short: bool = False) -> None:
            with memory.step():
                loss = model(data[model]).square().mean()
                if short:
                    torch.empty(1 << 48)
                loss.backward()
            model.zero_grad()

        for model in [*[one] * 6, *[other] * 6, *[one] * 3, other, *[one] * 4]:
            step(model)
        assert expected_kind(memory) is kind_of(one)
        assert memory.state != "observe"
        with pytest.raises(OutOfMemoryError):
            step(other, short=True)
        assert kind_of(one).plan is not None
        assert kind_of(other).plan is None


def test_a_step_does_not_audit_the_plan_that_is_made_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its own left too little room for such steps."""
    found = list[tuple[int, int | None]]()
    passed = Usage.note_peak
    watched = set[str]()

    def met(parts: Parts, kind: Kind, key: int, number: int, peak_bytes: int | None, held: Any) -> str:
        return "plan" if watched and not found and peak_bytes is not None else "none"

    def note_peak(usage: Usage, kind: Kind, peak_bytes: int, machine: Machine) -> None:
        assert kind.plan is not None
        former = kind.script
        passed(usage, kind, kind.plan.limit_bytes + 4096, machine)
        assert kind.script is not former
        found.append((usage.audits, usage.audited_peak_bytes))

    monkeypatch.setattr(Parts, "met", met)
    monkeypatch.setattr(Parts, "claim_count", lambda parts, number: bool(watched) and not found)
    monkeypatch.setattr(Usage, "note_peak", note_peak)
    model, data, dice = Dropped(), torch.randn(BATCH, WIDTH), random.Random(0)
    with ebbtide.Budget(int(0.7 * plain_peak(EVERY)), spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(30):
            if number == 10:
                watched.add("parts")
            left_out = {BLOCKS - 1, dice.randrange(1, BLOCKS - 1)} if watched else set()
            with memory.step():
                model(data, [block for block in EVERY if block not in left_out], 0).backward()
            model.zero_grad()
            if found:
                break
        kind = max(kinds_of(memory), key=lambda kind: len(kind.step.saved))
    assert found == [(kind.usage.audits, kind.usage.audited_peak_bytes)]


def test_steps_that_fail_leave_others_to_be_counted(tmp_path: Path) -> None:
    """Where nothing binds, a few are counted, of which nothing may come."""
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    data = torch.randn(1024, 64)
    with ebbtide.Budget("100%", spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(12):
            with contextlib.suppress(ZeroDivisionError), memory.step():
                loss = model(data).square().mean()
                if 2 <= number < 8:
                    raise ZeroDivisionError
                loss.backward()
            model.zero_grad()
        kind = latest_kind(memory)
        assert kind is not None
        assert kind.state == "idle"
        assert kind.usage.audited_peak_bytes is not None
