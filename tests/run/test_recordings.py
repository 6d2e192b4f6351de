"""Planned places where sizes vary from step to step: what a number of recordings say of the steps to come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from ebbtide.place.layout import FOREVER
from ebbtide.run import allocator
from ebbtide.run.native import arena_library, find_compiler
from ebbtide.run.recordings import Recording, expected
from ebbtide.run.rehearsed import ENOUGH, FAILURES, MOST_RECORDINGS, STRAYS, Rehearsed

KIB = 1 << 10
BLOCKS = 40

arena_only = pytest.mark.skipif(find_compiler() is None, reason="the arena takes a C++ compiler")


def recording(sizes: Sequence[int], lives: int = 3, *, written: bool = True) -> Recording:
    """Block n comes at time 2n, and goes after so many others have come, if there are so many."""
    numbers = np.arange(len(sizes), dtype=np.int64)
    dies = np.where(numbers + lives < len(sizes), 2 * (numbers + lives) + 1, FOREVER)
    return Recording(np.array(sizes, dtype=np.int64), 2 * numbers, dies, np.full(len(sizes), written))


def test_an_order_has_to_be_seen_often_enough() -> None:
    few, many = [recording([5000, 7000])] * 2, [recording([100, 200], lives=1)] * 3
    assert expected([*few, *many], 4) is None
    assert expected([*many, *few], 3) is None
    assert expected([], 1) is None
    found = expected([*few, *many], 3)
    assert found is not None
    assert found.blocks.sizes.tolist() == [100, 200]
    found = expected([*few, *many], 2)
    assert found is not None
    assert found.blocks.sizes.tolist() == [5000, 7000], "of orders that are seen often the one that takes most counts"


def test_what_does_not_vary_has_no_room_and_what_is_written_to_once_is() -> None:
    found = expected([recording([64, 640]), recording([64, 704], written=False)], 2)
    assert found is not None
    assert found.least.tolist() == [64, 0]
    assert found.blocks.sizes[0] == 64
    assert 704 < found.blocks.sizes[1] <= 1.15 * 704 + 1
    assert found.blocks.written.all()


@hypothesis.given(st.lists(st.lists(st.integers(1, 1 << 20), min_size=3, max_size=3), min_size=1, max_size=6))
def test_there_is_room_for_each_recording(rows: list[list[int]]) -> None:
    found = expected([recording(row) for row in rows], 1)
    assert found is not None
    for row in rows:
        assert (found.blocks.sizes >= row).all()
        assert (found.least <= row).all()


@pytest.fixture
def places() -> Iterator[Rehearsed]:
    """Tensors of 64 KiB and more come from the arena."""
    assert arena_library() is not None
    with allocator.tuned():
        yield Rehearsed(varies=True)


def run(places: Rehearsed, sizes: Sequence[int]) -> list[int]:
    """A step in which block n dies when block n + 3 is born; where the blocks were."""
    alive: list[torch.Tensor] = []
    seen = []
    places.begin()
    for number, size in enumerate(sizes):
        block = torch.full((size,), number % 251, dtype=torch.uint8)
        seen.append(block.data_ptr())
        assert not any(
            other.data_ptr() < seen[-1] + size and seen[-1] < other.data_ptr() + len(other) for other in alive
        )
        alive = [*alive[-2:], block]
    assert all(bool((block == block[0]).all()) for block in alive)
    del alive, block
    places.end(exact=True)
    return seen


def scaled(seed: int, share: float) -> list[int]:
    """Sizes of a step as long as ``share`` says, but for one block in four."""
    dice = random.Random(seed)
    sizes = [KIB * dice.randrange(256, 1024) for _ in range(BLOCKS)]
    return [size if number % 4 == 0 else int(share * size) for number, size in enumerate(sizes)]


@arena_only
def test_blocks_of_other_sizes_have_their_places(places: Rehearsed) -> None:
    dice = random.Random(0)
    for _ in range(ENOUGH):
        assert not places.serves
        run(places, scaled(0, dice.uniform(0.4, 1.0)))
    first = run(places, scaled(0, 0.9))
    for _ in range(8):
        assert places.serves
        assert run(places, scaled(0, dice.uniform(0.4, 1.0))) == first


@arena_only
def test_blocks_too_small_for_the_arena_are_left_out(places: Rehearsed) -> None:
    def step(share: float) -> list[int]:
        sizes = scaled(1, share)
        return [*sizes[:9], int(share * 70 * KIB), *sizes[9:20], int(share * 68 * KIB), *sizes[20:]]

    for number in range(ENOUGH):
        run(places, step(1.0 - 0.01 * number))
    large, small = run(places, step(1.0)), run(places, step(0.7))
    assert places.serves
    there = [number for number in range(BLOCKS + 2) if number not in (9, 21)]
    assert [small[number] for number in there] == [large[number] for number in there]
    assert small[9] != large[9]


@arena_only
def test_larger_steps_are_rehearsed_and_all_have_places_then(places: Rehearsed) -> None:
    for share in (0.4, 0.45, 0.5, 0.5):
        run(places, scaled(2, share))
    served = []
    for _ in range(STRAYS + 2):
        served.append(places.serves)
        large = run(places, scaled(2, 1.0))
    assert served == [*[True] * STRAYS, False, True]
    assert run(places, scaled(2, 0.45)) == large


@arena_only
def test_steps_that_take_another_order_from_now_on_have_places_again(places: Rehearsed) -> None:
    dice, served = random.Random(0), []
    for _ in range(ENOUGH):
        run(places, scaled(3, dice.uniform(0.5, 1.0)))
    for _ in range(STRAYS + ENOUGH + 4):
        served.append(places.serves)
        run(places, [*scaled(4, dice.uniform(0.5, 1.0)), *scaled(3, dice.uniform(0.5, 1.0))])
    assert served == [*[True] * STRAYS, *[False] * ENOUGH, *[True] * 4]


@arena_only
def test_steps_of_no_order_are_given_up(places: Rehearsed) -> None:
    steps = MOST_RECORDINGS - 1 + FAILURES
    for number in range(steps + 3):
        assert places._failures == max(0, min(FAILURES, number - MOST_RECORDINGS + 1))
        run(places, scaled(0, 1.0)[: 5 + number])
        assert not places.serves
