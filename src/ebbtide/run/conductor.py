"""Runs a plan under the user's loop.

Autograd's saves and requests are the clock: at each of them the conductor does what the script says, and nothing runs
between them. A dispatch mode runs only over the stretches of the step in which recipes capture their calls.

NOTE [Threads of autograd]
Autograd has a thread for each device, and uses the caller's for the CPU; they may call the hooks at once. Whatever
takes longer than a look, they do in turn. In which order they come is not for a plan to say: if it is not the observed
one, the plan is left.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.clock import Clock, Span
from ebbtide.observe.compiled_calls import compiled_calls
from ebbtide.observe.garbage import expect_objects
from ebbtide.observe.ledger import sizes
from ebbtide.observe.mode import DisableTorchDispatch, correct_mode_flags, is_between_ops, modes_on
from ebbtide.observe.passes import in_pass, tell_no_more, tell_of_passes
from ebbtide.observe.transforms import in_trace, in_transform
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import PLAIN_TYPES, inside, is_subclass
from ebbtide.run.allocator import Trimmer
from ebbtide.run.capture import OFF, CaptureMode
from ebbtide.run.forks import KnownScripts
from ebbtide.run.holdings import Kept, View, keep, outside_inference_mode
from ebbtide.run.safe import SafePolicy
from ebbtide.run.script import NOBODY, ExpectedSave, Script
from ebbtide.run.tiers import SlowTier
from ebbtide.run.tracker import Tracker
from ebbtide.run.verify import Truth
from ebbtide.run.versions import ChangedError
from ebbtide.run.wrapped import Handle, wrap_like


class _Nobody(dict[int, int]):
    """A table by event, with nobody in it."""

    def __missing__(self, event: int) -> int:
        return NOBODY


_NOBODY_SHOWN = _Nobody()


class Conductor(Tracker):
    """One planned step.

    Args:
        script: what to do.
        library, tier, safe, truth, new_truth: see `Tracker`.
        trimmer: keeps the resident size near the live bytes; None to leave it alone.
        clock: takes the stamps; None to take none.

    Attributes:
        stamps: with a clock: for each event its marks before and after what the conductor did there.
    """

    def __init__(
        self,
        script: Script,
        library: KnownScripts,
        tier: Callable[[str], SlowTier],
        safe: SafePolicy,
        truth: Truth | None = None,
        new_truth: Callable[[], Truth] = Truth,
        trimmer: Trimmer | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(script, library, tier, safe, truth, new_truth)
        self.stamps: list[Span] = []
        self._trimmer = trimmer
        self._objects = 0
        self._is_pass_new = False
        self._shown: Mapping[int, int] | tuple[int, ...]
        self._calls = compiled_calls()
        self._lock = threading.RLock()  # a value that dies in a hook may call another
        self._mark = clock.mark if clock is not None else None
        # Where nothing is to be done but to keep and to show, as at most events of most steps, the hooks are short.
        self._is_short = clock is None and trimmer is None
        self._shorten()

    def start(self) -> None:
        """Call when the step begins."""
        self._objects = self.script.objects + (len(self.script.expected) if self._mark is not None else 0)
        expect_objects(self._objects)
        self._modes_below = len(modes_on())
        tell_of_passes(self._pass_begins)
        if self._capture is not None:
            self._capture.below, self._capture.until = self._modes_below, self.script.next_saves[-1]
            if self.script.stretches[-1] >= 0:
                self._capture.begin(0, between_ops=True)

    def stop(self) -> None:
        """Call when the context ends; a later backward pass still follows the script."""
        expect_objects(-self._objects)
        self._objects = 0
        tell_no_more(self._pass_begins)
        self._end_captures()
        if self._capture is not None:
            correct_mode_flags()

    def _pass_begins(self) -> None:
        """Take the mode off, unless calls are captured in this backward pass, or ops counted right through it."""
        if self._safe.is_over:
            tell_no_more(self._pass_begins)
        self._is_pass_new = True  # what is asked for next is looked into, which the short hook does not do
        self._shown = _NOBODY_SHOWN
        goes_on = not self.left and self.script.stretches[self._event - 1] >= 0
        if not goes_on and not self.script.stays_on and compiled_calls() == self._calls:
            self._end_captures()

    def _end_captures(self) -> None:
        for capture in (self._capture, *reversed(self._outdated)):
            if capture is not None:
                capture.end()

    def _shorten(self) -> None:
        """Choose the events at which the hooks may be short."""
        script = self.script
        self._kept, self._numbers = script.kept, script.numbers
        self._shown = self._shown_shortly = script.shown if self._is_short else (NOBODY,) * len(script.shown)
        self._stretches, self._next_saves, self._holds = script.stretches, script.next_saves, script.holds
        self._also_held = self._library.also_held(script)
        if not self._is_short:
            self._kept = self._holds = (None,) * len(self._kept)
        else:
            repeats = self._library.repeats(script)
            self._kept = _without(self._kept, script, {*self._also_held, *repeats})
            self._holds = _without(self._holds, script, repeats)

    # --- hooks ---------------------------------------------------------------------------------------------------

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook."""
        event = self._event
        form = self._kept[event]
        if (
            form is not None
            and type(tensor) in PLAIN_TYPES  # a class of its own has its own code for what is asked here
            and tensor.dtype is form.dtype
            and not tensor.is_nested  # some of those have no shape
            and tensor.shape == form.shape
        ):
            capture, stretch = self._capture, self._stretches[event]
            if capture is None or capture.tick == OFF == stretch:
                self._event = event + 1
                return keep(tensor, self._numbers[event])
            if self._keep_on(capture, stretch, tensor) or self._switch(capture, stretch, tensor):
                self._event = event + 1
                with DisableTorchDispatch():
                    return keep(tensor, self._numbers[event])
        with self._lock:
            save = self._holds[event]
            if save is not None and event == self._event and type(tensor) is torch.Tensor:
                handle = self._hold_at_once(tensor, save)
                if handle is not None:
                    return handle
            return self._pack(tensor)

    def _hold_at_once(self, tensor: torch.Tensor, save: ExpectedSave) -> Kept | View | None:
        """Hold what is to be held here, if it is what is expected; None if that has to be looked into."""
        if tensor.is_nested or tensor.dtype is not save.dtype or tensor.shape != save.shape or self._is_lost:
            return None
        if not self._same_value(tensor, save) or in_trace():
            return None
        event, capture = self._event, self._capture
        if capture is not None:
            stretch = self._stretches[event]
            is_off = capture.tick == OFF == stretch
            if not (is_off or self._keep_on(capture, stretch, tensor) or self._switch(capture, stretch, tensor)):
                return None
        self._event = event + 1
        with DisableTorchDispatch():
            return self._hold(tensor, self._numbers[event], save)

    def _keep_on(self, capture: CaptureMode, stretch: int, tensor: torch.Tensor) -> bool:
        """Let the capture mode count from here on, if it is on and is to stay on. Returns whether it is."""
        if stretch < 0 or not capture.entered or self._is_lost:
            return False
        if type(tensor) not in PLAIN_TYPES or compiled_calls() != self._calls or in_trace():
            return False
        capture.tick, capture.until = capture.counted_from(stretch), self._next_saves[self._event]
        return True

    def _switch(self, capture: CaptureMode, stretch: int, tensor: torch.Tensor) -> bool:
        """Put the capture mode on, or take it off, where that is all that is to be done. Returns whether it was."""
        if self._is_lost or type(tensor) not in PLAIN_TYPES or compiled_calls() != self._calls:
            return False
        if in_pass() or in_trace() or in_transform():
            return False
        if stretch >= 0:
            capture.until = self._next_saves[self._event]
            capture.begin(stretch, is_between_ops(tensor))
        elif not capture.is_on_top or not capture.may_end(tensor):
            return False
        else:
            capture.end()
        return True

    def _pack(self, tensor: torch.Tensor) -> Any:
        began = self._mark() if self._mark is not None else None
        capture = self._capture
        if capture is not None:
            capture.hidden = True
        self._pass_by()
        number, inner = self._numbers[self._event], inside(tensor)
        if not self.left and not self._accept(inner, number) and not self._try_go_over(number, inner):
            self.leave(
                f"saved tensor {number} is {inner.dtype} {list(sizes(inner))}, which no known kind of step expects"
            )
        if self.left:
            handle: Handle = self._safe.pack(tensor)
        else:
            number = self._numbers[self._event]  # another one, if some were left out
            handle = wrap_like(tensor, inner, self._hold_unseen(inner, number, self.script.saves[number]))
            stretch = self.script.stretches[self._event]
            if self._capture is not None:
                self._capture.until = self.script.next_saves[self._event]
            self._act()
            if self._capture is not None:
                kind: Any = type(tensor)
                self._follow(stretch, inner if is_subclass(kind) else tensor)
            if self._mark is not None:
                self.stamps.append((began, self._mark()))
        if capture is not None:
            capture.hidden = False
        return handle

    @never_compiled
    def unpack(self, handle: Handle) -> torch.Tensor:
        """The unpack hook."""
        event = self._event
        try:
            if self._shown[event] == handle.number and (self._capture is None or not self._capture.entered):
                self._event = event + 1
                if type(handle) is Kept:
                    return handle.show()
                with self._lock, outside_inference_mode():  # another thread may wait for what is to be shown here
                    return handle.show()
            with self._lock, outside_inference_mode():
                return self._unpack(handle)
        except (ChangedError, RecipeError) as fault:  # which the step may catch
            self.refused = (self.refused or set()) | ({fault.leaf} if isinstance(fault, ChangedError) else set())
            raise

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if self.left:
            return self._safe.unpack(handle)
        began = self._mark() if self._mark is not None else None
        self._pass_by()
        if self._is_pass_new and self._begin_pass(handle.number):
            return self._safe.unpack(handle)
        is_expected = self._is_asked_for(handle.number)
        if not is_expected and self._try_leave_out_rest(handle.number):
            is_expected = self._is_asked_for(handle.number)
        if not is_expected and self.missing and self._comes_soon(handle.number):
            self._shown_early.add(handle.number)
            return handle.show()
        if not is_expected and not self._try_go_over(handle.number):
            self.leave(f"saved tensor {handle.number} was asked for out of turn")
            return handle.show()
        capture = self._capture
        if capture is not None:
            capture.hidden = True  # it may be on here: between two backward passes of one step it stays
        try:
            tensor = handle.show()
            self._act()
        finally:
            if capture is not None:
                capture.hidden = False
        if self._mark is not None:
            self.stamps.append((began, self._mark()))
        return tensor

    def _begin_pass(self, number: int) -> bool:
        """Look whether this is the script to follow in a backward pass that asks for ``number`` first. Returns whether
        the plan was left."""
        self._is_pass_new = False
        self._shown = self._shown_shortly
        self._look_at_pass(number)
        return bool(self.left)

    def _act(self) -> None:
        """What the script says to do at this event."""
        event = self._event
        self._event = event + 1
        actions = self.script.actions[event]
        if actions is not None:
            self._perform(actions)
        if self._trimmer is not None:
            self._trimmer.check(self.script.alive[event], self.script.headroom[event])

    def _follow(self, stretch: int, tensor: torch.Tensor) -> None:
        """Put the capture mode on for the stretch that begins at this save, or take it off. See NOTE [Counting ops]."""
        assert self._capture is not None
        if compiled_calls() != self._calls and not (self.script.stays_on and self._capture.entered):
            self.leave("something is called that torch.compile returned, which steps of this kind did not do so far")
            return
        if self._capture.tick == stretch:
            return
        if (stretch < 0 or not self._capture.entered) and (in_pass() or in_transform()):
            return  # what is done to the stack of modes there does not outlast the node, or the op
        if stretch >= 0:
            self._capture.begin(stretch, is_between_ops(tensor))
        elif self._capture.may_end(tensor) and self._capture in modes_on():  # it is not while it runs an op
            self._capture.end()

    # --- following -----------------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """Leave the plan, and no longer use the short hooks, which follow it."""
        self._is_short = False
        self._shorten()
        super().leave(reason)

    def retire(self, reason: str) -> None:
        """Leave the plan for good: the step is over, but its hooks are on still, in another thread."""
        with self._lock:
            self._safe.retire()  # before it takes over what is held, which stays where it is
            self.leave(reason)

    def _take_up(self, script: Script) -> None:
        super()._take_up(script)
        self._shorten()


def _without(table: tuple[Any, ...], script: Script, numbers: Collection[int]) -> tuple[Any, ...]:
    """A table by event, with nothing at those where these tensors are saved."""
    if not numbers:
        return table
    entries = list(table)
    for number in numbers:
        entries[bisect.bisect_right(script.numbers, number) - 1] = None
    return tuple(entries)
