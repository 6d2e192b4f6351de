"""What is left of saved-tensor hooks where a budget does not bind, or where a step was left in another thread."""

from __future__ import annotations

import math

import torch

from ebbtide.observe.hooks import any_on, pop_hooks, push_hooks, take_off
from ebbtide.observe.ledger import has_storage, sizes
from ebbtide.observe.mode import drop_modes, our_modes
from ebbtide.observe.passes import tell_no_more, tell_of_passes
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import inside
from ebbtide.run.holdings import keep
from ebbtide.run.wrapped import Handle, wrap_like
from ebbtide.step import Saved


def take_off_from_within() -> None:
    """Take the hooks off that are being called: their step was left in another thread, which could take nothing off
    here. Its modes, which see nothing any more, go before this thread's next backward pass: an op may be under way."""
    pop_hooks()
    modes = our_modes()

    def modes_go() -> None:
        drop_modes(modes)
        tell_no_more(modes_go)

    tell_of_passes(modes_go)


class LightWatch:
    """Watches a step whose budget does not bind: looks at the first saved tensor, then takes its hooks out.

    Args:
        first: what was saved first when such a step was observed; None if nothing was.

    Attributes:
        left: why the step is of another kind, or an empty string.
    """

    def __init__(self, first: Saved | None) -> None:
        self.left = ""
        self._has_seen = self._stays = False
        self._first = first

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved so far, though something was expected."""
        return self._first is not None and not self._has_seen

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Handle:
        """The pack hook."""
        if not self._stays:
            self._take_off()
        first, inner = self._first, inside(tensor)
        if self._has_seen:  # within a backward pass they come back on: see `take_off`
            return wrap_like(tensor, inner, keep(inner, -1))
        self._has_seen = True
        shape, most = sizes(inner), math.prod(first.shape) if first is not None else 0
        dtype = str(inner.dtype).removeprefix("torch.")
        if first is None or len(shape) != len(first.shape) or (has_storage(inner) and inner.numel() > most):
            self.left = f"the first saved tensor is {list(shape)}, expected {first.shape if first else 'none'}"
        elif dtype != first.dtype:
            self.left = f"the first saved tensor is of {dtype}, expected {first.dtype}"
        return wrap_like(tensor, inner, keep(inner, -1))

    def _take_off(self) -> None:
        take_off(self.pack, self.unpack)
        if any_on():  # the user's, from before the step: they are not asked within it
            self._stays = True
            push_hooks(self.pack, self.unpack)

    @never_compiled
    def unpack(self, handle: Handle) -> torch.Tensor:
        """The unpack hook."""
        return handle.show()


def forget_failed_backward() -> None:
    """Let go of what was ready to run when a backward pass failed: autograd keeps it until this thread's next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).clone().backward()
