"""A CUDA device: streams, clock, memory. All logic is elsewhere, where it is tested without one."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
from pathlib import Path
from typing import Any

import torch

from ebbtide.run.backends.base import ComputeStreams
from ebbtide.units import round_up

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device of the process, not only for the current one."""
_BEHIND_CYCLES = 200_000
"""Ticks of the device's own clock: 100 microseconds at 2 GHz. To launch one op takes the host 10 to 50."""
_EMPTY_SPANS = 16
"""Spans with nothing in them that are measured: their median is what the marks themselves take."""
_GRAIN_BYTES = 512
"""``kMinBlockSize`` in c10/cuda/CUDACachingAllocator: it hands out multiples of this."""
_StreamKey = tuple[int, int, int]
"""Identifier, device index and device type: how PyTorch's C names a stream."""


class CudaBackend:
    """CUDA device ``index``. See `ebbtide.run.backends.base.Backend`."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.streams = ComputeStreams(self)
        self._beside: dict[tuple[Any, torch.device], torch.cuda.Stream] = {}
        self._computing: dict[_StreamKey, torch.cuda.Stream] = {}

    def compute(self) -> torch.cuda.Stream:
        """See `Backend.compute`. One object for each stream: to make one takes as long as to launch an op."""
        key: _StreamKey = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._computing.get(key)
        if stream is None:
            stream = self._computing[key] = torch.cuda.current_stream(self.device)
        return stream

    def new_stream(self, _name: str) -> torch.cuda.Stream:
        """See `Backend.new_stream`."""
        return torch.cuda.Stream(self.device)

    def allocate(self, size_bytes: int, _like: int) -> torch.UntypedStorage:
        """See `Backend.allocate`. PyTorch's allocator aligns every block to 512 bytes, on the current stream."""
        return torch.UntypedStorage(size_bytes, device=self.device)

    def copy(self, stream: Any, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """See `Backend.copy`."""
        for device in (target.device, source.device):
            if device.type == "cuda" and device != self.device:
                with torch.cuda.stream(self._stream_beside(stream, device)):
                    self._copy(stream, target, source)
                return
        self._copy(stream, target, source)

    def _copy(self, stream: Any, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        index = self.device.index
        with torch._C._DisableTorchDispatch():
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                return
            before: _StreamKey = torch._C._cuda_getCurrentStream(index)
            try:  # around the first call, too: Ctrl-C is raised as it returns
                # What `torch.cuda.stream` does where the device is the current one, in a fraction of the time.
                torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
                target.copy_(source, non_blocking=True)
            finally:
                torch._C._cuda_setStream(*before)

    def _stream_beside(self, stream: Any, device: torch.device) -> torch.cuda.Stream:
        """A stream of a peer: PyTorch puts a copy between two devices in order with the current streams of both."""
        key = (stream, device)
        if key not in self._beside:
            self._beside[key] = torch.cuda.Stream(device)
        return self._beside[key]

    def used_on(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """See `Backend.used_on`."""
        with torch._C._DisableTorchDispatch():
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage).record_stream(stream)

    def adopt_thread(self) -> None:
        """See `Backend.adopt_thread`. To come back to device 0, where threads begin, would make a context there."""
        torch.cuda.set_device(self.device)

    def finish(self, stream: Any) -> None:
        """See `Backend.finish`. The thread sleeps: by default, CUDA would keep its core busy."""
        event = torch.cuda.Event(blocking=True)
        stream.record_event(event)
        event.synchronize()

    def pin(self, address: int, size_bytes: int) -> None:
        """See `Backend.pin`. Raises `torch.cuda.CudaError` if the system allows no more pinned memory."""
        with torch.cuda.device(self.device):  # elsewhere, it would make a context there
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
            except RuntimeError:
                # CUDA keeps a fault until somebody asks, and PyTorch asks after each kernel: this one fails for it.
                with torch._C._DisableTorchDispatch(), contextlib.suppress(RuntimeError):
                    torch.empty(1, device=self.device).fill_(0)
                raise

    def unpin(self, address: int) -> None:
        """See `Backend.unpin`."""
        with torch.cuda.device(self.device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def near_cpus(self) -> frozenset[int]:
        """See `Backend.near_cpus`."""
        properties: Any = torch.cuda.get_device_properties(self.device)
        parts: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        # Older versions of PyTorch do not say where a device is.
        return cpus_near("{:04x}:{:02x}:{:02x}.0".format(*parts)) if None not in parts else frozenset()


class CudaClock:
    """The clock of a CUDA device: see `ebbtide.observe.clock.Clock`.

    Marks are events on the current stream, half a microsecond fine.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._empty_seconds: float | None = None

    def mark(self) -> torch.cuda.Event:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """See `Clock.passed`."""
        return bool(mark.query())

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """See `Clock.seconds`. The time between two marks that have nothing between them is subtracted."""
        if self._empty_seconds is None:
            self._empty_seconds = self._measure_empty()
        earlier.synchronize()
        later.synchronize()
        return max(0.0, float(earlier.elapsed_time(later)) / 1e3 - self._empty_seconds)

    def _measure_empty(self) -> float:
        for _ in range(4):
            self.fall_behind()
        marks = [self.mark() for _ in range(_EMPTY_SPANS + 1)]
        marks[-1].synchronize()
        return statistics.median(float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)) / 1e3

    def fall_behind(self) -> None:
        """See `Clock.fall_behind`."""
        with torch.cuda.device(self._device):
            torch.cuda._sleep(_BEHIND_CYCLES)

    def is_behind(self, mark: torch.cuda.Event) -> bool:
        """See `Clock.is_behind`."""
        return not mark.query()


_caps: dict[torch.device, dict[CudaMemory, int]] = {}
"""By device, what budgets cap its memory at; the least holds."""
_uncapped: dict[torch.device, float] = {}
"""By device, the share of its memory that was allowed before there was a cap."""
_caps_lock = threading.RLock()  # a budget may die, and its cap go, while a thread has it


class CudaMemory:
    """The memory of a CUDA device: see `ebbtide.run.gauges.DeviceMemory`.

    What counts is what `torch.cuda.memory_allocated` does. `start_peak` resets what `torch.cuda.max_memory_allocated`
    says.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """See `Memory.size_of`. Others than PyTorch's allocator, as CuPy, give storages that cannot be resized."""
        is_counted = storage.device == self.device and storage.resizable()
        return round_up(storage.nbytes(), _GRAIN_BYTES) if is_counted else 0

    def allocated_bytes(self) -> int:
        """See `Memory.allocated_bytes`."""
        return self._count("allocated_bytes", "current")

    def start_peak(self) -> None:
        """See `Memory.start_peak`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """See `Memory.peak_bytes`."""
        return self._count("allocated_bytes", "peak")

    def free_bytes(self) -> int:
        """See `DeviceMemory.free_bytes`."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.device) * total)
        reachable = min(allowed, self._count("reserved_bytes", "current") + free)
        return max(0, reachable - self.allocated_bytes())

    def cap(self, limit_bytes: int | None) -> None:
        """See `DeviceMemory.cap`. The allocator counts the segments that it took from the device."""
        with _caps_lock:
            caps = _caps.setdefault(self.device, {})
            if not caps:
                _uncapped[self.device] = torch.cuda.get_per_process_memory_fraction(self.device)
            caps.pop(self, None)
            if limit_bytes is not None:
                caps[self] = limit_bytes
            fraction = _uncapped[self.device]
            if caps:
                least = min(caps.values())
                fraction = min(fraction, least / torch.cuda.mem_get_info(self.device)[1])
                if self._count("reserved_bytes", "current") > least:
                    torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def _count(self, what: str, which: str) -> int:
        # Nested, since `memory_stats` takes ten times as long to sort all of them into one dictionary.
        counts: Any = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(counts[what]["all"][which])


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
