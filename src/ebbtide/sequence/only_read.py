"""Tensors outside that a cell reads and does not write to: steps that run again must find in them what was there.

A plain loop does not mind if they are altered between the passes, unless autograd has saved them. Here small ones, as
the statistics of a normalizer or a schedule's factor, are for the backward pass what they were; larger ones are not
copied, and may not be altered. PyTorch counts alterations, so that nothing is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ebbtide.errors import SequenceError
from ebbtide.observe.wrapped import AsOrdinary
from ebbtide.sequence.surroundings import Reference, bytes_of_storage, unseen

KEPT_BYTES = 1 << 20
"""Copies of what is only read take at most this many bytes, the smallest first."""


@dataclasses.dataclass(slots=True)
class _Noted:
    """One of them.

    Attributes:
        reference: to it.
        version: what it must have.
        copy: of its storage's bytes, if there is one.
    """

    reference: Reference
    version: int
    copy: Tensor | None

    def altered(self) -> Tensor | None:
        """It, if it was altered and is still there."""
        tensor = self.reference()
        return tensor if tensor is not None and tensor._version != self.version else None

    def can_be_put(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which it is, can be what it was."""
        return self.copy is not None and tensor.untyped_storage().nbytes() == self.copy.numel()


class OnlyRead:
    """Those of a cell.

    Args:
        references: to them.
    """

    def __init__(self, references: tuple[Reference, ...]) -> None:
        self._references = references
        self._noted: list[_Noted] = []

    def note(self) -> None:
        """Take them as they are now, at the end of the forward pass."""
        left = KEPT_BYTES
        with _ordinarily():
            there = [(reference, tensor) for reference in self._references if (tensor := reference()) is not None]
            for reference, tensor in sorted(there, key=lambda pair: pair[1].untyped_storage().nbytes()):
                storage = tensor.untyped_storage()
                is_kept = storage.nbytes() <= left and not tensor.requires_grad  # autograd minds if weights are altered
                left -= storage.nbytes() if is_kept else 0
                copy = bytes_of_storage(storage).clone() if is_kept else None
                self._noted.append(_Noted(reference, tensor._version, copy))

    def check(self) -> None:
        """Raise `SequenceError` if one was altered that cannot be what it was."""
        with _ordinarily():
            for one in self._noted:
                tensor = one.altered()
                if tensor is not None and not one.can_be_put(tensor):
                    raise SequenceError(
                        f"a tensor outside of shape {tuple(tensor.shape)} that the cell reads was altered in place "
                        "before the backward pass, in which steps run again; alter it after that, or let the cell read "
                        "a copy"
                    )

    @contextlib.contextmanager
    def as_noted(self) -> Iterator[None]:
        """Inside, they are what they were, as far as they can be."""
        with _ordinarily():
            altered = [(one, tensor) for one in self._noted if (tensor := one.altered()) is not None]
        with contextlib.ExitStack() as stack:
            for one, tensor in altered:
                with _ordinarily():
                    if one.can_be_put(tensor):
                        storage = tensor.untyped_storage()
                        stack.callback(_put, storage, bytes_of_storage(storage).clone())
                        _put(storage, one.copy)
            yield
        skipped = {id(one) for one, _ in altered}
        with _ordinarily():
            for one in self._noted:  # steps other than the first may have written to them
                tensor = one.reference() if id(one) not in skipped else None
                if tensor is not None:
                    one.version = tensor._version


def _put(storage: torch.UntypedStorage, value: Tensor | None) -> None:
    if value is not None:
        with _ordinarily():
            bytes_of_storage(storage).copy_(value)


@contextlib.contextmanager
def _ordinarily() -> Iterator[None]:
    with torch.no_grad(), unseen(), AsOrdinary():
        yield
