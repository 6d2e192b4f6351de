"""Planned places: a repeated step needs no more memory than it has bytes alive, and nothing ever overlaps."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.run import allocator, held_bytes
from ebbtide.run.native import arena_library, find_compiler
from ebbtide.run.rehearsed import FAILURES, STEADY, STRAYS, Rehearsed
from ebbtide.run.resident import rss_bytes
from ebbtide.run.tiers.memory import bytes_of, take_memory
from tests.run.harness import FAST_DISK, STEPS, compare, run_plain
from tests.run.inside import latest_kind
from tests.run.programs import Chain

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="the arena takes a C++ compiler")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def arena() -> Iterator[None]:
    """Tensors of 64 KiB and more come from the arena."""
    assert arena_library() is not None
    with allocator.tuned():
        places = Rehearsed()
        repeat(places, [MIB] * 4)  # what is loaded to place blocks is there, and does not count
        places.forget()
        yield


def ladder(sizes: list[int], *, kept: int | None = None) -> tuple[list[int], torch.Tensor | None]:
    """A step in which block n dies when block n + 3 is born. Where the blocks were, and block ``kept``."""
    alive: list[torch.Tensor] = []
    places, result = [], None
    for number, size in enumerate(sizes):
        block = torch.full((size,), number % 251, dtype=torch.uint8)
        places.append(block.data_ptr())
        for other in alive:
            assert not (other.data_ptr() < places[-1] + size and places[-1] < other.data_ptr() + other.numel())
        result = block if number == kept else result
        alive = [*alive[-2:], block]
    assert all(bool((block == block[0]).all()) for block in alive)
    return places, result


def repeat(places: Rehearsed, sizes: list[int], times: int = 1) -> None:
    for _ in range(times):
        places.begin()
        ladder(sizes)
        places.end(exact=True)


def sizes_of(seed: int) -> list[int]:
    return [KIB * random.Random(seed * 1000 + i).randrange(64, 512) for i in range(60)]


def test_a_repeated_step_lies_where_it_was_planned() -> None:
    places, sizes = Rehearsed(), sizes_of(0)
    for number in range(4):
        assert places.serves == (number > 0)
        places.begin()
        seen, _ = ladder(sizes)
        places.end(exact=True)
    layout = places.layout
    assert layout is not None
    assert layout.footprint_bytes <= 1.05 * layout.max_live_bytes
    assert [place - seen[0] for place in seen] == [offset - layout.offsets[0] for offset in layout.offsets[: len(seen)]]


@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_what_comes_back_from_a_disk_lies_where_it_was_planned(block_bytes: int) -> None:
    places, sizes = Rehearsed(), sizes_of(4)
    for _ in range(3):
        places.begin()
        alive: list[torch.UntypedStorage] = []
        for size in sizes:
            left = torch.ones(size + 512, dtype=torch.uint8).untyped_storage()  # an odd number of blocks of 512 bytes
            alive = [*alive[-2:], left]
            pointer = left.data_ptr()
            alive[-1] = take_memory(size + 512, pointer % block_bytes, block_bytes)
            bytes_of(alive[-1]).fill_(1)
            del left
            assert (alive[-1].data_ptr() - pointer) % block_bytes == 0
        serves = places.serves
        if serves:
            library = arena_library()
            assert library is not None
            assert library.ebbtide_arena_unfollow() == 0
        places.end(exact=True)
    assert serves


@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_what_comes_back_has_its_place_wherever_in_a_block_it_begins(block_bytes: int) -> None:
    """Tensors of less than 64 KiB lie elsewhere in each step. What they take is counted without the room for that."""
    places, size, served = Rehearsed(), 40 * KIB, []
    for step in range(3):
        served.append(places.serves)
        turn = held_bytes.begin()
        places.begin()
        alive: list[torch.UntypedStorage] = []
        for number in range(20):
            offset = 16 * (11 * step + 7 * number) % block_bytes
            alive = [*alive[-2:], take_memory(size, offset, block_bytes)]
            assert alive[-1].data_ptr() % block_bytes == offset
            bytes_of(alive[-1]).fill_(number)
            assert [int(bytes_of(block).max()) for block in alive] == list(range(max(number - 2, 0), number + 1))
        found = held_bytes.end(turn)
        assert found is not None
        assert found.taken_bytes == 4 * size
        alive.clear()
        if places.serves:
            library = arena_library()
            assert library is not None
            assert library.ebbtide_arena_unfollow() == 0
        places.end(exact=True)
    assert served == [False, True, True]


def test_a_place_that_is_taken_is_left_alone() -> None:
    places, sizes = Rehearsed(), sizes_of(1)
    kept = None
    for number in range(6):
        places.begin()
        # What was kept in the step before lies where a block of this step should.
        _, kept = ladder(sizes, kept=20 + number)
        places.end(exact=True)
        assert kept is not None
        assert bool((kept == 20 + number).all())


def test_a_step_that_left_something_out_finds_its_places_again() -> None:
    places, sizes = Rehearsed(), sizes_of(2)
    for _ in range(2):
        places.begin()
        expected, _ = ladder(sizes)
        places.end(exact=True)
    places.begin()
    found, _ = ladder([*sizes[:10], *sizes[12:]])
    places.end(exact=False)
    assert found[-20:] == expected[-20:]
    assert places.serves


def test_a_step_that_strays_twice_is_rehearsed_again_and_one_that_always_does_given_up() -> None:
    places = Rehearsed()
    served = []
    for number in range((STRAYS + 1) * FAILURES + 3):
        served.append(places.serves)
        places.begin()
        ladder(sizes_of(number))
        places.end(exact=True)
    round_of_steps = [False, *[True] * STRAYS]
    assert served == [*round_of_steps * FAILURES, False, False, False]


@pytest.mark.parametrize(("serves", "is_of_use"), [(1, False), (STEADY, True)])
def test_places_that_serve_a_step_or_two_are_of_no_use(serves: int, is_of_use: bool) -> None:
    """Soon each fourth step was rehearsed for good, as where outputs are kept for a while."""
    places, rounds = Rehearsed(), list[list[bool]]()
    for number in range(FAILURES + 1):
        served = []
        for step in range(1 + serves + STRAYS):
            served.append(places.serves)
            places.begin()
            ladder(sizes_of(10 * number + max(0, step - serves)))
            places.end(exact=True)
        rounds.append(served)
    rehearsed, given_up = [False] + [True] * (serves + STRAYS), [False] * (1 + serves + STRAYS)
    assert rounds == [rehearsed] * FAILURES + [rehearsed if is_of_use else given_up]


def test_a_loop_that_keeps_its_outputs_for_a_while_is_not_rehearsed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step with places on, that of the output is taken."""
    rehearsed, learn = list[int](), Rehearsed._learn

    def noted(places: Rehearsed) -> None:
        learn(places)
        rehearsed.append(len(memory.measured))

    monkeypatch.setattr(Rehearsed, "_learn", noted)
    model, data = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))), torch.randn(1024, 256)
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=8)
    with ebbtide.Budget("150%", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(40):
            with memory.step():
                out = model(data)
                out.square().mean().backward()
            kept.append(out.detach())
            del out
            model.zero_grad()
        assert memory.state == "idle"
    assert 1 < len(rehearsed) <= FAILURES
    assert max(rehearsed) < 24


def test_what_ran_between_two_steps_is_given_back() -> None:
    places, sizes = Rehearsed(), sizes_of(3)
    repeat(places, sizes, 2)
    between = [torch.ones(4 << 20) for _ in range(4)]  # far more than the step's own places hold
    del between
    before = rss_bytes()
    places.begin()
    assert rss_bytes() < before - (32 << 20)
    places.end(exact=False)


def test_what_comes_and_goes_between_steps_uses_the_pages_of_the_steps() -> None:
    places, sizes = Rehearsed(), [MIB] * 20
    temporary, staying = 2 * MIB + 64, 2 * MIB + 128
    batch, seen = None, []
    for _ in range(5):
        places.begin()
        steps, _ = ladder(sizes)
        places.end(exact=True)
        for _ in range(2):
            block = torch.ones(temporary, dtype=torch.uint8)
            seen.append(block.data_ptr())
            del block
        batch = torch.ones(staying, dtype=torch.uint8)
    region = range(min(steps), max(steps) + MIB)
    assert seen[-1] in region
    assert batch is not None
    assert batch.data_ptr() not in region
    assert places.serves
    before = rss_bytes()
    places.begin()
    assert ladder(sizes)[0] == steps
    places.end(exact=True)
    assert rss_bytes() <= before + MIB


def ladder_with_ghosts(sizes: list[int]) -> list[int]:
    """A step whose blocks each have another beside them that nobody writes to. Where those were."""
    alive: list[torch.Tensor] = []
    places: list[int] = []
    for size in sizes:
        ghost = torch.empty(4 * size, dtype=torch.uint8)
        alive = [*alive[-2:], torch.ones(size, dtype=torch.uint8)]
        places.append(ghost.data_ptr())
        del ghost
    return places


def test_blocks_that_nobody_writes_to_take_no_memory() -> None:
    places, sizes = Rehearsed(), [MIB * (1 + seed % 3) for seed in range(20)]
    for _ in range(3):
        places.begin()
        ghosts = ladder_with_ghosts(sizes)
        places.end(exact=True)
    layout = places.layout
    assert layout is not None
    assert layout.max_live_bytes == 9 * MIB
    assert layout.footprint_bytes <= 1.1 * layout.max_live_bytes
    allocator.trim()
    places.begin()
    before = rss_bytes()
    alive = [torch.empty(4 * sizes[0], dtype=torch.uint8), torch.ones(sizes[0], dtype=torch.uint8)]
    assert alive[0].data_ptr() == ghosts[0]
    assert rss_bytes() - before <= 2 * MIB  # a huge page for the other
    alive[0].fill_(7)  # somebody does, once
    assert bool((alive[1] == 1).all())
    places.end(exact=False)


def test_a_block_written_to_at_its_end_only_is_no_ghost() -> None:
    places = Rehearsed()
    for _ in range(2):
        places.begin()
        block = torch.empty(8 * MIB, dtype=torch.uint8)
        block[-MIB:] = 3
        del block
        places.end(exact=True)
    assert places.layout is not None
    assert places.layout.footprint_bytes == 8 * MIB


def test_workspaces_that_nobody_writes_to_do_not_count() -> None:
    probe = allocator.arena_probe()
    assert probe is not None
    probe.before(0)
    torch.empty(8 * MIB, dtype=torch.uint8)
    kept = torch.ones(3 * MIB, dtype=torch.uint8)
    torch.ones(2 * MIB, dtype=torch.uint8)
    assert probe.after() == 5 * MIB
    probe.before(0)
    del kept
    torch.ones(MIB, dtype=torch.uint8)
    assert probe.after() == 0


def test_a_planned_step_takes_its_places(tmp_path: Path) -> None:
    expected = run_plain(Chain, STEPS + 4)
    program = Chain(0)
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
        for index, record in enumerate(expected):
            compare(record, program.run(index, memory.step), f"step {index} ({memory.state})")
        current = latest_kind(memory)
        assert current is not None
        assert current.rehearsed.serves


def test_a_layout_that_is_forgotten_leaves_no_pages() -> None:
    places, sizes = Rehearsed(), [8 * MIB] * 12
    repeat(places, sizes, 3)
    before = rss_bytes()
    places.forget()
    assert rss_bytes() < before - 3 * 7 * MIB


def test_a_rehearsed_step_leaves_no_pages() -> None:
    before = rss_bytes()
    places = Rehearsed()
    places.begin()
    ladder([8 * MIB] * 12)
    places.end(exact=True)
    assert places.serves
    assert rss_bytes() < before + 8 * MIB


def test_kinds_that_take_turns_have_the_same_pages() -> None:
    before = rss_bytes()
    one, other = Rehearsed(), Rehearsed()
    repeat(one, [8 * MIB] * 12, 2)
    between = torch.ones(MIB + 4112)  # of a size never seen to come and go, so it lies outside
    repeat(other, [7 * MIB] * 12, 2)
    for _ in range(2):
        repeat(one, [8 * MIB] * 12)
        repeat(other, [7 * MIB] * 12)
    assert one.layout is not None
    assert rss_bytes() < before + one.layout.footprint_bytes + between.nbytes + 8 * MIB


def test_of_kinds_whose_places_are_apart_only_one_has_pages() -> None:
    one, other = Rehearsed(), Rehearsed()
    repeat(one, [8 * MIB] * 12, 2)
    one.begin()
    _, kept = ladder([8 * MIB] * 12, kept=6)
    one.end(exact=True)
    repeat(other, [7 * MIB] * 12, 2)
    before = rss_bytes()
    for _ in range(2):
        repeat(one, [8 * MIB])
        repeat(other, [7 * MIB] * 12)
    assert one.serves
    assert other.serves
    assert abs(one._start - other._start) >= 8 * MIB
    assert rss_bytes() < before + 12 * MIB
    assert kept is not None
    assert bool((kept == 6).all())


def test_a_step_that_loses_its_way_takes_the_pages_of_the_planned_places() -> None:
    places = Rehearsed()
    repeat(places, [8 * MIB] * 12, 3)
    before = rss_bytes()
    places.begin()
    ladder([5 * MIB] * 16)
    assert rss_bytes() < before + 8 * MIB
    places.end(exact=False)
    repeat(places, [8 * MIB] * 12)
    assert places.serves
    assert rss_bytes() < before + 8 * MIB


def test_a_step_without_places_leaves_those_of_others_no_pages() -> None:
    places = Rehearsed()
    repeat(places, [8 * MIB] * 12, 3)
    before = rss_bytes()
    Rehearsed().begin(rehearses=False)
    assert rss_bytes() < before - 3 * 7 * MIB


def test_an_observed_step_leaves_the_planned_places_no_pages(tmp_path: Path) -> None:
    with ebbtide.Budget("150%", spill=tmp_path, machine=FAST_DISK) as memory:
        gained: dict[str, int] = {}
        for number in range(20):
            x = torch.ones(2 * MIB if number < 10 else MIB, requires_grad=True)
            state, before = memory.state, rss_bytes()
            with memory.step():
                gained[state] = rss_bytes() - before
                if number < 10:
                    x = (x * x).exp()
                x.sin().square().sum().backward()
            if number == 9:
                assert state == "idle"
                assert gained["observe"] >= 0
        assert gained["observe"] < -3 * 7 * MIB


def test_a_counted_step_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter is a dispatch mode, under which attention takes blocks that it does not take otherwise."""
    learnt: list[int] = []
    learn = Rehearsed._learn

    def counted(places: Rehearsed) -> None:
        learn(places)
        learnt.append(len(places._sizes))

    monkeypatch.setattr(Rehearsed, "_learn", counted)
    x = torch.randn(4, 4, 64, 64, requires_grad=True)
    with ebbtide.Budget("150%", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(8):
            x.grad = None
            with memory.step():
                y = x
                for _ in range(4):
                    y = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
                y.square().sum().backward()
        assert memory.state == "idle"
    assert len(learnt) == 1
