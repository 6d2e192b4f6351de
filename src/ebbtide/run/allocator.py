"""Where CPU tensors come from, and when its free pages go back to the system.

NOTE [The allocator decides]
PyTorch takes CPU tensors from ``posix_memalign``. By default glibc maps every large block afresh and unmaps it when it
is freed, so that each step pays a page fault for every 4 KiB it touches (20-40 % of a plain step). Told to keep its
heap, it faults no more, but does not put a tensor into the place of a freed one of the same size (alignment needs 96
bytes more), and a step that has half of its tensors alive has as much memory resident as one with all. So planned steps
take large tensors from an arena of our own (`ebbtide.run.native`), which has neither fault; where it cannot be built,
from glibc's heap with its pages kept. `Trimmer` gives the pages of holes back to the system when, and only when, the
resident size gets too far above what is alive. In the first observed step, which nobody knows anything about, each
large block is mapped on its own (`set_exact`), and nothing stays resident that is not alive.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

from ebbtide.observe.workspace import WorkspaceProbe
from ebbtide.run.native import arena_library
from ebbtide.run.resident import rss_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEEP_ALL = 2**31 - 1
_DEFAULT_MMAP_MAX, _DEFAULT_MMAP_THRESHOLD, _DEFAULT_TRIM_THRESHOLD = 65536, 128 * 1024, 128 * 1024
_EXACT_THRESHOLD = 64 * 1024
_SETTLING_STEPS = 5
"""First steps of a loop, before each of which the resident size at rest is measured: it changes yet."""
_STEPS_BETWEEN_RESTS = 64
"""How often the resident size at rest is measured anew, in steps."""


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is one with ``mallopt`` and ``malloc_trim``."""
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except OSError:
        return None


_LIBRARY = _glibc()


def _use_arena(on: bool) -> None:
    library = arena_library()
    if library is not None:
        library.ebbtide_arena_use(int(on))


def reserve_arena() -> None:
    """Let there be an arena for transfers, as while planned steps run, whatever CPU tensors are taken from."""
    library = arena_library()
    if library is not None:
        library.ebbtide_arena_reserve()


def set_tuned() -> None:
    """Take large tensors from the arena, all else from glibc's heap, and keep the pages of both."""
    _now_set_by(set_tuned)
    _use_arena(True)
    if _LIBRARY is not None:
        _LIBRARY.mallopt(_M_MMAP_MAX, 0)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, _KEEP_ALL)


def set_exact() -> None:
    """Map every block of 64 KiB or more on its own and give it back at once."""
    _now_set_by(set_exact)
    _use_arena(False)
    if _LIBRARY is not None:
        _LIBRARY.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        _LIBRARY.mallopt(_M_MMAP_THRESHOLD, _EXACT_THRESHOLD)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)


def set_default() -> None:
    """PyTorch's own allocator and glibc's own settings; that its threshold adapts itself cannot be brought back."""
    _now_set_by(set_default)
    _use_arena(False)
    if _LIBRARY is not None:
        _LIBRARY.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        _LIBRARY.mallopt(_M_MMAP_THRESHOLD, _DEFAULT_MMAP_THRESHOLD)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)


_set: Callable[[], None] = set_default
"""What has set the settings of now."""


def _now_set_by(setting: Callable[[], None]) -> None:
    global _set
    _set = setting


class _ArenaProbe:
    """A `WorkspaceProbe` that counts what an op takes from the arena."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._mark, self._most = library.ebbtide_arena_mark, library.ebbtide_arena_most
        self._alive = 0

    def before(self, _made_bytes: int) -> None:
        self._alive = self._mark()

    def after(self) -> int:
        return int(self._most()) - self._alive


def arena_probe() -> WorkspaceProbe | None:
    """Measures what ops take inside themselves while the arena is in use (`set_tuned`); None if there is no arena."""
    library = arena_library()
    return _ArenaProbe(library) if library is not None else None


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """The settings of planned steps, for the time of a ``with`` block; then those from before, maybe a loop's."""
    former = _set
    set_tuned()
    try:
        yield
    finally:
        former()


def trim() -> None:
    """Give the pages of the holes in the arena and the heap back to the system."""
    library = arena_library()
    if library is not None:
        library.ebbtide_arena_trim(1)
    trim_heap()


def trim_heap() -> None:
    """Give the pages of the heap's holes back to the system."""
    if _LIBRARY is not None:
        _LIBRARY.malloc_trim(0)


def leave_regions() -> None:
    """A step begins whose blocks have no planned places: give the pages of all others' places back to the system."""
    library = arena_library()
    if library is not None:
        library.ebbtide_arena_leave_regions()


class RestingSize:
    """Resident bytes between steps."""

    def __init__(self) -> None:
        self._rss_bytes = 0

    def before(self, step: int) -> int:
        """Resident bytes as step number ``step`` begins, or as one did before."""
        # Giving the holes back makes the next step fault them in again: done while things settle, then rarely.
        if step < _SETTLING_STEPS or step % _STEPS_BETWEEN_RESTS == 0:
            trim()
            self._rss_bytes = rss_bytes()
        return self._rss_bytes


class Trimmer:
    """Keeps the resident size near the live bytes while the allocator keeps its pages.

    Args:
        rest_bytes: resident bytes at rest.
        limit_bytes: resident bytes above which holes are given back.
    """

    _LEAST_GAIN_BYTES = 4 << 20
    """A trim that gives back less gained little: see `check`."""

    def __init__(self, rest_bytes: int, limit_bytes: int) -> None:
        self.rest_bytes = rest_bytes
        self.limit_bytes = limit_bytes
        self._backoff_bytes = 0

    def check(self, alive_bytes: int, growth_bytes: int) -> None:
        """Give holes back if the resident size is about to pass the limit.

        Args:
            alive_bytes: bytes alive above those at rest.
            growth_bytes: bytes that are about to be taken. Half of the holes is counted on to take them in.

        A trim that gains little is not tried again before the resident size has grown by as much again.
        """
        before = rss_bytes()
        holes = max(0, before - self.rest_bytes - alive_bytes)
        headroom_bytes = max(0, growth_bytes - holes // 2)
        if before + headroom_bytes <= max(self.limit_bytes, self._backoff_bytes):
            return
        trim()
        after = rss_bytes()
        gained_little = before - after < self._LEAST_GAIN_BYTES
        self._backoff_bytes = after + headroom_bytes + self._LEAST_GAIN_BYTES if gained_little else 0
