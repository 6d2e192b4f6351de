"""Planned places for the blocks of memory that a step takes, on a CPU.

NOTE [Rehearsed steps]
A planned step takes the same blocks in the same order each time. One of them is rehearsed: the arena writes down what
is taken and given back. From that `ebbtide.place` works out where each block lies best, so that a later step needs
hardly more memory than it has bytes alive: a page is touched once and then used again and again, none is given back
and faulted in anew; and of such layouts one in which the threads that compute find most lines in their own caches.
Blocks that ops take and never write to lie beyond all others, and cost addresses only. A step that strays from what was
rehearsed takes what it needs elsewhere, and is rehearsed again. Where sizes vary from step to step, a number of steps
are rehearsed, and what varies has room: see `ebbtide.run.recordings`.
"""

from __future__ import annotations

import numpy as np
import torch

from ebbtide.arrays import Ints
from ebbtide.place import Block, Layout, keep_local, place
from ebbtide.run.native import arena_library
from ebbtide.run.recordings import Recording, expected
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES
from ebbtide.units import round_up

STRAY_SHARE = 0.02
"""Share of a step's footprint that may lie outside its region: more, and the step strayed."""
STRAYS = 2
"""Steps that stray one after the other before one is rehearsed again: a single one may have had a profiler on."""
SLACK_SHARE = 0.02
"""Share of a step's footprint that may be left resident outside its region when it begins."""
HUGE_PAGE_BYTES = 2 << 20
"""What lies on one of these becomes resident together."""
FAILURES = 4
"""Rehearsals of no use, one after the other, before it is given up: each step takes other blocks."""
STEADY = 8
"""Steps, one after the other, that have to keep to their places for a rehearsal to have been of use."""
ENOUGH = 4
"""Where sizes vary, so many steps are rehearsed whose blocks come in the same order."""
MOST_RECORDINGS = 16
"""Where sizes vary, at most so many steps are rehearsed, whatever the order of their blocks."""


class Rehearsed:
    """Records steps of one kind, then gives their blocks planned places.

    Args:
        varies: whether blocks are of other sizes in each step.

    Attributes:
        layout: the planned places of what is written to; None until a step was rehearsed, and while it is to be
            rehearsed again.
    """

    def __init__(self, *, varies: bool = False) -> None:
        self.layout: Layout | None = None
        self._enough, self._most = (ENOUGH, MOST_RECORDINGS) if varies else (1, 1)
        self._recordings: list[Recording] = []
        self._recording = False
        self._strays = self._steady = self._failures = 0
        self._least = self._sizes = self._offsets = np.zeros(0, dtype=np.int64)
        self._start = 0

    @property
    def serves(self) -> bool:
        """Whether the next step has planned places."""
        return self.layout is not None

    def forget(self) -> None:
        """Steps will take other blocks from now on: the next one is rehearsed again, and needs none of these pages."""
        self._recordings.clear()
        self._give_up_places()

    def _give_up_places(self) -> None:
        arena = arena_library()
        if arena is not None and self.layout is not None:
            arena.ebbtide_arena_trim(1)
            self.layout = None

    def begin(self, *, rehearses: bool = True) -> None:
        """A step begins: give its blocks their places, or rehearse it, unless it takes others than later ones will."""
        arena = arena_library()
        if arena is None:
            return
        if self.layout is not None:
            if arena.ebbtide_arena_left_outside() > SLACK_SHARE * self.layout.footprint_bytes:
                arena.ebbtide_arena_trim(0)  # the places of whatever ran since, or lived on when the last step ended
            columns = self._least, self._sizes, self._offsets
            pointers = (column.ctypes.data for column in columns)
            arena.ebbtide_arena_follow(*pointers, len(self._sizes), self._start, self.layout.footprint_bytes)
            return
        arena.ebbtide_arena_leave_regions()
        if rehearses and self._failures < FAILURES:
            self._recording = True
            arena.ebbtide_arena_record(1)

    def end(self, *, exact: bool) -> None:
        """The step ends; ``exact``: it went as planned from beginning to end."""
        arena = arena_library()
        if arena is None:
            return
        if self._recording:
            self._recording = False
            arena.ebbtide_arena_record(0)
            if exact:
                self._learn()
        elif self.layout is not None:
            self._judge(arena.ebbtide_arena_unfollow(), exact)

    def _judge(self, astray_bytes: int, exact: bool) -> None:
        assert self.layout is not None
        if astray_bytes <= STRAY_SHARE * self.layout.footprint_bytes:
            self._strays, self._steady = 0, self._steady + 1
            if self._steady >= STEADY:
                self._failures = 0
            return
        self._steady = 0
        self._strays += exact
        if self._strays >= STRAYS:
            self._give_up_places()
            self._strays = 0
            self._failures += 1
            return
        arena = arena_library()
        assert arena is not None
        arena.ebbtide_arena_trim(0)

    def _learn(self) -> None:
        self._recordings = [*self._recordings, Recording.taken()][-self._most :]
        found = expected(self._recordings, self._enough)
        if found is None:
            self._failures += len(self._recordings) == self._most
            return
        layout, offsets, reach_bytes = _spread(found.blocks)
        arena = arena_library()
        assert arena is not None
        self._start = arena.ebbtide_arena_new_region(reach_bytes)
        if not self._start:
            self._failures += 1  # there are no addresses left
        else:
            self._least, self._sizes, self._offsets = found.least, found.blocks.sizes, offsets
            self.layout = layout
            arena.ebbtide_arena_trim(1)  # nobody reuses what the rehearsed step took


def _spread(recording: Recording) -> tuple[Layout, Ints, int]:
    """Places for all blocks, those that nobody writes to above all others, on pages that never become resident.

    Each begins at a whole block of any disk: what comes back from one has to lie like what was written, modulo a block,
    and was recorded with the room of one more for that.
    That makes layouts 0.03 % larger at most than multiples of 512 bytes, measured on six networks for images.

    Returns:
        The layout of the blocks that are written to, the offsets of all, and the end of the highest block.
    """
    columns = recording.sizes, recording.born, recording.dies
    blocks = [Block(*block) for block in zip(*(column.tolist() for column in columns), strict=True)]
    written = recording.written
    written_blocks = [block for block, touched in zip(blocks, written, strict=True) if touched]
    placed = place(written_blocks, PLACE_ALIGNMENT_BYTES)
    layout = keep_local(written_blocks, placed, torch.get_num_threads(), PLACE_ALIGNMENT_BYTES)
    ghosts = place(
        [block for block, touched in zip(blocks, written, strict=True) if not touched], PLACE_ALIGNMENT_BYTES
    )
    above = round_up(layout.footprint_bytes, HUGE_PAGE_BYTES)
    offsets = np.zeros(len(blocks), dtype=np.int64)
    offsets[written] = layout.offsets
    offsets[~written] = np.array(ghosts.offsets, dtype=np.int64) + above
    return layout, offsets, above + ghosts.footprint_bytes if ghosts.offsets else layout.footprint_bytes
