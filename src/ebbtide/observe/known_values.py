"""Values of fake tensors, where the program's text alone decides them.

Programs look into tensors that they have just made of numbers: ``torch.linspace(0, 0.1, 12).tolist()`` for the shares
of paths to drop, ``torch.unique`` of a network's widths, a counter of steps. Small fake tensors like these have a real
storage beside their fake one. Ops whose tensors are all known run on these storages, too, in place and through views
where the fake ones do, so that what a program finds there is what it would find without fake tensors. What
comes from parameters, random numbers or unset memory is not known, nor what was computed with it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from ebbtide.observe.ledger import has_storage, tensors_in
from ebbtide.observe.schema import running_statistics, trains

MOST_BYTES = 2**19
"""Storages of more bytes are not known: a mask of 16 times 4,096 tokens still is."""

UNKNOWN = object()
"""Instead of a result that depends on what is not known."""
LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What `torch.tensor` calls on the real tensor that it has made of numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """The bytes of a fake storage; ``owner`` makes it forgotten with that."""

    bytes: torch.UntypedStorage
    owner: weakref.ref[torch.UntypedStorage]


class KnownValues:
    """Which fake storages have known bytes, and these."""

    def __init__(self) -> None:
        self._values: dict[int, _Value] = {}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an ATen call on fake tensors gives on their values, with what it writes there; `UNKNOWN` if one is not
        known, or the result would not be."""
        if not isinstance(func, torch._ops.OpOverload) or _is_arbitrary(func):
            return UNKNOWN
        if not all(self._has(tensor) for tensor in tensors_in((*args, *kwargs.values()))):
            return UNKNOWN
        with no_dispatch():
            args, kwargs = tree_map_only(torch.Tensor, self._real, (tuple(args), dict(kwargs)))
            try:
                return func(*args, **kwargs)
            except NotImplementedError:  # raised by PyTorch: the op is one of CUDA, which has no kernel on the CPU
                return UNKNOWN

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Do to the values what an ATen call did to their fake tensors; ``made`` is its fake result."""
        if func in LIFTS and type(args[0]) is torch.Tensor:
            self.learn(made, args[0])
            return
        written = list(_written(func, args, kwargs)) if self._values else []
        fakes = list(tensors_in((made,)))
        new = [fake for fake in fakes if not self._has(fake)]
        if not written and not (new and all(_is_small(fake) for fake in new)):
            return
        found = self.result(func, args, kwargs)
        if found is UNKNOWN:
            for fake in filter(has_storage, written):
                self._values.pop(fake.untyped_storage()._cdata, None)
            return
        for fake, value in zip(fakes, tensors_in((found,)), strict=True):
            if not self._has(fake):
                self.learn(fake, value)

    def learn(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """From now on ``fake`` is known to have this ``value``, unless it is too large."""
        if not _is_small(fake):
            return
        storage = fake.untyped_storage()
        identity = storage._cdata
        with no_dispatch():
            real = torch.UntypedStorage(storage.nbytes())
            _view(real, fake).copy_(value)
        owner = weakref.ref(storage, lambda _: self._values.pop(identity, None))
        self._values[identity] = _Value(real, owner)

    def _has(self, tensor: torch.Tensor) -> bool:
        return (
            has_storage(tensor)
            and tensor.untyped_storage()._cdata in self._values
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def _real(self, fake: torch.Tensor) -> torch.Tensor:
        return _view(self._values[fake.untyped_storage()._cdata].bytes, fake)


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """``storage`` seen as ``like`` sees its own."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def _is_small(fake: torch.Tensor) -> bool:
    return has_storage(fake) and not fake.is_meta and fake.untyped_storage().nbytes() <= MOST_BYTES


@functools.cache
def _is_arbitrary(func: torch._ops.OpOverload) -> bool:
    """Whether the same arguments may give other values: random numbers, unset memory."""
    name = func._schema.name.removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded in func.tags or name.startswith(("empty", "new_empty", "resize"))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    for place, name in _outputs(func):
        yield from tensors_in((args[place] if place < len(args) else kwargs.get(name),))
    statistics = running_statistics(func)  # of which schemas may not say that they are written
    if statistics and trains(func, args):
        yield from tensors_in([args[place] for place in statistics if place < len(args)])


@functools.cache
def _outputs(func: Any) -> tuple[tuple[int, str], ...]:
    """Arguments that an op writes to, by place and name."""
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)
