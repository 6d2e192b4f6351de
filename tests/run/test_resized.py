"""Steps that take memory from what they have made, and give it back in the backward pass, by no op."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide.machine import Machine
from tests.run.harness import (
    FAST_DISK,
    NO_DISK,
    SLOW_DISK,
    Guard,
    Program,
    Record,
    assert_identical_within,
    plain_peak_bytes,
    run_plain,
)

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

WIDTH = 128
ROWS = 512
MACHINES = pytest.mark.parametrize("machine", [NO_DISK, FAST_DISK, SLOW_DISK], ids=["no disk", "fast", "slow"])


class ByHand(TorchDispatchMode):
    """The most bytes, behind any op, of the storages that ops have read or made: with what memory they have by then."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                shown = tensor.untyped_storage()
                self._seen[shown._cdata] = weakref.ref(shown)
        living = (storage for reference in self._seen.values() if (storage := reference()) is not None)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in living))
        return result


class WithoutOutput(torch.autograd.Function):
    """Makes an output of which the backward pass needs nothing: it was made again before that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, checkpoint: Checkpoint) -> Tensor:
        ctx.checkpoint = checkpoint
        return checkpoint.function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.checkpoint.gradient(grad), None


class Checkpoint:
    """Computes ``function`` of ``x``, whose output is emptied once it was used, and computed again before it is asked
    for, as by Megatron's `CheckpointWithoutOutput`."""

    def __init__(self, function: Any, x: Tensor) -> None:
        self.function, self.x = function, x
        apply: Any = WithoutOutput.apply
        self.output: Tensor = apply(x, self)
        self.leaf = self.again = x

    def discard(self, user: Tensor) -> None:
        """``user`` was computed from the output, and asks for it in its backward pass."""
        self.output.untyped_storage().resize_(0)
        user.register_hook(self.restore)

    def restore(self, _: Tensor) -> None:
        """Fill the output again."""
        with torch.enable_grad():
            self.leaf = self.x.detach().requires_grad_()
            self.again = self.function(self.leaf)
        memory, made = self.output.untyped_storage(), self.again.untyped_storage()
        memory.resize_(made.nbytes())
        memory.copy_(made)

    def gradient(self, grad: Tensor) -> Tensor:
        """What comes to the input."""
        (found,) = torch.autograd.grad(self.again, self.leaf, grad)
        del self.output, self.again, self.leaf, self.x
        return found


class Checkpointed(Program):
    """Layers whose activations are made again."""

    def build(self) -> nn.Module:
        layers = (nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)]) for _ in range(6))
        return nn.ModuleList(layers)

    def loss(self, index: int) -> Tensor:
        x = self.data(index, ROWS, WIDTH)
        for widen, narrow in self.model:
            checkpoint = Checkpoint(nn.functional.gelu, widen(x))
            found = narrow(checkpoint.output)
            x = x + found
            checkpoint.discard(found)
        return x.square().mean()


def bytes_by_hand(program: Program) -> int:
    """What a plain step holds."""
    with ByHand() as hand:
        program.compute(0, contextlib.nullcontext)
    return hand.peak_bytes


def test_what_is_emptied_counts_no_more() -> None:
    assert plain_peak_bytes(Checkpointed) == bytes_by_hand(Checkpointed())


@MACHINES
def test_a_limit_that_the_plain_step_keeps_to(machine: Machine, tmp_path: Path) -> None:
    limit = int(1.05 * bytes_by_hand(Checkpointed()))
    trial = assert_identical_within(Checkpointed, run_plain(Checkpointed), limit, machine, tmp_path)
    assert trial.plan is not None
    assert not trial.plan.binds


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_what_is_not_emptied_leaves(machine: Machine, tmp_path: Path) -> None:
    trial = assert_identical_within(Checkpointed, run_plain(Checkpointed), "60%", machine, tmp_path, may_raise_limit=1)
    assert trial.plan is not None
    assert trial.plan.binds


class Twice(Program):
    """Two backward passes through one graph, before each of which what was emptied is filled."""

    def build(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            x = self.data(index, ROWS, WIDTH)
            outputs: list[Tensor] = []
            for layer in self.model:
                with torch.no_grad():
                    copy = x.clone()
                outputs.append(copy)
                x = torch.tanh(layer(copy) + x)
            loss = x.square().mean()
            kept = [output.half() for output in outputs]
            for turn in range(2):
                for output in outputs:
                    output.untyped_storage().resize_(0)
                noise = [layer.weight.detach().exp().sum() for layer in self.model]
                for output, halves in zip(outputs, kept, strict=True):
                    output.untyped_storage().resize_(4 * output.numel())
                    output.untyped_storage().copy_(halves.float().untyped_storage())
                loss.backward(retain_graph=turn == 0)
                del noise
        return {"loss": loss}


class LeftEmpty(Program):
    """Takes the memory of what only a look at it has used, and gives it back never."""

    def build(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def loss(self, index: int) -> Tensor:
        x, self.looks = self.data(index, ROWS, WIDTH), []
        total = x.new_zeros(())
        for layer in self.model:
            x = torch.tanh(layer(x))
            look = x.detach().exp()
            total += look.sum()
            look.untyped_storage().resize_(0)
            self.looks.append(look)
        return x.square().mean() + total * 0


@pytest.mark.parametrize("build", [Twice, LeftEmpty])
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
def test_what_is_filled_twice_or_never(build: type[Program], machine: Machine, tmp_path: Path) -> None:
    assert plain_peak_bytes(build) == bytes_by_hand(build())
    assert_identical_within(build, run_plain(build), "100%", machine, tmp_path)
    assert_identical_within(build, run_plain(build), "70%", machine, tmp_path, may_raise_limit=1)


class ByStorage(Program):
    """Knows what it empties by its storage alone: no tensor of the user's shows that any more."""

    def build(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def loss(self, index: int) -> Tensor:
        x = self.data(index, ROWS, WIDTH)
        for layer in self.model:
            y = torch.tanh(x)
            z, copy, memory = layer(y), y.detach().clone(), y.untyped_storage()
            del y
            x = torch.sigmoid(z) + x * 0.5
            memory.resize_(0)

            def restore(_: Tensor, memory: torch.UntypedStorage = memory, copy: Tensor = copy) -> None:
                memory.resize_(copy.nbytes)
                memory.copy_(copy.untyped_storage())

            z.register_hook(restore)
        return x.square().mean()


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
@pytest.mark.parametrize("limit", ["60%", "90%"])
def test_what_is_emptied_is_not_moved_out(limit: str, machine: Machine, tmp_path: Path) -> None:
    """It would come back without memory, whatever it was filled with meanwhile."""
    assert_identical_within(ByStorage, run_plain(ByStorage), limit, machine, tmp_path, may_raise_limit=1)
