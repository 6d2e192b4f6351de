"""A peer: activations to pinned memory as torchtune's and TRL's ``OffloadActivations`` do, after their documentation.

Saved-tensor hooks send every activation of 1 KiB or more out on one side stream; at most five may be on their way out
at once before compute waits for the oldest. In the backward pass a tensor is fetched on the same stream when its node
asks for it: it comes early only as far as the host runs ahead of the device. Its memory goes back to the side stream
once the following node has run. The output layer and the loss keep what they save. Tensors are told from parameters by
storage, so that a transposed weight stays too, as in TRL.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.devices import Device
from benchmarks.methods import Plain, parameter_storages
from ebbtide.demo.workloads import Workload

LEAST_BYTES = 1024
MOST_LEAVING = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Away:
    """A saved tensor in pinned memory."""

    copy: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Shown:
    """A tensor that is back, how many held its storage then, and the end of the node that used it."""

    tensor: Tensor
    holders: int
    used: Any = None


class OffloadActivations(Plain):
    """See the module's first lines."""

    def __init__(self, workload: Workload, device: Device) -> None:
        self._head = list(workload.model.children())[-1]
        self._parameters = parameter_storages(workload.model)
        self._device = device
        self._side = device.new_stream()
        self._leaving: collections.deque[tuple[Tensor, Any]] = collections.deque()
        self._shown: list[_Shown] = []
        self._used: list[_Shown] = []
        self._keeps = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The hooks are on in here, until the output layer begins."""
        self._keeps = False
        handle = self._head.register_forward_pre_hook(self._reach_head)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            handle.remove()
            self._let_go_of_all()

    def _reach_head(self, *_: object) -> None:
        self._keeps = True

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        storage = tensor.untyped_storage().data_ptr()
        if self._keeps or tensor.nbytes < LEAST_BYTES or storage in self._parameters:
            return tensor
        while len(self._leaving) >= MOST_LEAVING:
            self._let_go()
        self._side.wait_stream(self._device.compute())
        with self._device.on(self._side):
            copy = self._device.pinned_like(tensor)
            copy.copy_(tensor.detach(), non_blocking=True)
        self._leaving.append((tensor.detach(), self._side.record_event()))
        return _Away(copy)

    def _let_go(self) -> None:
        """Compute waits until the oldest copy is out; then its memory may be used again."""
        _, copied = self._leaving.popleft()
        self._device.compute().wait_event(copied)

    def _unpack(self, packed: Tensor | _Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        while self._leaving:
            self._let_go()
        with self._device.on(self._side):
            tensor = packed.copy.to(self._device.torch_device, non_blocking=True)
        self._device.compute().wait_stream(self._side)
        if not self._shown:
            torch._C._current_autograd_node().register_hook(self._node_ran)
        self._shown.append(_Shown(tensor, _holders(tensor)))
        return tensor

    def _node_ran(self, *_: object) -> None:
        """What the node before this one used goes back to the side stream; what others hold goes when they are done."""
        compute = self._device.compute()
        self._forget_used()
        used = compute.record_event()
        for shown in self._shown:
            if _holders(shown.tensor) > shown.holders:
                self._device.also_used_on(compute, shown.tensor)
            else:
                self._used.append(dataclasses.replace(shown, used=used))
        self._shown.clear()

    def _forget_used(self) -> None:
        for shown in self._used:
            self._side.wait_event(shown.used)
        self._used.clear()

    def _let_go_of_all(self) -> None:
        while self._leaving:
            self._let_go()
        self._forget_used()
        self._shown.clear()


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
