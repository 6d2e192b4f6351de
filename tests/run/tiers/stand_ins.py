"""What tests of tiers share: storages with known bytes, and system calls that wait or fail."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ebbtide.run.tiers import DiskTier, QueuedTier
from ebbtide.run.tiers.memory import take_memory

MIB = 1 << 20
Tiers = list[QueuedTier]


def storage_of(size_bytes: int, seed: int = 0, offset_bytes: int = 0) -> torch.UntypedStorage:
    storage = take_memory(size_bytes, offset_bytes)
    if size_bytes:
        ctypes.memmove(storage.data_ptr(), random.Random(seed).randbytes(size_bytes), size_bytes)
    return storage


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


class HeldCall:
    """Stands in for a system call of a tier: holds it back until opened, then lets it through."""

    def __init__(self, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        real = getattr(tier, call)

        def held(fd: int, view: memoryview, offset_bytes: int) -> int:
            self.entered.set()
            assert self.open.wait(20)
            return int(real(fd, view, offset_bytes))

        monkeypatch.setattr(tier, call, held)


def failing(code: int) -> Callable[[int, memoryview, int], int]:
    def fail(fd: int, view: memoryview, offset_bytes: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
