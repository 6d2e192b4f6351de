"""A program in which something goes wrong, and what must hold when it has."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from torch import Tensor

import ebbtide
from ebbtide.run.tiers import DiskTier
from tests.conftest import hooks_left, modes_left
from tests.run.harness import STEPS, Guard, Record, compare
from tests.run.programs import Chain

OBSERVED, VERIFIED, PLANNED = 0, 2, STEPS - 1
"""Steps at which a budget observes, verifies its recipes, and runs its plan."""
Act = Callable[[], None]


class Steps(Chain):
    """A program in which something happens in the forward or the backward pass of step ``at``."""

    def __init__(self, at: int, *, forward: Act | None = None, backward: Act | None = None) -> None:
        super().__init__()
        self.at, self.in_forward, self.in_backward = at, forward, backward
        # Made here, as they are modules of their own: where torch.compile was used, it is told in Python when one dies,
        # and an interrupt is lost there.
        self.head, self.tail = self.model[:6], self.model[6:]

    def forward(self, index: int) -> Tensor:
        h = self.head(self.data(index, 256, 64))
        if index == self.at and self.in_forward is not None:
            self.in_forward()
        if index == self.at and self.in_backward is not None:
            act = self.in_backward
            h.register_hook(lambda grad: act())
        return self.tail(h)

    def attempt(self, guard: Guard) -> None:
        """Run step ``at``, which may fail; nothing is learnt from it."""
        try:
            self.compute(self.at, guard)
        finally:
            self.optimizer.zero_grad()

    def look(self, index: int, guard: Guard) -> Record:
        """Loss and gradients of a step from which nothing is learnt."""
        record = self.compute(index, guard)
        record |= {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return record


def assert_clean(memory: ebbtide.Budget) -> None:
    """Between steps there are no hooks, no dispatch modes, and no places taken on the disk."""
    assert (hooks_left(), modes_left()) == (0, 0), "saved-tensor hooks or dispatch modes are left"
    gc.collect()
    for tier in memory.tiers.values():
        assert isinstance(tier, DiskTier)
        deadline = time.monotonic() + 20
        tier.drain()
        while tier.places_in_use and time.monotonic() < deadline:
            time.sleep(0.001)  # a transfer that was interrupted while it was queued is waited for by nobody
            tier.drain()
        assert tier.places_in_use == 0, "places on the disk are left"


def written_bytes(memory: ebbtide.Budget) -> int:
    """What has gone to its disk."""
    disk = memory.tiers["disk"]
    assert isinstance(disk, DiskTier)
    return disk.written_bytes


def survive(
    memory: ebbtide.Budget,
    program: Steps,
    error: type[BaseException],
    match: str,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Run with a fault in step ``program.at``; all other steps are as in a plain run without that step."""
    plain, is_near = Steps(at=-1), memory.limit_bytes is not None
    for index in range(STEPS + 3):
        if index == program.at:
            with around(), pytest.raises(error, match=match):
                program.attempt(memory.step)
        else:
            expected = plain.run(index, contextlib.nullcontext)
            compare(expected, program.run(index, memory.step), f"step {index} ({memory.state})")
        assert_clean(memory)
        assert not is_near or index < 1 or written_bytes(memory), "nothing moved in an observed step"
