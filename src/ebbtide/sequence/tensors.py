"""How a state of tensors, and what goes with it, lies in one block of memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import (
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from ebbtide.errors import SequenceError
from ebbtide.observe.ledger import has_storage
from ebbtide.observe.loads import note_states
from ebbtide.observe.wrapped import is_subclass, is_wrapper
from ebbtide.sequence.blocks import Block
from ebbtide.sequence.surroundings import Surroundings, Written, unseen
from ebbtide.units import round_up

ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of this many bytes, as PyTorch's own do: kernels may choose their code by alignment."""
OBJECTS_BYTES = 2048
"""Bytes that Python's objects take for a stored state, besides those for its tensors."""
TENSOR_OBJECTS_BYTES = 640
"""Bytes that Python's objects take for each tensor of a stored state and of its surroundings. Chains of 14,000 steps
that stored all took 2.4 KiB for each state of one tensor, 4.4 for one of five, 5.0 with one that is carried."""
FORM_BYTES = 8
"""Bytes for the number of a state's form, which is stored with it."""

_NOTHING_WRITTEN = Written()

TensorState = list[Tensor]
"""The tensors of a state, detached; those that take part in the gradient have ``requires_grad`` set."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    path: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]  # where it lies dense

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{self.path or 'the state'}: {self.dtype} of shape {tuple(self.shape)}{where}"


def _leaf(path: str, part: Tensor) -> _Leaf:
    return _Leaf(path, part.shape, part.dtype, part.device, torch.empty(part.shape, device="meta").stride())


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How a tensor of a state lies in memory, and whether it takes part in the gradient: what differs between states.

    A state that comes back lies as it lay, with the same gaps: kernels may sum in another order if it does not.
    """

    stride: tuple[int, ...]
    shift_bytes: int
    needs_grad: bool

    @classmethod
    def of(cls, part: Tensor) -> _Form:
        """The form of a tensor."""
        return cls(*_form_of(part))

    def adopt(self, part: Tensor, *, own: bool) -> Tensor:
        """``part``, which is dense, in this form: a copy, or if it is our ``own`` and lies as it should, itself."""
        lies_well = self.shift_bytes == part.data_ptr() % ALIGNMENT_BYTES and self.stride == part.stride()
        if not (own and lies_well):
            part = self._copy(part)
        return part.requires_grad_(self.needs_grad)

    def _copy(self, part: Tensor) -> Tensor:
        if (
            self.shift_bytes == 0 and part.is_contiguous() and part.stride() == self.stride
        ):  # most are, and this is quick
            copied = torch.empty_like(part)
            if copied.data_ptr() % ALIGNMENT_BYTES == 0 and copied.stride() == self.stride:
                return copied.copy_(part)
        once = [1 if stride == 0 else size for size, stride in zip(part.shape, self.stride, strict=True)]
        span = 1 + sum((size - 1) * stride for size, stride in zip(once, self.stride, strict=True))
        if part.numel() == 0 or math.prod(once) > span:  # empty, or elements lie on top of each other
            return part.detach().clone()
        shift = self.shift_bytes // part.element_size()
        memory = torch.empty(shift + span, dtype=part.dtype, device=part.device)
        place = memory.as_strided(once, self.stride, shift)
        place.copy_(part[tuple(slice(size) for size in once)])
        return memory.as_strided(part.shape, self.stride, shift)


def _form_of(part: Tensor) -> tuple[tuple[int, ...], int, bool]:
    """The fields of a `_Form`: quicker to look up than that."""
    return part.stride(), part.data_ptr() % ALIGNMENT_BYTES, part.requires_grad


@dataclasses.dataclass(frozen=True, slots=True)
class _Views:
    """Tensors in a block: the number of the state's form, its surroundings, its own tensors."""

    form: npt.NDArray[np.int64]
    surroundings: list[Tensor]
    parts: list[Tensor]


class TensorLayout:
    """Structure, shapes, types and devices of a state: any pytree of tensors.

    Args:
        state: the state whose like is to be stored.
        written: what the cell writes to, besides.

    Attributes:
        size_bytes: bytes of a block for a state and its surroundings.
        objects_bytes: bytes that Python's objects for a state take besides.
        item_bytes: bytes of a number in the largest tensor.
        surroundings: the generators of the devices that states are on, and what the cell writes to.

    Raises:
        SequenceError: if there is something in it that is no dense tensor, or nothing at all.
    """

    def __init__(self, state: Any, written: Written = _NOTHING_WRITTEN) -> None:
        found, self._spec = _with_paths(state)
        for path, part in found:
            if not isinstance(part, Tensor) or part.layout is not torch.strided:
                what = f"a tensor of layout {part.layout}" if isinstance(part, Tensor) else type(part).__name__
                raise SequenceError(
                    f"the state has {what} at {keystr(path) or 'its root'}; each part of it must be a dense tensor "
                    "(what does not change from step to step, the cell can take from outside)"
                )
            refuse_class(part, f"the state has, at {keystr(path) or 'its root'},")
        # A state that is one tensor, or a tuple or list of some, is taken apart without PyTorch's help, which is slow.
        is_flat = type(state) in (tuple, list) and all(isinstance(part, Tensor) for part in state)
        self._container = type(state) if is_flat else None
        self._leaves = [_leaf(keystr(path), part) for path, part in found]
        if not found:
            raise SequenceError("the state has no tensors; give state 0 as a tensor, or a tuple, list or dict of them")
        self.device_types = sorted({"cpu", *(leaf.device.type for leaf in self._leaves)})
        devices = sorted({leaf.device for leaf in self._leaves if leaf.device.type == "cuda"}, key=str)
        self._devices = devices
        self.surroundings = Surroundings(devices, written)
        self._forms: list[tuple[tuple[_Form, ...], tuple[int, ...]]] = []  # the latter: see `_firsts`
        self._form_numbers: dict[tuple[Any, ...], int] = {}
        end = FORM_BYTES
        self._surrounding_places: list[tuple[int, int]] = []
        for part in self.surroundings.now():
            self._surrounding_places.append((end, part.numel()))
            end += part.numel()
        self.objects_bytes = OBJECTS_BYTES + (len(found) + len(self._surrounding_places)) * TENSOR_OBJECTS_BYTES
        self._offsets: list[int] = []
        for _, part in found:
            offset = round_up(end, ALIGNMENT_BYTES)
            self._offsets.append(offset)
            end = offset + part.numel() * part.element_size()
        self.size_bytes = end
        self.item_bytes = max((part for _, part in found), key=lambda part: part.nbytes).element_size()

    def flatten(self, state: Any, step: int) -> list[Tensor]:
        """The tensors of the state before ``step``. Raises `SequenceError` if it is not like the first one."""
        if type(state) is self._container and len(state) == len(self._leaves):
            if all(map(_is_like, state, self._leaves)):
                return list(state)
        elif isinstance(state, Tensor) and self._spec.is_leaf() and _is_like(state, self._leaves[0]):
            return [state]
        parts, spec = tree_flatten(state)
        if spec != self._spec:
            parts, spec = tree_flatten(_with_key_order(state, self.unflatten([*self._leaves])))
        if spec == self._spec and all(map(_is_like, parts, self._leaves)):
            return parts
        for part in parts:
            refuse_class(part, f"state {step} has")
        if spec != self._spec and spec.num_leaves == self._spec.num_leaves:
            told = _other_container(state, self.unflatten([*self._leaves]), "")
            if told:
                raise SequenceError(f"state {step} is not like state 0: {told}; all states must be of the same types")
        found, _ = _with_paths(state)
        got = ", ".join(
            str(_leaf(keystr(path), part))
            if isinstance(part, Tensor)
            else f"{keystr(path) or 'the state'}: {type(part).__name__}"
            for path, part in found
        )
        raise SequenceError(
            f"state {step} is not like state 0: expected {', '.join(map(str, self._leaves))}; got {got or 'nothing'}; "
            "all states of a chain must have the same structure, shapes, types and devices"
        )

    def unflatten(self, state: Sequence[Any]) -> Any:
        """The state as the user knows it."""
        return tree_unflatten(state, self._spec) if self._container is None else self._container(state)

    def pack(self, state: TensorState, block: Block) -> None:
        """Copy a state, and its surroundings as they are now, into a block."""
        firsts = _firsts(state)
        forms = (firsts, *map(_form_of, state))
        if forms not in self._form_numbers:
            self._form_numbers[forms] = len(self._forms)
            self._forms.append((tuple(map(_Form.of, state)), firsts))
        with torch.no_grad(), unseen():
            views = self._views(block)
            views.form[0] = self._form_numbers[forms]
            for place, part in zip(views.surroundings, self.surroundings.now(), strict=True):
                place.copy_(part)
            for part, place in zip(state, views.parts, strict=True):
                place.copy_(part)
        note_states((block.storage,))  # here, as no mode sees it above

    def unpack(self, block: Block) -> TensorState:
        """The state in a block, copied only where it must be; its surroundings go back to what they were."""
        with torch.no_grad(), unseen():
            views = self._views(block)
            forms, firsts = self._forms[int(views.form[0])]
            self.surroundings.set([place.clone() for place in views.surroundings])
            # Detached: a state's tensors are told apart by identity, and a block may be unpacked more than once.
            parts = [place.detach() for place in views.parts]
            if self.device_types != ["cpu"]:
                parts = [part.to(leaf.device) for part, leaf in zip(parts, self._leaves, strict=True)]
            state = _as_first([form.adopt(part, own=True) for form, part in zip(forms, parts, strict=True)], firsts)
        note_states((block.storage, *map(Tensor.untyped_storage, state)))
        return state

    def wait(self) -> None:
        """Wait until devices have done what they were given: nobody knows before what a step takes."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def copy(self, state: TensorState) -> TensorState:
        """A copy of a state in memory of its own, in which its tensors lie as they did."""
        with torch.no_grad(), unseen():
            copied = _as_first([_Form.of(part).adopt(part, own=False) for part in state], _firsts(state))
        note_states(map(Tensor.untyped_storage, copied))
        return copied

    def _views(self, block: Block) -> _Views:
        if block.views is None:
            storage = block.storage
            block.views = _Views(
                np.frombuffer(block.memory()[:FORM_BYTES], np.int64),
                [_over(storage, torch.uint8, offset, (size,), (1,)) for offset, size in self._surrounding_places],
                [
                    _over(storage, leaf.dtype, offset, leaf.shape, leaf.stride)
                    for leaf, offset in zip(self._leaves, self._offsets, strict=True)
                ],
            )
        views: _Views = block.views
        return views


def _with_key_order(tree: Any, like: Any) -> Any:
    """``tree`` with the keys of its dicts in the order that those of ``like`` have, where they are the same."""
    if type(tree) is not type(like):
        return tree
    if type(tree) is dict and tree.keys() == like.keys():
        return {key: _with_key_order(tree[key], part) for key, part in like.items()}
    if type(tree) in (tuple, list) and len(tree) == len(like):
        return type(tree)(map(_with_key_order, tree, like))
    return tree


def _with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """The leaves with their paths; with their numbers, where a class is registered that does not tell keys."""
    try:
        return tree_flatten_with_path(tree)
    except ValueError:
        parts, spec = tree_flatten(tree)
        return [((SequenceKey(number),), part) for number, part in enumerate(parts)], spec


def _other_container(tree: Any, like: Any, path: str) -> str:
    """Which part of ``tree`` is a container of another type than that of ``like``, in words; none if there is none."""
    if isinstance(tree, Tensor) or isinstance(like, _Leaf):
        return ""
    if type(tree) is not type(like):
        return f"expected {type(like).__name__}{f' at {path}' if path else ''}, got {type(tree).__name__}"
    if isinstance(tree, dict):
        keys = tree.keys() & like.keys()
        told = (_other_container(tree[key], like[key], f"{path}[{key!r}]") for key in like if key in keys)
    elif isinstance(tree, (tuple, list)):
        told = (_other_container(*pair, f"{path}[{place}]") for place, pair in enumerate(zip(tree, like, strict=False)))
    else:
        return ""
    return next(filter(None, told), "")


def apart_from(state: TensorState, grads: list[Tensor | None]) -> list[Tensor | None]:
    """``grads``, copied where they lie in the memory of ``state``, which may be a slot that serves again: a function's
    backward may hand out what it has saved. It is the same list."""
    memory = [(storage.data_ptr(), storage.nbytes()) for storage in map(Tensor.untyped_storage, state)]
    low, high = min(memory)[0], max(start + size for start, size in memory)
    for place, grad in enumerate(grads):
        if grad is None or (
            grad.layout is torch.strided and type(grad) is Tensor and not low <= grad.data_ptr() < high
        ):
            continue
        if has_storage(grad) and any(start <= grad.data_ptr() < start + size for start, size in memory):
            grads[place] = grad.clone()
    return grads


def _firsts(state: TensorState) -> tuple[int, ...]:
    """For each place the first one with the same tensor, in which all gradients add up; () if all differ."""
    ids = list(map(id, state))
    return () if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


def _as_first(state: TensorState, firsts: tuple[int, ...]) -> TensorState:
    return [state[place] for place in firsts] if firsts else state


def tensor_buffers(state: TensorState) -> Iterator[memoryview]:
    """The bytes of each tensor of a state."""
    for part in state:
        yield part.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def refuse_class(part: Any, who_has: str) -> None:
    """Raise `SequenceError` for a tensor with a class of its own: what is given to steps in its place has none."""
    if _has_class(part):
        raise SequenceError(
            f"{who_has} a tensor of the class {type(part).__name__}, but steps are given ordinary ones in its place; "
            "give the cell what it wraps, or as_subclass(torch.Tensor)"
        )


def _has_class(part: Any) -> bool:
    kind: Any = type(part)
    return kind is not Tensor and (is_subclass(kind) or is_wrapper(kind))


def _is_like(part: Any, leaf: _Leaf) -> bool:
    return (
        isinstance(part, Tensor)
        and not _has_class(part)
        and part.shape == leaf.shape
        and part.dtype is leaf.dtype
        and part.device == leaf.device
        and part.layout is torch.strided
    )


def _over(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset_bytes // dtype.itemsize, shape, stride)
