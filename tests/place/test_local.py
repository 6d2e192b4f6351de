"""Layouts that caches make more of: as small as before, nothing overlaps, and fewer lines come from other cores."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import ArgumentError
from ebbtide.place import Block, Layout, keep_local, place
from ebbtide.place.local import CACHE_BYTES
from tests.place.test_layout import check, lifetimes

MIB = 1 << 20


@settings(max_examples=150, deadline=None)
@given(lifetimes(), st.sampled_from([1, 64, 512]), st.sampled_from([1, 2, 16]))
def test_it_is_a_layout_of_the_same_footprint(blocks: list[Block], alignment_bytes: int, threads: int) -> None:
    before = place(blocks, alignment_bytes)
    after = keep_local(blocks, before, threads, alignment_bytes)
    check(blocks, after, alignment_bytes)
    assert (after.footprint_bytes, after.max_live_bytes) == (before.footprint_bytes, before.max_live_bytes)
    assert after == keep_local(blocks, before, threads, alignment_bytes)


def test_a_block_goes_where_one_of_its_size_lay() -> None:
    """Between a large and a small temporary that are dead, a small one lies on the small one, not across the large."""
    blocks = [Block(2 * MIB, 0, 2), Block(MIB, 1, 3), Block(MIB, 4, 6)]
    across = Layout((0, 2 * MIB, MIB), 3 * MIB, 3 * MIB)
    assert keep_local(blocks, across, threads=2).offsets == (0, 2 * MIB, 2 * MIB)


def test_a_block_goes_where_one_lay_lately() -> None:
    blocks = [Block(MIB, 0, 2), Block(CACHE_BYTES, 2, 4), Block(MIB, 3, 5), Block(MIB, 6, 7)]
    cold = Layout((0, MIB, MIB + CACHE_BYTES, 0), 2 * MIB + CACHE_BYTES, 2 * MIB + CACHE_BYTES)
    assert keep_local(blocks, cold, threads=2).offsets[3] == MIB + CACHE_BYTES


def test_with_one_thread_no_line_is_another_ones() -> None:
    blocks = [Block(2 * MIB, 0, 2), Block(MIB, 1, 3), Block(MIB, 4, 6)]
    within = Layout((0, 2 * MIB, 0), 3 * MIB, 3 * MIB)
    assert keep_local(blocks, within, threads=1).offsets == within.offsets


def test_fewer_lines_of_a_training_step_come_from_other_cores() -> None:
    """Activations of many sizes that die in the opposite order, with two temporaries in every op of both passes."""
    layers, blocks = 40, []
    for i in range(layers):
        size = 65536 * (1 + (7 * i) % 13)
        blocks.append(Block(size, 4 * i, 16 * layers - 8 * i))
        for op in (4 * i, 16 * layers - 8 * i - 4):
            blocks += [Block(size, op + 1, op + 3), Block(3 * size, op + 2, op + 3)]
    before = place(blocks)
    after = keep_local(blocks, before, threads=2)
    check(blocks, after, 512)
    assert _from_other_cores(blocks, after) < 0.75 * _from_other_cores(blocks, before)


@pytest.mark.parametrize(("given", "placed"), [(4, 2), (2, 4)])
def test_a_layout_of_other_blocks(given: int, placed: int) -> None:
    """What is compiled would read and write behind its end."""
    blocks = [Block(1000, i, i + 3) for i in range(4)]
    with pytest.raises(ArgumentError, match=f"layout: it is one of {placed} blocks, and there are {given}"):
        keep_local(blocks[:given], place(blocks[:placed]), threads=2)
    with pytest.raises(ArgumentError, match="threads=0: it must be a whole number, at least 1"):
        keep_local(blocks, place(blocks), threads=0)


def _from_other_cores(blocks: list[Block], layout: Layout) -> int:
    """Pieces, of 4 KiB, of blocks that lie where the other one of two threads wrote last."""
    wrote: dict[int, int] = {}
    found = 0
    for block, offset in sorted(zip(blocks, layout.offsets, strict=True), key=lambda placed: placed[0].born):
        for piece in range(0, block.size_bytes, 4096):
            thread = int(2 * piece >= block.size_bytes)
            found += wrote.get(offset + piece, thread) != thread
            wrote[offset + piece] = thread
    return found
