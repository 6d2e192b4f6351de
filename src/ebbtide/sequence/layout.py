"""How a state of NumPy arrays lies in one block of memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ebbtide.errors import SequenceError
from ebbtide.sequence.blocks import Block
from ebbtide.sequence.overlaps import Array, are_apart, are_same, hosts, place_within
from ebbtide.units import round_up

ALIGNMENT_BYTES = 64
"""Arrays begin at multiples of this many bytes: a cache line, and what the widest vector instructions want."""

Orders = tuple[tuple[int, ...], ...]
"""How each array of a state lies: its axes, the one with the longest stride first; () where that is C's order. To the
number of an axis along which elements lie backwards the number of axes is added.

For an array in the memory of another: `SHARED`, the number of the other, and, unless the two are the same, the offset
from the other's begin and the strides, in bytes. See NOTE [Shared memory] in `ebbtide.sequence.overlaps`."""
SHARED = -1
"""Begins the order of an array that lies in the memory of another one of the state."""
OBJECTS_BYTES = 2048
"""Bytes that Python's objects take for a stored state, besides those for its arrays."""
ARRAY_OBJECTS_BYTES = 320
"""Bytes that Python's objects take for each array of a stored state. Chains of 20,000 steps that stored all took 2316
bytes for each state of one array, 2661 for one of two and 3704 for one of five."""
_PLAIN = (np.ndarray, np.memmap)
"""Classes of arrays that steps may be given ordinary ones for."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset_bytes: int
    path: str

    def __str__(self) -> str:
        return f"{self.path or 'the state'}: {self.dtype} of shape {self.shape}"

    def place(self, memory: memoryview, order: tuple[int, ...]) -> Array:
        """The array of this leaf in a block, with axes in an order as in `Orders`."""
        if not order:
            return np.ndarray(self.shape, self.dtype, memory, self.offset_bytes)
        strides = [0] * len(order)
        size_bytes, first_bytes = self.dtype.itemsize, self.offset_bytes
        for code in reversed(order):
            backwards, axis = divmod(code, len(order))
            strides[axis] = -size_bytes if backwards else size_bytes
            if backwards:
                first_bytes += (self.shape[axis] - 1) * size_bytes
            size_bytes *= self.shape[axis]
        return np.ndarray(self.shape, self.dtype, memory, first_bytes, strides)


class _Views:
    """The arrays of a state in a block.

    Attributes:
        arrays: the arrays, which may be written to.
        read_only: views of the same arrays that cannot be written to.
    """

    __slots__ = ("_references", "_whole", "arrays", "read_only")

    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays
        self.read_only = [_read_only(array) for array in arrays]
        self._whole = arrays[0].base  # of all of them; views of them, and parts of those, hold it
        self._references = sys.getrefcount(self._whole)

    def are_held(self) -> bool:
        """Whether somebody has a view of one of these arrays."""
        return sys.getrefcount(self._whole) > self._references


class ArrayLayout:
    """Structure, shapes and types of a state: an array, or a tuple, list or dict of states.

    Anything that NumPy can view as an array without copying it (a `memoryview`, an `array.array`) serves as one.

    Args:
        state: the state whose like is to be stored.

    Attributes:
        size_bytes: bytes of a block for a state.
        objects_bytes: bytes that Python's objects for a state take besides.
        item_bytes: bytes of a number in the largest array.
        first_orders: how the arrays of ``state`` lie.

    Raises:
        SequenceError: if there is something in it that is no array of plain numbers, or no array at all, or arrays
            overlap so that copies cannot: see `orders`.
    """

    def __init__(self, state: Any) -> None:
        self._leaves: list[_Leaf] = []
        self.size_bytes = 0
        found = _flatten(state)
        for path, array in found:
            if array.dtype.hasobject:
                raise SequenceError(f"{path or 'the state'} is no array of plain numbers: {type(array).__name__}")
            offset = round_up(self.size_bytes, ALIGNMENT_BYTES)
            self._leaves.append(_Leaf(array.shape, array.dtype, offset, path))
            self.size_bytes = offset + array.nbytes
        if not self._leaves:
            raise SequenceError(
                "the state has no arrays; give state 0 of the chain as an array, or a tuple, list or dict"
            )
        self.objects_bytes = OBJECTS_BYTES + len(found) * ARRAY_OBJECTS_BYTES
        self.item_bytes = max(found, key=lambda leaf: leaf[1].nbytes)[1].dtype.itemsize
        self._structure = _rebuild(state, iter([None] * len(self._leaves)))
        # A state that is one array, or a tuple or list of some, is looked at and copied without recursion.
        is_flat = type(state) in (tuple, list) and all(type(part) is np.ndarray for part in state)
        self._container = type(state) if is_flat or type(state) is np.ndarray else None
        self.first_orders = self._orders([array for _, array in found])
        self._likes = [(leaf.shape, leaf.dtype) for leaf in self._leaves]

    def is_alike(self, state: Any) -> bool:
        """Whether a state is certainly like the first one. If not, `checked` says."""
        if type(state) is not self._container:
            return False
        parts = (state,) if self._container is np.ndarray else state
        if len(parts) != len(self._likes):
            return False
        for part, (shape, dtype) in zip(parts, self._likes, strict=True):
            if type(part) is not np.ndarray or part.shape != shape or part.dtype != dtype:
                return False
        return True

    def describe(self) -> list[str]:
        """Structure, shapes and types of a state, in words."""
        return [str(leaf) for leaf in self._leaves]

    def checked(self, state: Any, step: int) -> Any:
        """The state before ``step``, its dicts with their keys in the order of the first one's.

        Raises:
            SequenceError: if it is not like the first one.
        """
        if self.is_alike(state):
            return state
        found = _flatten(state)
        if self._are_alike(found):
            if _has_key_order(state, self._structure):
                return state
            return _rebuild(self._structure, iter([array for _, array in found]))
        got = ", ".join(str(_Leaf(array.shape, array.dtype, 0, path)) for path, array in found) or "nothing"
        raise SequenceError(
            f"state {step} is not like state 0: expected {', '.join(map(str, self._leaves))}; got {got}; "
            "all states of a chain must have the same structure, shapes and types"
        )

    def _are_alike(self, found: list[tuple[str, Array]]) -> bool:
        if len(found) != len(self._leaves):
            return False
        for (path, array), leaf in zip(found, self._leaves, strict=True):
            if path != leaf.path or array.shape != leaf.shape or array.dtype != leaf.dtype:
                return False
        return True

    def arrays(self, state: Any, step: int) -> Sequence[Array]:
        """The arrays of the state before ``step``. Errors: `checked`."""
        return self._parts(self.checked(state, step))

    def digest(self, state: Any) -> str:
        """A fingerprint of a state's bytes."""
        digest = hashlib.sha256()
        for _, array in _flatten(state):
            digest.update(value_bytes(array))
        return digest.hexdigest()

    def pack(self, state: Any, block: Block) -> Orders:
        """Copy a state into a block. Its arrays' elements stay in order: sums may add them up as they lie.

        Raises:
            SequenceError: see `orders`.
        """
        orders = self.orders(state)
        self._copy(state, self._views(block, orders).arrays)
        return orders

    def unpack(self, block: Block, orders: Orders, *, writeable: bool) -> Any:
        """The state in a block, for which `pack` gave ``orders``. It lives as long as its arrays."""
        views = self._views(block, orders)
        return self._built(views.arrays) if writeable else self._as_views(views.read_only)

    def view(self, state: Any) -> Any:
        """``state`` as arrays that cannot be written to, without copying them."""
        return _rebuild(self._structure, iter([_read_only(array) for _, array in _flatten(state)]))

    def new_parts(self, state: Any, orders: Orders) -> list[Array]:
        """Memory for a state like ``state``, in which elements lie in the same order."""
        if any(SHARED in order or max(order, default=-1) >= len(order) for order in orders):
            return self._places(memoryview(bytearray(self.size_bytes)), orders)  # no array: views hold the parts
        return [np.empty_like(part, order="K", subok=False) for part in self._parts(state)]

    def orders(self, state: Any) -> Orders:
        """See `Orders`.

        Raises:
            SequenceError: if arrays overlap, and neither has all bytes of the other and no gaps.
        """
        return self._orders(self._parts(state))

    def _orders(self, arrays: Sequence[Array]) -> Orders:
        orders = tuple([() if array.flags.c_contiguous else _order(array) for array in arrays])
        return orders if len(arrays) == 1 or are_apart(arrays) else self._orders_of_shared(arrays, orders)

    def _orders_of_shared(self, arrays: Sequence[Array], orders: Orders) -> Orders:
        found = list(orders)
        for number, host in enumerate(hosts(arrays)):
            if host is None:
                continue
            place = () if are_same(arrays[number], arrays[host]) else place_within(arrays[number], arrays[host])
            if place is None:
                names = " and ".join(self._leaves[index].path for index in sorted((number, host)))
                raise SequenceError(
                    f"{names} of a state share memory in a way that copies of it cannot; leave one out and make it in "
                    "the operators, or give copies"
                )
            found[number] = (SHARED, host, *place)
        return tuple(found)

    def copy_into(self, parts: list[Array], state: Any) -> Any:
        """A copy of a state, in memory of `new_parts`. Its arrays are views of them."""
        self._copy(state, parts)
        return self._as_views(parts)

    def _copy(self, state: Any, places: list[Array]) -> None:
        if self._container is np.ndarray:
            places[0][...] = state  # in a third of the time of np.copyto, for small ones
            return
        for part, place in zip(self._parts(state), places, strict=True):
            place[...] = part

    def _parts(self, state: Any) -> Sequence[Array]:
        if type(state) is self._container:
            return (state,) if self._container is np.ndarray else cast(Sequence[Array], state)
        return [array for _, array in _flatten(state)]

    def _built(self, arrays: list[Array]) -> Any:
        """A state of these arrays."""
        if self._container is np.ndarray:
            return arrays[0]
        return _rebuild(self._structure, iter(arrays)) if self._container is None else self._container(arrays)

    def _as_views(self, arrays: list[Array]) -> Any:
        """A state of views of these arrays: what an operator does to the shape of one stays with that."""
        if self._container is np.ndarray:
            return arrays[0].view()
        return self._built([array.view() for array in arrays])

    def _views(self, block: Block, orders: Orders) -> _Views:
        """The arrays in a block."""
        views: dict[Orders, _Views] = block.views or {}
        if orders not in views:
            # Where arrays lie elsewhere in each state, there would be no end of those that nobody has.
            block.views = views = {known: held for known, held in views.items() if held.are_held()}
            views[orders] = _Views(self._places(block.memory(), orders))
        return views[orders]

    def _places(self, memory: memoryview, orders: Orders) -> list[Array]:
        return [self._place(memory, orders, number) for number in range(len(orders))]

    def _place(self, memory: memoryview, orders: Orders, number: int) -> Array:
        leaf, order = self._leaves[number], orders[number]
        if SHARED not in order:
            return leaf.place(memory, order)
        _, host, *place = order
        if not place:
            return self._place(memory, orders, host)
        offset, *strides = place
        return np.ndarray(leaf.shape, leaf.dtype, memory, self._leaves[host].offset_bytes + offset, strides)

    def is_held(self, block: Block) -> bool:
        """Whether somebody has arrays of a block still, or parts of them."""
        return any(views.are_held() for views in (block.views or {}).values())


def _order(array: Array) -> tuple[int, ...]:
    """See `Orders`."""
    axes, strides = tuple(range(array.ndim)), array.strides
    if array.size == 0:
        return ()
    order = sorted(axes, key=lambda axis: -abs(strides[axis]))
    codes = tuple(axis + array.ndim * (strides[axis] < 0 and array.shape[axis] > 1) for axis in order)
    return () if codes == axes else codes


def value_bytes(array: Array) -> memoryview:
    """The bytes of an array's elements, without those that only pad them: these may be anything."""
    found = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    counts = _counting_bytes(array.dtype)
    return found.data if counts.all() else np.ascontiguousarray(found.reshape(-1, len(counts))[:, counts]).data


@functools.lru_cache(maxsize=64)
def _counting_bytes(dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Which bytes of an element are none that pad it, as in aligned structures and long doubles."""
    counts = np.ones(dtype.itemsize, np.bool_)
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.tile(_counting_bytes(base), math.prod(shape))
    if dtype.fields is not None:
        counts[:] = False
        for part, offset, *_ in dtype.fields.values():
            counts[offset : offset + part.itemsize] |= _counting_bytes(part)
    elif dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:  # the x87's, of 10 bytes
        counts.reshape(-1, np.dtype(np.longdouble).itemsize)[:, 10:] = False
    return counts


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _sorted(state: dict[Any, Any]) -> list[Any]:
    """The keys of a state in the order in which its arrays lie in a block, in whichever order they come."""
    return sorted(state, key=repr)


def _has_key_order(state: Any, like: Any) -> bool:
    """Whether the keys of dicts come in the order of those of ``like``, whose arrays have the same paths."""
    if isinstance(like, dict):
        return list(state) == list(like) and all(_has_key_order(state[key], part) for key, part in like.items())
    return not isinstance(like, (tuple, list)) or all(map(_has_key_order, state, like))


def _flatten(state: Any, path: str = "") -> list[tuple[str, Array]]:
    if isinstance(state, np.ndarray):
        if type(state) not in _PLAIN:
            raise SequenceError(
                f"{path or 'a state'} is of the class {type(state).__name__}, but steps are given ordinary arrays in "
                "its place, without what that adds; give np.asarray of it, and a mask as an array of its own"
            )
        return [(path, state)]
    if isinstance(state, dict):
        return [leaf for key in _sorted(state) for leaf in _flatten(state[key], f"{path}[{key!r}]")]
    if isinstance(state, (tuple, list)):
        return [leaf for number, part in enumerate(state) for leaf in _flatten(part, f"{path}[{number}]")]
    if state is None:
        raise SequenceError(f"{path or 'a state'} is None; a step forward must return the next state")
    return [(path, np.asarray(state))]


def _rebuild(structure: Any, arrays: Any) -> Any:
    """``structure`` with each array replaced by the next of ``arrays``."""
    if isinstance(structure, dict):
        parts = {key: _rebuild(structure[key], arrays) for key in _sorted(structure)}
        return {key: parts[key] for key in structure}
    if isinstance(structure, (tuple, list)):
        items = [_rebuild(part, arrays) for part in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return next(arrays)
