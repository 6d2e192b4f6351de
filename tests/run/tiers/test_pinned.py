"""The slow memory that streams reach: arenas grow between steps only and follow plans; what is pinned is unpinned."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import random
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.run.backends.cuda import CudaBackend
from ebbtide.run.tiers import Arena, pinned_memory
from ebbtide.run.tiers.pinned import GROWTH_BYTES, Place, PlannedPlaces, spare_bytes, touch
from ebbtide.run.tiers.places import Places
from tests.run.backends.threads import InlineBackend
from tests.run.tiers.stand_ins import MIB, bytes_of

pytestmark = pytest.mark.usefixtures("nothing_left")


class CurrentDevice:
    """Stands in for `torch.cuda.device`: remembers which device is current, 0 at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index = 0
        monkeypatch.setattr(torch.cuda, "device", self._on)

    @contextlib.contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before, self.index = self.index, device.index
        try:
            yield
        finally:
            self.index = before


def quiet() -> None:
    """No copy is under way."""


class TestArena:
    def test_it_grows_between_steps_by_what_was_missed(self) -> None:
        taken: list[int] = []

        def take(size_bytes: int) -> torch.UntypedStorage:
            taken.append(size_bytes)
            return torch.UntypedStorage(size_bytes)

        arena = Arena(take, 100 * MIB)
        assert arena.reserve(3 * MIB) is None
        assert arena.reserve(4 * MIB) is None
        assert taken == []
        arena.settle(None, quiet)
        assert taken == [8 * MIB]
        assert arena.reserve(3 * MIB) is not None
        assert arena.reserve(4 * MIB) is not None
        arena.settle(None, quiet)
        assert taken == [8 * MIB]

    def test_it_stays_within_its_limit(self) -> None:
        arena = Arena(torch.UntypedStorage, 5 * MIB, start_bytes=100 * MIB)
        assert arena.size_bytes == 5 * MIB
        assert arena.reserve(6 * MIB) is None
        arena.settle(None, quiet)
        assert arena.size_bytes == 5 * MIB

    def test_if_the_system_refuses_it_stays_as_it_was(self) -> None:
        def take(size_bytes: int) -> torch.UntypedStorage:
            if size_bytes > 4 * MIB:
                raise SpillError("no")
            return torch.UntypedStorage(size_bytes)

        arena = Arena(take, 100 * MIB, 4 * MIB)
        assert arena.reserve(5 * MIB) is None
        arena.settle(None, quiet)
        assert arena.limit_bytes == arena.size_bytes == 4 * MIB
        assert arena.reserve(5 * MIB) is None
        arena.settle(PlannedPlaces((), (), 50 * MIB), quiet)
        assert arena.reserve(4 * MIB) is not None

    def test_if_the_system_refuses_even_that_it_is_empty_and_asks_again(self) -> None:
        most = [4 * MIB]

        def take(size_bytes: int) -> torch.UntypedStorage:
            if size_bytes > most[0]:
                raise SpillError("no")
            return torch.UntypedStorage(size_bytes)

        arena = Arena(take, 100 * MIB, 4 * MIB)
        assert arena.reserve(5 * MIB) is None
        most[0] = 0
        arena.settle(None, quiet)
        assert arena.size_bytes == 0
        assert arena.limit_bytes == 4 * MIB
        assert arena.reserve(3 * MIB) is None
        most[0] = 4 * MIB
        arena.settle(None, quiet)
        assert arena.reserve(3 * MIB) is not None

    def test_growth_leaves_what_lies_there_alone(self) -> None:
        arena = Arena(torch.UntypedStorage, 100 * MIB, start_bytes=2 * MIB)
        place = arena.reserve(1 * MIB)
        assert place is not None
        ctypes.memset(place.storage.data_ptr(), 7, place.storage.nbytes())
        assert arena.reserve(2 * MIB) is None
        waited: list[int] = []
        arena.settle(None, lambda: waited.append(1))
        assert arena.size_bytes == 4 * MIB
        assert set(bytes_of(place.storage)) == {7}
        arena.give_back(place)
        assert waited == [1]
        arena.settle(None, lambda: waited.append(1))
        assert waited == [1, 1], "old memory goes back only after the copies from it"
        whole = arena.reserve(4 * MIB)
        assert whole is not None, "nothing is left behind"

    def test_pieces_are_added_in_steps_that_no_plan_knows(self) -> None:
        taken: list[int] = []

        def take(size_bytes: int) -> torch.UntypedStorage:
            taken.append(size_bytes)
            return torch.UntypedStorage(size_bytes)

        waited: list[int] = []
        arena = Arena(take, 10 * MIB, 2 * MIB, piece_bytes=4 * MIB)
        for _ in range(2):  # the second such step finds them
            places = [arena.reserve(size) for size in (2 * MIB, 3 * MIB, MIB, 3 * MIB)]
            assert all(place is not None for place in places)
            for number, place in enumerate(places):
                assert place is not None
                ctypes.memset(place.storage.data_ptr(), number, place.storage.nbytes())
            assert [set(bytes_of(place.storage)) for place in places if place is not None] == [{0}, {1}, {2}, {3}]
            assert taken == [2 * MIB, 4 * MIB, 4 * MIB]
            assert arena.reserve(2 * MIB) is None, "beyond the limit"
            for place in places:
                assert place is not None
                arena.give_back(place)
            arena.settle(None, lambda: waited.append(1))
        assert waited == []
        late = arena.reserve(3 * MIB)
        assert late is not None
        ctypes.memset(late.storage.data_ptr(), 5, late.storage.nbytes())
        arena.settle(PlannedPlaces((), (), 8 * MIB), lambda: waited.append(1))
        assert waited == [1]
        assert taken[3:] == [8 * MIB], "they make room for what the plan needs, in one piece"
        assert set(bytes_of(late.storage)) == {5}, "what lies there keeps its memory"
        assert arena.reserve(9 * MIB) is None
        assert len(taken) == 4, "where a plan is followed, nothing is added"
        arena.give_back(late)
        arena.settle(PlannedPlaces((), (), 8 * MIB), lambda: waited.append(1))
        assert waited == [1, 1]

    def test_if_the_system_refuses_a_piece_there_are_no_more(self) -> None:
        asked: list[int] = []

        def take(size_bytes: int) -> torch.UntypedStorage:
            asked.append(size_bytes)
            if len(asked) > 1:
                raise SpillError("no")
            return torch.UntypedStorage(size_bytes)

        arena = Arena(take, 100 * MIB, 2 * MIB, piece_bytes=4 * MIB)
        assert arena.reserve(3 * MIB) is None
        assert arena.reserve(3 * MIB) is None
        assert asked == [2 * MIB, 4 * MIB]
        assert arena.reserve(2 * MIB) is not None

    def test_what_comes_as_planned_lies_as_planned(self) -> None:
        planned = PlannedPlaces((1000, 2000, 500), (2048, 0, 0), 4096)
        arena = Arena(torch.UntypedStorage, GROWTH_BYTES)
        for _ in range(2):
            arena.settle(planned, quiet)
            first, second = arena.reserve(1000), arena.reserve(2000)
            assert first is not None
            assert second is not None
            assert (first.offset_bytes, second.offset_bytes) == (2048, 0)
            arena.give_back(second)
            third = arena.reserve(500)
            assert third is not None
            assert third.offset_bytes == 0
            for place in (first, third):
                arena.give_back(place)

    def test_what_strays_gets_a_place_of_its_own(self) -> None:
        arena = Arena(torch.UntypedStorage, GROWTH_BYTES)
        arena.settle(PlannedPlaces((1000, 1000, 1000), (0, 0, 1024), 4096), quiet)
        places = [arena.reserve(size) for size in (1000, 1000, 777, 10)]
        assert all(place is not None for place in places)
        spans = sorted((p.offset_bytes, p.offset_bytes + p.storage.nbytes()) for p in places if p is not None)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))

    def test_random_places_never_overlap(self) -> None:
        dice = random.Random(5)
        planned = PlannedPlaces(
            tuple(dice.randrange(1, 9000) for _ in range(400)), tuple(512 * dice.randrange(400) for _ in range(400)), 1
        )
        arena = Arena(torch.UntypedStorage, MIB // 4, MIB // 4)
        arena.settle(planned, quiet)
        taken: list[Place] = []
        for number in range(400):
            if taken and dice.random() < 0.5:
                arena.give_back(taken.pop(dice.randrange(len(taken))))
            size = planned.sizes_bytes[number] if dice.random() < 0.7 else dice.randrange(9000)
            place = arena.reserve(size)
            if place is None:
                continue
            for other in taken:
                start, stop = other.offset_bytes, other.offset_bytes + other.storage.nbytes()
                assert place.offset_bytes + size <= start or stop <= place.offset_bytes
            taken.append(place)
        for place in taken:
            arena.give_back(place)
        assert arena.reserve(MIB // 4) is not None


class TestClaim:
    def test_only_within_a_gap(self) -> None:
        places = Places(8192)
        assert places.claim(1024, 1024)
        assert not places.claim(512, 1024)
        assert not places.claim(1024, 512)
        assert not places.claim(8192 - 512, 1024)
        assert places.claim(0, 1024)
        assert places.take(6144) == 2048
        with pytest.raises(MemoryError):
            places.take(512)
        places.give_back(0, 8192)
        assert places.claim(0, 8192)


class TestPinnedMemory:
    def test_it_is_pinned_until_it_dies(self) -> None:
        pinned: dict[int, int] = {}

        class Pinning(InlineBackend):
            def pin(self, address: int, size_bytes: int) -> None:
                pinned[address] = size_bytes

            def unpin(self, address: int) -> None:
                del pinned[address]

            def near_cpus(self) -> frozenset[int]:
                return frozenset(os.sched_getaffinity(0))

        memory = pinned_memory(Pinning())(MIB)
        part = memory[4096:8192]
        assert pinned == {memory.data_ptr(): MIB}
        assert memory.data_ptr() % 4096 == 0
        del memory
        assert len(pinned) == 1
        part.fill_(1)
        del part
        assert not pinned

    def test_a_forked_child_does_not_keep_it(self) -> None:
        """Nor does it take away what has come to lie there in the child when what it has inherited dies."""
        memory = pinned_memory(InlineBackend())(4 * MIB)
        address = memory.data_ptr()
        child = os.fork()
        if child == 0:
            try:
                maps = Path("/proc/self/maps").read_text().splitlines()
                spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
                inherited = any(start <= address < stop for start, stop in spans)
                take = ctypes.CDLL(None).mmap
                take.restype, take.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
                own = take(address, MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
                del memory
                gc.collect()
                ctypes.memset(own, 1, MIB)
                os._exit(0 if not inherited and own == address else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ctypes.memset(address, 1, 4 * MIB)

    def test_as_cuda_does_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pinned: dict[int, tuple[int, int]] = {}
        current = CurrentDevice(monkeypatch)

        class Runtime:
            def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:  # noqa: N802
                assert current.index == 1, "another device would get a context"
                pinned[pointer] = (size_bytes, flags)
                return 0

            def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
                assert current.index == 1
                del pinned[pointer]
                return 0

        properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        memory = pinned_memory(CudaBackend(1))(MIB)
        assert pinned == {memory.data_ptr(): (MIB, 1)}
        del memory
        assert not pinned

    def test_what_cuda_remembers_of_a_refusal_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would fail the user's next kernel."""
        CurrentDevice(monkeypatch)
        pending: list[int] = []

        class Runtime:
            def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:  # noqa: N802
                pending.append(2)
                return 2

        def check_error(code: int) -> None:
            raise torch.cuda.CudaError.__base__(f"out of memory ({code})")  # type: ignore[misc]

        class Kernel:
            def fill_(self, value: int) -> None:
                assert pending.pop() == 2
                raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "check_error", check_error)
        with monkeypatch.context() as kernels:
            kernels.setattr(torch, "empty", lambda *_, device: Kernel())
            with pytest.raises(RuntimeError, match=r"^out of memory \(2\)$"):
                CudaBackend(0).pin(1 << 30, MIB)
        assert not pending

    def test_it_needs_no_huge_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel without them refuses the advice."""
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
        with InlineBackend() as backend:
            assert pinned_memory(backend)(MIB).nbytes() == MIB

    def test_a_refusal_is_one_clear_error(self) -> None:
        class Refusing(InlineBackend):
            def pin(self, address: int, size_bytes: int) -> None:
                raise RuntimeError("out of memory")

        with pytest.raises(SpillError, match=r"refuses to pin 1\.00 MiB of RAM \(out of memory\)"):
            pinned_memory(Refusing())(MIB)

    def test_touching_keeps_to_the_thread(self) -> None:
        before = os.sched_getaffinity(0)
        memory = torch.UntypedStorage(10_000)
        ctypes.memset(memory.data_ptr(), 3, 10_000)
        touch(memory.data_ptr(), 10_000, frozenset([min(before)]))
        assert set(bytes_of(memory)) == {0}
        assert os.sched_getaffinity(0) == before


def test_spare_memory_is_some_of_what_there_is() -> None:
    assert 0 < spare_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


@pytest.mark.parametrize(("processes", "parts"), [("8", 8), ("1", 1), ("0", 1), ("", 1), ("many", 1)])
def test_processes_of_one_machine_share_spare_memory(
    monkeypatch: pytest.MonkeyPatch, processes: str, parts: int
) -> None:
    monkeypatch.setattr("ebbtide.run.tiers.pinned.available_bytes", lambda: 160)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert spare_bytes() == 80 // parts
    assert spare_bytes(4) == 80 // (parts if processes in ("8", "1") else 4)
