"""What a step on some device is timed by, and what is asked about its memory."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from ebbtide.errors import StepError
from ebbtide.observe.allocated import Memory
from ebbtide.observe.clock import Clock, HostClock
from ebbtide.run.backends.cuda import CudaClock, CudaMemory


class DeviceMemory(Memory, Protocol):
    """The memory of a device whose allocator counts, and refuses what is too much."""

    def free_bytes(self) -> int:
        """How much more could be handed out, if none of it was lost between blocks."""
        ...

    def cap(self, limit_bytes: int | None, /) -> None:
        """Never take more than ``limit_bytes`` from the device, all told; None: what was allowed before, or others'
        caps on the device allow."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """One device.

    Attributes:
        device: the device whose steps are gauged.
        clock: what they are timed by.
        memory: None where the allocator does not count: a budget then counts the storages that a step touches or makes.
    """

    device: torch.device
    clock: Clock
    memory: DeviceMemory | None


def gauges_of(device: torch.device) -> Gauges:
    """The gauges of a CPU or a CUDA device; of the current one, if it has no index.

    Raises:
        RuntimeError: if there is no such CUDA device, or no driver; `AssertionError` if PyTorch was built without CUDA.
        StepError: if the allocator of CUDA memory is not PyTorch's own.
    """
    if device.type == "cuda":
        torch.cuda.init()  # before that, there is nothing to ask
        if torch.cuda.get_allocator_backend() == "pluggable":
            raise StepError(
                "PyTorch's allocator of CUDA memory was replaced by one that does not say what it hands out, as budgets"
                " need to know; leave torch.cuda.memory.change_current_allocator out"
            )
        if device == torch.device("cuda"):  # storages are on devices that have an index
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise RuntimeError(f"there are {torch.cuda.device_count()} CUDA devices")
        return Gauges(device, CudaClock(device), CudaMemory(device))
    return Gauges(device, HostClock(), None)


def likely_device() -> torch.device:
    """Where a step will run that nothing is known about: on the current CUDA device, if CUDA is in use."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
