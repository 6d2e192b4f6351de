"""What a scan takes its inputs from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, Protocol, cast

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from ebbtide.errors import SequenceError
from ebbtide.observe.ledger import has_storage


class Inputs(Protocol):
    """What `scan` takes an input from, by step, as often as it needs it."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int, /) -> Any: ...


def indexed(inputs: Iterable[Any]) -> Inputs:
    """``inputs`` as they are, where they can be indexed by steps, or their items.

    Raises:
        SequenceError: if they give one tensor several times, with other numbers in it.
    """
    if isinstance(inputs, Tensor):
        # Each index would make another tensor, but gradients must go to one.
        return inputs.unbind(0) if inputs.requires_grad else inputs
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs)
    return cast(Inputs, inputs) if _is_indexed(inputs) else _collected(inputs)


def in_turn(inputs: Iterable[Any]) -> Iterable[Any]:
    """What `indexed` gives, each once, which are not kept."""
    if not _is_indexed(inputs):
        return inputs
    steps = cast(Inputs, inputs)
    return (steps[step] for step in range(len(steps)))


def _is_indexed(inputs: Iterable[Any]) -> bool:
    # A sequence that can be altered may be another one by the time of the backward pass; keys are no numbers of steps.
    iterated = isinstance(inputs, (MutableSequence, IterableDataset)) or hasattr(inputs, "keys")
    return hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__") and not iterated


def _collected(inputs: Iterable[Any]) -> tuple[Any, ...]:
    items: list[Any] = []
    seen: list[list[tuple[Tensor, int]]] = []
    for item in inputs:
        items.append(item)
        seen.append([(part, part._version) for part in _counted(item)])
    last = {_place(part): step for step, parts in enumerate(seen) for part, _ in parts}
    for step, parts in enumerate(seen):
        for part, version in parts:
            # One that was altered and does not come again may be a neighbour's view: a version is of all of a storage.
            if part._version != version and last[_place(part)] > step:
                raise SequenceError(
                    f"a tensor of input {step} was given again as one of input {last[_place(part)]}, altered in place, "
                    "but inputs are kept for the backward pass; give new tensors, or clones"
                )
    return tuple(items)


def _counted(item: Any) -> Iterator[Tensor]:
    """The tensors in an input of which PyTorch counts how often they were altered."""
    for part in tree_leaves(item):
        if isinstance(part, Tensor) and not part.is_inference() and has_storage(part):
            yield part


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
