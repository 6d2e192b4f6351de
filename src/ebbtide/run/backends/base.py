"""What a tier needs of a device that works asynchronously.

NOTE [Streams]
1. A stream is a queue of work that a device does in order. Two streams keep no order between them, except where one
   waits for an event that was recorded on the other. The host waits for none of this.
2. The *compute stream* is the one that is current in the calling thread: ops that PyTorch launches there run on it.
   A thread of autograd makes that current on which the forward pass ran.
3. Memory is *stream-ordered*: a block belongs to the stream on which it was taken. The host may let go of it while work
   on that stream still uses it: whoever gets it next comes later on that stream. Work on any other stream has to be
   waited for on that stream before the host lets go, or told of by `Backend.used_on`.
4. A copy holds no memory alive, on no device. Whoever queues one keeps its memory until some stream has waited for it.

`torch.cuda.Stream` and `torch.cuda.Event` are streams and events as they stand here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the stream has got there. Never waits."""
        ...


class Stream(Protocol):
    """A queue of work of a device: see NOTE [Streams]. Equal streams are one stream, and hash alike."""

    def record_event(self) -> Any:
        """An `Event` after all that is queued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Queue a wait for an event of the same backend: what is queued from now on runs after it."""
        ...


class Backend(Protocol):
    """One device.

    Attributes:
        device: PyTorch's name of it, as of the storages that live on it.
        streams: its compute streams, as far as they are known: one knowledge for all tiers of the device.
    """

    device: torch.device
    streams: ComputeStreams

    def compute(self) -> Stream:
        """The compute stream of the calling thread."""
        ...

    def new_stream(self, name: str, /) -> Stream:
        """A stream of its own; ``name`` is for people."""
        ...

    def allocate(self, size_bytes: int, like: int, /) -> torch.UntypedStorage:
        """Memory on the compute stream, to take the place of what lay at address ``like``.

        Kernels may choose their code by alignment, so it is aligned like that.
        """
        ...

    def copy(self, stream: Any, target: torch.UntypedStorage, source: torch.UntypedStorage, /) -> None:
        """Queue a copy of ``source`` over ``target``, of the same size. One of them may be pinned memory, or on a peer.

        No dispatch mode sees it.
        """
        ...

    def used_on(self, storage: torch.UntypedStorage, stream: Any, /) -> None:
        """Once ``storage`` dies, its memory goes to nobody before ``stream`` has done what it has queued by then."""
        ...

    def adopt_thread(self) -> None:
        """The calling thread is one of ours, and works for this device from now on."""
        ...

    def finish(self, stream: Any, /) -> None:
        """Wait on the host until all that is queued on ``stream`` is done: for worker threads, and when things end."""
        ...

    def pin(self, address: int, size_bytes: int, /) -> None:
        """Make host memory one that copies reach without a detour."""
        ...

    def unpin(self, address: int, /) -> None:
        """Undo `pin`. The memory must not be in use any more."""
        ...

    def near_cpus(self) -> frozenset[int]:
        """CPUs of the NUMA node that the device is attached to; none if the system does not say."""
        ...


class ComputeStreams:
    """Every compute stream of a device that saved what may move, or asked for a transfer; as a rule there is one.

    Memory belongs to the stream on which it was taken (rule 3), but PyTorch does not say which that is, and what one
    stream saved another may be current for when it leaves. So what concerns compute concerns all of them.

    Without a budget, what autograd saves is there until the backward pass, for all streams that are behind the one that
    made it. With one it dies earlier, and comes back late: then they have to be told, by `share` and `lead`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: dict[Stream, None] = {}
        self._latest: Stream | None = None

    def note(self) -> Stream:
        """The compute stream of the calling thread, to be known from now on."""
        stream = self._backend.compute()
        if stream is not self._latest:  # to hash a stream takes longer than all the rest of this
            self._seen.setdefault(stream)
            self._latest = stream
        return stream

    def record(self) -> tuple[Any, ...]:
        """Events after all that they have queued so far."""
        return tuple(stream.record_event() for stream in tuple(self._seen))

    def wait(self, event: Any) -> None:
        """Make all of them wait for an event."""
        self.note()
        for stream in tuple(self._seen):
            stream.wait_event(event)

    def lead(self) -> None:
        """Make all others wait for what the calling thread's has queued so far."""
        here = self.note()
        if len(self._seen) > 1:
            event = here.record_event()
            for stream in tuple(self._seen):
                if stream != here:
                    stream.wait_event(event)

    def share(self, storage: torch.UntypedStorage) -> None:
        """Any of them may be at work with ``storage`` when it dies: see `Backend.used_on`."""
        if len(self._seen) > 1:
            for stream in tuple(self._seen):
                self._backend.used_on(storage, stream)


def seen_on(backend: Backend, home: Stream, storage: torch.UntypedStorage, like: int) -> torch.UntypedStorage:
    """The bytes of ``storage``, which belongs to stream ``home``, as memory that the compute stream may use.

    Where that is another stream, a copy on it: a block that goes back to ``home`` while this stream still reads it
    would be given away too early (rule 3). ``home`` waits for the copy, so that ``storage`` may be let go of at once.
    """
    here = backend.compute()
    if here == home:
        return storage
    mine = backend.allocate(storage.nbytes(), like)
    backend.copy(here, mine, storage)
    home.wait_event(here.record_event())
    return mine
