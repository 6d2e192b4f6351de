"""A disk behind a device: device, pinned host memory, file, both hops at once.

NOTE [Two hops]
Every part of a transfer goes through a stage, a piece of pinned memory of its size, in the hands of one worker thread:
copied to the stage and then written, or read to the stage and then copied on. There are more workers than one in each
direction, so that one part crosses the first hop while another crosses the second. The workers wait on the host; the
thread that computes does so only if it needs what has not come from the disk yet, or lets go of what is not there yet.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path

import torch

from ebbtide.run.backends.base import Backend, ComputeStreams, Stream, seen_on
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES, READERS, DiskPlace, DiskTier
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES
from ebbtide.run.tiers.pinned import pinned_memory
from ebbtide.run.tiers.transfers import QueuedLoad, Slot
from ebbtide.units import format_bytes, round_up

STAGE_BYTES = 8 << 20
"""Size of a stage, and so of the parts in which transfers go through one."""
WRITERS = 2
"""While one part is written, the next is copied to its stage."""


class StagedLoad(QueuedLoad):
    """A copy on its way back from a disk to a device: see `Load`. The host waits for what comes from the disk.

    Attributes:
        home: the stream that the memory belongs to; None if it is the caller's business.
    """

    def __init__(self, slot: Slot, storage: torch.UntypedStorage, backend: Backend) -> None:
        super().__init__(slot, storage)
        self._backend = backend
        self.home: Stream | None = None

    def wait(self) -> torch.UntypedStorage:
        """See `Load.wait`."""
        storage = super().wait()
        return storage if self.home is None else seen_on(self._backend, self.home, storage, self.slot.pointer)


class StagedTier(DiskTier):
    """A disk for tensors of a device with streams: see NOTE [Two hops].

    Args:
        directory, checksum: see `DiskTier`.
        backend: the device that storages come from.

    Raises:
        SpillError: as `DiskTier`, or if there is no memory for the stages.
    """

    part_bytes = STAGE_BYTES

    def __init__(self, directory: str | Path, backend: Backend, *, checksum: bool = False) -> None:
        count = WRITERS + READERS
        stages = pinned_memory(backend)(count * self.part_bytes)
        super().__init__(directory, checksum=checksum, writers=WRITERS)
        self.congruence_bytes = CONGRUENCE_BYTES  # whatever the disk wants: only stages are read and written directly
        self.device = backend.device
        self._backend = backend
        self._out = backend.new_stream(f"{self.name}-out")
        self._back = backend.new_stream(f"{self.name}-back")
        self._stages: queue.SimpleQueue[torch.UntypedStorage] = queue.SimpleQueue()
        for start in range(0, count * self.part_bytes, self.part_bytes):
            self._stages.put(stages[start : start + self.part_bytes])

    def expect(self, _device: torch.device) -> ComputeStreams:
        """See `SlowTier.expect`."""
        self._backend.streams.note()
        return self._backend.streams

    def close(self) -> None:
        """See `SlowTier.close`."""
        super().close()
        with contextlib.suppress(queue.Empty):  # no worker has one any more
            while True:
                self._stages.get_nowait()

    def _announce(self, transfer: Slot | QueuedLoad) -> None:
        home = self._backend.streams.note()
        if isinstance(transfer, StagedLoad):
            transfer.after = (home.record_event(),)
            transfer.home = home
        else:
            transfer.after = self._backend.streams.record()

    def _take_memory(self, slot: Slot) -> torch.UntypedStorage:
        return self._backend.allocate(slot.size_bytes, slot.pointer)

    def _make_load(self, slot: Slot, storage: torch.UntypedStorage) -> QueuedLoad:
        return StagedLoad(slot, storage, self._backend)

    def _reserve(self, slot: Slot) -> None:
        slot.payload_bytes = round_up(slot.size_bytes, self.block_bytes)
        size_bytes = round_up(slot.payload_bytes, PLACE_ALIGNMENT_BYTES)
        slot.place = DiskPlace(self._places.take(size_bytes), size_bytes, head_bytes=0)

    def _store(self, slot: Slot, start: int, stop: int) -> None:
        self._backend.adopt_thread()
        storage = slot.unwritten
        assert storage is not None
        with self._stage() as stage:
            _follow(self._out, slot)
            end = min(stop, slot.size_bytes)
            self._backend.copy(self._out, stage[: end - start], storage[start:end])
            self._backend.finish(self._out)
            self._put(slot.place, stage.data_ptr(), start, stop)

    def _fetch(self, load: QueuedLoad, start: int, stop: int) -> None:
        self._backend.adopt_thread()
        with self._stage() as stage:
            self._get(load.slot.place, stage.data_ptr(), start, stop)
            _follow(self._back, load)
            end = min(stop, load.size_bytes)
            self._backend.copy(self._back, load.storage[start:end], stage[: end - start])
            self._backend.finish(self._back)

    def _after_store(self, slot: Slot) -> None:
        """The stages held all of it."""

    def _after_fetch(self, load: QueuedLoad) -> None:
        """The stages held all of it."""

    def _explain(self, fault: BaseException, transfer: Slot | QueuedLoad) -> str:
        if isinstance(fault, OSError):
            return super()._explain(fault, transfer)
        # The disk has nothing to do with it: a device that has failed says so to whoever waits for it next.
        return (
            f"copying a tensor of {format_bytes(transfer.size_bytes)} between {self.device} and RAM failed: {fault!r}; "
            "if it is a kernel of the step that failed, CUDA_LAUNCH_BLOCKING=1 shows which"
        )

    @contextlib.contextmanager
    def _stage(self) -> Iterator[torch.UntypedStorage]:
        stage = self._stages.get()
        try:
            yield stage
        finally:
            self._stages.put(stage)


def _follow(stream: Stream, transfer: Slot | QueuedLoad) -> None:
    for event in transfer.after:
        stream.wait_event(event)
