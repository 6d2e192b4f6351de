"""Who is alive: the storages that a piece of code touches or makes, each followed until it dies."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.observe.schema import OperatorInfo
from ebbtide.observe.wrapped import PLAIN_TYPES, is_wrapper

_dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys

Written = list[tuple[torch.Tensor, int, int]]
"""Tensors, which storages they show, and the bytes of these."""
use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""References to the storage whose ``_cdata`` is given."""


def storage_wrapper_count() -> int:
    """What PyTorch counts for a storage whose only tensor is ours but which has a Python object."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    reference, identity = weakref.ref(storage), storage._cdata
    del storage
    return use_count(identity) if reference is not None else 0


def tensors_in(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results of an ATen call, in order; lists and tuples are entered."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has one storage of its own that can be followed.

    Sparse and nested tensors have none, nor have those that wrap others or that a transform has wrapped. Nor has what
    takes no memory: the zeros of forward mode, meta tensors, and fake tensors unless they stand for those of a step.
    """
    return _by_keys(tensor, _has_storage, _with_storage) if type(tensor) in PLAIN_TYPES else _has_storage(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, of one of `PLAIN_TYPES`, has a storage that says all of it: it is not quantized, nor lazily
    conjugated or negated."""
    return _by_keys(tensor, _is_dense, _dense)


_with_storage: dict[int, bool] = {}
_dense: dict[int, bool] = {}
_traceable: dict[int, bool] = {}


def _by_keys(tensor: torch.Tensor, tell: Callable[[torch.Tensor], bool], told: dict[int, bool]) -> bool:
    """What ``tell`` says of ``tensor``, of one of `PLAIN_TYPES`; ``told`` is what it said of others. Saved tensors are
    looked into all the time, and PyTorch knows all that is asked here by a tensor's dispatch keys."""
    keys = _dispatch_keys(tensor).raw_repr()
    known = told.get(keys)
    if known is None:
        known = told[keys] = tell(tensor)
    return known


def _is_dense(tensor: torch.Tensor) -> bool:
    return _has_storage(tensor) and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _has_storage(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and _has_memory(tensor)
        and not tensor.is_nested
        and not is_wrapper(type(tensor))
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # as `is_grads_batched` hands around
        and not tensor._is_zerotensor()
    )


@functools.cache
def _takes_ops(kind: type) -> bool:
    """Whether ops on tensors of this type are Python code of that class."""
    takes = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return takes and not issubclass(kind, FakeTensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) in PLAIN_TYPES:
        return not tensor.is_meta
    mode = getattr(tensor, "fake_mode", None)  # to ask a fake one for its device would be an op
    return mode is None or hasattr(mode, "stands_for_a_step")


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``tensor``; -1 stands for sizes of nested tensors that are not one number."""
    if not tensor.is_nested:
        return tensor.shape
    if tensor.layout is torch.strided:  # it has no shape
        return (-1,) * tensor.dim()
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


def written_by(info: OperatorInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written:
    """The tensors that an op is about to write in place, with the bytes of their storages: it may enlarge these."""
    given = [args[i] for i in info.written if i < len(args)] + [kwargs.get(name) for name in info.written_names]
    return [(tensor, *_which(tensor)) for tensor in tensors_in(given) if has_storage(tensor)]


def enlarged(written: Written) -> list[torch.Tensor]:
    """Those of `written_by` whose storages the op has given more memory, as `resize_` and ``out=`` do."""
    found = []
    for tensor, cdata, size_bytes in written:
        cdata_now, bytes_now = _which(tensor)
        if cdata_now == cdata and bytes_now > size_bytes:  # another storage is what `set_` gives
            found.append(tensor)
    return found


def _which(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def is_traceable(tensor: torch.Tensor) -> bool:
    """Whether it is known which version of which storage it shows, and that this is all that ops read of it.

    Versions of inference tensors are not counted. What a class does with ops on it, nobody can tell.
    """
    if type(tensor) in PLAIN_TYPES:
        return _by_keys(tensor, _has_versions, _traceable)
    return has_storage(tensor) and not tensor.is_inference() and not _takes_ops(type(tensor))


def _has_versions(tensor: torch.Tensor) -> bool:
    return has_storage(tensor) and not tensor.is_inference()


class StorageRecord:
    """One storage, from when it was first seen until it died.

    Attributes:
        number: order of first sight.
        size_bytes: bytes that the storage counts for.
        external: whether the code touched it without having made it.
        cdata: its identity while it lives; the number is reused after its death.
    """

    __slots__ = ("cdata", "external", "number", "reference", "size_bytes")

    def __init__(self, number: int, size_bytes: int, external: bool, cdata: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.external = external
        self.cdata = cdata
        self.reference: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it has not died."""
        return self.reference is not None and self.reference() is not None

    @property
    def is_emptied(self) -> bool:
        """Whether it lives, and somebody has taken its memory from it."""
        storage = self.reference() if self.reference is not None else None
        return storage is not None and self.size_bytes > 0 and not storage.nbytes()


class Ledger:
    """Counts live bytes, exactly: external storages for as long as the ledger runs, made ones until they die.

    Args:
        on_death: called when a storage has died.
        size_of: bytes that a storage counts for.

    Attributes:
        resting_bytes: bytes of all external storages that were touched, whether or not they still live.
        made_bytes: bytes alive now of storages that were made.
        peak_made_bytes: the most bytes of storages that were made and alive at once.
        open: whether it still counts.
    """

    def __init__(
        self,
        on_death: Callable[[StorageRecord], None] | None = None,
        size_of: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes,
    ) -> None:
        self.resting_bytes = 0
        self.made_bytes = 0
        self.peak_made_bytes = 0
        self.open = True
        self._living: dict[int, StorageRecord] = {}
        self._count = 0
        self._on_death = on_death
        self._size_of = size_of

    @property
    def live_bytes(self) -> int:
        """Bytes alive now: those at rest and those made."""
        return self.resting_bytes + self.made_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever alive."""
        return self.resting_bytes + self.peak_made_bytes

    @property
    def made_here_bytes(self) -> int:
        """Bytes of storages that were made and live, also when the ledger does not count any more."""
        return sum(record.size_bytes for record in list(self._living.values()) if not record.external)

    def touch(self, storage: torch.UntypedStorage) -> StorageRecord:
        """The record of a storage that is used; one that was never seen before is external."""
        return self._living.get(storage._cdata) or self._enter(storage, external=True)

    def make(self, storage: torch.UntypedStorage) -> tuple[StorageRecord, bool]:
        """The record of a storage that an op returned, and whether the op made it."""
        record = self._living.get(storage._cdata)
        if record is not None:
            return record, False
        return self._enter(storage, external=False), True

    def _enter(self, storage: torch.UntypedStorage, external: bool) -> StorageRecord:
        record = StorageRecord(self._count, self._size_of(storage), external, storage._cdata)
        self._count += 1
        self._living[record.cdata] = record
        if external:
            self.resting_bytes += record.size_bytes
        else:
            self.made_bytes += record.size_bytes
            self.reached(self.made_bytes)

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            # The address may be in use again when this runs late: only this very record is forgotten.
            if self._living.get(record.cdata) is record:
                del self._living[record.cdata]
            self._gone(record)

        record.reference = weakref.ref(storage, died)
        return record

    def _gone(self, record: StorageRecord) -> None:
        on_death = self._on_death  # another thread may close the ledger meanwhile
        if self.open:
            if not record.external:
                self.made_bytes -= record.size_bytes
            if on_death is not None:
                on_death(record)

    def outdated(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """The record of a storage that was made, if that has more memory by now, or less."""
        record = self._living.get(storage._cdata) if self.open else None
        is_outdated = record is not None and not record.external and record.size_bytes != self._size_of(storage)
        return record if is_outdated else None

    def resized(self, storage: torch.UntypedStorage) -> StorageRecord:
        """A storage has more memory, or less: it counts as another one from now on, and the former one as dead."""
        former = self._living.pop(storage._cdata, None)
        record = self._enter(storage, external=False)  # both count for a moment: one was copied to the other
        if former is not None:
            former.reference = None  # or it would report the death a second time
            self._gone(former)
        return record

    def at_rest(self) -> list[StorageRecord]:
        """The external storages that live."""
        return [record for record in list(self._living.values()) if record.external]

    def reached(self, made_bytes: int) -> None:
        """Note that ``made_bytes`` of storages that were made were alive at once."""
        self.peak_made_bytes = max(self.peak_made_bytes, made_bytes)

    def close(self) -> None:
        """Stop counting. Deaths after this are not reported."""
        self.open = False
        self._on_death = None  # it may keep all that was noted of a step
