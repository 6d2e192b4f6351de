"""Resident memory of this process, as the operating system counts it."""

from __future__ import annotations

import os
import threading

_PAGE = os.sysconf("SC_PAGE_SIZE")


class _ProcFile:
    """A file under /proc/self that is read again and again."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        return os.pread(self._descriptor, 4096, 0)

    def close(self) -> None:
        os.close(self._descriptor)


_statm: _ProcFile | None = None
_status: _ProcFile | None = None


def _after_fork_in_child() -> None:
    """The open files still show the parent, and their numbers may soon be those of other files."""
    global _statm, _status
    for file in (_statm, _status):
        if file is not None:
            file.close()
    _statm = _status = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def rss_bytes() -> int:
    """Resident bytes of this process now; 0 where there is no ``/proc`` to say so."""
    global _statm
    try:
        if _statm is None:
            _statm = _ProcFile("statm")
        return int(_statm.read().split(None, 2)[1]) * _PAGE
    except OSError:
        return 0


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

    Uses the system's high-water mark; where that cannot be reset, a thread samples every 2 ms. For the rest to be what
    is really in use, give the allocator's holes back first.
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
