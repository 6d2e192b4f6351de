"""Measures what a budget counts: the bytes of all storages that a piece of code touches or makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ebbtide.errors import StepError
from ebbtide.observe.allocated import Memory
from ebbtide.observe.asking import AskingNodes
from ebbtide.observe.inductor import compiled_as_ops
from ebbtide.observe.ledger import Ledger, StorageRecord, enlarged, has_storage, tensors_in, written_by
from ebbtide.observe.loads import unwatch_loads, watch_loads
from ebbtide.observe.mode import DispatchMode, run_op
from ebbtide.observe.resizing import tell_no_more_of_resizing, tell_of_resizing
from ebbtide.observe.schema import operator_info
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import AsOrdinary, runs_as_called, wraps


class PeakMeter(DispatchMode):
    """Counts, byte for byte, the storages alive over a ``with`` block; costs some microseconds an op.

    It sees the ops of the thread that the block begins in. What it tells is of the block so far while that runs, and of
    all of it afterwards.

    Args:
        tiers: those whose loads count, whoever asks for them; None for all. Others' count where their ops are seen, as
            those of another budget's step within the block are: in another thread there may be one, too.

    Raises:
        StepError: on a second ``with``, as a meter counts over one block.
    """

    def __init__(self, tiers: Collection[object] | None = None) -> None:
        super().__init__()
        self._tiers = tiers
        self._ledger = Ledger()
        self._asking = AskingNodes(self)
        self._hidden = False
        self._compiled = compiled_as_ops()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once, those at rest included."""
        return self._ledger.peak_bytes

    @property
    def resting_bytes(self) -> int:
        """Bytes of the storages that the block touched but did not make."""
        return self._ledger.resting_bytes

    def rest(self) -> list[StorageRecord]:
        """The storages that were there before the block, were touched in it, and still live."""
        return self._ledger.at_rest()

    @property
    def end_bytes(self) -> int:
        """Bytes alive now or, after the block, at its end; those at rest included."""
        return self._ledger.live_bytes

    def __enter__(self) -> PeakMeter:
        if self._hidden:
            raise StepError("a meter counts over one `with` block: make another one for the next")
        self._compiled.__enter__()
        super().__enter__()
        watch_loads(self)
        tell_of_resizing(self._resized)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ledger.close()
        self._asking.forget()
        self._hidden = True  # it stays on, if this is another thread than it was put on in
        unwatch_loads(self)
        tell_no_more_of_resizing(self._resized)
        super().__exit__(*exception)
        self._compiled.__exit__(None, None, None)

    def note_load(self, memory: torch.UntypedStorage, tier: object, is_on: bool) -> None:
        """Count memory for a load from ``tier``."""
        if is_on or self._tiers is None or tier in self._tiers:
            self._ledger.make(memory)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if self._ledger.outdated(storage) is not None:
            self._ledger.resized(storage)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._hidden and types and wraps(types):
            return self.see_within(self._count, func, args, kwargs)
        if types or runs_as_called(func, args, kwargs):
            return self._count(func, args, kwargs)
        with AsOrdinary():
            return self._count(func, args, kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._hidden:
            return func(*args, **kwargs)
        self._asking.follow()
        self._touch((*args, *kwargs.values()))
        written = written_by(operator_info(func), args, kwargs)
        result = run_op(func, args, kwargs)
        for tensor in enlarged(written):
            self._ledger.resized(tensor.untyped_storage())
        self._make(result)
        self._asking.made(func, result)
        return result

    def node_begins(self) -> None:
        """A node runs that calls what is not counted. See NOTE [Nodes that ask] in `asking.py`."""

    def node_ended(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Count what it was given and what it has made."""
        del name
        self._touch(given)
        self._make(made)

    def run_graph(self, run: Callable[[], Any], inputs: Sequence[Any], written: Collection[int]) -> Any:
        """Count what a compiled graph reads and what it returns."""
        del written
        if self._hidden:
            return run()
        self._touch(inputs)
        before = self._ledger.made_bytes
        self._hidden = True
        try:
            result = run()
        finally:
            self._hidden = False
        # A graph drops inputs while it runs, nobody knows when: they count until all of its results are there.
        self._ledger.reached(before + self._make(result))
        return result

    def _touch(self, items: Iterable[Any]) -> None:
        for tensor in tensors_in(items):
            if has_storage(tensor):
                self._ledger.touch(tensor.untyped_storage())

    def _make(self, result: Any) -> int:
        """Count what an op returned; the bytes of what it made."""
        made_bytes = 0
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else (result,)):
            if has_storage(tensor):
                record, new = self._ledger.make(tensor.untyped_storage())
                made_bytes += record.size_bytes if new else 0
        return made_bytes


class AllocatedMeter:
    """The most that an allocator had handed out at once between `enter` and `leave`, ``peak_bytes``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.peak_bytes = 0

    def enter(self) -> None:
        """Begin to count."""
        self._memory.start_peak()

    def leave(self) -> None:
        """Count no more."""
        self.peak_bytes = self._memory.peak_bytes()
