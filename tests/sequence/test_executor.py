"""Schedules of users' own that break a rule, run by `run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from ebbtide.errors import SequenceError
from ebbtide.sequence import run
from ebbtide.sequence.schedules import DISK, MEMORY, Advance, Drop, Load, Record, Reverse, Schedule, Store

pytestmark = pytest.mark.usefixtures("nothing_left")


class Given(Schedule):
    """What a test says."""

    n = 3
    slots: Mapping[str, int] = {MEMORY: 2}

    def __init__(self, *records: Record) -> None:
        self._records = records

    def records(self) -> Iterator[Record]:
        return iter(self._records)


def adjoint_by(schedule: Schedule) -> float:
    """Of 3 u^2 by steps that double, from u = 1."""
    chain = (lambda u, step: 2 * u, lambda u, adjoint, step: 2 * adjoint, schedule.n, np.ones(1))
    return float(run(*chain, turn=lambda u: 6 * u, memory=3 * 8, schedule=schedule).adjoint[0])


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([], "ends with step 2 not yet reversed"),
        ([Advance(0, 2), Reverse(2)], "ends with step 1 not yet reversed"),
        ([Reverse(2)], r"at Reverse\(step=2\): the working state is 0"),
        ([Reverse(0)], r"at Reverse\(step=0\): the next step to reverse is 2"),
        ([Advance(0, 2), Reverse(2), Reverse(1)], r"at Reverse\(step=1\): there is no working state"),
        ([Store(1, MEMORY)], "at Store.*: the working state is 0"),
        ([Advance(1, 2)], "at Advance.*: the working state is 0"),
        ([Advance(0, 3)], "at Advance.*: it must run a step, and none from the next one to reverse on"),
        ([Advance(0, 0)], "at Advance.*: it must run a step"),
        ([Load(1, MEMORY)], "loads state 1 from tier 'memory', where it is not"),
        ([Drop(1, MEMORY)], "drops state 1 from tier 'memory', where it is not"),
        ([Store(0, MEMORY), Store(0, MEMORY)], "stores state 0 in memory, where it is already"),
        ([Store(0, DISK)], "names a tier 'disk', which its slots do not"),
        ([Load(0, DISK)], "names a tier 'disk', which its slots do not"),
        ([Drop(0, DISK)], "names a tier 'disk', which its slots do not"),
    ],
)
def test_broken_schedule(records: list[Record], complaint: str) -> None:
    """The adjoint was that of other steps, or the error a `KeyError` from within."""
    with pytest.raises(SequenceError, match=complaint):
        adjoint_by(Given(*records))


@pytest.mark.parametrize("between", [(), (Store(0, MEMORY), Advance(0, 1), Store(1, DISK), Load(0, MEMORY))])
def test_state_that_is_stored_on_a_disk_twice(between: tuple[Record, ...], tmp_path: Path) -> None:
    """In a run of blocks the second one took the place of the first, so that other bytes were written."""
    chain = (lambda u, step: 2 * u, lambda u, adjoint, step: 2 * adjoint, 3, np.ones(512))
    schedule = Given(Store(0, DISK), *between, Store(0, DISK))
    schedule.slots = {MEMORY: 2, DISK: 2}
    with pytest.raises(SequenceError, match="stores state 0 in tier 'disk', where it is already"):
        run(*chain, turn=lambda u: 6 * u, memory=13 * 4096, spill=tmp_path, schedule=schedule)


def test_schedule_that_keeps_the_rules() -> None:
    first = (Store(0, MEMORY), Advance(0, 1), Store(1, MEMORY), Advance(1, 2), Reverse(2))
    rest = (Load(1, MEMORY), Drop(1, MEMORY), Reverse(1), Load(0, MEMORY), Reverse(0), Drop(0, MEMORY))
    assert adjoint_by(Given(*first, *rest)) == 6 * 8 * 8
