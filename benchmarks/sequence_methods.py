"""How the benchmark of sequences reverses a chain: ebbtide, every state stored, and two peers.

All run the same operators. ``count`` states fit in memory, the working state included.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import ebbtide
from benchmarks.sequence_cells import Array, Cell, LSTMOperators, Pair
from ebbtide.run.allocator import trim
from ebbtide.run.resident import RssPeak
from ebbtide.run.tiers import DiskTier
from ebbtide.sequence import run
from ebbtide.sequence.arrays import ArrayChain, OwnCopies
from ebbtide.sequence.blocks import Blocks
from ebbtide.sequence.disk import StateDisk
from ebbtide.sequence.executor import Executor
from ebbtide.sequence.layout import ArrayLayout
from ebbtide.sequence.planning import quickest
from ebbtide.sequence.schedules import DISK, Advance, Multistage, Record, Store
from ebbtide.sequence.spill import open_spill
from ebbtide.sequence.store import StateStore
from ebbtide.sequence.transfers import time_transfers
from ebbtide.sequence.trial import FEW_BLOCKS, Samples, Trial, time_steps

PILOT_STEPS = 300
STORE_ALL_BYTES = 4 << 30
"""Every state is stored only if they take no more RAM than this."""
H_REVOLVE_STEPS = 1000
"""Longest chain for which checkpoint_schedules makes H-Revolve's tables in seconds."""
H_REVOLVE_DISK_SLOTS = 20

Answer = dict[str, Any]
T = TypeVar("T")


def _measured(call: Callable[[], T]) -> tuple[T, Answer]:
    trim()
    with RssPeak() as rss:
        start = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - start
    return found, {"seconds": seconds, "rss_bytes": rss.above_rest_bytes}


def _digest(adjoint: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in adjoint)).hexdigest()[:16]


def state_bytes(cell: Cell) -> int:
    """Bytes of a state."""
    return ArrayLayout(cell.start).size_bytes


def reverse_seconds(cell: Cell, count: int) -> float:
    """Of a reverse step, in a short chain in as much memory: what it is likely to take now, as speeds vary."""
    samples = Samples()

    def timed(state: Pair, adjoint: Pair, step: int) -> Pair:
        start = time.perf_counter()
        adjoint = cell.reverse(state, adjoint, step)
        samples.add(time.perf_counter() - start)
        return adjoint

    run(cell.forward, timed, PILOT_STEPS, cell.start, turn=cell.turn, memory=count * state_bytes(cell))
    return samples.typical()


def ours(cell: Cell, n: int, count: int, spill: str) -> Answer:
    """`ebbtide.sequence.run`, which chooses the schedule itself."""
    expected = reverse_seconds(cell, count)  # not timed
    memory = count * state_bytes(cell)
    done, answer = _measured(
        lambda: run(
            cell.forward,
            cell.reverse,
            n,
            cell.start,
            turn=cell.turn,
            memory=memory,
            spill=spill,
            reverse_seconds=expected,
        )
    )
    choice = done.choice
    assert choice is not None
    return answer | {
        "adjoint": _digest(done.adjoint),
        "recompute_factor": done.recompute_factor,
        "predicted_factor": choice.recompute_factor,
        "predicted_seconds": None if math.isnan(choice.seconds) else choice.seconds,  # nothing was measured
        "waited_seconds": done.waited_seconds,
        "schedule": repr(choice.schedule),
    }


def revolve(cell: Cell, n: int, count: int, _spill: str) -> Answer:
    """`ebbtide.sequence.run` without a disk: plain Revolve."""
    memory = count * state_bytes(cell)
    done, answer = _measured(lambda: run(cell.forward, cell.reverse, n, cell.start, turn=cell.turn, memory=memory))
    return answer | {"adjoint": _digest(done.adjoint), "recompute_factor": done.recompute_factor}


def store_all(cell: Cell, n: int, _count: int, _spill: str) -> Answer | None:
    """A plain loop that keeps a copy of each state; None if they would take too much RAM."""
    if n * state_bytes(cell) > STORE_ALL_BYTES:
        return None

    def call() -> Pair:
        states, state = [], _copy(cell.start)
        for step in range(n):
            states.append(_copy(state))
            state = cell.forward(state, step)
        adjoint = cell.turn(state)
        for step in reversed(range(n)):
            adjoint = cell.reverse(states.pop(), adjoint, step)
        return adjoint

    adjoint, answer = _measured(call)
    return answer | {"adjoint": _digest(adjoint), "recompute_factor": 1.0}


def scan(cell: Cell, n: int, count: int, spill: str) -> Answer | None:
    """`ebbtide.scan` on the module itself; None for cells that have none. Its adjoint is rounded otherwise."""
    if not isinstance(cell, LSTMOperators):
        return None
    zeros = [torch.from_numpy(part).clone() for part in cell.start]
    memory = count * (state_bytes(cell) + 5120 + 64)  # the state of the random generator is stored, too

    def call() -> None:
        final, _ = ebbtide.scan(cell.module.cell, (*zeros, torch.zeros(())), range(n), memory=memory, spill=spill)
        final[2].backward()

    return _measured(call)[1]


class _Workspace:
    """pyrevolve's checkpoint and operators in one: the state and the adjoint that they work on."""

    dtype: Any

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.state = _copy(cell.start)
        self.before = self.state
        self.adjoint: Pair | None = None
        self.forward_steps = 0
        self.dtype = cell.start[0].dtype
        self.size = sum(part.size for part in cell.start)

    def get_data(self, _step: int) -> list[Array]:
        """What is to be stored."""
        return list(self.state)

    def get_data_location(self, _step: int) -> list[Array]:
        """Where it comes back to: over what is there, as pyrevolve's users have it."""
        return list(self.state)

    def advance(self, start: int, stop: int) -> None:
        """Forward steps."""
        for step in range(start, stop):
            self.before = self.state
            self.state = self.cell.forward(self.state, step)
        self.forward_steps += stop - start

    def reverse(self, step: int) -> None:
        """One adjoint step; the forward step was run just before, as pyrevolve wants it."""
        if self.adjoint is None:
            self.adjoint = self.cell.turn(self.state)
        self.adjoint = self.cell.reverse(self.before, self.adjoint, step)


class _Operator:
    def __init__(self, apply: Callable[[int, int], None]) -> None:
        self._apply = apply

    def apply(self, t_start: int, t_end: int) -> None:
        """As pyrevolve calls it."""
        self._apply(t_start, t_end)


def pyrevolve(cell: Cell, n: int, count: int, _spill: str) -> Answer:
    """pyrevolve's Revolve, snapshots in memory."""
    from pyrevolve import MemoryRevolver

    work = _Workspace(cell)

    def call() -> None:
        forward = _Operator(work.advance)
        reverse = _Operator(lambda start, _stop: work.reverse(start))
        revolver = MemoryRevolver(work, forward, reverse, min(count - 1, n - 1), n)
        revolver.apply_forward()
        revolver.apply_reverse()

    _, answer = _measured(call)
    return answer | {"adjoint": _digest(work.adjoint), "recompute_factor": work.forward_steps / n}


@functools.lru_cache(maxsize=64)
def _peer_actions(cell: Cell, n: int, count: int, spill: str) -> tuple[Any, ...]:
    """checkpoint_schedules' actions for measured costs: H-Revolve, or Periodic-Disk-Revolve for long chains."""
    from checkpoint_schedules import HRevolve, PeriodicDiskRevolve

    costs = _costs(cell, spill)
    step = costs["seconds"]
    in_steps = {
        "uf": 1.0,
        "ub": costs["reverse_seconds"] / step,
        "wd": costs["out_seconds"] / step,
        "rd": costs["back_seconds"] / step,
    }
    with contextlib.redirect_stdout(sys.stderr):  # it prints its period
        if n <= H_REVOLVE_STEPS:
            return tuple(HRevolve(n, count - 1, H_REVOLVE_DISK_SLOTS, **in_steps))
        return tuple(PeriodicDiskRevolve(n, count - 1, **in_steps))


def h_revolve(cell: Cell, n: int, count: int, spill: str) -> Answer:
    """checkpoint_schedules' H-Revolve; transfers to the disk are waited for. Making the schedule is not timed."""
    actions = _peer_actions(cell, n, count, spill)
    with contextlib.closing(_Synchronous(cell, n, spill)) as runner:
        _, answer = _measured(lambda: runner.run(actions))
    return answer | {"adjoint": _digest(runner.adjoint), "recompute_factor": (runner.forward_steps + 1) / n}


class _Synchronous:
    """Runs actions of checkpoint_schedules. What a reverse step needs is the state before it: no step for it."""

    def __init__(self, cell: Cell, n: int, spill: str) -> None:
        self.adjoint: Any = None
        self.forward_steps = 0
        self._cell = cell
        self._n = n
        self._state: Pair = _copy(cell.start)
        self._memory: dict[int, Pair] = {}
        self._disk = DiskTier(spill)
        self._layout = ArrayLayout(cell.start)
        trial = _trial(cell)
        (self._block,) = trial.samples(1)
        self._slots: dict[int, Any] = {}

    def run(self, actions: tuple[Any, ...]) -> None:
        """All of them."""
        from checkpoint_schedules import Copy, EndForward, Forward, Move, Reverse

        for action in actions:
            if isinstance(action, Forward):
                self._forward(action)
            elif isinstance(action, Reverse):
                for step in action:
                    self.adjoint = self._cell.reverse(self._state, self.adjoint, step)
            elif isinstance(action, (Copy, Move)):
                self._load(action, drop=isinstance(action, Move))
            elif isinstance(action, EndForward):
                self.adjoint = self._cell.turn(self._cell.forward(_copy(self._state), self._n - 1))

    def _forward(self, action: Any) -> None:
        if action.write_ics:
            self._store(action.n0, action.storage.name)
        if action.write_adj_deps:  # one step, the state before which is kept for its reverse
            return
        for step in action:
            self._state = self._cell.forward(self._state, step)
        self.forward_steps += len(action)

    def _store(self, step: int, storage: str) -> None:
        if storage == "RAM":
            self._memory[step] = _copy(self._state)
        else:
            self._layout.pack(self._state, self._block)
            self._slots[step] = self._disk.write(self._block.storage)
            self._slots[step].wait()

    def _load(self, action: Any, *, drop: bool) -> None:
        if action.from_storage.name == "RAM":
            self._state = self._memory.pop(action.n) if drop else _copy(self._memory[action.n])
            return
        self._disk.read(self._slots[action.n], self._block.storage).wait()
        self._state = _copy(self._layout.unpack(self._block, self._layout.first_orders, writeable=False))
        if drop:
            self._disk.free(self._slots.pop(action.n))

    def close(self) -> None:
        """Give the file back."""
        self._disk.close()


def sweep(cell: Cell, n: int, interval: int, spill: str, *, states: int = 10) -> Answer:
    """A forward sweep alone that stores every ``interval``-th state, with memory for ``states``; 0: the plain loop."""
    if interval == 0:

        def plain() -> None:
            state = _copy(cell.start)
            for step in range(n):
                state = cell.forward(state, step)

        return _measured(plain)[1]
    layout = ArrayLayout(cell.start)
    chain = ArrayChain(cell.forward, cell.reverse, cell.turn, layout, steps_took=lambda *_: None, check=False)

    def records() -> Iterator[Record]:
        for start in range(0, n, interval):
            yield Store(start, DISK)
            yield Advance(start, min(start + interval, n))

    with (
        contextlib.closing(StateDisk(spill)) as disk,
        StateStore(Blocks(layout.size_bytes, states - 1, for_disk=True), {DISK: disk}) as store,
    ):
        executor: Executor[Any] = Executor(chain, store, layout.view(cell.start), None)
        _, answer = _measured(lambda: executor.run(records()))
        return answer | {"waited_seconds": store.waited_seconds}


@functools.lru_cache(maxsize=1)
def _costs(cell: Cell, spill: str) -> Answer:
    trial = _trial(cell)
    step = time_steps(trial, 0.5)
    with contextlib.closing(StateDisk(spill)) as disk:
        slow = time_transfers(disk, trial, step.seconds, step.copy_seconds, None, seconds=1.0)
    return {
        "seconds": step.seconds,
        "copy_seconds": step.copy_seconds,
        "out_seconds": slow.out.seconds(trial.state_bytes),
        "back_seconds": slow.back.seconds(trial.state_bytes),
        "reverse_seconds": reverse_seconds(cell, FEW_BLOCKS),
        "state_bytes": trial.state_bytes,
    }


def chosen_interval(cell: Cell, n: int, count: int, spill: str) -> Answer | None:
    """The interval that `ours` chooses; None if it takes another schedule."""
    layout = ArrayLayout(cell.start)
    trial = _trial(cell, count - 1)
    with open_spill((Path(spill),), checksum=False, item_bytes=layout.item_bytes) as files:
        choice = quickest(n, files, trial, reverse_factor=2.0, reverse_seconds=reverse_seconds(cell, count)).choice
    assert choice is not None
    return {"interval": choice.schedule.interval} if isinstance(choice.schedule, Multistage) else None


def transfers(cell: Cell, _n: int, _count: int, spill: str) -> Answer:
    """Seconds of a step, of a copy of a state, and of a state to the disk and back beside steps."""
    return _costs(cell, spill)


METHODS: dict[str, Callable[..., Answer | None]] = {
    "ours": ours,
    "scan": scan,
    "revolve": revolve,
    "store-all": store_all,
    "pyrevolve": pyrevolve,
    "h-revolve": h_revolve,
    "sweep": sweep,
    "transfers": transfers,
    "interval": chosen_interval,
}


def _trial(cell: Cell, slots: int = FEW_BLOCKS) -> Trial:
    layout = ArrayLayout(cell.start)
    first = layout.view(cell.start)
    blocks = Blocks(layout.size_bytes, slots, for_disk=True)
    copies = OwnCopies(layout)
    return Trial(lambda: copies.copy(first), lambda u: cell.forward(u, 0), layout.pack, blocks)


def _copy(state: Pair) -> Pair:
    return state[0].copy(), state[1].copy()
