"""A state's tensors, and an input's, as leaves of the graph of one step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

_Hook = Callable[[Tensor], Tensor | None]


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


def as_in_loop(state: Sequence[Tensor], start: Sequence[bool] = ()) -> list[Tensor]:
    """A state of the same tensors, of which `is_kept` is what it is in a plain loop, where only ``start`` may be."""
    kept = {id(part) for part, is_it in zip(state, start, strict=False) if is_it}
    leaves = {id(part): leaf(part, kept=id(part) in kept) if part.requires_grad else part for part in state}
    return [leaves[id(part)] for part in state]


def place_of(tensor: Tensor, among: Sequence[Tensor]) -> int:
    """The first place at which ``tensor`` itself stands; -1 if it does not."""
    return next((place for place, part in enumerate(among) if part is tensor), -1)


def hand_over_hooks(given: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
    """Let hooks that a cell has put on what it was ``given`` run on the whole gradients of ``inputs``, if not removed.

    A step's own leaf gets a part of that only, where an input is used elsewhere.
    """
    for stand_in, part in zip(given, inputs, strict=True):
        hooks = stand_in._backward_hooks  # handles of theirs remove them from there
        if hooks:
            part.register_hook(functools.partial(_run_hooks, hooks))


def drop_hooks(tensors: Iterable[Tensor]) -> None:
    """Forget hooks that a cell which runs again has put on these: those that it put on first have been handed over."""
    for tensor in tensors:
        if tensor._backward_hooks:
            tensor._backward_hooks.clear()


@contextlib.contextmanager
def hooks_dropped(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hooks that are put on ``tensors`` inside are gone at the end."""
    before = [(tensor, set(tensor._backward_hooks or ())) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, known in before:
            for key in set(tensor._backward_hooks or ()) - known:
                del tensor._backward_hooks[key]  # type: ignore[union-attr]


def _run_hooks(hooks: Mapping[int, _Hook], grad: Tensor) -> Tensor | None:
    result = None
    for hook in tuple(hooks.values()):
        found = hook(grad if result is None else result)
        result = result if found is None else found
    return result
