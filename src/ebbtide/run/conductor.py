"""Runs a plan under the user's loop.

Autograd's saves and requests are the clock: at each of them the conductor does what the script says, and nothing runs
between them. A dispatch mode runs only over the stretches of the forward pass in which recipes capture their calls.

NOTE [Leaving the plan]
If a tensor is saved that the script does not expect there, the conductor first looks for another script that agrees
with all that was saved so far and goes on with that; a tensor that is only smaller than expected is no reason to leave.
Otherwise the plan is left: what is held stays valid (a holding never needs the script), new saves go to the safe
policy, and what is asked for comes back on demand.

NOTE [Threads of autograd]
Autograd has a thread for each device, and uses the caller's for the CPU; they may call the hooks at once. Whatever
takes longer than a look, they do in turn. In which order they come is not for a plan to say: if it is not the observed
one, the plan is left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.observe.clock import Clock, Span
from ebbtide.observe.compiled_calls import compiled_calls
from ebbtide.run.allocator import Trimmer
from ebbtide.run.holdings import Holding, Kept, View, is_plain, keep
from ebbtide.run.recipes import CaptureMode, Recipe
from ebbtide.run.safe import SafePolicy
from ebbtide.run.script import NOBODY, Actions, Saving, Script, Treatment
from ebbtide.run.tiers import SlowTier
from ebbtide.run.verify import Truth

_nodes_made: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]


class Conductor:
    """One planned step.

    Args:
        script: what to do.
        others: scripts of other kinds of step, to go over to if the step turns out to be one of them.
        tier: the tier of a name, and of an empty one that of values which no plan moves; called when values move.
        safe: takes over when the plan is left.
        truth: if given, every value that the plan computes again is also kept and compared.
        trimmer: keeps the resident size near the live bytes; None to leave it alone.
        clock: takes the stamps; None to take none.

    Attributes:
        script: the script that is followed, which may have changed since.
        left: why the plan was left, or an empty string.
        stamps: with a clock: for each event its marks before and after what the conductor did there.
    """

    def __init__(
        self,
        script: Script,
        others: Sequence[Script],
        tier: Callable[[str], SlowTier],
        safe: SafePolicy,
        truth: Truth | None = None,
        trimmer: Trimmer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.script = script
        self.left = ""
        self.stamps: list[Span] = []
        self._others = others
        self._tier = tier
        self._safe = safe
        self._truth = truth
        self._trimmer = trimmer
        self._outdated: list[CaptureMode] = []
        self._event = 0
        self._exact = True
        self._held: dict[int, weakref.ref[Holding]] = {}
        self._capture = CaptureMode(script.known, self.leave) if script.remakes else None
        self._calls = compiled_calls()
        self._lock = threading.RLock()  # a value that dies in a hook may call another
        self._mark = clock.mark if clock is not None else None
        # Where nothing is to be done but to keep and to show, as at most events of most steps, the hooks are short.
        self._is_short = clock is None and trimmer is None
        self._shorten()

    def start(self) -> None:
        """Call when the step begins."""
        if self._capture is not None and self.script.stretches[-1] >= 0:
            self._capture.begin(0, between_ops=True)

    def stop(self) -> None:
        """Call when the context ends; a later backward pass still follows the script."""
        for capture in (self._capture, *reversed(self._outdated)):
            if capture is not None:
                capture.end()

    @property
    def finished(self) -> bool:
        """Whether everything that the script expects has happened, as it expects it."""
        return not self.left and self._exact and self._event == len(self.script.expected)

    def _shorten(self) -> None:
        """Choose the events at which the hooks may be short."""
        self._kept, self._shown, self._numbers = self.script.kept, self.script.shown, self.script.numbers
        if not self._is_short:
            self._kept, self._shown = (None,) * len(self._kept), (NOBODY,) * len(self._shown)

    # --- hooks ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook."""
        event = self._event
        form = self._kept[event]
        if (
            form is not None
            and tensor.dtype is form.dtype
            and tensor.shape == form.shape
            and (self._capture is None or not self._capture.entered)
        ):
            self._event = event + 1
            return keep(tensor, self._numbers[event])
        with self._lock:
            return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        began = self._mark() if self._mark is not None else None
        capture = self._capture
        if capture is not None:
            capture.hidden = True
        number = self._numbers[self._event]
        if not self.left and not self._fits(tensor, number):
            self._go_over(tensor, number)
        if self.left:
            handle = self._safe.pack(tensor)
        else:
            handle = self._hold(tensor, number, self.script.savings[number])
            stretch = self.script.stretches[self._event]
            self._act()
            if self._capture is not None:
                self._follow(stretch, tensor)
            if self._mark is not None:
                self.stamps.append((began, self._mark()))
        if capture is not None:
            capture.hidden = False
        return handle

    def unpack(self, handle: Kept | View) -> torch.Tensor:
        """The unpack hook."""
        event = self._event
        if self._shown[event] == handle.number and (self._capture is None or not self._capture.entered):
            self._event = event + 1
            return handle.show()
        with self._lock:
            return self._unpack(handle)

    def _unpack(self, handle: Kept | View) -> torch.Tensor:
        if self.left:
            return self._safe.unpack(handle)
        began = self._mark() if self._mark is not None else None
        if self._event >= len(self.script.expected) or self.script.expected[self._event] != ~handle.number:
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

    def _perform(self, actions: Actions) -> None:
        for value in actions.drops:
            holding = self._holding(value)
            if holding is not None:
                self._drop(holding)
        for value in actions.releases:
            holding = self._holding(value)
            if holding is not None:
                holding.release()
        for value, tier in actions.outs:
            holding = self._holding(value)
            if holding is not None:
                holding.send(self._tier(tier))
        for value in actions.loads:
            holding = self._holding(value)
            if holding is not None:
                holding.fetch()

    def _follow(self, stretch: int, tensor: torch.Tensor) -> None:
        """Put the capture mode on for the stretch that begins at this save, or take it off. See NOTE [Counting ops]."""
        assert self._capture is not None
        if compiled_calls() != self._calls and not (self.script.stays_on and self._capture.entered):
            self.leave("something is called that torch.compile returned, which steps of this kind did not do so far")
            return
        between_ops = _is_result(tensor)
        if stretch >= 0:
            self._capture.begin(stretch, between_ops)
        elif between_ops:
            self._capture.end()

    # --- holdings ------------------------------------------------------------------------------------------------

    def _holding(self, value: int) -> Holding | None:
        reference = self._held.get(value)
        return reference() if reference is not None else None

    def _hold(self, tensor: torch.Tensor, number: int, saving: Saving) -> Kept | View:
        if saving.treatment == Treatment.KEEP or not is_plain(tensor):
            return keep(tensor, number)
        holding = self._holding(saving.value)
        fresh = holding is None
        if holding is None:
            holding = Holding()
            self._held[saving.value] = weakref.ref(holding)
        if fresh or saving.first:  # the node that saved it first may be gone already, and the holding with it
            holding.fill(tensor)
            holding.recipes = self._recipes(saving)
            for tier in saving.tiers:
                self._tier(tier).expect(tensor.device)
            if saving.treatment == Treatment.REMAKE:
                self._drop(holding)
            elif saving.treatment == Treatment.MOVE and not saving.first:
                holding.send(self._tier(saving.tiers[0]))  # its planned copy out went with the former holding
        elif holding.tensor is None and holding.recipe is None:
            return keep(tensor, number)
        return View(holding, tensor, number)

    def _recipes(self, saving: Saving) -> list[Recipe]:
        """How the value is made again, each time that it is."""
        recipes = []
        for remake in saving.remakes:
            assert self._capture is not None
            calls = [self._capture.calls.get(op) for op in remake.ops]
            leaves = {value: self._holding(value) for value in remake.leaves}
            if any(call is None for call in calls) or any(leaf is None for leaf in leaves.values()):
                return []  # The plan was left and taken up again in between: the value just stays.
            present = {value: leaf for value, leaf in leaves.items() if leaf is not None}
            recipes.append(Recipe(saving.value, [call for call in calls if call is not None], present, remake.leaves))
        return recipes

    def _drop(self, holding: Holding) -> None:
        """Let go of what the next recipe makes again."""
        if holding.recipes and holding.intact:
            recipe = holding.recipes.pop(0)
            if self._truth is not None:
                self._truth.watch(holding, recipe, self._tier(""))
            else:
                holding.drop(recipe)

    # --- deviation -----------------------------------------------------------------------------------------------

    def _fits(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether ``tensor`` is what the script expects here, or the same but smaller."""
        script = self.script
        if self._event >= len(script.expected) or script.expected[self._event] != number:
            return False
        saving = script.savings[number]
        if tensor.dtype is not saving.dtype:
            return False
        if tensor.shape == saving.shape:
            return self._same_value(tensor, saving)
        if (
            tensor.dim() == len(saving.shape)
            and tensor.numel() <= saving.shape.numel()
            and not self._known(tensor, number)
        ):
            self._exact = False
            return self._same_value(tensor, saving)
        return False

    def _same_value(self, tensor: torch.Tensor, saving: Saving) -> bool:
        """Whether a value that was saved before is saved again, if that is what the script expects."""
        if saving.treatment == Treatment.KEEP or saving.first:
            return True
        holding = self._holding(saving.value)
        return holding is None or holding.tensor is None or holding.identity == tensor.untyped_storage()._cdata

    def _known(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether another script expects exactly this tensor here."""
        return self._match(tensor, number) is not None

    def _match(self, tensor: torch.Tensor, number: int) -> Script | None:
        prefix = self.script.prefixes[number] if number < len(self.script.prefixes) else None
        for script in self._others:
            if (
                number < len(script.savings)
                and script.prefixes[number] == prefix
                and script.expected[self._event : self._event + 1] == (number,)
                and script.savings[number].shape == tensor.shape
                and script.savings[number].dtype is tensor.dtype
            ):
                return script
        return None

    def _go_over(self, tensor: torch.Tensor, number: int) -> None:
        """Take up the script that this step agrees with, if there is one; else leave the plan."""
        script = self._match(tensor, number) if self._exact else None
        if script is None:
            self.leave(
                f"saved tensor {number} is {tensor.dtype} {list(tensor.shape)}, which no known kind of step expects"
            )
            return
        if number > 0:
            self._exact = False  # what was done so far followed another plan
        self.script = script
        self._shorten()
        if self._capture is not None:
            self._capture.forget()
            self._outdated.append(self._capture)
        self._capture = CaptureMode(script.known, self.leave) if script.remakes else None

    def leave(self, reason: str) -> None:
        """Leave the plan. See NOTE [Leaving the plan]."""
        if not self.left:
            self.left = reason
            self._is_short = False
            self._shorten()
            if self._capture is not None:
                self._capture.forget()


def _is_result(tensor: torch.Tensor) -> bool:
    """Whether a tensor being saved is the result of the op whose node was made last: no op is under way then."""
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() == _nodes_made() - 1
