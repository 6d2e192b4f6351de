"""What is decided before a chain is run: where states may go, and by which schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from ebbtide.run.tiers import DiskTier
from ebbtide.run.tiers.disk import free_bytes
from ebbtide.sequence.choose import Choice, choose
from ebbtide.sequence.pace import Pace, time_transfers
from ebbtide.sequence.schedules import Multistage, Online, Record

DISK_SHARE = 0.9
"""Part of the free space in the spill directory that a schedule may plan with."""

Records = Callable[[Callable[[int], bool]], Iterator[Record]]
"""Makes the records, given whether the chain has a step of some number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """How a chain will be run.

    Attributes:
        records: makes the records.
        choice: what is expected; None where the length is not known.
        step_took: to be told the seconds of each step of the first sweep.
    """

    records: Records
    choice: Choice | None
    step_took: Callable[[float], None]


@contextlib.contextmanager
def open_spill(directory: str | Path | None, *, checksum: bool) -> Iterator[DiskTier | None]:
    """A spill file in ``directory`` while the context lasts, if there is a directory. Raises `SpillError`."""
    if directory is None:
        yield None
        return
    with contextlib.closing(DiskTier(directory, checksum=checksum)) as disk:
        yield disk


def quickest(
    n: int,
    slots: int,
    state_bytes: int,
    disk: DiskTier | None,
    trial: Callable[[], float],
    *,
    reverse_factor: float,
) -> Course:
    """The quickest course for ``n`` steps.

    Args:
        n: number of steps.
        slots: slots in memory, besides the working state.
        state_bytes: bytes of a state.
        disk: where states may go, if anywhere.
        trial: gives the seconds of a step forward; called only where they matter.
        reverse_factor: how much longer it takes to reverse a step, with what that runs forward itself.

    Raises:
        SpillError: if nothing can be written to the disk.
    """
    memory = (slots + 1) * max(state_bytes, 1)
    if disk is None or slots >= n - 1:
        choice = choose(n, state_bytes, 0.0, 0.0, memory)
        choice = dataclasses.replace(choice, seconds=math.nan)  # nothing was measured, as there is nothing to decide
        return Course(lambda _: choice.schedule.records(), choice, unnoted)
    step_seconds = trial()
    tier = time_transfers(disk, state_bytes, int(DISK_SHARE * free_bytes(disk.directory)))
    choice = choose(n, state_bytes, step_seconds, reverse_factor * step_seconds, memory, (tier,))
    schedule = choice.schedule
    if not isinstance(schedule, Multistage) or not schedule.parts:
        return Course(lambda _: schedule.records(), choice, unnoted)
    room = tier.slots(state_bytes)
    pace = Pace(schedule.interval, step_seconds, 1 if room is None else -(-n // max(room, 1)))
    online = Online(slots, pace.interval, disk.name)
    return Course(lambda more: online.records(more, n), choice, pace.step_took)


def unnoted(_: float) -> None:
    """A schedule that is fixed does not ask what steps take."""
