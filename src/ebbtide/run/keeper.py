"""What a planned step holds in place of its saved tensors, and what is done with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ebbtide.observe.mode import DisableTorchDispatch
from ebbtide.observe.passes import in_pass, keeps_graph
from ebbtide.observe.transforms import in_trace
from ebbtide.observe.wrapped import PLAIN_TYPES
from ebbtide.run.actions import Actions
from ebbtide.run.capture import CaptureMode
from ebbtide.run.holdings import Holding, Kept, View, is_plain, keep, view_of
from ebbtide.run.recipes import Recipe
from ebbtide.run.script import ExpectedSave, Treatment
from ebbtide.run.tiers import SlowTier
from ebbtide.run.verify import Truth
from ebbtide.run.versions import Version, version_of


class Keeper:
    """Holds the saved tensors of one step.

    Args:
        tier: the tier of a name, and of an empty one that of values which no plan moves; called when values move.
        truth: if given, every value that the plan computes again is also kept and compared.

    Attributes:
        truth: what is compared now.
    """

    def __init__(self, tier: Callable[[str], SlowTier], truth: Truth | None) -> None:
        self.truth = truth
        self._tier = tier
        self._held: dict[int, weakref.ref[Holding]] = {}
        self._versions: dict[int, list[Version]] = {}  # of their values; holdings may be gone before calls are compared
        self._also_held: frozenset[int] = frozenset()
        self._capture: CaptureMode | None = None
        self._put_off: dict[weakref.ref[Holding], bool] = {}  # whether they are to go as well

    def _perform(self, actions: Actions) -> None:
        """Do what the script says, as far as the values are still held."""
        if self._put_off:
            self._catch_up()
        for value in actions.drops:
            holding = self._holding(value)
            if holding is not None:
                self._drop(holding)
        for value in actions.releases:
            holding = self._holding(value)
            if holding is not None:
                holding.release()
                self._note_put_off(holding, goes=True)
        dies = bool(actions.spent) and in_pass() and not keeps_graph()
        for value, tier in actions.outs:
            holding = self._holding(value)
            if holding is not None and dies and value in actions.spent:
                # By itself, as a rule, and a copy under way would keep it. What another graph has still goes as it is
                # released.
                holding.put_off = self._tier(tier)
            elif holding is not None:
                holding.send(self._tier(tier))
                self._note_put_off(holding, goes=False)
        for value in actions.loads:
            holding = self._holding(value)
            if holding is not None:
                holding.fetch()

    def _holding(self, value: int) -> Holding | None:
        reference = self._held.get(value)
        return reference() if reference is not None else None

    def _hold_unseen(self, tensor: torch.Tensor, number: int, save: ExpectedSave) -> Kept | View:
        """`_hold`, without asking the capture mode whether it wants to see what is done there."""
        if self._capture is None or not self._capture.entered or type(tensor) not in PLAIN_TYPES or in_trace():
            return self._hold(tensor, number, save)
        with DisableTorchDispatch():
            return self._hold(tensor, number, save)

    def _hold(self, tensor: torch.Tensor, number: int, save: ExpectedSave) -> Kept | View:
        if self._put_off:
            self._catch_up()
        stays = save.treatment == Treatment.KEEP and number not in self._also_held
        if stays or not is_plain(tensor):
            return keep(tensor, number)
        holding = self._holding(save.value)
        fresh, count = holding is None, None
        if holding is None:
            holding = Holding()
            self._held[save.value] = weakref.ref(holding)
        if fresh or save.first:  # the node that saved it first may be gone already, and the holding with it
            if self._capture is not None:
                holding.versions = self._versions.setdefault(save.value, [])
            holding.fill(tensor, is_saved=True)
            holding.recipes = self._recipes(save, holding)
            self._expect(holding, tensor, save)
            if save.treatment == Treatment.REMAKE:
                self._drop(holding)
            elif save.treatment == Treatment.MOVE and not save.first:
                holding.send(self._tier(save.tiers[0]))  # its planned copy out went with the former holding
        elif holding.empty or not holding.knows(version_of(tensor)):
            return keep(tensor, number)
        else:  # maybe on another stream
            self._expect(holding, tensor, save)
            count = holding.other_count(tensor)
        return view_of(holding, tensor, number, count)

    def _expect(self, holding: Holding, tensor: torch.Tensor, save: ExpectedSave) -> None:
        for tier in save.tiers or ("",):
            holding.streams = self._tier(tier).expect(tensor.device)

    def _recipes(self, save: ExpectedSave, holding: Holding) -> tuple[Recipe, ...]:
        """How the value is made again, each time that it is; empty if that was not captured, or not this value."""
        recipes = []
        for remake in save.remakes:
            assert self._capture is not None
            calls = self._capture.calls_of(remake.ops)
            leaves = {v: leaf for v in remake.leaves if (leaf := self._holding(v)) is not None}
            if calls is None or len(leaves) < len(remake.leaves):
                return ()
            recipe = Recipe(save.value, calls, leaves, remake.leaves)
            if not recipe.makes(holding, self._versions):
                return ()
            recipes.append(recipe)
        return tuple(recipes)

    def _drop(self, holding: Holding) -> None:
        """Let go of what the next recipe makes again; what has none moves out."""
        if holding.recipes and holding.intact:
            recipe, *later = holding.recipes
            holding.recipes = tuple(later)
            if self.truth is not None:
                self.truth.watch(holding, recipe, self._tier(""), later=len(later))
            else:
                holding.drop(recipe)
        elif holding.intact:
            self._send(holding, "")
            holding.release()
            self._note_put_off(holding, goes=True)

    def _note_put_off(self, holding: Holding, *, goes: bool) -> None:
        """Copy it out, and let go of it if it ``goes``, as soon as that may be."""
        if holding.put_off is not None:
            reference = weakref.ref(holding)
            self._put_off[reference] = goes or self._put_off.get(reference, False)

    def _catch_up(self) -> None:
        """Move out what could not be moved out before."""
        noted, self._put_off = self._put_off, {}
        for reference, goes in noted.items():
            holding = reference()
            if holding is not None and holding.put_off is not None:
                holding.send(holding.put_off)
                if goes:
                    holding.release()
                self._note_put_off(holding, goes=goes)

    def _send(self, holding: Holding, tier: str) -> None:
        """Queue the copy out of what the script does not move."""
        if holding.tensor is not None:
            self._tier(tier).expect(holding.tensor.device)
            holding.send(self._tier(tier))
