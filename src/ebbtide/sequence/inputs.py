"""What a scan takes its inputs from."""

from __future__ import annotations

import dataclasses
import types
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import IterableDataset

from ebbtide.errors import SequenceError
from ebbtide.observe.ledger import has_storage
from ebbtide.sequence.layout import value_bytes
from ebbtide.sequence.surroundings import unseen
from ebbtide.sequence.tensors import tensor_buffers

_WHOLE = (Tensor, np.ndarray, torch.Generator, torch.nn.Module, type, types.ModuleType, types.FunctionType)
"""Leaves of inputs whose attributes are not looked at: they have none, or are no data."""
_LEVELS = 2
"""Attributes are followed this many levels deep: those of leaves, and theirs."""


class Inputs(Protocol):
    """What `scan` takes an input from, by step, as often as it needs it."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int, /) -> Any: ...


def are_fixed(inputs: Inputs) -> bool:
    """Whether each of the inputs is the same object, or in the same memory, whenever it is taken.

    What others than tuples and tensors give by index may be made anew each time.
    """
    return isinstance(inputs, (tuple, Tensor))


class FirstInput:
    """Sees whether a cell alters input 0 in place where that stays so.

    What inputs give by index may lie in memory of theirs, as rows of an array do, which is the same in each run of a
    step: it may be altered only if it is filled anew each time. In steps PyTorch tells of tensors that stay. Of
    generators, and of tensors inside objects that PyTorch does not look into, those that all steps share go back with
    the states; but where each input has its own, only those of input 0 do.

    Args:
        inputs: what the scan takes them from.
        first: what they gave for step 0.
    """

    def __init__(self, inputs: Inputs, first: Any) -> None:
        self._is_fixed = are_fixed(inputs)
        self._inputs = inputs
        self._parts: dict[int, Any] = {}
        self._may_be_shared: set[int] = set()
        known = {id(part) for part in tree_leaves(first)}
        for place, part in enumerate(_parts_of(first)):
            if isinstance(part, torch.Generator) or (_is_plain(part) and id(part) not in known):
                self._may_be_shared.add(place)
            elif not isinstance(part, np.ndarray) and (self._is_fixed or not _is_plain(part)):
                continue
            self._parts[place] = part
        with unseen():
            self._before = {place: _contents(part) for place, part in self._parts.items()}

    def watched(self, cell: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """``cell``, of which a run with it raises `SequenceError` if it leaves it altered."""

        def looking(state: Any, x: Any) -> Any:
            found = cell(state, x)
            with unseen():
                self._check()
            return found

        return looking

    def _check(self) -> None:
        found = {place: _contents(part) for place, part in self._parts.items() if self._may_differ(place)}
        altered = {place: now for place, now in found.items() if now != self._before[place]}
        again = [*_parts_of(self._inputs[0])] if altered else []
        for place, now in altered.items():
            part, other = self._parts[place], again[place] if place < len(again) else None
            # Where only the version tells, another storage may have been filled anew with what the cell has left of it.
            is_same = _lies_as(part, other, alike=now.data == self._before[place].data)
            if is_same and _contents(part) == now and not (place in self._may_be_shared and self._is_shared(place)):
                raise _altered(part)

    def _may_differ(self, place: int) -> bool:
        part = self._parts[place]
        return not isinstance(part, Tensor) or part._version != self._before[place].version

    def _is_shared(self, place: int) -> bool:
        """Whether other steps have nothing else in that place: all those that are there, else step 1."""
        for step in range(1, len(self._inputs) if self._is_fixed else min(len(self._inputs), 2)):
            parts = [*_parts_of(self._inputs[step])]
            part, other = self._parts[place], parts[place] if place < len(parts) else None
            if type(other) is type(part) and not _lies_as(part, other, alike=True):
                return False
        return True


def indexed(inputs: Iterable[Any]) -> Inputs:
    """``inputs`` as they are, where they can be indexed by steps, or their items.

    Raises:
        SequenceError: if they give one tensor, array or object several times, with other numbers in it.
    """
    if isinstance(inputs, Tensor):
        # Each index would make another tensor, but gradients must go to one.
        return inputs.unbind(0) if inputs.requires_grad else inputs
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs)
    return cast(Inputs, inputs) if _is_indexed(inputs) else _collect(inputs)


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


def _collect(inputs: Iterable[Any]) -> tuple[Any, ...]:
    items, seen = [], _Seen()
    for item in inputs:
        leaves, structure = tree_flatten(item)
        seen.note(leaves)
        items.append(tree_unflatten(leaves, structure))  # the container may be filled anew, and come again
    seen.check()
    return tuple(items)


class _Seen:
    """The inputs that an iterable has given, to find those that came again with other numbers in them."""

    def __init__(self) -> None:
        self._counted: list[list[tuple[Tensor, int]]] = []  # with their versions
        self._of_others: dict[Hashable, tuple[int, int]] = {}  # the first step that they came in, and their checksums
        self._objects: list[tuple[int, Any, list[Any]]] = []  # with what was in their attributes

    def note(self, leaves: list[Any]) -> None:
        """Note the next input. Raises `SequenceError` if memory that is not PyTorch's was given before, and altered."""
        step, parts = len(self._counted), [*_parts_of(leaves)]
        self._counted.append([(part, part._version) for part in parts if _is_counted(part)])
        self._objects += [(step, leaf, held) for leaf in leaves if (held := _held(leaf))]
        for part in parts:
            if _is_of_others(part):
                checksum = zlib.crc32(_bytes_of_others(part))
                first, before = self._of_others.setdefault(_look(part), (step, checksum))
                if checksum != before:
                    raise _refilled("a tensor" if isinstance(part, Tensor) else "an array", first, step)

    def check(self) -> None:
        """Call when all are noted. Raises `SequenceError` if an object or a tensor of PyTorch's came several times, and
        was altered between."""
        last_of = {id(leaf): step for step, leaf, _ in self._objects}
        for step, leaf, held in self._objects:
            if last_of[id(leaf)] > step and not {*map(id, held)} <= {*map(id, _held(leaf))}:
                raise _refilled("an object", step, last_of[id(leaf)])
        last = {_place(part): step for step, parts in enumerate(self._counted) for part, _ in parts}
        for step, parts in enumerate(self._counted):
            for part, version in parts:
                # What was altered and does not come again may be a neighbour's view: a version is of a whole storage.
                if part._version != version and last[_place(part)] > step:
                    raise _refilled("a tensor", step, last[_place(part)])


def _refilled(what: str, step: int, again: int) -> SequenceError:
    return SequenceError(
        f"{what} of input {step} was given again as one of input {again}, altered in place, but inputs are kept for "
        "the backward pass; give new tensors, or clones"
    )


def _held(leaf: Any) -> list[Any]:
    """Tensors and arrays in the attributes of a leaf."""
    parts = [] if isinstance(leaf, _WHOLE) else _parts_of(leaf)
    return [part for part in parts if isinstance(part, (Tensor, np.ndarray))]


def _is_counted(part: Any) -> bool:
    """Whether it is a tensor of which PyTorch counts how often it was altered."""
    return isinstance(part, Tensor) and not part.is_inference() and has_storage(part)


def _is_of_others(part: Any) -> bool:
    """Whether it is in memory that others than PyTorch have, and may alter without PyTorch's knowledge."""
    if isinstance(part, np.ndarray):
        return part.nbytes > 0 and not part.dtype.hasobject
    return (
        isinstance(part, Tensor)
        and part.device.type == "cpu"
        and has_storage(part)
        and not part.is_quantized
        and not part.untyped_storage().resizable()
    )


def _bytes_of_others(part: Any) -> memoryview:
    return next(tensor_buffers([part])) if isinstance(part, Tensor) else value_bytes(part)


def _look(part: Any) -> Hashable:
    """Where a tensor or an array lies, and how."""
    if isinstance(part, Tensor):
        return part.data_ptr(), part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg()
    return part.ctypes.data, part.dtype, part.shape, part.strides


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _parts_of(item: Any, levels: int = _LEVELS) -> Iterator[Any]:
    """The leaves of a tree, and of what lies in the attributes of those that PyTorch does not look into."""
    for leaf in tree_leaves(item):
        yield leaf
        if levels and not isinstance(leaf, _WHOLE):
            for value in _attributes(leaf):
                yield from _parts_of(value, levels - 1)


def _altered(part: Any) -> SequenceError:
    if isinstance(part, torch.Generator):
        return SequenceError(
            "the cell draws from a generator in its input, and each input has its own, which would draw on when a step "
            "runs again; give seeds, or one generator to all steps"
        )
    return SequenceError("the cell has altered its input in place in step 0; it must alter a copy of it")


def _attributes(item: object) -> list[Any]:
    slots: list[str] = []
    for kind in type(item).__mro__:
        named = vars(kind).get("__slots__", ())
        slots += [named] if isinstance(named, str) else named
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name) for name in slots if hasattr(item, name))]


@dataclasses.dataclass(frozen=True, slots=True)
class _Contents:
    """The bytes of a tensor on the CPU, of an array or of a generator's state, and the version of a tensor."""

    version: int
    data: bytes


def _contents(part: Any) -> _Contents:
    if isinstance(part, torch.Generator):
        return _Contents(0, part.get_state().numpy().tobytes())
    if isinstance(part, np.ndarray):
        return _Contents(0, part.tobytes())
    return _Contents(part._version, bytes(*tensor_buffers([part])) if part.device.type == "cpu" else b"")


def _is_plain(part: Any) -> bool:
    """Whether it is an ordinary tensor, of which PyTorch counts how often it is altered."""
    return type(part) is Tensor and part.layout is torch.strided and not (part.is_inference() or part.is_quantized)


def _lies_as(part: Any, other: Any, *, alike: bool) -> bool:
    """Whether one that is like ``part`` lies in the same memory; if they are ``alike``, in the same storage."""
    if type(other) is not type(part):
        return False
    if isinstance(part, torch.Generator):
        return part is other
    if isinstance(part, np.ndarray):
        return bool(part.ctypes.data == other.ctypes.data)
    storages = part.untyped_storage()._cdata, other.untyped_storage()._cdata
    return bool(part.data_ptr() == other.data_ptr()) and (not alike or storages[0] == storages[1])
