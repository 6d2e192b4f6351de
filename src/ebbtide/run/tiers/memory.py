"""Memory for what comes back from a slower memory."""

from __future__ import annotations

import contextlib
import mmap

import torch

CONGRUENCE_BYTES = 512
"""Memory that comes back lies like the memory that left, modulo this: kernels may choose their code by alignment, and
another choice can round differently. Large enough for direct I/O on most disks, too."""
HUGE_PAGES_FROM_BYTES = 4 << 20
"""From this size on memory is backed by 2 MiB pages where the system has them: on a disk of 2.4 GB/s, faulting pages of
4 KiB in while reading left 1.2 GB/s."""


def take_memory(size_bytes: int, offset_bytes: int = 0) -> torch.UntypedStorage:
    """A storage of exactly ``size_bytes`` that begins ``offset_bytes`` after a page; unmapped as soon as it dies.

    Not from the allocator: an anonymous mapping goes back to the system at once, and no dispatch mode sees it made.

    Raises:
        OSError: if the system has no memory, or no mapping, left.
    """
    if size_bytes == 0:
        return torch.UntypedStorage(0)
    mapping = mmap.mmap(-1, size_bytes + offset_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_PAGES_FROM_BYTES:
        with contextlib.suppress(OSError):  # advice only: a kernel without huge pages refuses it
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size_bytes, offset=offset_bytes).untyped_storage()
