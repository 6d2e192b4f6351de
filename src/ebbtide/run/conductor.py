"""Runs a plan under the user's loop.

Autograd's saves and requests are the clock: at each of them the conductor does what the script says, and nothing runs
between them. A dispatch mode runs only over the stretches of the forward pass in which recipes capture their calls.

NOTE [Leaving the plan]
If a tensor is saved, or asked for, that the script does not expect there, the conductor first looks for another script
that agrees with all that happened so far, and goes on with that, unless the rest of the step is but a part of what the
script expects: see NOTE [Going over] and NOTE [Leaving out] in `ebbtide.run.forks`. A tensor that is only smaller than
expected is no reason to leave, here or in the other script, as long as what was saved before the first such tensor is
the same in both; nor are ops that are not the recorded ones, since the step may turn out to be of another kind: no more
calls are captured then, and what they should make again moves out instead. Otherwise the plan is left: what is held
stays valid (a holding never needs the script), new saves go to the safe policy, and what is asked for comes back on
demand.

NOTE [Threads of autograd]
Autograd has a thread for each device, and uses the caller's for the CPU; they may call the hooks at once. Whatever
takes longer than a look, they do in turn. In which order they come is not for a plan to say: if it is not the observed
one, the plan is left.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.observe.clock import Clock, Span
from ebbtide.observe.compiled_calls import compiled_calls
from ebbtide.observe.ledger import sizes
from ebbtide.observe.mode import correct_notes, modes_on
from ebbtide.observe.wrapped import PLAIN_TYPES, inside
from ebbtide.run.allocator import Trimmer
from ebbtide.run.capture import OFF, CaptureMode, is_between_ops
from ebbtide.run.forks import Known, Library, catch_up, is_like, is_smaller, next_like, remade_alike, renumbered
from ebbtide.run.garbage import expect_objects
from ebbtide.run.holdings import is_plain, keep, version_of
from ebbtide.run.keeper import DisableTorchDispatch, Keeper
from ebbtide.run.passes import in_pass, tell_no_more, tell_of_passes
from ebbtide.run.safe import LEAST_MOVED_BYTES, SafePolicy
from ebbtide.run.script import NOBODY, Saving, Script, Treatment
from ebbtide.run.tiers import SlowTier
from ebbtide.run.verify import Truth
from ebbtide.run.wrapped import Handle, wrap_like

SOON = 64
"""Requests within which what is asked for out of turn is to come, in a step that has left out some: what it saves may
be taken for something like it that another node saves a little earlier, or later."""


class Conductor(Keeper):
    """One planned step.

    Args:
        script: what to do.
        library: scripts of all kinds of step, to go over to if the step turns out to be one of them.
        tier: the tier of a name, and of an empty one that of values which no plan moves; called when values move.
        safe: takes over when the plan is left.
        truth: if given, every value that the plan computes again is also kept and compared.
        new_truth: makes one for a script that nothing has verified yet, if the step goes over to it.
        trimmer: keeps the resident size near the live bytes; None to leave it alone.
        clock: takes the stamps; None to take none.

    Attributes:
        script: the script that is followed, which may have changed since.
        left: why the plan was left, or an empty string.
        differs: why nothing more was captured, though the plan was not left, or an empty string.
        missing: numbers of the saved tensors that the script expects and that this step leaves out.
        stamps: with a clock: for each event its marks before and after what the conductor did there.
    """

    def __init__(
        self,
        script: Script,
        library: Library,
        tier: Callable[[str], SlowTier],
        safe: SafePolicy,
        truth: Truth | None = None,
        new_truth: Callable[[], Truth] = Truth,
        trimmer: Trimmer | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(tier, truth)
        self.script = script
        self.left = self.differs = ""
        self.stamps: list[Span] = []
        self._library = library
        self._safe = safe
        self._new_truth = new_truth
        self._trimmer = trimmer
        self._outdated: list[CaptureMode] = []
        self._place = self._objects = 0
        self._event = 0
        self._exact = self._alike = self._whole = True
        self.missing: set[int] = set()
        self._shown_early: set[int] = set()
        self._is_lost = False
        self._capture = CaptureMode(script.known, self._differs) if script.remakes else None
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
        self._place = len(modes_on())
        tell_of_passes(self._pass_begins)
        if self._capture is not None:
            self._capture.place = self._place
            if self.script.stretches[-1] >= 0:
                self._capture.begin(0, between_ops=True)

    def stop(self) -> None:
        """Call when the context ends; a later backward pass still follows the script."""
        expect_objects(-self._objects)
        self._objects = 0
        tell_no_more(self._pass_begins)
        self._end_captures()
        if self._capture is not None:
            correct_notes()

    def _pass_begins(self) -> None:
        """Nothing is captured in a backward pass: take the mode off, unless ops are counted right through it."""
        goes_on = not self.left and self.script.stretches[self._event - 1] >= 0
        if not goes_on and not self.script.stays_on and compiled_calls() == self._calls:
            self._end_captures()

    def _end_captures(self) -> None:
        for capture in (self._capture, *reversed(self._outdated)):
            if capture is not None:
                capture.end()

    @property
    def finished(self) -> bool:
        """Whether everything that the script expects has happened, as it expects it, from the beginning on. Tensors
        that are small anyway, such as what a loss makes of the boxes in an image, may have been smaller."""
        return self.went_through and not self.differs

    @property
    def followed(self) -> bool:
        """The same, but that any tensors may have been smaller."""
        return self._is_through() and not self.differs

    @property
    def went_through(self) -> bool:
        """The same as `finished`, but that ops may have been others."""
        return self._alike and self._is_through()

    @property
    def left_some_out(self) -> bool:
        """Whether the step went through the script but for what it left out. See NOTE [Leaving out]."""
        passed_by = self.missing | self._shown_early
        rest = self.script.expected[self._event :]
        return bool(self.missing) and not self.left and all(~event in passed_by for event in rest)

    def _is_through(self) -> bool:
        return self._whole and not self.left and not self.missing and self._event == len(self.script.expected)

    def _shorten(self) -> None:
        """Choose the events at which the hooks may be short."""
        script = self.script
        self._kept, self._shown, self._numbers = script.kept, script.shown, script.numbers
        self._stretches = script.stretches
        self._also_held = self._library.also_held(script)
        if not self._is_short:
            self._kept, self._shown = (None,) * len(self._kept), (NOBODY,) * len(self._shown)
        elif self._also_held:
            kept = list(script.kept)
            for number in self._also_held:
                kept[bisect.bisect_right(script.numbers, number) - 1] = None
            self._kept = tuple(kept)

    # --- hooks ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook."""
        event = self._event
        form = self._kept[event]
        if (
            form is not None
            and tensor.dtype is form.dtype
            and not tensor.is_nested  # some of those have no shape
            and tensor.shape == form.shape
        ):
            counted = self._capture.tick if self._capture is not None else OFF
            if counted == OFF == self._stretches[event]:
                self._event = event + 1
                return keep(tensor, self._numbers[event])
            if counted == self._stretches[event] and type(tensor) in PLAIN_TYPES and compiled_calls() == self._calls:
                self._event = event + 1
                with DisableTorchDispatch():
                    return keep(tensor, self._numbers[event])
        with self._lock:
            return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        began = self._mark() if self._mark is not None else None
        capture = self._capture
        if capture is not None:
            capture.hidden = True
        self._pass_by()
        number, inner = self._numbers[self._event], inside(tensor)
        if not self.left and not self._fits(inner, number) and not self._goes_over(number, inner):
            self.leave(
                f"saved tensor {number} is {inner.dtype} {list(sizes(inner))}, which no known kind of step expects"
            )
        if self.left:
            handle: Handle = self._safe.pack(tensor)
        else:
            number = self._numbers[self._event]  # another one, if some were left out
            handle = wrap_like(tensor, inner, self._hold_unseen(inner, number, self.script.savings[number]))
            stretch = self.script.stretches[self._event]
            self._act()
            if self._capture is not None:
                self._follow(stretch, tensor)
            if self._mark is not None:
                self.stamps.append((began, self._mark()))
        if capture is not None:
            capture.hidden = False
        return handle

    def unpack(self, handle: Handle) -> torch.Tensor:
        """The unpack hook."""
        event = self._event
        if self._shown[event] == handle.number and (self._capture is None or not self._capture.entered):
            self._event = event + 1
            return handle.show()
        with self._lock:
            return self._unpack(handle)

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if self.left:
            return self._safe.unpack(handle)
        began = self._mark() if self._mark is not None else None
        self._pass_by()
        is_expected = self._is_asked_for(handle.number)
        if not is_expected and self._leaves_out_rest(handle.number):
            is_expected = self._is_asked_for(handle.number)
        if not is_expected and self.missing and self._comes_soon(handle.number):
            self._shown_early.add(handle.number)
            return handle.show()
        if not is_expected and not self._goes_over(handle.number):
            self.leave(f"saved tensor {handle.number} was asked for out of turn")
            return handle.show()
        capture = self._capture
        if capture is not None:
            capture.hidden = True  # it may be on here: between two backward passes of one step it stays
        tensor = handle.show()
        self._act()
        if capture is not None:
            capture.hidden = False
        if self._mark is not None:
            self.stamps.append((began, self._mark()))
        return tensor

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
        between_ops = is_between_ops(tensor)
        if in_pass() and (stretch < 0 or not self._capture.entered):
            return  # what is done to the stack of modes within a node of autograd's does not outlast it
        if stretch >= 0:
            self._capture.begin(stretch, between_ops)
        elif between_ops:
            self._capture.end()

    # --- deviation -----------------------------------------------------------------------------------------------

    def _fits(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether ``tensor`` is what the script expects here, or the same but smaller."""
        script = self.script
        if self._event >= len(script.expected) or script.expected[self._event] != number:
            return False
        saving = script.savings[number]
        like = is_like(tensor, saving)
        if like and self._same_value(tensor, saving):
            self._is_sure()
            return True
        known = self._match(number, tensor) if self._exact else None
        if not like and known is None and not self.missing and is_smaller(tensor, saving):
            self._is_sure()
            self._note_smaller(saving)
            return self._same_value(tensor, saving)
        return self._leaves_out(tensor, known)

    def _leaves_out(self, tensor: torch.Tensor, known: Known | None) -> bool:
        """Go on at the next save of the script that is like this one, if that is the thing to do; ``known`` agrees with
        all that happened so far."""
        script = self.script
        if in_pass() or not (self._exact or self.missing):
            return False
        if known is not None and not self._library.covers(script, known.script, self._event):
            return False

        def is_next(number: int) -> bool:
            saving = script.savings[number]
            return is_like(tensor, saving) and self._same_value(tensor, saving)

        event = next_like(script, self._event, is_next)
        if event is not None:
            self._leave_out(event)
        return event is not None

    def _leaves_out_rest(self, number: int) -> bool:
        """The same where saved tensor ``number`` is asked for, though more was to be saved before."""
        script = self.script
        if not (self._exact or self.missing) or self._event >= len(script.expected) or script.expected[self._event] < 0:
            return False
        known = self._match(number, None) if self._exact else None
        if known is not None and not self._library.covers(script, known.script, self._event):
            return False
        saves = itertools.takewhile(lambda event: event >= 0, script.expected[self._event :])
        self._leave_out(self._event + sum(1 for _ in saves))
        self._pass_by()
        return True

    def _leave_out(self, event: int) -> None:
        """What was to be saved before ``event`` is not."""
        self.missing.update(self.script.expected[self._event : event])
        self._exact = self._is_lost = False
        self.differs = ""
        self._do_without(event)
        if self._capture is not None:
            self._capture.lose_count()

    def _do_without(self, event: int) -> None:
        """Do what is to be done at the events before ``event``, which do not come."""
        for actions in self.script.actions[self._event : event]:
            if actions is not None:
                self._perform(actions)
        self._event = event

    def _is_asked_for(self, number: int) -> bool:
        """Whether a saved tensor is to be asked for now."""
        return self.script.expected[self._event : self._event + 1] == (~number,)

    def _comes_soon(self, number: int) -> bool:
        """Whether a saved tensor is to be asked for soon, in a step that has left out some."""
        expected = self.script.expected
        coming = (expected[event] for event in range(self._event, len(expected)))
        return ~number in itertools.islice((each for each in coming if ~each not in self.missing), SOON)

    def _pass_by(self) -> None:
        """Go on behind requests for what was left out, or asked for before its turn."""
        expected, event = self.script.expected, self._event
        while self.missing and event < len(expected) and expected[event] < 0:
            number = ~expected[event]
            if number in self._shown_early:
                self._shown_early.remove(number)
            elif number not in self.missing:
                break
            event += 1
        if event > self._event:
            self._do_without(event)

    def _note_smaller(self, saving: Saving) -> None:
        """A tensor is smaller than expected: the step is still like the planned one if what was expected is small."""
        self._exact = False
        self._alike = self._alike and saving.shape.numel() * saving.dtype.itemsize < LEAST_MOVED_BYTES

    def _same_value(self, tensor: torch.Tensor, saving: Saving) -> bool:
        """Whether a value that was saved before is saved again, if that is what the script expects."""
        if saving.treatment == Treatment.KEEP or saving.first or not is_plain(tensor):
            return True
        holding = self._holding(saving.value)
        return holding is None or holding.knows(version_of(tensor))

    def _match(self, number: int, tensor: torch.Tensor | None) -> Known | None:
        """Another script that agrees with all that happened so far, and with ``tensor`` or number that comes next."""
        return self._library.agreeing(self.script, self._event, number, tensor)

    def _goes_over(self, number: int, tensor: torch.Tensor | None = None) -> bool:
        """Take up the script that this step agrees with, if there is one."""
        former, count = self.script, self._numbers[self._event]
        other = self._match(number, tensor) if self._exact and number >= 0 else None
        if other is None and self._exact and tensor is not None:
            other = self._library.larger(former, self._event, tensor)
            if other is not None:
                self._note_smaller(other.script.savings[number])
        names = renumbered(former, other.script, count) if other is not None else None
        if other is None or names is None:
            return False
        script = self.script = other.script
        self._whole = self._whole and not self._event
        self._held = {names[value]: holding for value, holding in self._held.items()}
        self.truth = None if other.verified else self._new_truth()
        self.differs = ""
        self._shorten()
        outdated, self._capture = self._capture, None
        if script.remakes:
            self._capture = CaptureMode(script.known, self._differs, self._place)
        if outdated is not None:
            outdated.forget()
            self._outdated.append(outdated)
            if self._capture is not None:
                self._capture.take_over(outdated, former.known)
        held = {value: holding for value in self._held if (holding := self._holding(value)) is not None}
        catch_up(script, self._event, held, remade_alike(former, script, count), self._send)
        return True

    def _differs(self, reason: str) -> None:
        """An op is not the recorded one: what is saved next tells whether some were left out. See NOTE [Leaving the
        plan]."""
        self.differs = self.differs or reason
        self._is_lost = True
        if self._capture is not None:
            self._capture.lose_count()

    def _is_sure(self) -> None:
        """What was to be saved was saved: if ops were others, then not because some were left out."""
        if self._is_lost:
            self._is_lost = False
            if self._capture is not None:
                self._capture.forget()

    def leave(self, reason: str) -> None:
        """Leave the plan. See NOTE [Leaving the plan]."""
        if not self.left:
            self.left = reason
            self._is_short = False
            self._shorten()
            self._safe.assume(self.script.alive_at(self._event))
            if self._capture is not None:
                self._capture.forget()
