"""The adjoint of a chain of steps on NumPy arrays, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ebbtide.arguments import as_callable, as_directories, as_duration, as_size, as_switch, as_whole
from ebbtide.errors import ArgumentError, SequenceError
from ebbtide.sequence.arrays import ArrayChain, Condition, ForwardOperator, Lookahead, OwnCopies, ReverseOperator
from ebbtide.sequence.blocks import Blocks, blocks_within, bytes_on_disk
from ebbtide.sequence.choose import Choice, memory_slots, predicted
from ebbtide.sequence.disk import StatePlace
from ebbtide.sequence.executor import Executor
from ebbtide.sequence.layout import ArrayLayout
from ebbtide.sequence.planning import SequencePlan, online, quickest, uses_disks
from ebbtide.sequence.progress import is_wanted, watch
from ebbtide.sequence.schedules import DISK, MEMORY, Schedule
from ebbtide.sequence.schedules.continued import resumed
from ebbtide.sequence.spill import Spill, SpillFiles, open_named, open_spill
from ebbtide.sequence.store import StateStore
from ebbtide.sequence.trial import Trial
from ebbtide.units import format_bytes

REVERSE_FACTOR = 2.0
"""A reverse step takes this many times a step forward: it runs one, and does about as much again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What `run` returns.

    Attributes:
        adjoint: the adjoint of state 0: what ``reverse`` returned for step 0, whatever its structure.
        final: the last state, in the structure of state 0.
        steps: number of steps that the chain had.
        resumed_step: the first step that was run; above 0 if the run went on from where it had been killed.
        forward_steps: steps run forward, besides those that the reverse of each step runs itself.
        recompute_factor: forward steps per step of the chain; 1 if none ran twice.
        waited_seconds: time for which compute has waited for the disk.
        slow_bytes: bytes that have gone to the disk, in whole blocks of it; if they were compressed, before that.
        choice: the schedule and what was expected of it; None where the length was not known.
    """

    adjoint: Any
    final: Any
    steps: int
    resumed_step: int
    forward_steps: int
    recompute_factor: float
    waited_seconds: float
    slow_bytes: int
    choice: Choice | None


def run(
    forward: ForwardOperator,
    reverse: ReverseOperator,
    n: int | Condition,
    state: Any,
    *,
    turn: Callable[[Any], Any],
    memory: int | str,
    spill: Spill = None,
    name: str | None = None,
    schedule: Schedule | None = None,
    reverse_seconds: float | None = None,
    check: bool = False,
    progress: bool | None = None,
) -> Outcome:
    """Run a chain of steps forward, and their adjoint back.

    A state is an array, or a tuple, list or dict of states; anything with a buffer serves as an array. With a disk,
    states go there every so many steps while steps run, as in Kukreja, Hueckelheim and Gorman 2018 (arXiv 1806.01117),
    if that is quickest; between them, and without one, steps run by Revolve (Griewank and Walther 2000).

    Args:
        forward: ``forward(state, step)`` gives the next state: new arrays, or the same ones altered in place. It is
            called again for the same step, and must then give the same.
        reverse: ``reverse(state, adjoint, step)`` gives the adjoint of the state before ``step``, from that state,
            which must stay as it is, and the adjoint of the state after it.
        n: number of steps; or, where it is not known, ``n(state, step)`` that says whether there is a further step
            ``step`` from ``state``. There always is a step 0. It is asked once for each further one.
        state: state 0. It is not altered.
        turn: gives the adjoint of the last state, from that state. An adjoint may be any object, as it is only handed
            on to ``reverse``.
        memory: what the states held between steps may take; bytes, or such as ``"256MiB"``. What the operators take
            while they run comes on top: usually the next state, and the adjoint. So do the last state, from the turn
            on, as it is returned; one copy more of states of up to 1 MiB, and of any where ``n`` is a condition; and up
            to 4 MiB of Python's objects for states and of what pads these.
        spill: directory for states that do not fit, on a fast disk; or several, fastest first, called ``disk``,
            ``disk2``, ... by schedules. Without one, steps are run again.
        name: name of the run. Its states on the disk are then kept until it ends, in a folder of the spill directory:
            if the process is killed, the same call goes on from the last one. Whatever the operators depend on, besides
            the state, should be told by the name.
        schedule: what to do; `choose` makes one. If not given, the quickest is taken; to know it, with ``spill``,
            step 0 and the disk are timed first.
        reverse_seconds: seconds of one step reversed, with what it runs forward itself; if not given, twice those of a
            step forward, as measured.
        check: compare every state that is computed again with a checksum of the first time, and what the disk gives
            back with what it was given. Takes 4 bytes of memory for each step.
        progress: whether to show a bar; if not given, for long chains on a terminal.

    Returns:
        The adjoint of state 0, the last state, and what the run took.

    Raises:
        SequenceError: if there are no steps, ``memory`` holds fewer than two states, states differ in structure or
            shape, the schedule does not fit or breaks a rule, with ``check``, a step does not give the same state
            again, or, with ``name``, the run that was killed was another one.
        ArgumentError: if an operator cannot be called, ``memory`` is not a size, ``spill`` not a path, ``name`` not fit
            for a folder's name, ``check`` or ``progress`` neither True nor False, or another argument of the wrong
            type; it is a `ValueError`.
        SpillError: if the spill directory is missing, full or faulty.
    """
    for name_of_operator, operator in (("forward", forward), ("reverse", reverse), ("turn", turn)):
        as_callable(name_of_operator, operator)  # or it would be found after the forward pass
    _check_schedule(schedule)
    if reverse_seconds is not None:
        reverse_seconds = as_duration("reverse_seconds", reverse_seconds)
    directories, check = as_directories("spill", spill), as_switch("check", check)
    progress = progress if progress is None else as_switch("progress", progress)
    n = _as_length(n)
    layout = ArrayLayout(state)
    slots, first = memory_slots(layout.size_bytes, memory), layout.view(state)
    with _spill(directories, name, n, layout, first, check) as files:
        blocks = _blocks(layout, n, slots, as_size("memory", memory), schedule, files)
        plan = _make_plan(schedule, n, slots, files, _trial(forward, layout, first, blocks), reverse_seconds)
        chain = ArrayChain(forward, reverse, turn, layout, steps_took=plan.steps_took, check=check)
        return _run_and_reverse(chain, layout, first, n, plan, blocks, files, progress)


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"schedule={schedule!r}: it must be a Schedule, one of ebbtide.sequence.schedules; of what `choose` "
            "returns, give `.schedule`"
        )


def _as_length(n: Any) -> int | Condition:
    """An ``int`` of Python, as those of NumPy have no place in a journal, or a condition."""
    try:
        return n if callable(n) else as_whole("n", n)
    except ArgumentError as fault:
        raise ArgumentError(f"{fault}, or a condition: n(state, step)") from None


def _run_and_reverse(
    chain: ArrayChain,
    layout: ArrayLayout,
    first: Any,
    n: int | Condition,
    plan: SequencePlan,
    blocks: Blocks,
    files: SpillFiles,
    progress: bool | None,
) -> Outcome:
    """Run ``chain`` by ``plan``, forward from the state ``first`` and back."""
    with _store(chain, layout, plan, blocks, files) as store:
        executor = _run_chain(chain, store, first, n, plan, progress)
        files.drain()
        assert chain.steps is not None
        return Outcome(
            adjoint=chain.adjoint,
            final=chain.final,
            steps=chain.steps,
            resumed_step=chain.first_step or 0,
            forward_steps=executor.forward_steps,
            recompute_factor=(executor.forward_steps + 1) / chain.steps,
            waited_seconds=store.waited_seconds,
            slow_bytes=sum(store.stored.values()) * bytes_on_disk(layout.size_bytes),
            choice=plan.choice,
        )


def _store(chain: ArrayChain, layout: ArrayLayout, plan: SequencePlan, blocks: Blocks, files: SpillFiles) -> StateStore:
    """The states of ``chain``, among them those of a named run that was killed."""
    named = files.named

    def written(step: int, place: StatePlace) -> None:
        if named is not None and chain.steps is None:
            named.note(step, place, chain.orders(step))

    tiers = files.tiers() if plan.spills else {}
    store = StateStore(blocks, tiers, late=plan.was_late, written=written, is_held=layout.is_held)
    if named is not None and plan.spills:
        for step, place in files.there.items():
            store.adopt(step, DISK, place)
            chain.adopt(step, named.orders[step])
    return store


def _run_chain(
    chain: ArrayChain, store: StateStore, first: Any, n: int | Condition, plan: SequencePlan, progress: bool | None
) -> Executor[Any]:
    """The executor that has run ``chain`` by ``plan``."""
    executor: Executor[Any] = Executor(chain, store, first, None if callable(n) else n)
    more = Lookahead(chain, executor, n) if callable(n) else range(n).__contains__
    records = plan.records(more)
    if is_wanted(progress, plan.choice.seconds if plan.choice else 0.0):
        records = watch(records, plan.choice.forward_steps + plan.choice.schedule.n if plan.choice else None)
    executor.run(records)
    executor.finish()
    return executor


def _spill(
    spill: Sequence[Path], name: str | None, n: int | Condition, layout: ArrayLayout, first: Any, check: bool
) -> AbstractContextManager[SpillFiles]:
    if name is None:
        return open_spill(spill, checksum=check, item_bytes=layout.item_bytes)
    if callable(n):
        raise SequenceError(f"name={name!r}: only a run of a known number of steps can go on where it was interrupted")
    identity = {
        "number of steps": n,
        "state": layout.describe(),
        "order of elements": [list(order) for order in layout.first_orders],
        "state 0": layout.digest(first),
    }
    return open_named(spill, name, identity, state_bytes=layout.size_bytes, item_bytes=layout.item_bytes)


def _blocks(
    layout: ArrayLayout, n: int | Condition, slots: int, memory_bytes: int, schedule: Schedule | None, files: SpillFiles
) -> Blocks:
    """The slots in memory; of a given schedule's, nothing but the states counts, as where it was made."""
    if schedule is not None:
        return Blocks(layout.size_bytes, slots, for_disk=uses_disks(schedule) or bool(files.there))
    most = None if callable(n) or files.there else n - 1
    return blocks_within(memory_bytes, slots, layout, most, spills=bool(files.names))


def _trial(forward: ForwardOperator, layout: ArrayLayout, first: Any, blocks: Blocks) -> Trial:
    copies = OwnCopies(layout)

    def step(state: Any) -> Any:
        return layout.checked(forward(state, 0), 1)

    return Trial(lambda: copies.copy(first), step, layout.pack, blocks)


def _make_plan(
    schedule: Schedule | None,
    n: int | Condition,
    slots: int,
    files: SpillFiles,
    trial: Trial,
    reverse_seconds: float | None,
) -> SequencePlan:
    """What to do: as ``schedule`` says or, where there is none, what is quickest."""
    if schedule is not None:
        return _given(schedule, n, slots, trial.state_bytes, files)
    if callable(n):
        return online(files, trial)
    return quickest(n, files, trial, reverse_factor=REVERSE_FACTOR, reverse_seconds=reverse_seconds)


def _given(
    schedule: Schedule,
    n: int | Condition,
    slots: int,
    state_bytes: int,
    files: SpillFiles,
) -> SequencePlan:
    if callable(n) or schedule.n != n:
        raise SequenceError(f"the schedule is for {schedule.n} steps, not for {'any number' if callable(n) else n}")
    wanted = schedule.slots
    states = wanted.get(MEMORY, 0) + 1
    if states > slots + 1:
        raise SequenceError(
            f"the schedule holds {states} states in memory, the working state included, and {slots + 1} fit; "
            f"give at least {format_bytes(states * state_bytes)} ({states * state_bytes} bytes)"
        )
    for tier, count in wanted.items():
        if tier != MEMORY and count and tier not in files.names:
            known = (
                f"spill=... is called {' and '.join(map(repr, files.names))}"
                if files.names
                else "spill=... is not given"
            )
            raise SequenceError(f"the schedule stores states in a tier called {tier!r}, but {known}")
    choice = predicted(schedule, state_bytes, math.nan)
    spills = uses_disks(schedule) or bool(files.there)
    return SequencePlan(lambda _: resumed(schedule.records(), files.there, DISK), choice, spills)
