"""Where in which script a step is, and what becomes of it when it does not do what the script expects.

NOTE [Leaving the plan]
If a tensor is saved, or asked for, that the script does not expect there, the step first looks for another script that
agrees with all that happened so far, and goes on with that, unless the rest of the step is but a part of what the
script expects: see NOTE [Going over] and NOTE [Leaving out] in `ebbtide.run.forks`. A tensor that is only smaller than
expected is no reason to leave, here or in the other script, as long as what was saved before the first such tensor is
the same in both; nor are ops that are not the recorded ones, since the step may turn out to be of another kind: no more
calls are captured then, and what they should make again moves out instead. Otherwise the plan is left: what is held
stays valid (a holding never needs the script) and goes to the safe policy, as do new saves, and what is asked for comes
back on demand.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from ebbtide.observe.passes import in_pass, keeps_graph
from ebbtide.run.capture import CaptureMode
from ebbtide.run.covering import next_like
from ebbtide.run.forks import KnownScript, KnownScripts, catch_up, is_like, is_smaller, remade_alike, renumbered
from ebbtide.run.holdings import is_plain
from ebbtide.run.keeper import Keeper
from ebbtide.run.roomy import LEAST_BLOCK_BYTES
from ebbtide.run.safe import SafePolicy
from ebbtide.run.script import ExpectedSave, Script, Treatment
from ebbtide.run.tiers import SlowTier
from ebbtide.run.verify import Truth
from ebbtide.run.versions import version_of

SOON = 64
"""In a step that has left out some: how many requests early, or late, a saved tensor may be asked for. That of one node
may have been taken for one like it that another node saves a little before or after."""


class Tracker(Keeper):
    """A step on its way through a script.

    Args:
        script: what to do.
        library: scripts of all kinds of step, to go over to if the step turns out to be one of them.
        tier: the tier of a name, and of an empty one that of values which no plan moves; called when values move.
        safe: takes over when the plan is left.
        truth: if given, every value that the plan computes again is also kept and compared.
        new_truth: makes one for a script that nothing has verified yet, if the step goes over to it.

    Attributes:
        script: the script that is followed, which may have changed since.
        left: why the plan was left, or an empty string.
        differs: why nothing more was captured, though the plan was not left, or an empty string.
        missing: numbers of the saved tensors that the script expects and that this step leaves out.
        keeps_graphs: whether a backward pass so far keeps the graph that it goes through.
        refused: once something could not be made again, values among those that it reads that were written to.
    """

    def __init__(
        self,
        script: Script,
        library: KnownScripts,
        tier: Callable[[str], SlowTier],
        safe: SafePolicy,
        truth: Truth | None,
        new_truth: Callable[[], Truth],
    ) -> None:
        super().__init__(tier, truth)
        self.script = script
        self.left = self.differs = ""
        self.missing: set[int] = set()
        self.keeps_graphs = False
        self.refused: set[int] | None = None
        self._library = library
        self._safe = safe
        self._new_truth = new_truth
        self._outdated: list[CaptureMode] = []
        self._modes_below = 0
        self._event = 0
        self._exact = self._alike = self._whole = True
        self._shown_early: set[int] = set()
        self._is_lost = False
        self._capture = self._new_capture(script)

    @property
    def finished(self) -> bool:
        """Whether everything that the script expects has happened, as it expects it, from the beginning on. Tensors
        that are small anyway, such as what a loss makes of the boxes in an image, may have been smaller."""
        return self.went_through and not self.differs

    @property
    def followed(self) -> bool:
        """Whether everything that the script expects has happened, though any tensors may have been smaller."""
        return self._is_through() and not self.differs

    @property
    def went_through(self) -> bool:
        """Whether the step came to the script's end with the saves it expects, though its ops may have been others."""
        return self._alike and self._is_through()

    @property
    def left_some_out(self) -> bool:
        """Whether the step went through the script but for what it left out. See NOTE [Leaving out]."""
        passed_by = self.missing | self._shown_early
        rest = self.script.expected[self._event :]
        return bool(self.missing) and not self.left and all(~event in passed_by for event in rest)

    @property
    def is_empty(self) -> bool:
        """Whether nothing of what the script expects has happened, as in a step that evaluates."""
        return self._event == 0 and bool(self.script.expected) and not (self.left or self.missing)

    @property
    def ended_at(self) -> int | None:
        """The event before which the step ended, if it did what the script expects until something was asked for, and
        nothing of the rest, as one with fewer backward passes does; otherwise None."""
        event, expected = self._event, self.script.expected
        is_early = 0 < event < len(expected) and expected[event - 1] < 0
        return event if is_early and not self.left and not self.left_some_out else None

    @property
    def went_over(self) -> bool:
        """Whether the step has done all that the script expects, which it took up on its way."""
        return not (self._whole or self.left or self.missing) and self._event == len(self.script.expected)

    @property
    def is_part(self) -> bool:
        """Whether the step did a part of what the script expects, and nothing else."""
        return self.left_some_out or self.ended_at is not None

    def rewritten(self) -> set[int]:
        """External values that captured calls have read, and that were written in place since."""
        calls = self._capture.calls.values() if self._capture is not None else ()
        return {argument.value for call in calls for argument in call.arguments() if argument.is_rewritten}

    def _is_through(self) -> bool:
        return self._whole and not self.left and not self.missing and self._event == len(self.script.expected)

    def _accept(self, tensor: torch.Tensor, number: int) -> bool:
        """Take ``tensor``, which may be smaller, for what the script expects here or, where the step leaves out some,
        at its next save that is like it. Returns whether that was done."""
        script = self.script
        if self._event >= len(script.expected) or script.expected[self._event] != number:
            return False
        save = script.saves[number]
        like = is_like(tensor, save)
        if like and self._same_value(tensor, save) and self._saved_again(number, tensor) is None:
            self._find_again()
            return True
        known = self._match(number, tensor) if self._exact else None
        if not like and known is None and not self.missing and is_smaller(tensor, save):
            self._find_again()
            self._note_smaller(save)
            return self._same_value(tensor, save)
        return self._try_leave_out(tensor, known)

    def _try_leave_out(self, tensor: torch.Tensor, known: KnownScript | None) -> bool:
        """Go on at the next save of the script that is like this one, if that is the thing to do; ``known`` agrees with
        all that happened so far. Returns whether that was done."""
        script = self.script
        if in_pass() or not (self._exact or self.missing):
            return False
        if known is not None and not self._library.covers(script, known.script, self._event):
            return False

        def is_next(number: int) -> bool:
            save = script.saves[number]
            return is_like(tensor, save) and self._same_value(tensor, save)

        event = next_like(script, self._event, is_next)
        if event is not None:
            self._leave_out(event)
        return event is not None

    def _try_leave_out_rest(self, number: int) -> bool:
        """Go on where saved tensor ``number`` is asked for, though the script expects more saves before that. Returns
        whether that was done."""
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

    def _note_smaller(self, save: ExpectedSave) -> None:
        """A tensor is smaller than expected: the step is still like the planned one if what was expected is small."""
        self._exact = False
        self._alike = self._alike and save.shape.numel() * save.dtype.itemsize < LEAST_BLOCK_BYTES

    def _same_value(self, tensor: torch.Tensor, save: ExpectedSave) -> bool:
        """Whether a value that was saved before is saved again, if that is what the script expects."""
        if save.treatment == Treatment.KEEP or save.first or not is_plain(tensor):
            return True
        holding = self._holding(save.value)
        return holding is None or holding.knows(version_of(tensor))

    def _match(self, number: int, tensor: torch.Tensor | None) -> KnownScript | None:
        """Another script that agrees with all that happened so far, and with ``tensor`` or number that comes next."""
        again = self._saved_again(number, tensor) if tensor is not None else None
        return again or self._library.agreeing(self.script, self._event, number, tensor)

    def _saved_again(self, number: int, tensor: torch.Tensor) -> KnownScript | None:
        """A script that agrees with all that happened so far, and in which ``tensor`` shows the earlier value that it
        does, where a new one is expected."""
        others = self._library.repeats(self.script).get(number, ()) if self._exact else ()
        until = self._event + 1
        for known, earlier in others:
            holding = self._holding(self.script.saves[earlier].value)
            is_same = holding is not None and is_plain(tensor) and holding.knows(version_of(tensor))
            if is_same and known.script.expected[:until] == self.script.expected[:until]:
                return known
        return None

    def _take_up(self, script: Script) -> None:
        """Follow ``script`` from here on."""
        self.script = script

    def _look_at_pass(self, number: int) -> None:
        """A backward pass begins, and asks for ``number`` first: whether it keeps its graph tells kinds apart that are
        the same until then, and by plans for a graph that is let go of all that is shown would stay."""
        script, event, library = self.script, self._event, self._library
        keeps = keeps_graph()
        self.keeps_graphs |= keeps
        expects = library.keeps_graphs(script) and library.asks_again(script, event)
        if keeps == expects or not (self._exact and self._is_asked_for(number)):
            return
        other = library.keeping(script, event, number, keeps=keeps)
        if other is not None:
            is_room = not keeps and library.covers(script, other.script, event)
            is_other = not keeps or not library.keeps_graphs(script)
            if is_other and not is_room and not self._try_go_over_to(other) and keeps:
                self.leave("a backward pass keeps its graph, and what is held does not fit the plan for that")
        elif keeps and not library.keeps_graphs(script):
            self.leave("a backward pass keeps its graph, as none did in steps of this kind so far")

    def _try_go_over(self, number: int, tensor: torch.Tensor | None = None) -> bool:
        """Take up the script that this step agrees with. Returns whether there was one."""
        other = self._match(number, tensor) if self._exact and number >= 0 else None
        if other is None and self._exact and tensor is not None:
            other = self._library.larger(self.script, self._event, tensor)
            if other is not None:
                self._note_smaller(other.script.saves[number])
        return other is not None and self._try_go_over_to(other)

    def _try_go_over_to(self, other: KnownScript) -> bool:
        """Take up another script, unless it shows one value where the former one has two. Returns whether that was
        done."""
        former, script, count = self.script, other.script, self.script.numbers[self._event]
        held = {value: holding for value in self._held if (holding := self._holding(value)) is not None}
        names = renumbered(former, script, count, held)
        if names is None:
            return False
        self._whole = False  # before the first save, too, ops were not captured
        held = {names[value]: holding for value, holding in held.items()}
        self._held = {value: weakref.ref(holding) for value, holding in held.items()}
        self._versions = {names[value]: known for value, known in self._versions.items() if value in names}
        self._versions |= {value: holding.versions for value, holding in held.items()}
        self.truth = None if other.verified else self._new_truth()
        self.differs = ""
        self._take_up(script)
        self._capture_for(script, former)
        catch_up(script, self._event, held, remade_alike(former, script, count), self._send)
        for holding in held.values():  # some before they have to go, which does no harm
            self._note_put_off(holding, goes=True)
        return True

    def _capture_for(self, script: Script, former: Script) -> None:
        """Capture the calls that ``script`` needs from here on, instead of those of the former one."""
        outdated = self._capture
        if outdated is not None and outdated.entered and former.stays_on and script.stays_on:
            # Another mode could not be put on here if this is within a call of something compiled.
            outdated.turn_to(script.known, script.names, former.known)
            return
        self._capture = self._new_capture(script, self._modes_below)
        if outdated is not None:
            outdated.forget()
            self._outdated.append(outdated)
            if self._capture is not None:
                self._capture.take_over(outdated, former.known)

    def _new_capture(self, script: Script, below: int | None = None) -> CaptureMode | None:
        """What captures the calls that the recipes of ``script`` need, if there are any, or, where no mode could be put
        on later, those of a script that it may go over to."""
        if not (script.remakes or (script.stays_on and self._library.captures_all)):
            return None
        # It must not keep what keeps it: the tensors that calls were given, such as the batch, would outlive the step.
        differs = weakref.WeakMethod(self._differs)

        def tell(reason: str) -> None:
            if (told := differs()) is not None:
                told(reason)

        return CaptureMode(script.known, script.names, tell, below, stays_on=script.stays_on)

    def _differs(self, reason: str) -> None:
        """An op is not the recorded one: what is saved next tells whether some were left out. See NOTE [Leaving the
        plan]."""
        self.differs = self.differs or reason
        self._is_lost = True
        if self._capture is not None:
            self._capture.lose_count()

    def _find_again(self) -> None:
        """What was to be saved was saved: if ops were others, then not because some were left out."""
        if self._is_lost:
            self._is_lost = False
            if self._capture is not None:
                self._capture.forget()

    def leave(self, reason: str) -> None:
        """Leave the plan. See NOTE [Leaving the plan]."""
        if not self.left:
            self.left = reason
            if self._capture is not None:
                self._capture.forget()
            held = [holding for value in self._held if (holding := self._holding(value)) is not None]
            self._safe.take_over(held, self.script.alive_at(self._event), self.script.footprint.growth_bytes)
