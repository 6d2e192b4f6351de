"""Computing a value again: the calls that made it, captured in this very step, run once more when it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.asking import shown
from ebbtide.observe.ledger import tensors_in
from ebbtide.observe.schema import is_partly_written
from ebbtide.run.calls import Argument, Call
from ebbtide.run.holdings import Holding
from ebbtide.run.tiers.memory import bytes_of
from ebbtide.run.versions import Version, changed_error, is_among, is_same


class Recipe:
    """The calls that make one value, and the holdings of the values they start from.

    Args:
        target: the value.
        calls: in order.
        leaves: the holdings of what they start from, by value.
        order: the same values, by first use.
    """

    __slots__ = ("calls", "leaves", "order", "target")

    def __init__(self, target: int, calls: list[Call], leaves: dict[int, Holding], order: tuple[int, ...]) -> None:
        self.target = target
        self.calls = calls
        self.leaves = leaves
        self.order = order

    @property
    def is_exact(self) -> bool:
        """Whether what it makes is the same bit for bit, as far as is known of its ops."""
        return not any(is_partly_written(call.func) and call.known.outputs[-1] == self.target for call in self.calls)

    def makes(self, holding: Holding, alike: Mapping[int, Sequence[Version]]) -> bool:
        """Whether the calls, as they were captured, made what ``holding`` holds from what the leaves hold.

        They were told by their place among the ops of the step, which a branch or one op more may have shifted. By
        value, ``alike`` are versions with the same bytes: what has come back may have been read instead.
        """
        made = {value: leaf.versions[0] for value, leaf in self.leaves.items() if leaf.versions}
        for call in self.calls:
            for argument in call.arguments():
                shown = argument.shown
                if shown is not None:
                    version = made.get(argument.value)
                    if version is None:
                        return False
                    if not is_same(version, shown):
                        known = alike.get(argument.value, ())
                        if not (is_among(version, known) and is_among(shown, known)):
                            return False
            made.update(call.made)
        return self.target in made and holding.knows(made[self.target])

    def replay(self) -> torch.Tensor:
        """Run the calls again; returns a tensor that shows the storage of the value.

        Raises:
            RecipeError: if something external that they read has been changed since.
        """
        for value in self.order:
            self.leaves[value].arrive()
        made: dict[int, torch.Tensor] = {}
        # No tensor here requires grad, so nothing is saved whatever the mode.
        grad = torch.is_grad_enabled()
        try:
            with torch._C._DisableAutocast(), shown():
                if len(self.calls) == 1:
                    self._run(self.calls[0], made)
                else:
                    self._run_all(made)
        finally:
            _set_grad(grad)
        return made[self.target]

    def _run_all(self, made: dict[int, torch.Tensor]) -> None:
        """Run the calls, and let go of what no later one reads."""
        last_use = {value: index for index, call in enumerate(self.calls) for value in call.known.inputs}
        for index, call in enumerate(self.calls):
            self._run(call, made)
            for value in (*call.known.inputs, *call.known.outputs):
                if last_use.get(value, -1) <= index and value != self.target:
                    made.pop(value, None)

    def _run(self, call: Call, made: dict[int, torch.Tensor]) -> None:
        known = call.known
        for old, new in known.mutated:
            # A fresh copy where the older version is still wanted: it is somebody's saved tensor.
            made[new] = made.pop(old) if old in made else _copy(self.leaves[old].arrive())
            made[old] = made[new]
        args = list(call.args)
        for place in call.places:
            args[place] = self._filled(args[place], made)
        kwargs = {name: self._filled(item, made) for name, item in call.kwargs.items()} if call.kwargs else {}
        _set_grad(call.grad)
        result = call.func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and len(known.outputs) == 1 and not known.mutated:
            made[known.outputs[0]] = result  # of its own, as it was when it was captured
            return
        for old, _ in known.mutated:
            del made[old]
        given = {t.untyped_storage()._cdata for t in tensors_in([args[place] for place in call.places])}
        given |= {t.untyped_storage()._cdata for t in tensors_in(kwargs.values())}
        made.update(call.fresh(result, given))

    def _filled(self, item: Any, made: dict[int, torch.Tensor]) -> Any:
        """What a captured argument stands for now."""
        if isinstance(item, Argument):
            if item.external is not None:
                return item.as_captured(_unchanged(item.external, item))
            if item.value in made:
                return item.of(made[item.value])
            leaf = self.leaves[item.value]
            tensor = leaf.arrive()
            if not leaf.intact:
                raise changed_error(tensor, tensor._version, leaf.version, item.value)
            return item.of(tensor)
        if type(item) in (list, tuple):
            return type(item)(self._filled(part, made) for part in item)
        return item


def _set_grad(enabled: bool) -> None:
    """Without a context, which takes as long as a small op."""
    if torch.is_grad_enabled() is not enabled:
        torch._C._set_grad_enabled(enabled)


def _unchanged(external: torch.Tensor, captured: Argument) -> torch.Tensor:
    if captured.is_rewritten:
        raise RecipeError(
            f"a tensor {list(external.shape)} that a value is computed again from was changed in place between forward "
            "and backward, which was not so in the steps that were observed and verified; change it after the backward "
            "pass. From the next step on, plans keep what is computed from it, if they can"
        )
    if external.shape != captured.shape or (external.numel() and not external.untyped_storage().nbytes()):
        raise RecipeError(
            f"a tensor {list(captured.shape)} that a value is computed again from had its memory taken from it between "
            "forward and backward, which was not so in the step that was observed; leave verify on: such values are "
            "then found in the first planned step and kept"
        )
    return external.detach()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor.untyped_storage()).clone()
