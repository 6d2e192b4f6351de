"""What a scan learns of its cell before it runs: what step 0 writes to, under which contexts, and its first run."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from ebbtide.errors import SequenceError
from ebbtide.sequence.call_context import CallContext, keeping_conversions, keeps_conversions
from ebbtide.sequence.cells import Cell, CellChain
from ebbtide.sequence.first_run import FirstRun
from ebbtide.sequence.grads import Replaced, SeenGrads, given, refuse_sum
from ebbtide.sequence.inputs import FirstInput, Inputs, are_fixed
from ebbtide.sequence.surroundings import Watch, Written
from ebbtide.sequence.tensors import TensorLayout, TensorState


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """What step 0 has shown.

    Attributes:
        layout: how states lie in a block, with what the cell writes to outside of its arguments.
        context: the state of PyTorch that steps are to run in.
        first_run: what the cell does in its first run.
    """

    layout: TensorLayout
    context: CallContext
    first_run: FirstRun


def survey(cell: Cell, state: Any, start: TensorState, inputs: Inputs, layout: TensorLayout) -> Survey:
    """Run step 0 to see what it does; that is undone.

    Args:
        cell: see `ebbtide.scan`.
        state: the user's state 0.
        start: its tensors, detached.
        inputs: one for each step.
        layout: how states lie in a block without what the cell writes to.

    Raises:
        SequenceError: if the cell alters its input in place, or makes a tensor that later steps write to.
    """
    drawing = Watch(start)
    try:
        with drawing if not are_fixed(inputs) else contextlib.nullcontext():
            first = inputs[0]
        written, context, first_run = _survey_cell(cell, start, inputs, first, layout)
    finally:
        drawing.rewind()
    layout = TensorLayout(state, written.drawing_from(drawing.generators(), drawing.drawn_on))
    return Survey(layout, context, first_run)


def _survey_cell(
    cell: Cell, start: TensorState, inputs: Inputs, first: Any, layout: TensorLayout
) -> tuple[Written, CallContext, FirstRun]:
    """What the cell writes to besides in step 0, with the ``first`` of the inputs, and the rest of a `Survey`."""
    first_run = FirstRun()
    own = (*start, *tree_leaves(first))
    cached, first_input = Watch(own), FirstInput(inputs, first)
    if parametrize._cache_enabled:
        keeping = keeping_conversions(keeps_conversions(layout.device_types))
        with keeping, layout.surroundings.preserved(), cached:
            # What it caches is to be made outside the steps, which share it.
            first_run.noted(cell, layout.surroundings, cached)(layout.unflatten(start), first)
            cached.grads.put_back()
        if cached.converts:
            torch.clear_autocast_cache()
    context, watch = CallContext(layout.device_types), Watch(own)
    noting = first_input.watched(first_run.noted(cell, layout.surroundings, watch))
    fixed = are_fixed(inputs)
    chain = CellChain(noting, (first,) if fixed else [first], layout)
    with context.noting_modules(cell, inputs):
        written = _watch_step(chain, start, context, watch, cached)
    made, replaced = watch.made(), watch.grads.replaced
    if made or written.generators or replaced:
        if written.generators and not fixed:  # it may make one, too
            first = inputs[0]
            chain = CellChain(noting, [first], layout)
        again = Watch((*start, *tree_leaves(first)))
        with given(replaced):
            ran_again = _watch_step(chain, start, context, again, cached)
            written = _with_grads(written.drawn_again(ran_again), replaced, ran_again, again.grads)
        if again.wrote_to(made):
            raise SequenceError(
                "the cell makes a tensor in its first step that it writes to in the next ones, such as a running mean; "
                "make it before the scan, for example by calling the cell once"
            )
    context.converts = watch.converts
    return written, context, first_run


def _with_grads(written: Written, replaced: Sequence[Replaced], again: Written, seen: SeenGrads) -> Written:
    """``written``, and the `.grad` that step 0 has ``replaced``.

    What it does where there is one already, a run ``again`` has shown, in which ``seen`` was what it did to `.grad`.

    Raises:
        SequenceError: if it then makes a new one of that.
    """
    others = {id(one.tensor) for one in seen.replaced}
    altered = {id(reference()) for reference, _ in again.grads}
    read = {id(reference()) for reference in again.only_read}
    grads, carried = list(written.grads), list(written.carried)
    for one in replaced:
        key, put = id(one.tensor), one.given
        if put is None or (key in others) == (key in altered) or id(put) in read:
            raise refuse_sum(one.tensor)
        if key in others:
            one.tensor.grad = one.before
        else:
            carried.append(put.untyped_storage())
        grads.append((weakref.ref(one.tensor), None if key in others else put))
    counters = (*written.counters, *again.counters) if replaced else written.counters
    return dataclasses.replace(written, carried=tuple(carried), grads=tuple(grads), counters=counters)


def _watch_step(chain: CellChain, start: TensorState, context: CallContext, watch: Watch, before: Watch) -> Written:
    """Run step 0 under ``watch``, and undo what it wrote to, also what it wrote there under ``before``.

    Returns what it wrote to.
    """
    try:
        with context.set():
            chain.trial(start, watch)
    finally:
        if watch.converts:
            torch.clear_autocast_cache()
        written = watch.put_back()
        watch.grads.put_back()
        before.put_back(written)
    return written
