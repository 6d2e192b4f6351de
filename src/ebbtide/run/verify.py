"""The verify step: every value that a plan computes again is kept as well, compared bit for bit, and the truth is used.

A kernel that the recorder could not see (one that fills memory behind ATen's back, one that is not deterministic) can
so cost speed, never correctness: what differs is banned from being computed again. Of the few ops that are known to
leave parts of a result unwritten, which no op reads, it is only looked whether they run.
"""

from __future__ import annotations

import torch

from ebbtide.run.holdings import Holding
from ebbtide.run.recipes import Recipe
from ebbtide.run.tiers import SlowTier


class _Witness(Recipe):
    """Stands in a holding for a recipe: brings the true value back, computes it again, compares."""

    __slots__ = ("_recipe", "_true", "_truth")

    def __init__(self, truth: Truth, recipe: Recipe, true: Holding) -> None:
        self._truth = truth
        self._recipe = recipe
        self._true = true

    def replay(self) -> torch.Tensor:
        self._truth.compared.add(self._recipe.target)
        true = self._true.arrive()
        try:
            again = self._recipe.replay()
            same = not self._recipe.is_exact or torch.equal(_bytes(true), _bytes(again))
        except Exception:  # whatever the reason: what cannot be computed again here is never computed again
            same = False
        if not same:
            self._truth.differing.add(self._recipe.target)
        return true


class Truth:
    """Collects what the verify step finds.

    Attributes:
        compared: values that were computed again, and compared.
        differing: those of them whose recomputation is not bit for bit what the forward pass made.
    """

    def __init__(self) -> None:
        self.compared: set[int] = set()
        self.differing: set[int] = set()

    def watch(self, holding: Holding, recipe: Recipe, tier: SlowTier) -> None:
        """Keep the true value of ``holding`` in ``tier`` and compare it when it is asked for."""
        true = Holding()
        assert holding.tensor is not None
        true.fill(holding.tensor)
        true.streams = holding.streams
        true.send(tier)
        true.release()
        holding.drop(_Witness(self, recipe, true))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
