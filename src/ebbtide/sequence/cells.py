"""A cell as a chain of steps: run forward once with its outputs, again as often as needed, and back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec

from ebbtide.errors import SequenceError
from ebbtide.observe.mode import nodes_made
from ebbtide.sequence.blocks import Block
from ebbtide.sequence.checksums import Checksums
from ebbtide.sequence.draws import StepDraws
from ebbtide.sequence.graphs import Outside, close_off, is_dense, local_gradients
from ebbtide.sequence.hooks import PutHooks, drop_hooks
from ebbtide.sequence.inputs import Inputs, are_fixed
from ebbtide.sequence.leaves import as_in_loop, detached, is_kept, leaf, place_of
from ebbtide.sequence.results import Hazards, refuse_transforms
from ebbtide.sequence.steps import (
    LEAF,
    CellStep,
    Number,
    StepRun,
    Steps,
    flatten,
    has_gradient,
    needs_grad,
    other_graph,
    returned,
    unflatten,
    versions_of,
)
from ebbtide.sequence.store import unnoted
from ebbtide.sequence.sums import Sums
from ebbtide.sequence.tensors import TensorLayout, TensorState, apart_from, refuse_class, tensor_buffers

Cell = Callable[[Any, Any], tuple[Any, Any]]
_NO_CONTEXT = contextlib.nullcontext()
_NOTHING: tuple[list[Any], TreeSpec] = ([None], LEAF)


class CellChain:
    """A `Chain` of a cell's steps.

    Args:
        cell: see `ebbtide.scan`.
        inputs: one for each step.
        layout: how a state lies in a block.
        truncate: see `ebbtide.scan`.
        check: whether to compare states that are computed again.
        began: called when step 0 has run for the first time, with the hooks that it has put.

    Attributes:
        outside: tensors made outside the cell that its steps use.
        hazards: what its steps did, or others do with `results`, that cannot be reversed.
        hooks: those that a step puts on tensors; it must be entered where steps run.
        results: tensors with a gradient that the steps put out and, at the end, those of the last state; detached.
        steps_took: told how many steps of the first sweep have been run, and in how many seconds.
        converts: `is_kept` of each tensor of state 0, if steps run within contexts of autocast that keep anything.
    """

    def __init__(
        self,
        cell: Cell,
        inputs: Inputs,
        layout: TensorLayout,
        *,
        truncate: int | None = None,
        check: bool = False,
        began: Callable[[PutHooks], object] = unnoted,
    ) -> None:
        self.outside = Outside()
        self.hazards = Hazards()
        self.hooks = PutHooks()
        self.results: list[Tensor] = []
        self.steps_took: Callable[[int, float], None] = unnoted
        self.converts: Sequence[bool] | None = None
        self._cell = cell
        self._inputs = inputs
        self._inputs_are_fixed = are_fixed(inputs)
        self._layout = layout
        self._truncate = truncate
        self._began = began
        self._draws = StepDraws(layout.surroundings)
        self._checksums = Checksums("cell") if check else None
        self._steps = Steps()
        self._ys: list[tuple[list[Any], TreeSpec]] = []
        self._final: list[Any] = []
        self._start: list[int | None] = []
        self._passed_on: dict[int, int] = {}  # numbers of results that are tensors from outside
        self._just_passed_on: dict[int, int] = {}  # by the last step, which may have made some for itself
        self._start_passed_on: list[tuple[int, int]] = []
        # While steps are reversed:
        self._around_formulas: AbstractContextManager[object] = _NO_CONTEXT
        self._grads: list[Tensor | None] = []
        self._position = 0
        self._adjoint: list[Tensor | None] = []
        self._sums = Sums()

    # --- forward -------------------------------------------------------------------------------------------------

    def advance(self, state: TensorState, start: int, stop: int) -> TensorState:
        """See `Chain.advance`. It does not alter ``state``."""
        is_new, began = start >= len(self._steps), time.perf_counter()
        for step in range(start, stop):
            state = self._advance(state, step)
            self._settle()
        if is_new and start < stop:
            self._layout.wait()
            self.steps_took(stop - start, time.perf_counter() - began)
        return state

    def _advance(self, state: TensorState, step: int) -> TensorState:
        following = self._run_again(state, step) if step < len(self._steps) else self._run_first(state, step)
        return detached(following, cut=self._truncate is not None and (step + 1) % self._truncate == 0)

    def _run_first(self, state: TensorState, step: int) -> TensorState:
        self.hazards.guard(state, step)
        since, ran = nodes_made(), self._run(state, step)
        self._note(ran, state, step, since)
        refuse_transforms((*ran.inputs, *ran.following, *ran.parts))
        self.hazards.note(ran, state, step)
        self.hooks.hand_over(ran.given, ran.inputs)
        close_off((*state, *ran.given))
        if step == 0:
            self._began(self.hooks)
        self.hooks.handles.clear()
        return ran.following

    def _run_again(self, state: TensorState, step: int) -> TensorState:
        try:
            following = self._run(state, step).following
        finally:
            self.hooks.undo()
        if needs_grad(following) != self._steps[step].needs_grad:
            raise other_graph(step)
        return following

    def _run(self, state: TensorState, step: int, whole: Collection[int] = ()) -> StepRun:
        """Run a step. Inputs get detached from what they were made of, but for those whose number is in ``whole``."""
        parts, spec = flatten(self._inputs[step])
        inputs_before = versions_of(parts) if self._inputs_are_fixed else ()
        if step < len(self._steps) and inputs_before != self._steps[step].versions:
            raise SequenceError(
                f"input {step} was altered in place after step {step} ran, which must run again; alter a copy of it"
            )
        inputs = {id(part): part for part in parts if has_gradient(part)}
        if whole:
            inputs = {key: part for key, part in inputs.items() if self.outside.find(part) not in whole}
        for part in inputs.values():
            refuse_class(part, f"input {step}, which wants a gradient, has")
        given = {key: leaf(part, kept=self.converts is None or is_kept(part)) for key, part in inputs.items()}
        self.hazards.guard_inputs(inputs.values(), given.values())
        state_before = versions_of(state)
        found = self._cell(self._layout.unflatten(state), unflatten([given.get(id(p), p) for p in parts], spec))
        if self.converts is not None:
            torch.clear_autocast_cache()  # what contexts of the cell's own keep is this step's
        following = self._layout.flatten(returned(found, step)[0], step + 1)
        if state_before != versions_of(state):
            raise SequenceError(f"the cell has altered its state in place in step {step}; it must return a new one")
        if self._inputs_are_fixed and inputs_before != versions_of(parts):
            raise SequenceError(f"the cell has altered its input in place in step {step}; it must alter a copy of it")
        if self._checksums is not None:
            self._checksums.compare(tensor_buffers(following), step)
        return StepRun(list(inputs.values()), list(given.values()), following, *flatten(found[1]), inputs_before)

    def _note(self, ran: StepRun, state: TensorState, step: int, since: int) -> None:
        """Take up what the first run of a step shows and puts out."""
        by_place = ran.outputs()
        outputs = list(by_place.values())
        uses = self.outside.used(
            [*ran.following, *outputs], [*state, *ran.given], since, step, lambda: self._run_unseen(state, step)
        )
        same = tuple(place_of(output, ran.following) for output in outputs)
        inputs = tuple(map(self.outside.input_number, ran.inputs))
        self._steps.note(inputs, uses, tuple(by_place), same, needs_grad(ran.following), ran.versions)
        numbers = {id(output): Number(len(self.results) + k) for k, output in enumerate(outputs)}
        self._note_passed_on(ran, state, step, outputs)
        self.results += [output.detach() for output in outputs]
        nothing = ran.spec is LEAF and ran.parts[0] is None
        self._ys.append(_NOTHING if nothing else ([numbers.get(id(part), part) for part in ran.parts], ran.spec))
        if step == len(self._inputs) - 1:
            self._draws.end(step + 1)
            for part in ran.following:
                if part.requires_grad and id(part) not in numbers:
                    numbers[id(part)] = Number(len(self.results))
                    self.results.append(part.detach())
            self._final = [numbers.get(id(part), part) for part in ran.following]

    def _note_passed_on(self, ran: StepRun, state: TensorState, step: int, outputs: list[Tensor]) -> None:
        """Which results are tensors from outside, put out as they were."""
        for result, output in enumerate(outputs, start=len(self.results)):
            given = place_of(output, ran.given)
            number = self.outside.find(ran.inputs[given] if given >= 0 else output)
            if number is not None:
                self._just_passed_on[result] = number
            elif step == 0 and (place := place_of(output, state)) >= 0:
                self._start_passed_on.append((result, place))

    def _settle(self) -> None:
        """Forget leaves that the last step made for itself, as its graph is gone."""
        gone = self.outside.settle()
        if gone:
            self._steps.forget(gone)
        if self._just_passed_on:
            self._passed_on |= {result: number for result, number in self._just_passed_on.items() if number not in gone}
            self._just_passed_on = {}

    def trial(self, state: TensorState, inside: AbstractContextManager[Any] = _NO_CONTEXT) -> TensorState:
        """Run step 0, ``inside`` a context. No trace is left but in what the layout does not know to be written to."""
        with _disable_current_modes(), inside:
            following = self._run_unseen(state, 0)
        self._layout.wait()
        return following

    def _run_unseen(self, state: TensorState, step: int) -> TensorState:
        checksums, self._checksums = self._checksums, None
        put_before = len(self.hooks.handles)  # by the step that is looked at, whose first run was before
        try:
            with self._layout.surroundings.preserved():
                return self._run(state, step).following
        finally:
            self._checksums = checksums
            self.hooks.undo(since=put_before)

    def take_results(self, start: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, given the user's state 0; they are not held here any more."""
        self._start = [self.outside.find(part) for part in start]
        for result, place in self._start_passed_on:
            number = self._start[place]
            if number is not None:
                self._passed_on[result] = number
        results, self.results = self.results, []
        self.hazards.watch(results)
        return tuple(results)

    def assemble(self, results: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """The last state and the outputs of all steps, with ``results`` in their places; not held here any more."""

        def put(parts: Iterable[Any]) -> list[Any]:
            return [results[part.value] if isinstance(part, Number) else part for part in parts]

        ys = [unflatten(put(parts), spec) for parts, spec in self._ys]
        self._ys = []
        return self._layout.unflatten(put(self._final)), ys

    # --- back ----------------------------------------------------------------------------------------------------

    def begin_reverse(self, grads: Sequence[Tensor | None], around: AbstractContextManager[object]) -> None:
        """Take the gradients of the results. ``around`` is entered for each step's graph, to run it back."""
        self._around_formulas = around
        self._sums = Sums(len(self.outside.tensors))
        self._grads = list(grads)
        self._adjoint = []
        for part in self._final:
            self._adjoint.append(self._grads[part.value] if isinstance(part, Number) else None)
            if isinstance(part, Number):
                self._grads[part.value] = None  # so that it counts once, whatever else the same tensor is
        for result, number in self._passed_on.items():  # in a plain loop, it comes before all that steps have to add
            self._sums.add(number, self._grads[result])
            self._grads[result] = None
        self._position = self._steps.outputs()
        del self._grads[self._position :]

    def reverse(self, state: TensorState, step: int) -> None:
        """See `Chain.reverse`."""
        record = self._steps[step]
        self._position -= len(record.same)
        grads = self._grads[self._position :]
        del self._grads[self._position :]
        if self.converts is not None:
            state = as_in_loop(state, self.converts if step == 0 else ())
        whole = record.twice if step > 0 else record.in_several_parts(self._start)
        if whole:
            record = record.with_whole(whole)
        if whole and step == 0:
            state = [
                part if number not in whole else self.outside.tensors[number]
                for part, number in zip(state, self._start, strict=True)
            ]
        seeds = self._seeds(len(state), step, whole)
        own = [(k, grad) for k, grad in enumerate(grads) if grad is not None and record.same[k] < 0]
        if own or any(grad is not None for grad in self._adjoint):
            try:
                self._run_back(state, step, record, own, seeds, whole)
            finally:
                self.hooks.undo()
        self._adjoint = seeds

    def _seeds(self, parts: int, step: int, whole: frozenset[int]) -> list[Tensor | None]:
        """Gradients that a state has as the output of the step before it."""
        seeds: list[Tensor | None] = [None] * parts
        if step == 0:
            # What it has got as something else comes first: see NOTE [The same order of additions] in `graphs.py`.
            held = self._sums.held
            for place, number in enumerate(self._start):
                if number is not None and number not in whole:
                    seeds[place], held[number] = held[number], None
        else:
            same = self._steps[step - 1].same
            for place, grad in zip(same, self._grads[self._position - len(same) :], strict=True):
                if place >= 0:
                    seeds[place] = grad
        return seeds

    def _run_back(
        self,
        state: TensorState,
        step: int,
        record: CellStep,
        own: list[tuple[int, Tensor]],
        seeds: list[Tensor | None],
        whole: frozenset[int],
    ) -> None:
        """Run a step again, and its graph back; ``own`` are the gradients of its outputs."""
        since, generators = nodes_made(), self._draws.begin()
        ran = self._run(state, step, whole)
        self._draws.check(step, generators)
        if self.hooks.handles:
            drop_hooks(ran.given)
            self.outside.fence.silence(self.outside.tensors[number] for number in record.uses)
        roots = [(part, grad) for part, grad in zip(ran.following, self._adjoint, strict=True) if grad is not None]
        if own:
            found = [ran.parts[place] for place in record.outputs if place < len(ran.parts)]
            # What is whole may be several of them: they are fewer, each once.
            if not all(map(has_gradient, found)) or len(ran.outputs() if not whole else found) != len(record.same):
                raise other_graph(step)
            roots += [(found[k], grad) for k, grad in own]
        self._add(state, ran, record, roots, seeds, step, whole, since)

    def _add(
        self,
        state: TensorState,
        ran: StepRun,
        record: CellStep,
        roots: list[tuple[Tensor, Tensor]],
        seeds: list[Tensor | None],
        step: int,
        whole: frozenset[int],
        since: int,
    ) -> None:
        """Run a step's graph back: into ``seeds`` what its state gets, into the sums what is outside.

        ``since`` is `nodes_made` when it began.
        """
        if needs_grad(ran.following) != record.needs_grad or len(ran.given) != len(record.inputs):
            raise other_graph(step)
        tensors, held = self.outside.tensors, self._sums.held
        ours = {id(tensors[number]) for number in whole}
        places = []
        for place, part in enumerate(state):
            if part.requires_grad and id(part) not in ours:
                places.append(place)
                ours.add(id(part))  # it may be there several times
        targets = [*(state[place] for place in places), *ran.given, *(tensors[number] for number in record.uses)]
        if not targets:
            return
        # What is added afterwards is not fed in: see NOTE [The same order of additions] in `graphs.py`.
        added = [once and is_dense(held[k]) for k, once in zip(record.uses, record.uses_once, strict=True)]
        sums = [*(seeds[place] for place in places), *(held[number] for number in record.inputs)]
        sums += [None if add else held[k] for k, add in zip(record.uses, added, strict=True)]
        keep = any(tensors[number].grad_fn is not None for number in record.uses)
        with self._around_formulas, self.outside.fence:
            found = apart_from(state, local_gradients(roots, targets, sums, keep=keep))
        for place, grad in zip(places, found, strict=False):
            seeds[place] = grad
        rest = found[len(places) :]
        if missed := [k for k, grad in zip(record.uses, rest[len(ran.given) :], strict=True) if grad is None]:
            outputs = (*ran.following, *ran.outputs().values())
            self.outside.check_reached(missed, outputs, (*state, *ran.given), since, step)
        into = [self._sums.put] * len(record.inputs) + [self._sums.add if add else self._sums.put for add in added]
        for put, number, grad in zip(into, (*record.inputs, *record.uses), rest, strict=True):
            put(number, grad)

    def end_reverse(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of `outside` and of state 0; not held here any more."""
        sums, adjoint = self._sums.held, self._adjoint
        self._sums, self._adjoint, self._grads = Sums(), [], []
        return sums, adjoint

    # --- states --------------------------------------------------------------------------------------------------

    def pack(self, state: TensorState, block: Block, _step: int) -> None:
        """See `Chain.pack`."""
        self._layout.pack(state, block)

    def unpack(self, block: Block, _step: int, *, own: bool) -> TensorState:  # noqa: ARG002 - passed by name
        """See `Chain.unpack`."""
        return self._layout.unpack(block)

    def own(self, state: TensorState) -> TensorState:
        """See `Chain.own`."""
        return self._layout.copy(state)
