"""Static placement: lifetimes and sizes in, offsets out.

The problem is dynamic storage allocation, the "weighted graph colouring" of SmartPool (Zhang et al. 2019): blocks that
are alive at the same time must not overlap, and the footprint should be as near as possible to the most bytes alive at
once, which no layout goes below. Two ways of placing are tried. A *skyline* takes, of all blocks that are left, the one
that can lie lowest on top of what is placed already. *First fit* takes the blocks in a given order, each to the lowest
gap between those that are alive at the same time. The result depends on the order of the blocks, so many orders are
tried: those by birth, by life, by size and by life times size, and random mixtures of these.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.arguments import as_whole, check_instance
from ebbtide.arrays import Ints
from ebbtide.compiled import compiled
from ebbtide.errors import ArgumentError
from ebbtide.heaps import make_heap, take_least
from ebbtide.step import MOST_BYTES
from ebbtide.units import round_up

FOREVER = np.iinfo(np.int64).max
"""When a block dies that outlives the trace."""
ALIGNMENT_BYTES = 512
"""Offsets are multiples of this: what direct I/O wants of memory on most disks."""
MOST_TRIES = 400
"""Random orders to try at most."""
WORK = 200_000_000
"""Pairs of blocks to look at, at most, in all random orders together."""
NOISE = (0.0, 0.05, 0.2, 0.5)
"""How far a block may be moved in an order at random, as shares of the number of blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Memory of ``size_bytes`` that is wanted from time ``born`` until just before time ``dies``."""

    size_bytes: int
    born: int
    dies: int = FOREVER


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where blocks lie.

    Attributes:
        offsets: in bytes, in the order of the blocks.
        footprint_bytes: end of the highest block.
        max_live_bytes: most bytes alive at once, sizes rounded up to the alignment. No layout can be smaller.
    """

    offsets: tuple[int, ...]
    footprint_bytes: int
    max_live_bytes: int


def place(
    blocks: Sequence[Block], alignment_bytes: int = ALIGNMENT_BYTES, *, seed: int = 0, tries: int = MOST_TRIES
) -> Layout:
    """The best layout found. The same arguments give the same layout.

    Args:
        blocks: what to place.
        alignment_bytes: offsets and sizes are rounded up to multiples of this.
        seed: seed of the random orders.
        tries: how many random orders to try at most, after the four plain ones; of many blocks fewer are tried.

    Raises:
        ArgumentError: if a block dies before it is born, has a negative size or is none, all together are larger than
            any memory, or another argument is no whole number; it is a `ValueError`.
    """
    seed, tries = as_whole("seed", seed, 0), as_whole("tries", tries, 0)
    born, dies, sizes = columns(blocks, alignment_bytes)
    least = _max_live(born, dies, sizes)
    best, best_bytes = np.zeros(len(blocks), dtype=np.int64), FOREVER
    for ranking in _rankings(
        born, np.minimum(dies, 1 + dies[dies < FOREVER].max(initial=born.max(initial=0))), sizes, seed, tries
    ):
        for method in (_skyline, _first_fit):
            offsets, footprint_bytes = compiled(method)(born, dies, sizes, ranking, best_bytes)
            if footprint_bytes < best_bytes:
                best, best_bytes = offsets, int(footprint_bytes)
        if best_bytes <= least:
            break
    return Layout(tuple(best.tolist()), best_bytes if blocks else 0, least)


def _rankings(born: Ints, dies: Ints, sizes: Ints, seed: int, tries: int) -> Iterator[Ints]:
    """Permutations of the blocks, best first as a rule."""
    life = dies - born
    bases = [_ranks(key) for key in (born, -life, -sizes, -sizes.astype(np.float64) * life)]
    yield from bases
    generator = np.random.default_rng(seed)
    for _ in range(min(tries, WORK // max(1, len(born)) ** 2)):
        mixed = generator.random(len(bases)) @ np.array(bases)
        yield _ranks(mixed + generator.choice(NOISE) * len(born) * generator.random(len(born)))


def _ranks(keys: npt.NDArray[Any]) -> Ints:
    ranks = np.empty(len(keys), dtype=np.int64)
    ranks[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    return ranks


def max_live_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes alive at once: what every layout needs at least. Raises `ArgumentError` as `place` does."""
    return _max_live(*columns(blocks, 1))


def columns(blocks: Sequence[Block], alignment_bytes: int) -> tuple[Ints, Ints, Ints]:
    """When blocks are born, when they die, and their sizes, rounded up to the alignment. Raises `ArgumentError` if one
    of them cannot be: a time that is cut to a whole number would let blocks overlap, as would a sum that overflows."""
    alignment_bytes = as_whole("alignment_bytes", alignment_bytes)
    if alignment_bytes < 1:
        raise ArgumentError(f"blocks are aligned to 1 byte at least, not {alignment_bytes}")
    rows = [_row(block) for block in blocks]
    sizes = [round_up(size, alignment_bytes) for _, _, size in rows]
    if sum(sizes) > MOST_BYTES:
        raise ArgumentError(f"blocks of more than {MOST_BYTES} bytes, rounded up to {alignment_bytes}, have no place")
    born, dies, _ = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    return born, dies, np.array(sizes, dtype=np.int64)


def _row(block: Block) -> tuple[int, int, int]:
    check_instance("blocks", block, Block)
    try:
        born, dies, size = operator.index(block.born), operator.index(block.dies), operator.index(block.size_bytes)
    except TypeError:
        raise ArgumentError(f"{block}: its size and its times must be whole numbers") from None
    if not (-FOREVER <= born < dies <= FOREVER and size >= 0):
        raise ArgumentError(
            f"{block}: a block must not be smaller than nothing, and must die after it is born, within 64 bits"
        )
    return born, dies, size


def _max_live(born: Ints, dies: Ints, sizes: Ints) -> int:
    times = np.concatenate([dies, born])  # what dies at a time makes room for what is born then
    changes = np.concatenate([-sizes, sizes])
    order = np.argsort(times, kind="stable")
    return int(np.cumsum(changes[order]).max(initial=0))


# What numba compiles. Both stop as soon as the footprint reaches ``bound_bytes``; both return offsets and footprint.


def _skyline(born: Ints, dies: Ints, sizes: Ints, rank: Ints, bound_bytes: int) -> tuple[Ints, int]:
    """Take, again and again, the block that can lie lowest; among equals the one of the smallest rank."""
    count = len(born)
    offsets, lowest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    placed = np.zeros(count, np.bool_)
    footprint = 0
    for _ in range(count):
        best = -1
        for i in range(count):
            if not placed[i] and (
                best < 0 or lowest[i] < lowest[best] or (lowest[i] == lowest[best] and rank[i] < rank[best])
            ):
                best = i
        placed[best] = True
        offsets[best] = lowest[best]
        top = lowest[best] + sizes[best]
        footprint = max(footprint, top)
        if footprint >= bound_bytes:
            break
        for i in range(count):
            if not placed[i] and lowest[i] < top and born[i] < dies[best] and dies[i] > born[best]:
                lowest[i] = top
    return offsets, footprint


def _first_fit(born: Ints, dies: Ints, sizes: Ints, rank: Ints, bound_bytes: int) -> tuple[Ints, int]:
    """Take the blocks by rank, each to the lowest gap that it fits in."""
    count = len(born)
    order = np.empty(count, np.int64)
    for block in range(count):
        order[rank[block]] = block
    offsets = np.zeros(count, np.int64)
    starts, ends, lowest_first = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    footprint = 0
    for k in range(count):
        block = order[k]
        beside = 0
        for j in range(k):
            other = order[j]
            if born[other] < dies[block] and dies[other] > born[block]:
                starts[beside] = offsets[other]
                ends[beside] = offsets[other] + sizes[other]
                lowest_first[beside] = beside
                beside += 1
        make_heap(lowest_first, beside, starts)
        lowest = 0
        for left in range(beside, 0, -1):
            j = take_least(lowest_first, left, starts)
            if starts[j] - lowest >= sizes[block]:
                break
            lowest = max(lowest, ends[j])
        offsets[block] = lowest
        footprint = max(footprint, lowest + sizes[block])
        if footprint >= bound_bytes:
            break
    return offsets, footprint
