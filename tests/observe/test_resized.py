"""Storages that are emptied, and filled again, by no op count with what they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ebbtide.observe import resizing
from ebbtide.observe.recorder import Recorder
from ebbtide.plan import plain_peak_bytes
from ebbtide.run.meter import PeakMeter
from ebbtide.step_checks import check_agreement, check_step

pytestmark = pytest.mark.usefixtures("nothing_left")

COUNT = 1 << 16
SIZE_BYTES = 4 * COUNT


def _resize(tensor: Tensor, size_bytes: int) -> None:
    tensor.untyped_storage().resize_(size_bytes)


def emptied() -> None:
    """Nobody fills it again; another one comes in its place."""
    data = torch.ones(COUNT)
    _resize(data, 0)
    torch.ones(COUNT)


def refilled() -> None:
    """While it has no memory, others have."""
    data = torch.ones(COUNT)
    _resize(data, 0)
    torch.ones(2 * COUNT)
    _resize(data, SIZE_BYTES)
    torch.ones(COUNT // 2)


def refilled_twice() -> None:
    """What it is filled with is there, too."""
    data = torch.ones(COUNT)
    for _ in range(2):
        _resize(data, 0)
        other = torch.ones(COUNT)
        _resize(data, SIZE_BYTES)
        data.untyped_storage().copy_(other.untyped_storage())
        del other


def made_smaller() -> None:
    """To half: the other half is free."""
    data = torch.ones(COUNT)
    torch.ones(COUNT // 2)
    _resize(data, SIZE_BYTES // 2)
    torch.ones(COUNT)


def dead_while_empty() -> None:
    """Its death frees nothing more."""
    data = torch.ones(COUNT)
    _resize(data, 0)
    del data
    torch.ones(COUNT)


def filled_and_dead() -> None:
    """After its death another one takes as much."""
    data = torch.ones(COUNT)
    _resize(data, 0)
    _resize(data, SIZE_BYTES)
    data.fill_(1)
    del data
    torch.ones(COUNT)


def gone_before_an_op() -> None:
    """No op sees what it has meanwhile."""
    data, other = torch.ones(COUNT // 2), torch.ones(COUNT // 2)
    _resize(data, 0)
    _resize(data, SIZE_BYTES // 2)
    _resize(data, 0)
    _resize(other, SIZE_BYTES // 4)
    _resize(other, 0)
    _resize(other, SIZE_BYTES // 2)
    del other
    torch.ones(COUNT)


def there_before() -> None:
    """What the code did not make counts all the time."""
    _before.add_(1)
    _resize(_before, 0)
    torch.ones(COUNT)
    _resize(_before, SIZE_BYTES)
    _before.fill_(1)


_before = torch.ones(COUNT)
CASES = {
    emptied: SIZE_BYTES,
    refilled: 2 * SIZE_BYTES,
    refilled_twice: 2 * SIZE_BYTES,
    made_smaller: SIZE_BYTES * 3 // 2,
    dead_while_empty: SIZE_BYTES,
    filled_and_dead: SIZE_BYTES,
    gone_before_an_op: SIZE_BYTES,
    there_before: 2 * SIZE_BYTES,
}


@pytest.mark.parametrize("code", CASES)
def test_the_peak(code: Callable[[], None]) -> None:
    with PeakMeter() as meter:
        code()
    assert meter.peak_bytes == CASES[code]
    with Recorder() as recorder:
        code()
    step = recorder.finish()
    check_step(step)
    check_agreement(step)
    assert plain_peak_bytes(step) == CASES[code]
    assert plain_peak_bytes(step) == step.resting_bytes + recorder.ledger.peak_made_bytes


def test_what_was_filled_was_made_by_what_comes_next() -> None:
    with Recorder() as recorder:
        refilled()
    step = recorder.finish()
    first, second = (value for value in step.values if value.size_bytes == SIZE_BYTES)
    assert [op.replay for op in step.ops] == ["pure", "pure", "opaque"]
    assert (first.maker, first.dies) == (0, 1)
    assert (second.maker, second.dies) == (2, 3)
    assert first.storage != second.storage


@torch.library.custom_op("ebbtide_tests::fill_anew", mutates_args=["data"])
def fill_anew(data: Tensor) -> None:
    """Takes the memory of what it writes, and gives it back."""
    _resize(data, 0)
    _resize(data, SIZE_BYTES)
    data.fill_(2)


@pytest.mark.parametrize("count", [COUNT, COUNT // 2])
def test_an_op_that_resizes_what_it_writes(count: int) -> None:
    with Recorder() as recorder:
        data = torch.ones(count)
        fill_anew(data.view(-1))
        data.exp()
    step = recorder.finish()
    check_step(step)
    check_agreement(step)
    assert plain_peak_bytes(step) == SIZE_BYTES + data.nbytes
    reader = step.ops[-1]
    assert step.values[reader.inputs[0]].size_bytes == SIZE_BYTES
    assert [op.replay for op in step.ops if op.name != "aten.view.default"] == ["pure", "opaque", "opaque"]


def test_nobody_is_told_afterwards() -> None:
    with PeakMeter(), Recorder():
        assert len(resizing._told) == 2
    assert not resizing._told
    storage = torch.ones(2).untyped_storage()
    assert storage.resize_(0) is storage
    assert storage.nbytes() == 0
