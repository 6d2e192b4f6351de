"""The dispatch mode that captures calls, over the stretches of a step in which recipes need them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.asking import AskingNodes
from ebbtide.observe.mode import DispatchMode, is_within_op, run_op, stand_behind_inference_mode
from ebbtide.observe.schema import operator_info
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import AsOrdinary, runs_as_called, wraps
from ebbtide.run.calls import Call, KnownOp, capture

_pass_number: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass under way in this thread; -1 if none is."""
_class_code_runs: Callable[[], bool] = torch._C._is_torch_function_enabled
OFF, _UNKNOWN, _EVER = -1, -(1 << 60), 1 << 60
"""No index of an op: while the mode is off, while it does not know which op comes next, and after all of them."""
_COPY = torch.ops.aten.clone.default
COPY_NAME = str(_COPY)
"""The op that copies a tensor. See NOTE [Counting ops]."""


class CaptureMode(DispatchMode):
    """Captures the calls that recipes need. It runs only over the stretches of a step that hold such calls.

    NOTE [Counting ops]
    Autograd saves a tensor either between two ops, or in the middle of the one that is just being called.

    1. A mode that is put on in the middle of an op does not see that op, but the ops that it calls itself, which are
       not counted: they come with autograd left out, or, within an op that is made of several and began under the mode,
       have neither name. Whether a save was between ops or in the middle of one is told by the name of the op that is
       seen next; if both would have the same name, by the next event that has another tick.
    2. A mode that is taken off in the middle of an op leaves that op to PyTorch, which runs it without any mode (since
       its version 2.6) if Python knows one of its arguments. It knows the tensor that has just been saved, but for two
       cases, in which the mode stays on: an op that writes in place may save a copy of what it is to write over, which
       it makes itself; and what is lazily conjugated, negated or zero is copied on the way, and the op gets the copy.
    3. A mode that is put on before such a copy sees the copy, but not the op.

    The mode also goes as a pass begins, see `passes.py`, unless calls are captured in it. Within one it is neither put
    on nor taken off: autograd puts the stack of modes back after each node. Nor is it put on or taken off within a call
    of what `torch.compile` returned, see `compiled_calls.py`, or in a transform, see `transforms.py`: in steps with
    such calls, or with saves in transforms, it stays on from beginning to end. So it does where it has to be on in
    a pass with nodes that are hidden from modes, as it has to see which these are: see NOTE [Nodes that ask] in
    `ebbtide.observe.asking`.

    Counts start anew at each save. So ops that come besides the recorded ones, before a save that the wanted call comes
    after, do no harm: as where processes exchange buffers before some of their steps, or something is looked at.

    On the stack it lies below all modes that were put on since the step began: the end of a ``with`` block of the
    user's takes off whichever mode is on top.

    Args:
        known: what the step's record says, by tick, of the ops that recipes replay.
        names: the names of all ops, by tick.
        on_mismatch: called with a reason when an op is not the recorded one.
        below: see the attribute.
        stays_on: whether it stays on from beginning to end.

    Attributes:
        tick: index of the next op; set when a stretch begins, `OFF` while the mode is off.
        until: index of the first op that does not come before the next save.
        copied: whether the op seen last was a copy.
        hidden: while true, ops are not counted; the runtime sets it around its own.
        calls: captured calls by tick.
        below: how many modes on the stack are below it, whenever it is on: those that were on as the step began.
    """

    def __init__(
        self,
        known: dict[int, KnownOp],
        names: Sequence[str],
        on_mismatch: Callable[[str], None],
        below: int | None = None,
        *,
        stays_on: bool = False,
    ) -> None:
        super().__init__()
        stand_behind_inference_mode()
        self.tick = OFF
        self.until = _EVER
        self.hidden = False
        self.entered = self.copied = False
        self.calls: dict[int, Call] = {}
        self.below = below
        self._begun_at = -1
        self._opening: Sequence[str] = ()
        self._is_quick = False
        self._known = known
        self._names = names
        self._on_mismatch = on_mismatch
        self._asking = AskingNodes(self) if stays_on else None

    def begin(self, tick: int, between_ops: bool) -> None:
        """Start a stretch at an event of tick ``tick``, or go on with the one under way. See NOTE [Counting ops]."""
        if not self.entered:
            self.entered, self.copied = True, False
            self._begun_at = -1 if between_ops else tick
            self._opening = () if between_ops else self._names[tick : tick + 2]
            self._is_quick = True  # first, as an interrupt may come in between
            if not self.put_on(self.below):
                self._is_quick = False
                self.enter(self.below)
        self.tick = self.counted_from(tick)

    def counted_from(self, tick: int) -> int:
        """Index of the next op at an event of tick ``tick``, as far as it is known while the mode is on."""
        return tick if tick > self._begun_at else _UNKNOWN

    def take_over(self, other: CaptureMode, known: dict[int, KnownOp]) -> None:
        """Take the calls of another mode's, which looked for the ops in ``known``, that are the same here."""
        self.calls |= {tick: call for tick, call in other.calls.items() if self._known.get(tick) == known[tick]}

    def turn_to(self, known: dict[int, KnownOp], names: Sequence[str], former: dict[int, KnownOp]) -> None:
        """Look for other ops from now on than those in ``former``, and keep the calls that are the same."""
        self.calls = {tick: call for tick, call in self.calls.items() if known.get(tick) == former[tick]}
        self._known, self._names = known, names

    def lose_count(self) -> None:
        """Capture nothing more until an event says which op comes next."""
        if self.entered:
            self.tick, self._opening = _UNKNOWN, ()

    def forget(self) -> None:
        """Capture nothing more; the mode itself stays until `end`."""
        self._known = {}

    def may_end(self, saved: torch.Tensor) -> bool:
        """Whether the stretch may end as ``saved`` is being saved. See NOTE [Counting ops]."""
        return not (self.copied or saved.is_conj() or saved.is_neg() or saved._is_zerotensor())

    def end(self) -> None:
        """End the stretch, if one is under way. See NOTE [Counting ops]."""
        if self.entered:
            if self._asking is not None:
                self._asking.forget()  # its graph, by a handle of ours, would keep this mode
            if self._is_quick:
                self.take_off()
            else:
                self.leave()
            self.entered = False
            self.tick = OFF

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _pass_number() >= 0 and not types and _class_code_runs() and not runs_as_called(func, args, kwargs):
            with AsOrdinary():  # see NOTE [Subclasses] in `ebbtide.observe.wrapped`
                return self.__torch_dispatch__(func, types, args, kwargs)
        if self.hidden:
            return func(*args, **(kwargs or {}))
        if types and wraps(types):
            return self.see_within(self._count, func, args, kwargs or {})
        self.copied = func is _COPY
        if self.tick < 0 and self._opening and not is_within_op():
            self.tick = self._told_by(operator_info(func).name)
        known = self._known.get(self.tick)
        self.tick += 1
        if self.tick > self.until:
            known = None
        if self._asking is not None:
            return self._run_watched(self._asking, func, args, kwargs or {}, known)
        return self._run_known(func, args, kwargs or {}, known) if known else run_op(func, args, kwargs or {})

    def _run_watched(
        self, asking: AskingNodes, func: Any, args: Any, kwargs: dict[str, Any], known: KnownOp | None
    ) -> Any:
        """Run an op whose node may ask whether a mode is on."""
        asking.follow()
        result = self._run_known(func, args, kwargs, known) if known else run_op(func, args, kwargs)
        asking.made(func, result)
        return result

    def node_begins(self) -> None:
        """A node runs; what it calls is not shown, and nothing of it is captured."""

    def node_ended(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Count it as the one op that it is in the step's record."""
        del name, given, made
        self.tick += 1

    def _told_by(self, name: str) -> int:
        """The index of the op ``name``, if it is the first since the mode was put on. See NOTE [Counting ops]."""
        opening, self._opening = self._opening, ()
        if name == COPY_NAME:
            self._begun_at += 1  # the op that made it may be under way still
        elif is_clear(opening):
            if name in opening:
                return self._begun_at + opening.index(name)
            self._opening = opening  # what the op under way calls within such a one as is made of several
        return self.tick

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Count what an op on tensors that wrap others becomes."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _run_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownOp) -> Any:
        tick = self.tick - 1
        if operator_info(func).name != known.name:
            self._on_mismatch(f"op {tick} is {func}, expected {known.name}")
            return run_op(func, args, kwargs)
        try:
            call, given = capture(func, args, kwargs, known)
        except RecipeError as fault:
            self._on_mismatch(f"op {tick}: {fault}")
            return run_op(func, args, kwargs)
        result = func(*args, **kwargs)
        call.note(result, given)
        self.calls[tick] = call
        return result

    def calls_of(self, ops: Sequence[int]) -> list[Call] | None:
        """The calls of these ops, or None if any was not captured."""
        calls = [call for op in ops if (call := self.calls.get(op)) is not None]
        return calls if len(calls) == len(ops) else None

    def run_graph(self, run: Callable[[], Any], inputs: Sequence[Any], written: Collection[int]) -> Any:
        """Count a compiled graph as the op that it is in the step's record."""
        del inputs, written
        if self.hidden:
            return run()
        known = self._known.get(self.tick)
        self.tick += 1
        if known is not None and self.tick <= self.until:
            self._on_mismatch(f"op {self.tick - 1} is a compiled graph, expected {known.name}")
        self.hidden = True
        try:
            return run()
        finally:
            self.hidden = False


def is_clear(opening: Sequence[str]) -> bool:
    """Whether the name of an op says which of two it is that may come first, given both. See NOTE [Counting ops]."""
    return len(set(opening)) == 2 and COPY_NAME not in opening
