"""Where states are on a disk, and whether they are compressed there."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import SpillError
from ebbtide.machine import Link
from ebbtide.run.tiers import DiskTier
from ebbtide.run.tiers.disk import memory_view
from ebbtide.run.tiers.memory import take_memory
from ebbtide.sequence import SlowMemory, planning, run
from ebbtide.sequence.codec import Codec, codec_for, paying_share
from ebbtide.sequence.disk import StateDisk, StatePlace
from ebbtide.sequence.schedules import Multistage
from ebbtide.sequence.shelf import Shelf

pytestmark = pytest.mark.usefixtures("nothing_left")
Array = npt.NDArray[Any]
SIZE = 4096


class TestCodec:
    @given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8, 12, 16, 24]))
    def test_gives_back_what_it_was_given(self, raw: bytes, item_bytes: int) -> None:
        """Items of structures need not fill it."""
        found = bytearray(len(raw))
        tool = Codec(item_bytes)
        tool.unpack(memoryview(tool.pack(memoryview(raw))), memoryview(found))
        assert found == raw

    def test_smooth_fields_shrink_and_noise_does_not_pay(self) -> None:
        """Whatever the disk, noise is written as it is; a fast disk gets everything as it is."""
        smooth = np.sin(np.linspace(0, 3, 1 << 15)).round(6).data.cast("B")
        noise = memoryview(np.random.default_rng(0).bytes(len(smooth)))
        tool = codec_for(8)
        assert tool is not None
        share = paying_share(tool, smooth, 10.0, 10.0)
        assert share is not None
        assert 0.9 < share < 1
        assert paying_share(tool, noise, 10.0, 10.0) is None
        assert paying_share(tool, smooth, 1e-7, 10.0) is None
        assert paying_share(tool, smooth, 10.0, 1e-7) is None

    def test_is_optional(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        assert codec_for(8) is None


@pytest.mark.usefixtures("queued_copies")
class TestCompressedStates:
    WIDTH = 50_000

    def attempt(self, directory: Path, bytes_per_second: float, noisy: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A chain with a disk that is so slow; also how many bytes have gone through it."""
        noise = np.random.default_rng(0).standard_normal(self.WIDTH)
        moved = {"_pwrite": 0, "_preadv": 0}

        def throttled(name: str) -> Any:
            real = getattr(DiskTier, name)

            def call(disk: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
                time.sleep(len(view) / bytes_per_second)
                moved[name] += len(view)
                return int(real(disk, fd, view, offset_bytes))

            return call

        def forward(u: Array, step: int) -> Array:
            time.sleep(1e-3)
            return u + (noise if noisy else 1.0)

        for name in moved:
            monkeypatch.setattr(DiskTier, name, throttled(name))
        start = np.zeros(self.WIDTH)
        done = run(
            forward,
            lambda u, adjoint, step: adjoint + u[:7],
            150,
            start,
            turn=lambda u: np.zeros(7),
            memory=5 * start.nbytes,
            spill=directory,
        )
        expected, u = np.zeros(7), [start[:7]]
        for _ in range(149):
            u.append(u[-1] + (noise[:7] if noisy else 1.0))
        for state in reversed(u):
            expected = expected + state
        assert done.adjoint.tobytes() == expected.tobytes()
        return done, moved

    def test_where_it_pays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slow disk and states that shrink: a small part goes to it."""
        done, moved = self.attempt(tmp_path, 20e6, noisy=False, monkeypatch=monkeypatch)
        assert 0 < moved["_pwrite"] < 0.5 * done.slow_bytes

    def test_noise(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is written as it is."""
        done, moved = self.attempt(tmp_path, 20e6, noisy=True, monkeypatch=monkeypatch)
        assert moved["_pwrite"] >= done.slow_bytes

    def test_a_fast_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is packed for it."""

        def measured(*_: Any, **__: Any) -> SlowMemory:
            return SlowMemory("disk", Link("m", "disk", 0, 5e9, 5e9), Link("disk", "m", 0, 5e9, 5e9))

        monkeypatch.setattr(planning, "time_transfers", measured)
        done, moved = self.attempt(tmp_path, 100e9, noisy=False, monkeypatch=monkeypatch)
        assert moved["_pwrite"] >= done.slow_bytes

    def disk_and_states(self, directory: Path) -> tuple[StateDisk, list[torch.UntypedStorage], list[torch.Tensor]]:
        """A disk that states are packed for, the bytes of one that shrinks and one that does not, and views of them."""
        disk = StateDisk(directory, checksum=True, codec=codec_for(8))
        disk.share = 0.9
        blocks = [take_memory(1 << 16, 0, disk.congruence_bytes) for _ in range(2)]
        views = [torch.empty(0, dtype=torch.uint8).set_(block) for block in blocks]
        views[0].fill_(3)
        views[1].copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)))
        return disk, blocks, views

    def test_states_that_shrink_no_more(self, tmp_path: Path) -> None:
        """A part that does not is written as it is, and for a while no other is tried."""
        disk, blocks, views = self.disk_and_states(tmp_path)
        kinds = []
        for number in (0, 1, 0):
            slot = disk.write(blocks[number])
            slot.wait()
            kinds.append(bool(slot.place.packed))
            before = views[number].clone()
            back = disk.read(slot).wait()
            assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(back), before)
        assert kinds == [True, False, False]
        disk.close()

    def test_states_that_shrink_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a while it is tried."""
        monkeypatch.setattr("ebbtide.sequence.disk.LOOK_AGAIN_PARTS", 2)
        disk, blocks, _ = self.disk_and_states(tmp_path)
        kinds = []
        for number in (1, 0, 0, 0):
            slot = disk.write(blocks[number])
            slot.wait()
            kinds.append(bool(slot.place.packed))
        assert kinds == [False, False, False, True]
        disk.close()

    def test_a_compressed_state_that_is_damaged_is_told(self, tmp_path: Path) -> None:
        disk = StateDisk(tmp_path, checksum=True, codec=codec_for(8))
        disk.share = 0.9
        block = take_memory(1 << 16, 0, disk.congruence_bytes)
        smooth = torch.linspace(0, 1, 1 << 13, dtype=torch.float64).round(decimals=3)
        torch.empty(0, dtype=torch.float64).set_(block).copy_(smooth)
        slot = disk.write(block)
        slot.wait()
        assert slot.place.packed
        view = memory_view(take_memory(SIZE, 0, SIZE).data_ptr(), SIZE)

        def flip(at: int) -> None:
            disk._move(disk._preadv, view, slot.place.offset_bytes)
            view[at] ^= 1
            disk._move(disk._pwrite, view, slot.place.offset_bytes)

        for at in (slot.place.packed[0] // 2 % SIZE, 20):
            flip(at)
            with pytest.raises(SpillError, match=r"a compressed state came back from .* other than it was written"):
                disk.read(slot).wait()
            flip(at)
        disk.read(slot).wait()
        disk.close()


class TestShelf:
    @given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=80))
    def test_is_a_dict(self, actions: list[tuple[int, bool]]) -> None:
        shelf, free = Shelf(), list(range(100, 0, -1))
        model: dict[int, StatePlace] = {}
        for step, plain in actions:
            if step in model:
                place = model.pop(step)
                assert shelf.take(step) == place
                free.append(place.offset_bytes // SIZE)
            else:
                model[step] = StatePlace(free.pop() * SIZE, SIZE, 0, checksums={} if plain else {0: step})
                shelf.put(step, model[step])
            assert shelf.take(41) is None
        for step, place in model.items():
            assert shelf.take(step) == place

    def test_evenly_spaced_states_take_no_memory(self) -> None:
        shelf = Shelf()
        for number in range(10_000):
            shelf.put(7 * number, StatePlace(number * SIZE, SIZE, 0))
        assert len(shelf._runs) == 1
        for number in reversed(range(10_000)):
            assert shelf.take(7 * number) == StatePlace(number * SIZE, SIZE, 0)
        assert shelf._runs == []


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("width", [1, 64, 512, 600])
def test_the_file_takes_what_is_said(width: int, check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states take whole blocks, as large ones do."""
    took = []
    close = StateDisk.close

    def closed(disk: StateDisk) -> None:
        took.append(disk.file_bytes)
        close(disk)

    monkeypatch.setattr(StateDisk, "close", closed)
    start = np.zeros(width)
    done = run(
        lambda u, step: u + 1,
        lambda u, adjoint, step: adjoint,
        60,
        start,
        turn=lambda u: u,
        memory=5 * start.nbytes,
        spill=tmp_path,
        schedule=Multistage(60, 4, 2),
        check=check,
    )
    assert done.choice is not None
    assert took == [done.slow_bytes] == [*done.choice.slow_bytes.values()]


def test_memory_does_not_grow_with_the_number_of_states(tmp_path: Path) -> None:
    """What is left of a state on the disk, once it is there: nothing."""

    def peak(n: int) -> int:
        start = np.zeros(64)
        tracemalloc.start()
        try:
            run(
                lambda u, step: u + 1,
                lambda u, adjoint, step: adjoint,
                n,
                start,
                turn=lambda u: u,
                memory=5 * start.nbytes,
                spill=tmp_path,
                schedule=Multistage(n, 4, 2),
            )
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)
    assert peak(3000) < peak(300) + 20_000
