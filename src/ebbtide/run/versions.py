"""Which version of a storage a tensor shows, and who counts it.

NOTE [Counts]
PyTorch counts what is written in place to a tensor, and to what counts together with it: its views, and what
`torch.Tensor.detach` gives. Others that show the same storage count by themselves, from 0 on: what ``data`` gives, and
that by which `torch.kron` reads what it is given. Autograd compares the count of the very tensor that it saved.
1. Saved tensors that count apart, none of which was written to yet, are views of one holding as others are, and have
   their own count (`Count`).
2. Where one was written to, the same value has several numbers: it stays, see `ebbtide.observe.storages.Storages.use`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from ebbtide.observe.ledger import sizes
from ebbtide.observe.mode import is_mode_on, unseen


class Shown(Protocol):
    """A tensor, or what is known of one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...


class ChangedError(RuntimeError):
    """What was saved has been written in place since. PyTorch itself raises a `RuntimeError` that says the same.

    Attributes:
        leaf: the value that was written to, if another one was to be computed from it, as in no plain step; or -1.
    """

    leaf = -1


def changed_error(shown: Shown, found: int, version: int, leaf: int = -1) -> ChangedError:
    """The error for what ``shown`` has, whose version is ``found`` and should be ``version``."""
    shape = list(sizes(shown) if isinstance(shown, torch.Tensor) else shown.shape)
    error = ChangedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{shown.dtype} {shape}] is at version {found}; expected version {version} instead."
        + (" From the next step on, plans keep what is computed from it, if they can" if leaf >= 0 else "")
    )
    error.leaf = leaf
    return error


@functools.cache
def nothing(device: torch.device) -> torch.Tensor:
    """A tensor of no elements, kept: a plain one, whatever mode or transform of the user's is on."""
    with (
        torch.inference_mode(False),
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
    ):
        return torch.empty(0, device=device)


def shell_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that counts its versions with ``tensor``: it shows what is written in place later."""
    if is_mode_on():  # in which there may be no tensors with memory
        with unseen():
            return _shell_of(tensor)
    return _shell_of(tensor)


def _shell_of(tensor: torch.Tensor) -> torch.Tensor:
    shell = tensor.detach()
    shell.data = nothing(tensor.device)
    return shell


class Version(NamedTuple):
    """One version of one storage, however long it lives: as long as this does, nothing else is equal to it."""

    storage: weakref.ref[torch.UntypedStorage]
    number: int

    def written(self) -> Version:
        """The next version."""
        return Version(self.storage, self.number + 1)


def version_of(tensor: torch.Tensor) -> Version:
    """What ``tensor`` shows."""
    # All references to one object are one object, dead or alive, as long as one of them is kept: none is a stranger's.
    return Version(weakref.ref(tensor.untyped_storage()), tensor._version)


def is_same(one: Version, other: Version) -> bool:
    """Whether they are the same version of the same storage, which may be gone."""
    return one.storage is other.storage and one.number == other.number


def is_among(version: Version, known: Iterable[Version]) -> bool:
    """Whether it is one of these."""
    return any(is_same(each, version) for each in known)


class Count(NamedTuple):
    """What counts the versions of a saved tensor, and its version as it was saved."""

    shell: torch.Tensor
    version: int


def count_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether of two tensors that show one storage each sees from its version what is written to the other.

    Views do, and what `torch.Tensor.detach` gives; ``data`` does not, nor that by which `torch.kron` reads what it is
    given. There is no other way to tell than to try.
    """
    number = one._version
    if number != other._version:
        return False
    try:  # an interrupt may come at any moment
        torch._C._autograd._unsafe_set_version_counter((one,), (number + 1,))
        return other._version != number
    finally:
        torch._C._autograd._unsafe_set_version_counter((one,), (number,))
