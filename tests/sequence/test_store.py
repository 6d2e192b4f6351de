"""States that go to a disk and come back several at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import SequenceError
from ebbtide.sequence import aio, run
from ebbtide.sequence.blocks import HUGE_STATE_BYTES, RUN_BYTES, Block, Blocks, storage_of
from ebbtide.sequence.disk import StateCopy, StateDisk, StatePlace, joined
from ebbtide.sequence.schedules import DISK, MEMORY, Multistage
from ebbtide.sequence.store import StateStore
from tests.sequence.test_run import START, forward, forward_in_place, plain, reverse, turn

pytestmark = pytest.mark.usefixtures("nothing_left")
STATE_BYTES = 5000
needs_aio = pytest.mark.skipif(not aio.is_there(), reason="needs the GNU C library")


def advised_huge(address: int) -> bool:
    """Whether the system was asked for huge pages at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(None, 1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs a kernel that has huge pages"
)
def test_large_states_lie_in_huge_pages_and_small_ones_in_few() -> None:
    """Ten small states must not take whole huge pages; disks move large ones faster from these."""
    for size_bytes, huge in ((HUGE_STATE_BYTES, True), (HUGE_STATE_BYTES // 2, False)):
        blocks = Blocks(size_bytes, 20, for_disk=True)
        run_of_them = blocks.take_run(10)
        assert [advised_huge(block.address) for block in run_of_them] == [huge] * len(run_of_them)


class Noting(StateDisk):
    """Notes how many bytes each transfer has."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.out: list[int] = []
        self.back: list[int] = []

    def store(self, storage: torch.UntypedStorage) -> StateCopy:
        self.out.append(storage.nbytes())
        return super().store(storage)

    def bring(self, place: StatePlace, storage: torch.UntypedStorage) -> StateCopy:
        self.back.append(storage.nbytes())
        return super().bring(place, storage)


class LateCopy:
    """A copy that is never there before somebody waits for it."""

    ready = False

    def __init__(self, copy: StateCopy, waited: Callable[[], None] = lambda: None) -> None:
        self.place = copy.place
        self._copy, self._waited = copy, waited

    def wait(self) -> None:
        self._copy.wait()
        self._waited()


class LateDisk(StateDisk):
    """Counts the copies back that nobody has waited for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.coming = 0

    def store(self, storage: torch.UntypedStorage) -> StateCopy:
        return LateCopy(super().store(storage))

    def bring(self, place: StatePlace, storage: torch.UntypedStorage) -> StateCopy:
        self.coming += 1
        return LateCopy(super().bring(place, storage), self._came)

    def _came(self) -> None:
        self.coming -= 1

    def forget(self, place: StatePlace) -> None:
        assert self.coming == 0, "the place is given away while it is read"
        super().forget(place)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Noting]:
    disk = Noting(tmp_path)
    yield disk
    disk.close()


def put(store: StateStore, step: int, tier: str) -> None:
    block = store.take(tier)
    block.memory()[:] = bytes([step % 256]) * block.storage.nbytes()
    store.put(step, tier, block)


def holds(block: Block, step: int) -> bool:
    return bool((np.frombuffer(block.memory(), np.uint8) == step % 256).all())


class TestRuns:
    @given(st.lists(st.booleans(), max_size=60), st.randoms(use_true_random=False))
    @settings(max_examples=30, deadline=None)
    def test_blocks_of_a_run(self, takes: list[bool], random: Any) -> None:
        """They lie one after another, nobody else has them, and there are never more than there should be."""
        blocks = Blocks(STATE_BYTES, 12, for_disk=True)
        taken: list[Block] = []
        for take in takes:
            if take and not blocks.are_taken:
                run = blocks.take_run(4)
                addresses = [block.address for block in run]
                first = addresses[0]
                assert addresses == list(range(first, first + len(run) * blocks.block_bytes, blocks.block_bytes))
                assert not {block.address for block in taken} & set(addresses)
                assert storage_of(run).nbytes() == len(run) * blocks.block_bytes
                taken += run
            elif taken:
                blocks.give_back(taken.pop(random.randrange(len(taken))))
            assert len(taken) <= blocks.made <= 12

    def test_how_long_they_are(self) -> None:
        """Three of them fit, and larger states go alone."""
        assert Blocks(STATE_BYTES, 12, for_disk=True).run_length == 4
        assert Blocks(STATE_BYTES, 2, for_disk=True).run_length == 1
        assert Blocks(STATE_BYTES, 10**6, for_disk=True).run_length == RUN_BYTES // 8192
        assert Blocks(RUN_BYTES, 100, for_disk=True).run_length == 1

    def test_places(self) -> None:
        whole = StatePlace(8192, 4096 * 3, 0)
        parts = whole.split(3)
        assert [part.offset_bytes for part in parts] == [8192, 8192 + 4096, 8192 + 2 * 4096]
        assert parts[0].is_right_before(parts[1])
        assert not parts[1].is_right_before(parts[0])
        assert not parts[0].is_right_before(parts[2])
        assert joined(parts[::-1]) == whole
        parts[1].checksums[0] = 1
        assert not parts[0].is_right_before(parts[1])


class TestStore:
    @needs_aio
    def test_states_go_together_and_come_back(self, disk: Noting) -> None:
        """Twelve blocks make runs of four; all are free again for those that come back."""
        blocks = Blocks(STATE_BYTES, 12, for_disk=True)
        written: list[int] = []
        with StateStore(blocks, {DISK: disk}, written=lambda step, _: written.append(step)) as store:
            for step in range(0, 80, 2):
                put(store, step, DISK)
            assert disk.out == [4 * blocks.block_bytes] * 10
            assert store.stored == {DISK: 40}
            for last in range(78, 0, -8):
                steps = range(last, last - 8, -2)
                for step in steps:
                    store.fetch(step, DISK)
                for step in steps:
                    assert holds(store.get(step, MEMORY), step)
                    store.drop(step, DISK)
                    store.drop(step, MEMORY)
            assert sum(disk.back) == 40 * blocks.block_bytes
            assert len(disk.back) < 20
            assert blocks.made <= 12
        assert written == list(range(0, 80, 2))

    @needs_aio
    def test_one_that_is_wanted_at_once(self, disk: Noting) -> None:
        """A run that is not full goes when one of its states is wanted, or when its blocks are."""
        blocks = Blocks(STATE_BYTES, 6, for_disk=True)
        with StateStore(blocks, {DISK: disk}) as store:
            put(store, 0, DISK)
            assert disk.out == []
            assert holds(store.get(0, DISK), 0)
            assert disk.out == [blocks.block_bytes]
            put(store, 1, DISK)
            for step in range(2, 8):
                put(store, step, MEMORY)
            assert disk.out == [blocks.block_bytes] * 2
            with pytest.raises(SequenceError, match="more states in memory than its 6 slots"):
                store.take(MEMORY)
            store.drop(3, MEMORY)
            store.fetch(1, DISK)
            assert holds(store.get(1, MEMORY), 1)
            with pytest.raises(SequenceError, match="where it is not"):
                store.get(3, DISK)

    @pytest.mark.parametrize("tier", [DISK, MEMORY])
    def test_a_state_that_is_dropped_as_it_comes_back_is_waited_for(self, tier: str, tmp_path: Path) -> None:
        """Its place on the disk, and its block in memory, serve again."""
        blocks, disk = Blocks(STATE_BYTES, 4, for_disk=True), LateDisk(tmp_path)
        with StateStore(blocks, {DISK: disk}) as store:
            put(store, 0, DISK)
            store.fetch(0, DISK)
            store.drop(0, tier)
            assert disk.coming == 0
        disk.close()

    def test_who_waits_for_a_copy_out_tells(self, tmp_path: Path) -> None:
        told: list[tuple[float, int]] = []
        blocks, disk = Blocks(STATE_BYTES, 4, for_disk=True), LateDisk(tmp_path)
        with StateStore(blocks, {DISK: disk}, late=lambda *late: told.append(late)) as store:
            for step in range(8):
                put(store, step, DISK)
            store.get(7, DISK)
            assert sum(states for _, states in told) == 8
            assert all(seconds > 0 for seconds, _ in told)
            assert store.waited_seconds >= sum(seconds for seconds, _ in told)
            for step in range(8):
                store.drop(step, DISK)
        disk.close()

    def test_checked_states_go_alone(self, tmp_path: Path) -> None:
        disk = Noting(tmp_path, checksum=True)
        blocks = Blocks(STATE_BYTES, 12, for_disk=True)
        with StateStore(blocks, {DISK: disk}) as store:
            for step in range(8):
                put(store, step, DISK)
            for step in reversed(range(8)):
                store.fetch(step, DISK)
            assert all(holds(store.get(step, MEMORY), step) for step in range(8))
        assert disk.out == disk.back == [blocks.block_bytes] * 8
        disk.close()


@given(st.integers(2, 90), st.integers(6, 20), st.integers(1, 12), st.booleans())
@settings(max_examples=25, deadline=None)
def test_chains_whose_states_go_together(n: int, states: int, interval: int, in_place: bool) -> None:
    """The adjoint is that of the plain loop, and the forward steps are the schedule's."""
    schedule = Multistage(n, states, interval)
    operator, memory = forward_in_place if in_place else forward, (states + 1) * START.nbytes
    with tempfile.TemporaryDirectory() as directory:
        done = run(operator, reverse, n, START, turn=turn, memory=memory, spill=directory, schedule=schedule)
    assert done.adjoint.tobytes() == plain(n)[0].tobytes()
    assert done.forward_steps == schedule.forward_steps
