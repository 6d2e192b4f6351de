"""The memory an op takes and gives back inside itself, read from the system's high-water mark."""

from __future__ import annotations

import os


class WorkspaceProbe:
    """Measures how far the resident size rises while an op runs.

    Meaningful only while the C allocator maps each large block on its own (`ebbtide.run.allocator.set_exact`);
    elsewhere, and where the mark cannot be reset, workspaces are read as 0.
    """

    def __init__(self) -> None:
        self._rest = 0
        try:
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._reset = self._status = -1

    def before(self) -> None:
        """Call right before the op."""
        if self._reset >= 0:
            os.write(self._reset, b"5")
            self._rest = self._read(b"VmRSS:")

    def after(self) -> int:
        """Call right after the op: bytes by which the resident size rose at most, its outputs included."""
        return self._read(b"VmHWM:") - self._rest if self._reset >= 0 else 0

    def _read(self, field: bytes) -> int:
        status = os.pread(self._status, 4096, 0)
        start = status.index(field) + len(field)
        return int(status[start : status.index(b"kB", start)]) * 1024

    def close(self) -> None:
        """Close the files."""
        if self._reset >= 0:
            os.close(self._reset)
            os.close(self._status)
            self._reset = -1
