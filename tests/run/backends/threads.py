"""Devices made of threads: every stream is a thread, and runs late, early, slowly or in fits, as a seed says.

NOTE [Two ways to compute]
1. `InlineBackend`: the calling thread is the compute stream, as it is for PyTorch on a CPU. A wait of the compute
   stream blocks it. Whole PyTorch programs run over this, with copies that really happen beside them.
2. `QueuedBackend`: compute is a thread, too, and its kernels are closures. The host runs ahead of it, as it does of a
   GPU, and memory is stream-ordered. So whatever can go wrong between streams does, if a wait is missing.

What is queued knows memory by its address alone, like the work of a real device: nothing is kept alive by accident.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ebbtide.run.backends.base import ComputeStreams
from ebbtide.run.tiers.gate import Gate
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES, take_memory
from tests.run.backends.ordered import OrderedMemory

PIECES = 4
"""Copies are made in so many pieces, between which a slow stream pauses."""

Work = Callable[[], object]
_B = TypeVar("_B", bound="InlineBackend")


class Temper(enum.Enum):
    """How a stream works: at once, after a pause before each piece, with pauses within it, or now so, now so."""

    PROMPT = enum.auto()
    LATE = enum.auto()
    SLOW = enum.auto()
    MOODY = enum.auto()


class ThreadEvent:
    """See `ebbtide.run.backends.base.Event`."""

    def __init__(self, *, done: bool = False) -> None:
        self._done = Gate()
        if done:
            self._done.open()

    def query(self) -> bool:
        """See `Event.query`."""
        return self._done.is_open

    def synchronize(self) -> None:
        """Wait for it."""
        self._done.wait()

    def happen(self) -> None:
        """The stream has got there."""
        self._done.open()


class ThreadStream:
    """A thread that does work in the order in which it is queued.

    Args:
        name: name of the thread.
        temper: how it works.
        dice: decides about each pause.
        pause_seconds: the longest pause.
    """

    def __init__(self, name: str, temper: Temper, dice: random.Random, pause_seconds: float) -> None:
        self.temper = temper
        self._dice = dice
        self._pause_seconds = pause_seconds
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"ebbtide-stream-{name}", daemon=True)
        self._thread.start()

    def record_event(self) -> ThreadEvent:
        """See `Stream.record_event`."""
        event = ThreadEvent()
        self._work.put(event.happen)
        return event

    def wait_event(self, event: ThreadEvent) -> None:
        """See `Stream.wait_event`."""
        self._work.put(event.synchronize)

    def launch(self, *pieces: Work) -> None:
        """Queue a piece of work that is done in so many pieces."""
        self._work.put(functools.partial(self._do, pieces))

    def close(self) -> None:
        """Finish the work and end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _do(self, pieces: tuple[Work, ...]) -> None:
        temper = self.temper
        if temper is Temper.MOODY:
            temper = self._dice.choice((Temper.PROMPT, Temper.LATE, Temper.SLOW))
        if temper is Temper.LATE:
            self._pause()
        for piece in pieces:
            piece()
            if temper is Temper.SLOW:
                self._pause()

    def _pause(self) -> None:
        time.sleep(self._pause_seconds * self._dice.uniform(0.3, 1.0))


class InlineStream:
    """The calling thread as a stream: what was queued is done."""

    def record_event(self) -> ThreadEvent:
        """See `Stream.record_event`."""
        return ThreadEvent(done=True)

    def wait_event(self, event: ThreadEvent) -> None:
        """See `Stream.wait_event`."""
        event.synchronize()


class InlineBackend:
    """A CPU whose copies run on threads beside it. See NOTE [Two ways to compute].

    Args:
        seed: of the tempers of its streams, and of all their pauses.
        pause_seconds: the longest pause.
        temper: of all its streams; by the seed if not given.
    """

    device = torch.device("cpu")

    def __init__(self, seed: int = 0, *, pause_seconds: float = 3e-4, temper: Temper | None = None) -> None:
        self._seed = seed
        self._pause_seconds = pause_seconds
        self._temper = temper
        self.streams = ComputeStreams(self)
        self._inline = InlineStream()
        self._streams: list[ThreadStream] = []

    def compute(self) -> Any:
        """See `Backend.compute`."""
        return self._inline

    def new_stream(self, name: str) -> ThreadStream:
        """See `Backend.new_stream`."""
        dice = random.Random(f"{self._seed} {len(self._streams)}")
        temper = self._temper or dice.choice(list(Temper))
        stream = ThreadStream(name, temper, dice, self._pause_seconds)
        self._streams.append(stream)
        return stream

    def allocate(self, size_bytes: int, like: int) -> torch.UntypedStorage:
        """See `Backend.allocate`. Raises `OSError` if there is no memory left."""
        return take_memory(size_bytes, like % CONGRUENCE_BYTES)

    def copy(self, stream: Any, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """See `Backend.copy`."""
        size_bytes = target.nbytes()
        assert size_bytes == source.nbytes(), "a copy between storages of two sizes"
        piece_bytes = max(1, -(-size_bytes // PIECES))
        to, fro = target.data_ptr(), source.data_ptr()
        pieces = [
            functools.partial(_move, to + start, fro + start, min(piece_bytes, size_bytes - start))
            for start in range(0, size_bytes, piece_bytes)
        ]
        if isinstance(stream, ThreadStream):
            stream.launch(*pieces)
        else:
            for piece in pieces:
                piece()

    def used_on(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """See `Backend.used_on`. There is one compute stream, which is done."""

    def adopt_thread(self) -> None:
        """See `Backend.adopt_thread`."""

    def finish(self, stream: Any) -> None:
        """See `Backend.finish`."""
        stream.record_event().synchronize()

    def pin(self, address: int, size_bytes: int) -> None:
        """See `Backend.pin`. All memory is reached alike."""

    def unpin(self, address: int) -> None:
        """See `Backend.unpin`."""

    def near_cpus(self) -> frozenset[int]:
        """See `Backend.near_cpus`."""
        return frozenset()

    def close(self) -> None:
        """Finish all work and end the threads."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def __enter__(self: _B) -> _B:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class QueuedBackend(InlineBackend):
    """A device of threads alone. See NOTE [Two ways to compute].

    Args:
        seed, pause_seconds, temper: see `InlineBackend`.
        memory_bytes: how much memory the device has.
    """

    def __init__(
        self, seed: int = 0, *, memory_bytes: int, pause_seconds: float = 3e-4, temper: Temper | None = None
    ) -> None:
        super().__init__(seed, pause_seconds=pause_seconds, temper=temper)
        self._memory = OrderedMemory(memory_bytes, self.order)
        self._default = self.new_stream("compute")
        self._current = threading.local()

    def compute(self) -> ThreadStream:
        """See `Backend.compute`."""
        current: ThreadStream = getattr(self._current, "stream", self._default)
        return current

    @contextlib.contextmanager
    def on(self, stream: ThreadStream) -> Iterator[None]:
        """Make ``stream`` the compute stream of this thread."""
        before = self.compute()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    @staticmethod
    def order(before: ThreadStream, after: ThreadStream) -> None:
        """Make a stream go on behind another."""
        after.launch(before.record_event().synchronize)

    def used_on(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """See `Backend.used_on`."""
        self._memory.used_on(storage, stream)

    def allocate(self, size_bytes: int, _like: int) -> torch.UntypedStorage:
        """See `Backend.allocate`. Raises `MemoryError` if the device has no more."""
        return self._memory.take(self.compute(), size_bytes)


def _move(to: int, fro: int, size_bytes: int) -> None:
    ctypes.memmove(to, fro, size_bytes)
