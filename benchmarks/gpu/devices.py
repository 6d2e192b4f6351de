"""What the benchmark asks of a device: time by its own clock, peaks by its own count, streams, pinned memory.

A CUDA device answers with events and with its allocator's statistics. The CPU stands in for it where there is none,
so that the whole benchmark runs everywhere: its streams do everything at once, and live bytes are counted by tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ebbtide.run.meter import PeakMeter

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What one piece of work took: seconds, and the most bytes allocated where the device counts them all along."""

    seconds: float
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of a piece of work, those that were there before included; reserved ones where there are such."""

    resting_bytes: int
    peak_bytes: int
    reserved_bytes: int | None


class Device(Protocol):
    """See the module's first lines.

    Attributes:
        torch_device: where models and data lie.
        name: of the hardware.
    """

    torch_device: torch.device
    name: str

    def timed(self, run: Run) -> Cost:
        """Run something once, from an idle device to an idle device."""
        ...

    def counted(self, run: Run) -> Peak:
        """Run something once with no memory cached from before."""
        ...

    def give_back(self) -> None:
        """Give cached memory back to the system, on the device and pinned."""
        ...

    def compute(self) -> Any:
        """The stream that ops are launched on."""
        ...

    def new_stream(self) -> Any:
        """A stream of its own."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on ``stream`` within a ``with`` block."""
        ...

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Host memory for a copy of ``tensor``: the same shape, type and strides."""
        ...

    def also_used_on(self, stream: Any, tensor: Tensor) -> None:
        """Memory of ``tensor`` is not to be used again before what is queued on ``stream`` when the tensor dies."""
        ...


class CudaDevice:
    """The current CUDA device. See `Device`."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)

    def timed(self, run: Run) -> Cost:
        """See `Device.timed`."""
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        return Cost(began.elapsed_time(ended) / 1e3, torch.cuda.max_memory_allocated())

    def counted(self, run: Run) -> Peak:
        """See `Device.counted`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        resting_bytes = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return Peak(resting_bytes, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def give_back(self) -> None:
        """See `Device.give_back`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # There is no public name for this yet; without it, peers would keep what they pinned from those that follow.
        getattr(torch._C, "_host_emptyCache", _nothing)()

    def compute(self) -> torch.cuda.Stream:
        """See `Device.compute`."""
        return torch.cuda.current_stream()

    def new_stream(self) -> torch.cuda.Stream:
        """See `Device.new_stream`."""
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See `Device.on`."""
        return torch.cuda.stream(stream)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """See `Device.pinned_like`."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def also_used_on(self, stream: Any, tensor: Tensor) -> None:
        """See `Device.also_used_on`."""
        tensor.record_stream(stream)


class _InOrder:
    """A stream, and an event of it, on a device that does everything at once."""

    def record_event(self) -> _InOrder:
        return self

    def wait_event(self, _event: Any) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass


class CpuDevice:
    """The CPU in place of a device. See `Device`; host copies count as bytes of the device here."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "CPU"
        self._stream = _InOrder()

    def timed(self, run: Run) -> Cost:
        """See `Device.timed`."""
        began = time.perf_counter()
        run()
        return Cost(time.perf_counter() - began, None)

    def counted(self, run: Run) -> Peak:
        """See `Device.counted`."""
        with PeakMeter() as meter:
            run()
        return Peak(meter.resting_bytes, meter.peak_bytes, None)

    def give_back(self) -> None:
        """See `Device.give_back`."""

    def compute(self) -> _InOrder:
        """See `Device.compute`."""
        return self._stream

    def new_stream(self) -> _InOrder:
        """See `Device.new_stream`."""
        return _InOrder()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See `Device.on`."""
        return contextlib.nullcontext(stream)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """See `Device.pinned_like`."""
        return torch.empty_like(tensor)

    def also_used_on(self, _stream: Any, _tensor: Tensor) -> None:
        """See `Device.also_used_on`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second between pinned host memory and the device: each way alone, and both together at once."""

    to_device: float
    to_host: float
    both: float


def measure_bandwidths(device: Device, size_bytes: int, repeats: int) -> Bandwidths:
    """Medians over ``repeats`` copies of ``size_bytes``."""
    here, target = (torch.ones(size_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    away, source = (device.pinned_like(here).fill_(1) for _ in range(2))
    streams = device.new_stream(), device.new_stream()

    def copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for stream, (into, origin) in zip(streams, pairs, strict=False):
            stream.wait_stream(device.compute())
            with device.on(stream):
                into.copy_(origin, non_blocking=True)
        for stream in streams:
            device.compute().wait_stream(stream)

    def rate(*pairs: tuple[Tensor, Tensor]) -> float:
        seconds = [device.timed(lambda: copies(pairs)).seconds for _ in range(repeats)]
        return len(pairs) * size_bytes / statistics.median(seconds)

    return Bandwidths(rate((target, source)), rate((away, here)), rate((target, source), (away, here)))


def make_device(name: str) -> Device:
    """The device called ``cuda`` or ``cpu``."""
    return CudaDevice() if name == "cuda" else CpuDevice()


def _nothing() -> None:
    """Nothing to do."""
