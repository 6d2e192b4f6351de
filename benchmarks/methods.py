"""Ways to run a training step: plain PyTorch, ebbtide, and the peers it is compared with."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbtide.demo.workloads import Workload
from ebbtide.run.allocator import set_tuned
from ebbtide.run.budget import Budget

MOST_STEPS_TO_SETTLE = 30
_LEAST_ELEMENTS = 1000
"""Saved tensors with fewer elements stay in memory, as in PyTorch's tutorial on saved-tensor hooks."""


class Method(Protocol):
    """A way to run steps. `active` wraps each of them."""

    def active(self) -> AbstractContextManager[Any]:
        """The context in which one forward and backward pass runs."""
        ...

    def settled(self) -> bool:
        """Whether the next step runs as all later ones will."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the method knows about itself, for the results."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Plain:
    """PyTorch as it is; also what a method does that says nothing else."""

    def active(self) -> AbstractContextManager[Any]:
        """Nothing around the step."""
        return contextlib.nullcontext()

    def settled(self) -> bool:
        """Always."""
        return True

    def facts(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing to give back."""


class PlainTuned(Plain):
    """PyTorch with the allocator settings that ebbtide uses."""

    def __init__(self) -> None:
        set_tuned()


class Ebbtide(Plain):
    """Steps within a budget of ``limit``, moving to the directory ``spill``; other options are those of `Budget`."""

    def __init__(self, limit: int | str, spill: str | None, **options: Any) -> None:
        self._memory = Budget(limit, spill=spill, **options)

    @property
    def memory(self) -> Budget:
        """The budget."""
        return self._memory

    def active(self) -> AbstractContextManager[Any]:
        """The budget's own context."""
        return self._memory.step()

    def settled(self) -> bool:
        """Once steps have been observed, planned for, checked, timed and, if that pays, planned for again."""
        return self._memory.settled

    def facts(self) -> dict[str, Any]:
        """What the plan promised."""
        if self._memory.plan is None:
            return {}
        bound_seconds = self._memory.report().bound_seconds
        plan = self._memory.plan
        return {
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_physical_bytes": plan.physical_peak_bytes,
            "predicted_seconds": plan.seconds,
            "predicted_plain_seconds": plan.plain_seconds,
            "bound_seconds": bound_seconds,
        }

    def close(self) -> None:
        """End the budget."""
        self._memory.close()


class CheckpointBlocks(Plain):
    """`torch.utils.checkpoint` around each of the workload's blocks."""

    def __init__(self, workload: Workload) -> None:
        self._blocks = workload.blocks

    def active(self) -> AbstractContextManager[Any]:
        """The blocks' forward passes go through `checkpoint` in here."""
        return forwards_replaced(self._blocks, [_checkpointed(block.forward) for block in self._blocks])


@contextlib.contextmanager
def forwards_replaced(blocks: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within a ``with`` block, each of ``blocks`` runs its one of ``forwards`` instead of its own."""
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # uncovers the class's own


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def parameter_storages(model: nn.Module) -> frozenset[int]:
    """Addresses of the storages of all parameters."""
    return frozenset(parameter.untyped_storage().data_ptr() for parameter in model.parameters())


class EverythingToDisk(Plain):
    """Each saved tensor but the parameters goes to a file of its own, as in PyTorch's tutorial on the hooks."""

    def __init__(self, workload: Workload, spill: str | None) -> None:
        self._parameters = parameter_storages(workload.model)
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-", dir=spill)

    def active(self) -> AbstractContextManager[Any]:
        """The hooks are on in here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()

    def _pack(self, tensor: Tensor) -> Tensor | _TemporaryTensorFile:
        if tensor.numel() < _LEAST_ELEMENTS or tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        return _TemporaryTensorFile(tensor, Path(self._directory.name))


class _TemporaryTensorFile:
    """A tensor in a file that goes when this object goes."""

    def __init__(self, tensor: Tensor, directory: Path) -> None:
        self._path = directory / uuid.uuid4().hex
        torch.save(tensor, self._path)

    def load(self) -> Tensor:
        tensor: Tensor = torch.load(self._path)
        return tensor

    def __del__(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def _unpack(packed: Tensor | _TemporaryTensorFile) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.load()


def make_method(name: str, workload: Workload, *, limit_bytes: int | None, spill: str | None) -> Method:
    """The method called ``name``; only ``ebbtide`` uses ``limit_bytes``, which it needs."""
    match name:
        case "plain":
            return Plain()
        case "plain-tuned":
            return PlainTuned()
        case "ebbtide" if limit_bytes is not None:
            return Ebbtide(limit_bytes, spill)
        case "checkpoint":
            return CheckpointBlocks(workload)
        case "disk-hook":
            return EverythingToDisk(workload, spill)
    raise ValueError(f"no method {name!r} with limit {limit_bytes}")
