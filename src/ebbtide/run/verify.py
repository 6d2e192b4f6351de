"""The verify step: every value that a plan computes again is kept as well, compared bit for bit, and the truth is used.

A kernel that the recorder could not see (one that fills memory behind ATen's back, one that is not deterministic) can
so cost speed, never correctness: what differs is banned from being computed again. Of the few ops that are known to
leave parts of a result unwritten, which no op reads, it is only looked whether they run.

The truth comes back part by part, each to be compared and let go of, so that this step keeps to the budget, too: it has
one part more than the plan says. Only of what differs, or cannot be made, the whole truth takes the place.
"""

from __future__ import annotations

import logging
import traceback

import torch

from ebbtide.errors import SpillError
from ebbtide.observe.loads import note_memory
from ebbtide.run.holdings import Holding
from ebbtide.run.recipes import Recipe
from ebbtide.run.tiers import Slot, SlowTier
from ebbtide.run.tiers.memory import bytes_of

_log = logging.getLogger(__name__)

PART_BYTES = 256 << 10
"""Small beside any budget; a value takes a disk less than twice as long in such parts as in one."""


class _TrueBytes:
    """The bytes of ``storage``, copied out to ``tier``. Raises `SpillError` if that fails, and so do its methods."""

    __slots__ = ("_device", "_parts", "_size_bytes", "_tier")

    def __init__(self, storage: torch.UntypedStorage, tier: SlowTier) -> None:
        self._tier = tier
        self._device = storage.device
        self._size_bytes = storage.nbytes()
        parts = [slice(start, start + PART_BYTES) for start in range(0, self._size_bytes, PART_BYTES)]
        self._parts = [(part, tier.write(storage[part])) for part in parts]
        for _, slot in self._parts:
            slot.wait()

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` has the same bytes."""
        if storage.nbytes() != self._size_bytes:
            return False
        found = bytes_of(storage)
        return all(torch.equal(found[part], self._read(slot)) for part, slot in self._parts)

    def whole(self) -> torch.Tensor:
        """All of them as uint8, of shape ``(size_bytes,)``, in memory of their own."""
        whole = torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device)
        note_memory(whole.untyped_storage(), self._tier)
        for part, slot in self._parts:
            whole[part].copy_(self._read(slot))
        return whole

    def _read(self, slot: Slot) -> torch.Tensor:
        return bytes_of(self._tier.read(slot).wait())


class _Witness(Recipe):
    """Stands in a holding for a recipe: computes the value again and compares it with what is true."""

    __slots__ = ("_later", "_recipe", "_true", "_truth")

    def __init__(self, truth: Truth, recipe: Recipe, later: int, true: _TrueBytes) -> None:
        self._truth = truth
        self._recipe = recipe
        self._later = later
        self._true = true

    def replay(self) -> torch.Tensor:
        self._truth.compared.add((self._recipe.target, self._later))
        try:
            again = self._recipe.replay()
        except (SpillError, MemoryError, torch.OutOfMemoryError):
            raise  # these say nothing of the recipe, and a planned step would raise them, too
        except Exception as fault:  # whatever the reason: what cannot be computed again here is never computed again
            reason = traceback.format_exception_only(fault)[-1].strip()  # the fault would keep this step's frames
            _log.debug("value %d cannot be computed again: %s", self._recipe.target, reason)
            again = None
        with torch._C._DisableTorchDispatch():
            if again is not None and (not self._recipe.is_exact or self._true.is_in(again.untyped_storage())):
                return again
            self._truth.differing.add(self._recipe.target)
            del again  # first, for there may be no room for both
            return self._true.whole()


class Truth:
    """Collects what the verify step finds.

    Attributes:
        compared: values that were computed again and compared, each with the number of times that it is to be computed
            again after that: each time has a recipe of its own.
        differing: those of these values whose recomputation is not bit for bit what the forward pass made.
    """

    def __init__(self) -> None:
        self.compared: set[tuple[int, int]] = set()
        self.differing: set[int] = set()

    def watch(self, holding: Holding, recipe: Recipe, tier: SlowTier, *, later: int = 0) -> None:
        """Keep the true value of ``holding`` in ``tier`` and compare it when it is asked for; ``later``: how many times
        it will be computed again after that."""
        assert holding.tensor is not None
        holding.drop(_Witness(self, recipe, later, _TrueBytes(holding.tensor.untyped_storage(), tier)))
