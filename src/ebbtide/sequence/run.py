"""Runs the adjoint of a chain of steps on NumPy arrays, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbtide.errors import SequenceError
from ebbtide.run.tiers import DiskTier
from ebbtide.sequence.arrays import ArrayChain, Forward, Lookahead, More, Reverse
from ebbtide.sequence.choose import Choice, hidden_interval, memory_slots, predicted
from ebbtide.sequence.executor import Executor
from ebbtide.sequence.layout import Layout
from ebbtide.sequence.pace import Pace, time_step, time_transfers
from ebbtide.sequence.planning import Course, open_spill, quickest, unnoted
from ebbtide.sequence.progress import is_wanted, watch
from ebbtide.sequence.schedules import MEMORY, Online, OnlineInMemory, Schedule
from ebbtide.sequence.store import StateStore
from ebbtide.units import format_bytes

REVERSE_FACTOR = 2.0
"""A reverse step runs a step forward and does about as much again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What `run` returns.

    Attributes:
        adjoint: what the reverse of step 0 returned.
        final: the last state.
        steps: how many the chain had.
        forward_steps: steps run forward, besides those that the reverse of each step runs itself.
        recompute_factor: forward steps per step of the chain; 1 if none ran twice.
        waited_seconds: how long compute has waited for the disk.
        slow_bytes: what has gone to the disk.
        choice: what was expected; None where the length was not known.
    """

    adjoint: Any
    final: Any
    steps: int
    forward_steps: int
    recompute_factor: float
    waited_seconds: float
    slow_bytes: int
    choice: Choice | None


def run(
    forward: Forward,
    reverse: Reverse,
    n: int | More,
    state: Any,
    *,
    turn: Callable[[Any], Any],
    memory: int | str,
    spill: str | Path | None = None,
    schedule: Schedule | None = None,
    check: bool = False,
    progress: bool | None = None,
) -> Outcome:
    """Run a chain of steps forward, and their adjoint back.

    A state is an array, or a tuple, list or dict of states; anything with a buffer serves as an array.

    Args:
        forward: ``forward(state, step)`` gives the next state: new arrays, or the same ones altered in place. It is
            called again for the same step, and must then give the same.
        reverse: ``reverse(state, adjoint, step)`` gives the adjoint of the state before ``step``, from that state,
            which must stay as it is, and the adjoint of the state after it.
        n: number of steps; or, where it is not known, ``n(state, step)`` that says whether there is a further step
            ``step`` from ``state``. There always is a step 0. It is asked once for each further one.
        state: state 0. It is not altered.
        turn: gives the adjoint of the last state, from that state.
        memory: for the states held between steps; bytes, or such as ``"256MiB"``. What the operators take while they
            run comes on top: usually the next state, and the adjoint.
        spill: directory for states that do not fit, on a fast disk. Without one, steps are run again.
        schedule: what to do; `choose` makes one. If not given, the quickest is taken; to know it, with ``spill``,
            step 0 and the disk are timed first.
        check: compare every state that is computed again with a checksum of the first time, and what the disk gives
            back with what it was given. Takes 4 bytes of memory for each step.
        progress: whether to show a bar; if not given, for long chains on a terminal.

    Raises:
        SequenceError: if there are no steps, memory takes less than two states, states differ in structure or shape,
            the schedule does not fit, or, with ``check``, a step does not give the same state again.
        SpillError: if the spill directory is missing, full or faulty.
    """
    layout = Layout(state)
    slots = memory_slots(layout.size_bytes, memory)
    first = layout.view(state)

    def trial() -> float:
        return time_step(lambda: forward(layout.copy(first), 0))

    with open_spill(spill, checksum=check) as disk:
        if schedule is not None:
            plan = _given(schedule, n, slots, layout.size_bytes, disk)
        elif callable(n):
            plan = _online(slots, layout.size_bytes, disk, trial)
        else:
            plan = quickest(n, slots, layout.size_bytes, disk, trial, reverse_factor=REVERSE_FACTOR)
        before_bytes = 0 if disk is None else disk.written_bytes
        chain = ArrayChain(forward, reverse, turn, layout, step_took=plan.step_took, check=check)
        with StateStore(layout.size_bytes, slots, {} if disk is None else {disk.name: disk}) as store:
            executor: Executor[Any] = Executor(chain, store, first)
            more = Lookahead(chain, executor, n) if callable(n) else range(n).__contains__
            records = plan.records(more)
            if is_wanted(progress, plan.choice.seconds if plan.choice else 0.0):
                records = watch(records, plan.choice.forward_steps + plan.choice.schedule.n if plan.choice else None)
            executor.run(records)
            if disk is not None:
                disk.drain()
        assert chain.steps is not None
        return Outcome(
            adjoint=chain.adjoint,
            final=chain.final,
            steps=chain.steps,
            forward_steps=executor.forward_steps,
            recompute_factor=(executor.forward_steps + 1) / chain.steps,
            waited_seconds=store.waited_seconds,
            slow_bytes=0 if disk is None else disk.written_bytes - before_bytes,
            choice=plan.choice,
        )


def _given(schedule: Schedule, n: int | More, slots: int, state_bytes: int, disk: DiskTier | None) -> Course:
    if callable(n) or schedule.n != n:
        raise SequenceError(f"the schedule is for {schedule.n} steps, not for {'any number' if callable(n) else n}")
    wanted = schedule.slots
    states = wanted.get(MEMORY, 0) + 1
    if states > slots + 1:
        raise SequenceError(
            f"the schedule holds {states} states in memory, the working state included, and {slots + 1} fit; "
            f"give at least {format_bytes(states * state_bytes)}"
        )
    for tier, count in wanted.items():
        if tier != MEMORY and count and (disk is None or tier != disk.name):
            there = "spill=... is not given" if disk is None else f"spill=... is called {disk.name!r}"
            raise SequenceError(f"the schedule stores states in a tier called {tier!r}, but {there}")
    return Course(lambda _: schedule.records(), predicted(schedule, state_bytes, math.nan), unnoted)


def _online(slots: int, state_bytes: int, disk: DiskTier | None, trial: Callable[[], float]) -> Course:
    if disk is None or slots < 2:
        return Course(OnlineInMemory(slots).records, None, unnoted)
    step_seconds = trial()
    links = time_transfers(disk, state_bytes, None)
    interval = hidden_interval(step_seconds, links.out.seconds(state_bytes))
    pace = Pace(interval, step_seconds)
    return Course(Online(slots, pace.interval, disk.name).records, None, pace.step_took)
