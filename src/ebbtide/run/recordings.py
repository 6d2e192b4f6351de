"""What rehearsed steps took, and what that says of the steps to come.

Where tensors are of other sizes each time, a step still takes its blocks in the order of others, and gives them back in
the same, but for some that are too small for the arena in one step and not in another. So a number of steps are
recorded, and a block is planned as large as it was in any of them, with room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ebbtide.arrays import Ints, Mask
from ebbtide.place.layout import FOREVER
from ebbtide.run.native import arena_library
from ebbtide.run.roomy import sizes_with_room


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """The blocks of one step, in the order in which it took them.

    Attributes:
        sizes: in bytes.
        born, dies: when each was taken and given back, as numbers of such events; `FOREVER` if it was kept.
        written: whether it was ever written to.
    """

    sizes: Ints
    born: Ints
    dies: Ints
    written: Mask

    @classmethod
    def taken(cls) -> Recording:
        """What the arena recorded last."""
        arena = arena_library()
        assert arena is not None
        count = arena.ebbtide_arena_recorded(None, None, None, None, 0)
        columns = np.zeros((4, count), dtype=np.int64)
        left = arena.ebbtide_arena_recorded(*(column.ctypes.data for column in columns), count)
        sizes, born, dies, written = columns[:, :left]  # another budget's step may have begun to record
        dies[dies < 0] = FOREVER
        return cls(sizes, born, dies, written.astype(np.bool_))

    @property
    def order(self) -> bytes:
        """What recordings have in common whose blocks come and go in the same order."""
        return self.born.tobytes() + self.dies.tobytes()


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The blocks that steps are likely to take.

    Attributes:
        blocks: the blocks, each as large as it may be.
        least: the least size of each: the same if it does not vary, otherwise none is too small.
    """

    blocks: Recording
    least: Ints


def expected(recordings: Sequence[Recording], enough: int) -> Expected | None:
    """What ``recordings`` say of the steps to come: those with the same order of blocks, ``enough`` of them at least,
    that took most. None where the order of the last one was not seen so often: it may be that of all later ones."""
    orders: dict[bytes, list[Recording]] = {}
    for recording in recordings:
        orders.setdefault(recording.order, []).append(recording)
    if not recordings or len(orders[recordings[-1].order]) < enough:
        return None
    often = [alike for alike in orders.values() if len(alike) >= enough]
    alike = max(often, key=lambda those: max(int(recording.sizes.sum()) for recording in those))
    sizes = np.array([recording.sizes for recording in alike])
    most = sizes_with_room(sizes)
    written = np.logical_or.reduce([recording.written for recording in alike])
    blocks = dataclasses.replace(alike[0], sizes=most, written=written)
    return Expected(blocks, np.where(sizes.min(axis=0) < sizes.max(axis=0), 0, most))
