"""Memory that another thread may unmap is read without an end of the process, and what was written from it is whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.run.allocator import set_default, set_exact
from ebbtide.run.tiers import DiskTier
from ebbtide.run.tiers import disk as disk_module
from ebbtide.run.tiers import memory as module
from ebbtide.run.tiers.memory import read_memory
from tests.run.tiers.stand_ins import bytes_of, storage_of


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


@pytest.mark.parametrize("size_bytes", [0, 1, 511, 8192, 1 << 20])
def test_what_is_mapped(size_bytes: int) -> None:
    storage = storage_of(size_bytes)
    assert read_memory(storage.data_ptr(), size_bytes) == bytes_of(storage)


def test_what_is_mapped_no_more() -> None:
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as pages:
        address = address_of(pages)
        libc = ctypes.CDLL(None)
        middle = ctypes.c_void_p(address + mmap.PAGESIZE)
        assert libc.mprotect(middle, mmap.PAGESIZE, 0) == 0
        for start in (0, mmap.PAGESIZE):  # where it begins well, and where it does not
            with pytest.raises(OSError, match="Bad address") as caught:
                read_memory(address + start, 2 * mmap.PAGESIZE)
            assert caught.value.errno == errno.EFAULT
        assert read_memory(address + 2 * mmap.PAGESIZE, 10) == bytes(10)
        assert libc.mprotect(middle, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_the_call_is_refused(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(module, "_process_vm_readv", refuse)
    storage = storage_of(1000)
    assert read_memory(storage.data_ptr(), 1000) == bytes_of(storage)


@pytest.mark.parametrize(("call", "number"), [("copy_memory", 0), ("copy_memory", 3), ("read_memory", 1)])
def test_a_storage_that_gets_other_memory_just_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    set_exact()  # each large tensor has a mapping of its own, which is gone when the tensor is
    real: Callable[..., Any] = getattr(disk_module, call)
    numbers = torch.arange((1 << 20) + 5)
    tensor = numbers.clone()
    calls = iter(range(100))

    def late(*arguments: int) -> object:
        if next(calls) == number:
            tensor.share_memory_()
        return real(*arguments)

    monkeypatch.setattr(disk_module, call, late)
    with contextlib.closing(DiskTier(tmp_path, checksum=True)) as disk:
        slot = disk.write(tensor.untyped_storage())
        slot.wait()
        assert next(calls) > number + 1
        assert torch.equal(torch.empty(0, dtype=numbers.dtype).set_(disk.read(slot).wait()), numbers)
    set_default()
