"""Memory for what comes back from a slower memory.

NOTE [One memory for all]
What comes back takes the place of what has just died, and both are large. So its memory comes from where PyTorch's own
CPU tensors come from: from the arena, or where there is none from ``malloc``. The holes, whose pages are there already,
serve both. Mappings of our own were tried: pages had to move from one to the other and back in each step, at the price
of faulting them in.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ebbtide.run.native import arena_library

CONGRUENCE_BYTES = 512
"""Memory that comes back lies like the memory that left, modulo this: kernels may choose their code by alignment, and
another choice can round differently. Large enough for direct I/O on most disks, too."""

_library = ctypes.CDLL(None)
_library.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_library.free.argtypes = [ctypes.c_void_p]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


# Without letting go of the interpreter's lock: to get it again may take far longer than to copy a few bytes.
_process_vm_readv = ctypes.PyDLL(None, use_errno=True).process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = [ctypes.c_int, *(ctypes.POINTER(_Iovec), ctypes.c_ulong) * 2, ctypes.c_ulong]

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _give_back(block: Any) -> None:
    block.free(block.base)


@lru_cache(maxsize=4096)
def _block_type(size_bytes: int) -> Any:
    """A type of buffers of ``size_bytes`` that free their memory when they die."""
    return type("Block", (ctypes.c_ubyte * size_bytes,), {"__del__": _give_back})


def take_memory(
    size_bytes: int, offset_bytes: int = 0, alignment_bytes: int = CONGRUENCE_BYTES
) -> torch.UntypedStorage:
    """A storage of exactly ``size_bytes`` at an address that is ``offset_bytes`` modulo ``alignment_bytes``.

    It goes back as soon as it dies. No dispatch mode sees it made.

    Raises:
        OSError: if there is no memory left.
    """
    if size_bytes == 0:
        return torch.UntypedStorage(0)
    arena = arena_library()
    if arena is not None:
        tensor = arena.ebbtide_arena_take(size_bytes, alignment_bytes, offset_bytes)
        if tensor:
            adopted: torch.Tensor = torch._C._from_dlpack(_capsule(tensor, b"dltensor", None))
            storage = adopted.untyped_storage()
            arena.ebbtide_arena_let_resize(storage._cdata)
            return storage
    pointer = ctypes.c_void_p()
    fault = _library.posix_memalign(ctypes.byref(pointer), alignment_bytes, size_bytes + offset_bytes)
    if fault or pointer.value is None:
        raise OSError(fault or errno.ENOMEM, os.strerror(fault or errno.ENOMEM))
    return storage_over(pointer.value + offset_bytes, size_bytes, pointer.value, _library.free)


def storage_over(address: int, size_bytes: int, base: Any, free: Callable[[Any], Any]) -> torch.UntypedStorage:
    """A storage over memory that somebody else has made. ``free(base)`` is called as soon as it dies."""
    block = _block_type(size_bytes).from_address(address)
    block.base, block.free = base, free
    return torch.frombuffer(block, dtype=torch.uint8).untyped_storage()


def read_memory(pointer: int, size_bytes: int) -> bytes:
    """The ``size_bytes`` at an address. Raises `OSError` as `copy_memory`."""
    if not size_bytes:
        return b""
    copy = ctypes.create_string_buffer(size_bytes)
    copy_memory(ctypes.addressof(copy), pointer, size_bytes)
    return copy.raw


def copy_memory(target: int, source: int, size_bytes: int) -> None:
    """Copy ``size_bytes`` between addresses, of which another thread may unmap those at ``source`` meanwhile.

    The system copies them: it says so where there is no memory any more, and a read of our own would end the process.

    Raises:
        OSError: EFAULT if not all of them are mapped.
    """
    here, there = _Iovec(target, size_bytes), _Iovec(source, size_bytes)
    count = _process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count == size_bytes:
        return
    fault = ctypes.get_errno() if count < 0 else errno.EFAULT
    if fault not in (errno.EPERM, errno.ENOSYS):
        raise OSError(fault, os.strerror(fault))
    ctypes.memmove(target, source, size_bytes)  # the filters of some containers refuse the call


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of ``storage`` as uint8, of shape ``(storage.nbytes(),)``; not copied."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
