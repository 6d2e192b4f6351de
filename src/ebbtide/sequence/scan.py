"""Backpropagation through a loop over a cell, in bounded memory, as a part of any autograd graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ebbtide.arguments import as_callable, as_directories, as_size, as_switch, as_whole
from ebbtide.errors import SequenceError
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.sequence.blocks import blocks_within
from ebbtide.sequence.cells import Cell, CellChain
from ebbtide.sequence.choose import memory_slots
from ebbtide.sequence.draws import CallersDraws
from ebbtide.sequence.executor import Executor
from ebbtide.sequence.inputs import Inputs, in_turn, indexed
from ebbtide.sequence.leaves import detached, is_kept
from ebbtide.sequence.only_read import OnlyRead
from ebbtide.sequence.planning import SequencePlan, quickest
from ebbtide.sequence.progress import is_wanted, watch
from ebbtide.sequence.results import refuse_batched, refuse_transforms
from ebbtide.sequence.schedules import Record, Reverse
from ebbtide.sequence.spill import Spill, SpillFiles, open_spill
from ebbtide.sequence.steps import versions_of
from ebbtide.sequence.store import StateStore
from ebbtide.sequence.survey import Survey, survey
from ebbtide.sequence.tensors import TensorLayout, TensorState
from ebbtide.sequence.trial import Trial

REVERSE_FACTOR = 3.0
"""A reverse step takes this many times a step forward: it runs one, and its graph back in about twice the time."""

_log = logging.getLogger(__name__)


@never_compiled
def scan(
    cell: Cell,
    state: Any,
    inputs: Iterable[Any],
    *,
    memory: int | str = "256MiB",
    spill: Spill = None,
    truncate: int | None = None,
    check: bool = False,
    progress: bool | None = None,
) -> tuple[Any, list[Any]]:
    """Run ``state, y = cell(state, x)`` for each ``x``; the backward pass takes bounded memory, however many there are.

    Gives what the plain loop gives, bit for bit, gradients included: for state 0, the inputs, and whatever else the
    cell uses. The backward pass runs steps again from stored states. Under `torch.no_grad` it is the plain loop.
    With a disk, states go there every so many steps while steps run, as in Kukreja, Hueckelheim and Gorman 2018 (arXiv
    1806.01117), if that is quickest; between them, and without one, steps run by Revolve (Griewank and Walther 2000).

    Args:
        cell: ``cell(state, x)`` gives the next state and an output, any pytree (or None). It is called again for the
            same step, so:

            * it must then do the same: what changes from step to step must be in the state, in the input, or in tensors
              outside that it writes to in step 0 already, as batch norm does, which are put back for that;
            * it may draw random numbers of PyTorch, which are drawn again as they were;
            * it must not alter its state or its input in place.
        state: state 0, a pytree of tensors. All states have the same structure, shapes, types and devices.
        inputs: any iterable. What can be indexed is, anew for each run of a step; the items of others, of mappings
            and of what may be altered as lists are, are kept, so each must be of its own memory.
        memory: for the states held between steps, in RAM; bytes, or such as ``"256MiB"``. What one step and its graph
            take comes on top, and so do inputs, outputs and gradients.
        spill: directory for states that do not fit, on a fast disk; or several, fastest first. Without one, steps are
            run again.
        truncate: detach the state before each step whose number is a multiple of this, at least 1, but not state 0.
        check: compare every state that is computed again with a checksum of the first time, and what the disk gives
            back with what it was given. Takes 4 bytes of memory for each step.
        progress: whether to show a bar; if not given, for long chains on a terminal.

    Returns:
        The last state, as a pytree like ``state``, and the list of all outputs. The gradient of an output counts only
        its uses after the scan, not its effect on later steps.

    Raises:
        SequenceError: if ``memory`` holds fewer than two states, a state is not like state 0, the cell misbehaves, what
            it writes to outside has another size than in step 0, or tensors have tangents of forward-mode derivatives
            or a transform of `torch.func` is under way; also from the backward pass.
        ArgumentError: if ``cell`` cannot be called, ``memory`` is not a size, ``spill`` not a path, ``truncate`` not a
            whole number of at least 1, or ``check`` or ``progress`` neither True nor False; it is a `ValueError`.
        SpillError: if the spill directory is missing, full or faulty; also from the backward pass.
    """
    as_callable("cell", cell)
    if truncate is not None:
        truncate = as_whole("truncate", truncate, 1)
    directories, check = as_directories("spill", spill), as_switch("check", check)
    progress = progress if progress is None else as_switch("progress", progress)
    if not torch.is_grad_enabled():
        return _plain(cell, state, inputs)
    refuse_transforms(tree_leaves(state))
    steps = indexed(inputs)
    if len(steps) == 0:
        return state, []
    layout = TensorLayout(state)
    memory_slots(layout.size_bytes, memory)  # it is told before anything runs that there is too little
    start = detached(layout.flatten(state, 0))
    with layout.surroundings.preserved():  # an input may be drawn
        found = survey(cell, state, start, steps, layout)
    user_start = found.layout.flatten(state, 0)
    options = _Options(as_size("memory", memory), directories, truncate, check, progress)
    sweep = _Sweep(cell, start, steps, found, options)
    if found.context.converts:
        sweep.chain.converts = list(map(is_kept, user_start))
    sweep.chain.hazards.begin(user_start)
    sweep.forward()
    if not sweep.chain.results:
        sweep.close()
        return sweep.chain.assemble(())
    results = _Reversal.apply(sweep, len(user_start), *sweep.chain.outside.tensors, *user_start)  # type: ignore[no-untyped-call]
    return sweep.chain.assemble(results)


vars(scan)["_torchdynamo_disable"] = True  # where what calls it is compiled, Dynamo does not look into it


def _plain(cell: Cell, state: Any, inputs: Iterable[Any]) -> tuple[Any, list[Any]]:
    ys = []
    for x in in_turn(inputs):
        state, y = cell(state, x)
        ys.append(y)
    return state, ys


class _Reversal(torch.autograd.Function):
    """The whole scan as one node of the user's graph. What it returns was computed before."""

    @staticmethod
    def forward(ctx: Any, sweep: _Sweep, parts: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sweep = sweep
        ctx.save_for_backward(*(tensor for tensor in tensors if not tensor.is_inference()))
        return sweep.chain.take_results(tensors[-parts:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises what PyTorch does if they were altered since, or the graph was freed
        if torch.is_grad_enabled():
            raise SequenceError(
                "a scan cannot be differentiated twice: run its backward pass without create_graph=True"
            )
        refuse_batched(grads)
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        outside, state = ctx.sweep.back(grads)
        return None, None, *outside, *state


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    """What a user has asked of a scan: see `scan`."""

    memory_bytes: int
    directories: Sequence[Path]
    truncate: int | None
    check: bool
    progress: bool | None


class _Sweep:
    """A chain's run: the forward part at once, the rest when gradients come.

    A second backward pass through a graph that was retained begins with the forward part again.
    """

    def __init__(self, cell: Cell, start: TensorState, inputs: Inputs, survey: Survey, options: _Options) -> None:
        layout = survey.layout
        began = functools.partial(survey.first_run.compare, layout.surroundings)
        self.chain = CellChain(cell, inputs, layout, truncate=options.truncate, check=options.check, began=began)
        self._start = start
        self._n = len(inputs)
        self._layout = layout
        self._slots = memory_slots(layout.size_bytes, options.memory_bytes, layout.surroundings.carried_bytes)
        self._options = options
        self._context = survey.context
        self._only_read = OnlyRead(layout.surroundings.only_read)
        self._start_surroundings = layout.surroundings.read()
        self._turn_surroundings = self._start_surroundings
        self._plan: SequencePlan | None = None
        self._resources = contextlib.ExitStack()
        self._files: SpillFiles | None = None
        self._executor: Executor[TensorState] | None = None
        self._records: Iterator[Record] = iter(())
        self._turn_versions: tuple[int, ...] = ()

    def forward(self) -> None:
        """Run every step once. If that fails, nothing is left."""
        with self._context.set(), self.chain.hooks:
            try:
                self._to_the_turn()
                self._turn_surroundings = self._layout.surroundings.read()
                assert self._executor is not None
                self._turn_versions = versions_of(self._executor.working)
                # On detached tensors: this is the first run of the last step, and gradients go through its second run.
                self.chain.advance(detached(self._executor.working), self._n - 1, self._n)
                self._only_read.note()
            except BaseException:
                self.close()
                raise

    def back(self, grads: tuple[Tensor | None, ...]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Reverse every step; gradients of what is outside and of state 0. Nothing is left after it."""
        chain, surroundings, only_read = self.chain, self._layout.surroundings, self._only_read
        draws = CallersDraws(surroundings, self._context.callers_autocast())
        with self._context.set(), surroundings.preserved(), only_read.as_noted(), chain.outside.fenced(), chain.hooks:
            try:
                chain.hazards.check()
                only_read.check()
                if self._executor is not None and versions_of(self._executor.working) != self._turn_versions:
                    self.close()  # it is what a step has put out, too, and who has that has altered it
                if self._executor is None:
                    self._layout.surroundings.set(self._start_surroundings)
                    self._to_the_turn()
                else:
                    self._layout.surroundings.set(self._turn_surroundings)
                assert self._executor is not None
                self.chain.begin_reverse(grads, draws)
                self._executor.run(self._watched(self._records, forward=False))
                if self._files is not None:
                    self._files.drain()
                found = self.chain.end_reverse()
            finally:
                self.close()
        draws.put()
        return found

    def close(self) -> None:
        """Give back memory and files."""
        self._executor, self._files, self._records = None, None, iter(())
        self._resources.close()

    def _to_the_turn(self) -> None:
        """Run all records before the first reverse step."""
        layout = self._layout
        spill = open_spill(self._options.directories, checksum=self._options.check, item_bytes=layout.item_bytes)
        self._files = files = self._resources.enter_context(spill)
        blocks = blocks_within(self._options.memory_bytes, self._slots, layout, self._n - 1, spills=bool(files.names))
        if self._plan is None:
            trial = Trial(lambda: self._start, self.chain.trial, layout.pack, blocks)
            self._plan = quickest(self._n, files, trial, reverse_factor=REVERSE_FACTOR)
            self.chain.steps_took = self._plan.steps_took
            _log.info("%s", self._plan.choice)
        tiers = files.tiers() if self._plan.spills else {}
        store = StateStore(blocks, tiers, late=self._plan.was_late)
        self._resources.enter_context(store)
        self._executor = Executor(self.chain, store, self._start, self._n)
        records = self._plan.records(range(self._n).__contains__)
        self._executor.run(self._watched(self._until_turn(records), forward=True))

    def _until_turn(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if isinstance(record, Reverse):
                self._records = itertools.chain((record,), records)
                return
            yield record

    def _watched(self, records: Iterator[Record], *, forward: bool) -> Iterator[Record]:
        choice = self._plan.choice if self._plan is not None else None
        assert choice is not None
        if not is_wanted(self._options.progress, choice.seconds):
            return records
        first = self._n - 1
        return watch(records, first if forward else choice.forward_steps - first + self._n)
