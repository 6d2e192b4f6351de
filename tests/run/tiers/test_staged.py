"""A disk behind a device: both hops at once, and faults belong to whoever waits."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.run.tiers import StagedTier
from tests.run.backends.threads import InlineBackend, Temper
from tests.run.tiers.stand_ins import bytes_of, failing, storage_of

PART = 64 << 10

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def backend() -> Iterator[InlineBackend]:
    with InlineBackend(temper=Temper.PROMPT) as made:
        yield made


@pytest.fixture
def tier(backend: InlineBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StagedTier]:
    monkeypatch.setattr(StagedTier, "part_bytes", PART)
    made = StagedTier(tmp_path, backend, checksum=True)
    yield made
    made.close()


def test_a_part_is_written_while_the_next_is_copied(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, enough = [], threading.Event()
    copy, write = tier._backend.copy, tier._pwrite

    def counted(stream: object, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        copies.append(target.nbytes())
        if len(copies) == 2:
            enough.set()
        copy(stream, target, source)

    def held(fd: int, view: memoryview, offset_bytes: int) -> int:
        assert enough.wait(20), "the second part is not copied before the first is written"
        return write(fd, view, offset_bytes)

    monkeypatch.setattr(tier._backend, "copy", counted)
    monkeypatch.setattr(tier, "_pwrite", held)
    slot = tier.write(storage := storage_of(3 * PART + 100))
    slot.wait()
    assert sorted(copies) == [100, PART, PART, PART]
    assert bytes_of(tier.read(slot).wait()) == bytes_of(storage)


def test_a_part_is_copied_back_while_the_next_is_read(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = tier.write(storage := storage_of(3 * PART + 100))
    slot.wait()
    reads, enough = [], threading.Event()
    copy, read = tier._backend.copy, tier._preadv

    def counted(fd: int, view: memoryview, offset_bytes: int) -> int:
        reads.append(offset_bytes)
        if len(reads) == 2:
            enough.set()
        return read(fd, view, offset_bytes)

    def held(stream: object, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        assert enough.wait(20), "the second part is not read before the first has arrived"
        copy(stream, target, source)

    monkeypatch.setattr(tier._backend, "copy", held)
    monkeypatch.setattr(tier, "_preadv", counted)
    assert bytes_of(tier.read(slot).wait()) == bytes_of(storage)


def test_a_closed_tier_keeps_no_stages(tier: StagedTier) -> None:
    slot = tier.write(storage_of(3 * PART))
    slot.wait()
    tier.close()
    assert tier._stages.empty()
    tier.close()


def test_a_full_disk(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_pwrite", failing(errno.ENOSPC))
    slot = tier.write(storage := storage_of(2 * PART))
    with pytest.raises(SpillError, match="is full"):
        slot.wait()
    assert slot.unwritten is storage, "its bytes are not lost"
    with pytest.raises(SpillError, match="is full"):
        tier.read(slot).wait()


def test_a_read_that_fails(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = tier.write(storage_of(2 * PART))
    slot.wait()
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_preadv", failing(errno.EIO))
        with pytest.raises(SpillError, match="reading a tensor"):
            tier.read(slot).wait()
    slot.place.checksums[0] ^= 1
    with pytest.raises(SpillError, match="other than they were written"):
        tier.read(slot).wait()


def test_a_device_that_has_failed_is_not_taken_for_the_disk(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's fault is told to whoever waits for the device next: here, a worker."""
    there = tier.write(storage_of(2 * PART))
    there.wait()

    def finish(stream: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(tier._backend, "finish", finish)
    for move in (lambda: tier.write(storage_of(2 * PART)).wait(), lambda: tier.read(there).wait()):
        with pytest.raises(SpillError, match=r"between cpu and RAM failed: .*device-side assert") as caught:
            move()
        assert "disk" not in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_stages_come_back_after_faults(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_pwrite", failing(errno.EIO))
        for _ in range(10):
            with pytest.raises(SpillError):
                tier.write(storage_of(2 * PART)).wait()
    storage = storage_of(5 * PART)
    assert bytes_of(tier.read(tier.write(storage)).wait()) == bytes_of(storage)


def test_workers_work_for_the_device(tier: StagedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA every thread begins on device 0, which is not theirs to touch."""
    adopted: set[int] = set()
    copied: set[int] = set()
    copy = tier._backend.copy

    def noted(stream: object, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        copied.add(threading.get_ident())
        assert copied <= adopted
        copy(stream, target, source)

    monkeypatch.setattr(tier._backend, "adopt_thread", lambda: adopted.add(threading.get_ident()))
    monkeypatch.setattr(tier._backend, "copy", noted)
    slot = tier.write(storage := storage_of(3 * PART))
    assert bytes_of(tier.read(slot).wait()) == bytes_of(storage)
    assert copied
