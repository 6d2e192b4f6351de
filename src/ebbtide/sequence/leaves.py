"""A state's tensors, and an input's, as leaves of the graph of one step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def detached(state: Sequence[Tensor], *, cut: bool = False) -> list[Tensor]:
    """The tensors of a state as leaves; one that is there several times is one leaf. If ``cut``, none requires grad."""
    leaves = {id(part): part.detach().requires_grad_(part.requires_grad and not cut) for part in state}
    return [leaves[id(part)] for part in state]


def is_kept(part: Tensor) -> bool:
    """Whether autocast keeps what it has converted of ``part``, so that gradients of several uses of it are added up in
    the lower precision: it does of leaves that are no views."""
    return part.is_leaf and part.requires_grad and not part._is_view()


def leaf(part: Tensor, *, kept: bool) -> Tensor:
    """``part`` as a leaf that requires grad, of which `is_kept` is ``kept``."""
    found = part.detach()
    return (found if kept else found.view_as(found)).requires_grad_()


def as_in_loop(state: Sequence[Tensor], start: Sequence[bool]) -> list[Tensor]:
    """A state of the same tensors, of which `is_kept` is what it is in a plain loop, where only ``start`` may be."""
    kept = {id(part) for part, is_it in zip(state, start, strict=False) if is_it}
    leaves = {id(part): leaf(part, kept=id(part) in kept) if part.requires_grad else part for part in state}
    return [leaves[id(part)] for part in state]


def place_of(tensor: Tensor, among: Sequence[Tensor]) -> int:
    """The first place at which ``tensor`` itself stands; -1 if it does not."""
    return next((place for place, part in enumerate(among) if part is tensor), -1)
