"""A CUDA device. Streams and events are PyTorch's own; all logic is elsewhere, where it is tested without one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device of the process, not only for the current one."""


class CudaBackend:
    """CUDA device ``index``. See `ebbtide.run.backends.base.Backend`."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._beside: dict[tuple[Any, torch.device], torch.cuda.Stream] = {}

    def compute(self) -> torch.cuda.Stream:
        """See `Backend.compute`."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self, _name: str) -> torch.cuda.Stream:
        """See `Backend.new_stream`."""
        return torch.cuda.Stream(self.device)

    def allocate(self, size_bytes: int, _like: int) -> torch.UntypedStorage:
        """See `Backend.allocate`. PyTorch's allocator aligns every block to 512 bytes, on the current stream."""
        return torch.UntypedStorage(size_bytes, device=self.device)

    def copy(self, stream: Any, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """See `Backend.copy`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._DisableTorchDispatch())
            for storage in (target, source):
                if storage.device.type == "cuda" and storage.device != self.device:
                    stack.enter_context(torch.cuda.stream(self._stream_beside(stream, storage.device)))
            stack.enter_context(torch.cuda.stream(stream))
            target.copy_(source, non_blocking=True)

    def _stream_beside(self, stream: Any, device: torch.device) -> torch.cuda.Stream:
        """A stream of a peer: PyTorch puts a copy between two devices in order with the current streams of both."""
        key = (stream, device)
        if key not in self._beside:
            self._beside[key] = torch.cuda.Stream(device)
        return self._beside[key]

    def finish(self, stream: Any) -> None:
        """See `Backend.finish`. The thread sleeps: by default, CUDA would keep its core busy."""
        event = torch.cuda.Event(blocking=True)
        stream.record_event(event)
        event.synchronize()

    def pin(self, address: int, size_bytes: int) -> None:
        """See `Backend.pin`. Raises `torch.cuda.CudaError` if the system allows no more pinned memory."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        """See `Backend.unpin`."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def near_cpus(self) -> frozenset[int]:
        """See `Backend.near_cpus`."""
        properties: Any = torch.cuda.get_device_properties(self.device)
        parts: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        # Older versions of PyTorch do not say where a device is.
        return cpus_near("{:04x}:{:02x}:{:02x}.0".format(*parts)) if None not in parts else frozenset()


def cpus_near(pci_address: str, system: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of the NUMA node that a PCI device (``0000:3b:00.0``) is attached to; none if the system does not say."""
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        ranges = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return frozenset()
    cpus: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
