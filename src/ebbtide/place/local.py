"""Layouts no larger than others, of which the caches of several cores make more.

NOTE [Whose cache]
A block is written over whatever lay there before. If that was in use lately, its lines are in a cache still. But the
threads that compute share out each tensor, the first part of it to the first thread and so on, and a line that another
core wrote last has to come out of that core's cache: where the two have no cache in common, to write a block of which
each half had been the other core's takes 1.8 times as long as to write it again where it was. So a block lies best
where one lay lately whose parts were the same threads' as its own: one of the same size, say. `place` looks at the
footprint alone, and lays blocks of all sizes across each other. Here each block in turn, in the order of birth, moves
to the best place that it can have between those that are alive beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ebbtide.arguments import as_whole, check_instance
from ebbtide.arrays import Floats, Ints
from ebbtide.compiled import compiled
from ebbtide.errors import ArgumentError
from ebbtide.place.layout import ALIGNMENT_BYTES, WORK, Block, Layout, columns

CACHE_BYTES = 32 << 20
"""What was in use lately: the last so many bytes that blocks were born with. A cache that several cores share holds
about as much."""
COLD_WRITE_COST = 0.6
"""What it costs to write a byte over one that is in no cache, as a multiple of `FAR_WRITE_COST`."""
FAR_WRITE_COST = 1.0
"""What it costs to write a byte over one that is in another core's cache: the unit of all costs here."""
SAMPLES = 8
"""Points of a block at which it is looked what lay there."""
LATELY = 24
"""How many of the blocks that died last are tried as places."""
PASSES = 4
"""How often all blocks are gone through, at most: where one moved, those born after it find other lines."""
WORTH = 0.02
"""Share of its cost that a block must save to move."""


def keep_local(blocks: Sequence[Block], layout: Layout, threads: int, alignment_bytes: int = ALIGNMENT_BYTES) -> Layout:
    """A layout of the same footprint in which blocks lie where their threads find their lines. See NOTE [Whose cache].

    Args:
        blocks: what `place` placed.
        layout: what it returned.
        threads: how many threads share out a tensor; with one, only what is in no cache counts.
        alignment_bytes: that of ``layout``: offsets stay multiples of it.

    Returns:
        ``layout`` with other offsets, in bytes, in the order of the blocks. The same arguments give the same ones.

    Raises:
        ArgumentError: if ``layout`` is not of so many blocks, or something cannot be, as for `place`.
    """
    check_instance("layout", layout, Layout)
    threads, alignment_bytes = as_whole("threads", threads, 1), as_whole("alignment_bytes", alignment_bytes)
    if len(layout.offsets) != len(blocks):  # what is compiled would read and write behind the end
        raise ArgumentError(f"layout: it is one of {len(layout.offsets)} blocks, and there are {len(blocks)}")
    born, dies, sizes = columns(blocks, alignment_bytes)
    order = np.argsort(born, kind="stable")
    written = np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.float64)
    bytes_at_birth, bytes_at_death = (written[np.searchsorted(born[order], times)] for times in (born, dies))
    by_death = np.argsort(dies, kind="stable")
    dead_before = np.searchsorted(dies[by_death], born, side="right")
    offsets = np.array(layout.offsets, dtype=np.int64)
    threads = threads if threads > 1 else 0  # whatever is in a cache is in that of the only one
    lives = born, dies, sizes, bytes_at_birth, bytes_at_death
    for _ in range(min(PASSES, WORK // max(1, len(blocks)) ** 2)):
        moved = compiled(_move_all)(
            offsets, *lives, order, by_death, dead_before, threads, alignment_bytes, layout.footprint_bytes
        )
        if not moved:
            break
    return dataclasses.replace(layout, offsets=tuple(offsets.tolist()))


# What numba compiles.


def _cost(
    block: int,
    place: int,
    offsets: Ints,
    sizes: Ints,
    bytes_at_birth: Floats,
    bytes_at_death: Floats,
    by_death: Ints,
    dead_before: Ints,
    threads: int,
) -> float:
    """What it costs to write ``block`` at ``place``: a share of its bytes, times these.

    Args:
        block, place: number of the block, and the offset that is tried, in bytes.
        offsets, sizes: of all blocks, in bytes.
        bytes_at_birth, bytes_at_death: by block, how many bytes all blocks had been born with when it was born, and
            when it died.
        by_death: numbers of the blocks in the order in which they die.
        dead_before: by block, how many had died when it was born: the first so many of ``by_death``.
        threads: among how many a tensor is shared out; 0 if that does not matter.
    """
    cost = 0.0
    for sample in range(SAMPLES):
        part = (sample + 0.5) / SAMPLES
        point = place + part * sizes[block]
        here = COLD_WRITE_COST
        for i in range(dead_before[block] - 1, -1, -1):
            former = by_death[i]
            age = bytes_at_birth[block] - bytes_at_death[former]
            if age >= CACHE_BYTES:
                break
            if offsets[former] <= point < offsets[former] + sizes[former]:
                other_part = (point - offsets[former]) / sizes[former]
                here = max(min(FAR_WRITE_COST, threads * abs(part - other_part)), COLD_WRITE_COST * age / CACHE_BYTES)
                break
        cost += here
    return float(cost / SAMPLES * sizes[block])


def _gaps(block: int, offsets: Ints, born: Ints, dies: Ints, sizes: Ints, footprint_bytes: int) -> tuple[Ints, Ints]:
    """Starts and ends of what those that are alive beside ``block`` leave to it."""
    beside = np.flatnonzero((born < dies[block]) & (dies > born[block]))
    beside = beside[beside != block]
    starts, ends = np.zeros(len(beside) + 1, np.int64), np.full(len(beside) + 1, footprint_bytes, np.int64)
    reached = 0
    for i, other in enumerate(beside[np.argsort(offsets[beside])]):
        starts[i], ends[i] = reached, offsets[other]
        reached = max(reached, offsets[other] + sizes[other])
    starts[-1] = reached
    fits = ends - starts >= sizes[block]
    return starts[fits], ends[fits]


def _move_all(
    offsets: Ints,
    born: Ints,
    dies: Ints,
    sizes: Ints,
    bytes_at_birth: Floats,
    bytes_at_death: Floats,
    order: Ints,
    by_death: Ints,
    dead_before: Ints,
    threads: int,
    alignment_bytes: int,
    footprint_bytes: int,
) -> int:
    """Move each block to its best place, if that is better than its own. Returns how many moved."""
    moved = 0
    for block in order:
        seen = offsets, sizes, bytes_at_birth, bytes_at_death, by_death, dead_before, threads
        least = (1 - WORTH) * _cost(block, offsets[block], *seen)
        best = offsets[block]
        starts, ends = _gaps(block, offsets, born, dies, sizes, footprint_bytes)
        lately = by_death[max(0, dead_before[block] - LATELY) : dead_before[block]]
        wanted = np.concatenate(
            (starts, ends - sizes[block], offsets[lately], offsets[lately] + sizes[lately] - sizes[block])
        )
        for place in wanted:
            if place % alignment_bytes or not np.any((starts <= place) & (place + sizes[block] <= ends)):
                continue
            cost = _cost(block, place, *seen)
            if cost < least:
                least, best = cost, place
        if best != offsets[block]:
            offsets[block] = best
            moved += 1
    return moved
