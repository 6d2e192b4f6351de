"""The methods of the benchmark, made by name for a workload on a device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.gpu.devices import Device
from benchmarks.gpu.offload import OffloadActivations
from benchmarks.methods import CheckpointBlocks, Ebbtide, Method, Plain, forwards_replaced
from ebbtide.demo.workloads import Workload
from ebbtide.machine import Machine
from ebbtide.run.tiers.devices import DeviceTiers

METHODS = ("ebbtide", "checkpoint", "offload-checkpoint", "offload-activations", "save-on-cpu", "compile-budget")
COMPILE_BUDGET = 0.5
"""What `activation_memory_budget` is set to."""


class UnavailableError(Exception):
    """A method that this device does not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """For budgets.

    Attributes:
        spill: directory on a disk; None for the system's temporary one.
        host: pinned memory, at most.
        machine: the links, once they were measured.
    """

    spill: str | None
    host: str
    machine: Machine | None = None


class SaveOnCpu(Plain):
    """PyTorch's own hook: every saved tensor to pinned memory, parameters too."""

    def active(self) -> AbstractContextManager[Any]:
        """The hook is on in here."""
        return torch.autograd.graph.save_on_cpu(pin_memory=True)


class OffloadCheckpoint(Plain):
    """Checkpointing of each block, whose inputs `OffloadActivations` moves: the use its authors recommend."""

    def __init__(self, workload: Workload, device: Device) -> None:
        self._blocks = CheckpointBlocks(workload)
        self._offload = OffloadActivations(workload, device)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Both are on in here."""
        with self._offload.active(), self._blocks.active():
            yield


class CompileBudget(Plain):
    """Each block compiled by Inductor, its partitioner told to save `COMPILE_BUDGET` of what it would.

    By block, since equal blocks are compiled once: a whole GPT-2 XL takes minutes.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        if device.torch_device.type != "cuda":
            raise UnavailableError("compiling is measured on CUDA only: for a CPU it would build C++ for a minute")
        import torch._dynamo.config  # it takes seconds, for which only those wait who compile
        import torch._functorch.config

        torch._dynamo.reset()
        self._settings = contextlib.ExitStack()
        self._settings.enter_context(torch._functorch.config.patch(activation_memory_budget=COMPILE_BUDGET))
        self._settings.enter_context(torch._dynamo.config.patch(recompile_limit=len(workload.blocks) + 1))
        self._blocks = workload.blocks
        self._compiled = [torch.compile(block.forward, dynamic=False) for block in workload.blocks]

    def active(self) -> AbstractContextManager[Any]:
        """The compiled forward passes are in place in here."""
        return forwards_replaced(self._blocks, self._compiled)

    def close(self) -> None:
        """Forget the compiled code and the settings it was compiled with."""
        self._settings.close()
        torch._dynamo.reset()


def make_budget(share: float, options: Options, device: Device) -> Ebbtide:
    """Steps within ``share`` of the plain peak.

    As a share, so that steps are observed before the limit is known: they run plain, and nothing goes to the disk
    while there is no plan that says how much pinned memory to take. Nothing is verified at run time, since the
    benchmark compares all gradients.
    """
    method = Ebbtide(f"{100 * share:.6f}%", options.spill, host=options.host, machine=options.machine, verify=False)
    host = method.memory.tiers.get("host")
    if isinstance(host, DeviceTiers):
        host.of(device.torch_device)  # made before the first planned step, it grows between steps and not in one
    return method


def make_peer(name: str, workload: Workload, device: Device) -> Method:
    """The method called ``name``, one of `METHODS` but not ``ebbtide``.

    Raises:
        UnavailableError: if this device does not have it.
    """
    match name:
        case "checkpoint":
            return CheckpointBlocks(workload)
        case "offload-checkpoint":
            return OffloadCheckpoint(workload, device)
        case "offload-activations":
            return OffloadActivations(workload, device)
        case "save-on-cpu":
            return SaveOnCpu()
        case "compile-budget":
            return CompileBudget(workload, device)
    raise ValueError(f"no method {name!r}")
