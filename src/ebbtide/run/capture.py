"""The dispatch mode that captures calls, over the stretches of a step in which recipes need them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.mode import DispatchMode, stand_behind_inference_mode
from ebbtide.observe.schema import operator_info
from ebbtide.observe.wrapped import wraps
from ebbtide.run.calls import Call, KnownOp, capture

_nodes_made: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
OFF, _UNKNOWN = -1, -(1 << 60)
"""No index of an op: while the mode is off, and while it does not know which op comes next."""
_COPY = torch.ops.aten.clone.default


class CaptureMode(DispatchMode):
    """Captures the calls that recipes need. It runs only over the stretches of a step that hold such calls.

    NOTE [Counting ops]
    Autograd saves a tensor either between two ops, or in the middle of the one that is just being called. A mode that
    is put on in the middle of an op does not see that op: then it counts again from the next event that has another
    tick. One that is taken off there leaves the op to PyTorch, which runs it without any mode (since its version 2.6)
    if one of its arguments is known to Python. What has just been saved of them is; but an op that writes in place may
    save a copy, which it makes itself, of what it is to write over: there the mode stays.

    The mode also goes as a pass begins, see `passes.py`, unless calls are captured in it. Within one it is neither put
    on nor taken off: autograd puts the stack of modes back after each node. Nor is it put on or taken off within a call
    of what `torch.compile` returned, see `compiled_calls.py`, or in a transform, see `transforms.py`: in steps with
    such calls, or with saves in transforms, it stays on from beginning to end.

    On the stack it lies below all modes that were put on since the step began: the end of a ``with`` block of the
    user's takes off whichever mode is on top.

    Args:
        known: what the step's record says, by tick, of the ops that recipes replay.
        on_mismatch: called with a reason when an op is not the recorded one.

    Attributes:
        tick: index of the next op; set when a stretch begins, `OFF` while the mode is off.
        copied: whether the op seen last was a copy.
        hidden: while true, ops are not counted; the runtime sets it around its own.
        calls: captured calls by tick.
        place: how many modes on the stack are below it, whenever it is on: those that were on as the step began.
    """

    def __init__(self, known: dict[int, KnownOp], on_mismatch: Callable[[str], None], place: int | None = None) -> None:
        super().__init__()
        stand_behind_inference_mode()
        self.tick = OFF
        self.hidden = False
        self.entered = self.copied = False
        self.calls: dict[int, Call] = {}
        self.place = place
        self._begun_at = -1
        self._known = known
        self._on_mismatch = on_mismatch

    def begin(self, tick: int, between_ops: bool) -> None:
        """Start a stretch at an event of tick ``tick``, or go on with the one under way. See NOTE [Counting ops]."""
        if not self.entered:
            self.entered, self.copied = True, False
            self._begun_at = -1 if between_ops else tick
            self.enter(self.place)
        self.tick = self.counted_from(tick)

    def counted_from(self, tick: int) -> int:
        """Index of the next op at an event of tick ``tick``, as far as it is known while the mode is on."""
        return tick if tick > self._begun_at else _UNKNOWN

    def take_over(self, other: CaptureMode, known: dict[int, KnownOp]) -> None:
        """Take the calls of another mode's, which looked for the ops in ``known``, that are the same here."""
        self.calls |= {tick: call for tick, call in other.calls.items() if self._known.get(tick) == known[tick]}

    def lose_count(self) -> None:
        """Capture nothing more until an event says which op comes next."""
        if self.entered:
            self.tick = _UNKNOWN

    def forget(self) -> None:
        """Capture nothing more; the mode itself stays until `end`."""
        self._known = {}

    def end(self) -> None:
        """End the stretch, if one is under way. See NOTE [Counting ops]."""
        if self.entered:
            self.leave()
            self.entered = False
            self.tick = OFF

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.hidden:
            return func(*args, **(kwargs or {}))
        if types and wraps(types):
            return self.see_within(self._count, func, args, kwargs or {})
        self.copied = func is _COPY
        known = self._known.get(self.tick)
        self.tick += 1
        if known is None:
            return func(*args, **(kwargs or {}))
        return self._run_known(func, args, kwargs or {}, known)

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Count what an op on tensors that wrap others becomes."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _run_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownOp) -> Any:
        tick = self.tick - 1
        if operator_info(func).name != known.name:
            self._on_mismatch(f"op {tick} is {func}, expected {known.name}")
            return func(*args, **kwargs)
        try:
            call, given = capture(func, args, kwargs, known)
        except RecipeError as fault:
            self._on_mismatch(f"op {tick}: {fault}")
            return func(*args, **kwargs)
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
        if known is not None:
            self._on_mismatch(f"op {self.tick - 1} is a compiled graph, expected {known.name}")
        self.hidden = True
        try:
            return run()
        finally:
            self.hidden = False


def is_between_ops(saved: torch.Tensor) -> bool:
    """Whether no op is under way as a tensor is being saved: it is the result of the op whose node was made last, and
    no copy, which that op would have made for itself. See NOTE [Counting ops]."""
    node = saved.grad_fn
    return node is not None and node._sequence_nr() == _nodes_made() - 1 and node.name() != "CloneBackward0"
