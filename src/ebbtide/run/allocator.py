"""What the operating system sees: resident memory, and the settings of glibc's allocator.

NOTE [The C allocator decides]
PyTorch takes CPU tensors from ``malloc``. By default glibc maps every large block afresh and unmaps it when it is freed,
so that each step pays a page fault for every 4 KiB it touches (20-40 % of a plain step). With the mapping threshold
off, blocks come from one heap that keeps its pages: no faults, but the heap's holes stay resident too. ebbtide needs
both: few faults, and a resident size that follows the live bytes. So planned steps run on the heap (`tuned`), and
`Trimmer` gives the pages of the holes back to the system when, and only when, the resident size gets too far above
what is alive. While a step is observed each large block is mapped on its own (`exact`), so that the resident size is
the live bytes and the workspace inside each op can be read off the system's high-water mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEEP_ALL = 2**31 - 1
_DEFAULT_MMAP_MAX, _DEFAULT_MMAP_THRESHOLD, _DEFAULT_TRIM_THRESHOLD = 65536, 128 * 1024, 128 * 1024
_EXACT_THRESHOLD = 64 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is one with ``mallopt`` and ``malloc_trim``."""
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except OSError:
        return None


_LIBRARY = _glibc()


def set_tuned() -> None:
    """Take every block from the heap and keep its pages."""
    if _LIBRARY is not None:
        _LIBRARY.mallopt(_M_MMAP_MAX, 0)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, _KEEP_ALL)


def set_exact() -> None:
    """Map every block of 64 KiB or more on its own and give it back at once."""
    if _LIBRARY is not None:
        _LIBRARY.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        _LIBRARY.mallopt(_M_MMAP_THRESHOLD, _EXACT_THRESHOLD)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)


def set_default() -> None:
    """glibc's own settings (its threshold no longer adapts itself, which cannot be restored)."""
    if _LIBRARY is not None:
        _LIBRARY.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        _LIBRARY.mallopt(_M_MMAP_THRESHOLD, _DEFAULT_MMAP_THRESHOLD)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """The settings of planned steps, for the time of a ``with`` block."""
    set_tuned()
    try:
        yield
    finally:
        set_default()


def trim() -> None:
    """Give the pages of the heap's holes back to the system."""
    if _LIBRARY is not None:
        _LIBRARY.malloc_trim(0)


class _ProcFile:
    """A file under /proc/self that is read again and again."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)
        self._process = os.getpid()
        self._name = name

    def read(self) -> bytes:
        if self._process != os.getpid():  # after a fork the descriptor still shows the parent
            self.__init__(self._name)  # type: ignore[misc]
        return os.pread(self._descriptor, 4096, 0)


_statm: _ProcFile | None = None
_status: _ProcFile | None = None


def rss_bytes() -> int:
    """Resident bytes of this process now."""
    global _statm
    if _statm is None:
        _statm = _ProcFile("statm")
    return int(_statm.read().split(None, 2)[1]) * _PAGE


def high_water_bytes() -> int:
    """The most resident bytes since `reset_high_water`, or since the process began."""
    global _status
    if _status is None:
        _status = _ProcFile("status")
    status = _status.read()
    start = status.index(b"VmHWM:") + 6
    return int(status[start : status.index(b"kB", start)]) * 1024


def reset_high_water() -> bool:
    """Start a new high-water mark; False where the system does not allow it."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return True


class RssPeak:
    """Resident memory over a ``with`` block: ``rest_bytes`` before it, ``peak_bytes`` in it, in bytes.

    The heap's holes are given back first, so that the rest is what is really in use. Uses the system's high-water
    mark; where that cannot be reset, a thread samples every 2 ms.
    """

    def __init__(self) -> None:
        self.rest_bytes = 0
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    @property
    def above_rest_bytes(self) -> int:
        """Bytes of the peak above the rest."""
        return self.peak_bytes - self.rest_bytes

    def __enter__(self) -> RssPeak:
        trim()
        self.rest_bytes = self.peak_bytes = rss_bytes()
        if not reset_high_water():
            self._sampler = threading.Thread(target=self._sample, name="ebbtide-rss", daemon=True)
            self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, rss_bytes())

    def __exit__(self, *_: object) -> None:
        if self._sampler is None:
            self.peak_bytes = high_water_bytes()
        else:
            self._stop.set()
            self._sampler.join()


class Trimmer:
    """Keeps the resident size near the live bytes while the allocator keeps its pages.

    Args:
        limit_bytes: resident bytes above which the heap's holes are given back.
    """

    _LEAST_GAIN = 4 << 20

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.trims = 0
        self._backoff_bytes = 0

    def check(self, headroom_bytes: int = 0) -> None:
        """Give holes back if the resident size plus ``headroom_bytes`` is above the limit.

        A trim that gains little is not tried again before the resident size has grown by as much again.
        """
        before = rss_bytes()
        if before + headroom_bytes <= max(self.limit_bytes, self._backoff_bytes):
            return
        trim()
        self.trims += 1
        after = rss_bytes()
        self._backoff_bytes = after + headroom_bytes + self._LEAST_GAIN if before - after < self._LEAST_GAIN else 0
