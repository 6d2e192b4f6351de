"""The safe policy: an on-line tensor cache for steps that have no plan, in the manner of SuperNeurons (2018).

Saved tensors stay until the live bytes come near the budget; then the least recently used one that only autograd holds
moves out, and comes back when it is asked for. Transfers are waited for: this is for the few steps that are observed,
or that leave their plan, not for speed.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebbtide.observe.allocated import Memory
from ebbtide.observe.ledger import storage_wrapper_count, use_count
from ebbtide.observe.recorder import Recorder
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import inside
from ebbtide.plan.profile import SMALLEST_BYTES
from ebbtide.run.allocator import Trimmer
from ebbtide.run.holdings import (
    Holding,
    Kept,
    View,
    attributes_of,
    detached,
    is_plain,
    keep,
    outside_inference_mode,
    view_of,
)
from ebbtide.run.hooks import take_off_from_within
from ebbtide.run.tiers import SlowTier
from ebbtide.run.versions import Count
from ebbtide.run.wrapped import Handle, Outer, wrap_like

ROOM_FOR_GARBAGE = 1 / 16
"""Share of the limit that is made room for where garbage is collected, which takes as long as some hundred ops."""
MORE_AFTER_VAIN = 1.125
"""Where there was less than half of `ROOM_FOR_GARBAGE` to collect, so many times the bytes have to be alive before
garbage is looked for again."""


class _CachedHolding(Holding):
    """A holding that tells the recorder when it lets go of its tensor."""

    __slots__ = ("record", "recorder")

    def __init__(self, recorder: Recorder | None, record: Any) -> None:
        super().__init__()
        self.record = record
        self.recorder = recorder

    def __del__(self) -> None:
        recorder = getattr(self, "recorder", None)  # an interrupt may have come before it was set
        if recorder is not None and self.tensor is not None:
            recorder.storages.held(self.record, -1)


class _CachedView(View):
    """A view that tells the recorder when autograd drops it."""

    __slots__ = ("policy", "record")
    holding: _CachedHolding

    def __init__(
        self, holding: _CachedHolding, tensor: torch.Tensor, number: int, count: Count | None, policy: SafePolicy
    ) -> None:
        super().__init__(tensor)
        self.attributes = attributes_of(tensor)
        self.count = count
        self.holding = holding
        self.number = number
        self.policy = policy
        self.record: Any = None

    def __del__(self) -> None:
        record = getattr(self, "record", None)  # an interrupt may have come before it was set
        if record is not None and self.policy.recorder is not None:
            self.policy.recorder.storages.shown(record, -1)


class SafePolicy:
    """Keeps the live bytes of a step near a limit without knowing what comes.

    Args:
        limit_bytes: bytes to stay below, or None to move nothing.
        tier: where tensors go; called when the first one goes.
        recorder: writes the step down, and knows the live bytes exactly.
        other_bytes: without a recorder: bytes to assume alive besides what is held here.
        trimmer: keeps the resident size near the live bytes; None to leave it alone.
        memory: of the device that the limit is for, if its allocator says what is taken: then that is what is live,
            and nothing that lies elsewhere moves.
        growth_bytes: so many bytes are known to be taken at most from one hook to the next; more may be seen to be.
        resting_bytes: with a recorder: so many were at rest in other steps, and may be touched yet.

    Attributes:
        seen_bytes: by device, the bytes of all tensors that autograd saved and that may be moved.
        is_over: whether its step was left in another thread than the one whose hooks it has.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        tier: Callable[[], SlowTier],
        recorder: Recorder | None = None,
        other_bytes: int = 0,
        trimmer: Trimmer | None = None,
        memory: Memory | None = None,
        growth_bytes: int = 0,
        resting_bytes: int = 0,
    ) -> None:
        self.recorder = recorder
        # Threads of autograd come in turn, those with an op as those with a hook.
        self._lock = recorder.lock if recorder is not None else threading.RLock()
        self.seen_bytes: collections.Counter[torch.device] = collections.Counter()
        self._memory = memory
        self._trimmer = trimmer
        self._limit_bytes = limit_bytes
        self._tier = tier
        self._other_bytes = other_bytes
        self._wrapper = storage_wrapper_count()
        self._held: dict[int, weakref.ref[Holding]] = {}
        self._cache: collections.OrderedDict[int, weakref.ref[Holding]] = collections.OrderedDict()
        self._away: list[weakref.ref[Holding]] = []
        self._last_live_bytes = 0
        self._growth_bytes = growth_bytes
        self._known_resting_bytes = resting_bytes
        self._collects_at = 0.0
        self.is_over = False

    def retire(self) -> None:
        """Move nothing any more: the step is over, but its hooks are on still, in another thread."""
        self.is_over, self._limit_bytes = True, None

    def take_over(self, held: Iterable[Holding], live_bytes: int, growth_bytes: int) -> None:
        """A plan is left, and what it has ``held`` moves as if it had been saved here.

        Args:
            live_bytes: at least so many bytes are alive now.
            growth_bytes: so many more are taken at most from one hook to the next, as far as the plan knows.
        """
        held = list(held)
        here = [holding for holding in held if holding.tensor is not None and self._counts(holding.tensor)]
        self._away = [weakref.ref(holding) for holding in held if holding.tensor is None]
        for holding in here:
            self._note_here(holding)
        self._other_bytes = max(self._other_bytes, live_bytes - sum(holding.size_bytes for holding in here))
        self._growth_bytes = max(self._growth_bytes, growth_bytes)
        self._last_live_bytes = self._live_bytes()
        self._make_room()

    def _note_here(self, holding: Holding) -> None:
        """Note that a holding is in the memory that the limit is for, and may leave: as the last, if it was here
        already."""
        self._held[holding.identity] = reference = weakref.ref(holding)
        self._cache.pop(id(holding), None)
        if holding.size_bytes >= SMALLEST_BYTES:
            self._cache[id(holding)] = reference

    def _note_returned(self) -> None:
        """What is asked for is made from others, which come back with it."""
        away, self._away = self._away, []
        for reference in away:
            holding = reference()
            if holding is not None and holding.tensor is None:
                self._away.append(reference)
            elif holding is not None and holding.tensor is not None and self._counts(holding.tensor):
                self._note_here(holding)

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook."""
        recorder = self.recorder
        with self._lock:
            if self.is_over:
                take_off_from_within()
                inner = inside(tensor)
                return wrap_like(tensor, inner, keep(inner, -1))
            if recorder is None or not recorder.ledger.open:
                return self._take(tensor, -1)
            recorder.hidden = True
            try:
                return self._take(tensor, recorder.pack(tensor))
            finally:
                recorder.hidden = False
                recorder.resume()

    @never_compiled
    def unpack(self, handle: Handle) -> torch.Tensor:
        """The unpack hook."""
        recorder = self.recorder
        with self._lock, outside_inference_mode():
            if recorder is None:
                return self._show(handle)
            if not recorder.ledger.open:
                return handle.show()
            recorder.hidden = True
            try:
                recorder.unpack(handle.number)
                return self._show(handle)
            finally:
                recorder.hidden = False
                recorder.resume()

    def _take(self, tensor: torch.Tensor, number: int) -> Handle:
        inner = inside(tensor)
        return wrap_like(tensor, inner, self._take_plain(inner, number))

    def _take_plain(self, tensor: torch.Tensor, number: int) -> Kept | View:
        recorder = self.recorder if number >= 0 else None
        if not is_plain(tensor) or (recorder is not None and recorder.is_external(number)):
            return keep(tensor, number)
        identity = tensor.untyped_storage()._cdata
        reference = self._held.get(identity)
        holding = reference() if reference is not None else None
        count = None
        if holding is None or not holding.shows(identity, tensor._version):
            holding = self._hold(tensor, identity, number)
        else:
            count = holding.other_count(tensor)
            if holding.streams is not None:  # maybe on another stream
                self._tier().expect(tensor.device)
        if not isinstance(holding, _CachedHolding):  # one that was taken over
            return view_of(holding, tensor, number, count)
        view = _CachedView(holding, tensor, number, count, self)
        if recorder is not None:
            view.record = recorder.storage_of(number)
            recorder.storages.shown(view.record, 1)
        self._make_room()
        return view

    def _hold(self, tensor: torch.Tensor, identity: int, number: int) -> _CachedHolding:
        recorder = self.recorder if number >= 0 else None
        holding = _CachedHolding(recorder, recorder.storage_of(number) if recorder is not None else None)
        holding.fill(tensor)
        self._held[identity] = weakref.ref(holding)
        self.seen_bytes[tensor.device] += holding.size_bytes
        if self._counts(tensor) and holding.size_bytes >= SMALLEST_BYTES:
            self._cache[id(holding)] = self._held[identity]
            if self._limit_bytes is not None:
                holding.streams = self._tier().expect(tensor.device)
        if recorder is not None:
            recorder.storages.held(holding.record, 1)
        return holding

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the memory that the limit is for."""
        return self._memory is None or self._memory.size_of(tensor.untyped_storage()) > 0

    def _show(self, handle: Handle) -> torch.Tensor:
        if isinstance(handle, Outer) and isinstance(view := handle.view, View):
            return handle.around(lambda: self._show(view))
        if not isinstance(handle, View):
            return handle.show()
        holding = handle.holding
        away = holding.tensor is None
        tensor = handle.show()
        if away and isinstance(holding, _CachedHolding) and holding.recorder is not None:
            holding.recorder.storages.restored(holding.record, tensor.untyped_storage())
            holding.recorder.storages.held(holding.record, 1)
        if away and self._away:
            self._note_returned()
        if self._counts(tensor):  # another backward pass may ask for it
            self._note_here(holding)
        # Autograd may work with the very tensor that it is given: with one of its own, it is seen for how long.
        own = handle.with_attributes(detached(tensor)) if tensor is holding.tensor else tensor
        self._make_room()
        return own

    def _live_bytes(self) -> int:
        if self._memory is not None:
            return self._memory.allocated_bytes()
        if self.recorder is not None and self.recorder.ledger.open:
            return self.recorder.ledger.made_bytes + self._resting_bytes()
        here = {reference() for reference in self._held.values()}  # what has come back has two addresses
        return self._other_bytes + sum(h.size_bytes for h in here if h is not None and h.tensor is not None)

    def _resting_bytes(self) -> int:
        if self.recorder is None or not self.recorder.ledger.open:
            return self._other_bytes
        return max(self._known_resting_bytes, self.recorder.ledger.resting_bytes)

    def _make_room(self) -> None:
        """Move tensors out until the next stretch of ops is likely to fit."""
        if self._limit_bytes is None:
            return
        live = self._live_bytes()
        if self._last_live_bytes:
            self._growth_bytes = max(self._growth_bytes, live - self._last_live_bytes)
        self._last_live_bytes = live
        left = self._evict_some(live, self._limit_bytes)
        if left + self._growth_bytes > self._limit_bytes:
            self._collect_garbage(left, self._limit_bytes)
        if self._trimmer is not None:
            self._trimmer.check(live - self._resting_bytes(), self._growth_bytes)

    def _evict_some(self, live_bytes: int, limit_bytes: int) -> int:
        """Move out what may leave until there is room. Returns the bytes that are alive then."""
        for key, reference in list(self._cache.items()):
            if live_bytes + self._growth_bytes <= limit_bytes:
                break
            holding = reference()
            if holding is None or holding.tensor is None:
                del self._cache[key]
            elif not holding.tensor.untyped_storage().nbytes():
                pass  # whoever has emptied it may fill it again
            elif holding.intact and use_count(holding.identity) <= self._wrapper:  # ours is the only tensor of it
                del self._cache[key]
                self._evict(holding)
                live_bytes = self._live_bytes()  # to ask takes long where there are many
        return live_bytes

    def _collect_garbage(self, live_bytes: int, limit_bytes: int) -> None:
        """All that may leave has left, and there is no room: collect garbage, unless Python does that by itself, and
        move out what it had."""
        recorder = self.recorder
        if recorder is None or not recorder.ledger.open or live_bytes < self._collects_at:
            return
        recorder.storages.collect_garbage()
        room = int(ROOM_FOR_GARBAGE * limit_bytes)
        left = self._evict_some(self._live_bytes(), limit_bytes - room)
        self._collects_at = 0.0 if live_bytes - left >= room / 2 else MORE_AFTER_VAIN * left

    def _evict(self, holding: Holding) -> None:
        holding.send(self._tier())
        if isinstance(holding, _CachedHolding) and holding.recorder is not None:
            holding.recorder.storages.evicted(holding.record)
            holding.recorder.storages.held(holding.record, -1)
        holding.release()
