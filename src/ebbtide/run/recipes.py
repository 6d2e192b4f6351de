"""Computing a value again: capture the calls that make it in this very step, replay them when it is needed.

The arguments are captured afresh in every step, because a number among them may change from step to step. Tensors
among them are remembered as values and views of them, never kept alive for their own sake, unless they are external.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.ledger import is_traceable, tensors_in
from ebbtide.observe.mode import DispatchMode
from ebbtide.observe.schema import operator_info
from ebbtide.run.holdings import Holding, Version, View, changed_error, is_same, version_of

_nodes_made: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
_NO_STATISTICS = {torch.ops.aten._native_batch_norm_legit.default: torch.ops.aten._native_batch_norm_legit.no_stats}


@dataclasses.dataclass(slots=True)
class _Argument:
    """A tensor among the captured arguments: a view of value ``value``, which was ``shown``, or an external tensor and
    its version.

    A view may be lazily conjugated or negated: marks of the tensor, of which its storage shows nothing.
    """

    value: int
    view: View
    conjugated: bool
    negated: bool
    shown: Version | None = None
    external: torch.Tensor | None = None
    version: int = 0

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The argument, shown by ``storage``."""
        tensor = self.view.over(storage)
        tensor = torch.conj(tensor) if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


@dataclasses.dataclass(slots=True)
class Call:
    """One captured ATen call: what is needed to run it again.

    Attributes:
        outputs: values it makes, in the order of the step's record: those written in place, then new storages.
        written: values that it writes in place, old and new.
        grad: whether gradients were enabled: some kernels return more when they are.
        given: the storages of its arguments.
        made: the values of ``outputs`` as they were there.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    written: dict[int, int]
    grad: bool
    given: frozenset[int]
    made: dict[int, Version] = dataclasses.field(default_factory=dict)

    def note(self, result: Any) -> None:
        """Note what the call has made, by its ``result``."""
        if isinstance(result, torch.Tensor) and len(self.outputs) == 1 and not self.written:  # as most do
            if is_traceable(result) and result.untyped_storage()._cdata not in self.given:
                self.made[self.outputs[0]] = version_of(result)
            return
        if self.written:
            shown = {argument.value: argument.shown for argument in _arguments(self)}
            read = {new: shown.get(old) for old, new in self.written.items()}
            self.made.update((new, version.written()) for new, version in read.items() if version is not None)
        self.made.update((value, version_of(tensor)) for value, tensor in _fresh(self, self.given, result))


def capture(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownOp) -> Call:
    """Remember a call, its tensors as values in the order in which the step's record names them.

    Raises:
        RecipeError: if a tensor among its arguments is of a kind that no recipe can read.
    """
    if known.batch_norm:
        args = (*args[:3], *args[5:]) if func in _NO_STATISTICS else (*args[:3], None, None, *args[5:])
        func = _NO_STATISTICS.get(func, func)
    numbers: dict[int, int] = {}
    remaining: Iterator[int] = iter(known.inputs)

    def remember(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if not is_traceable(item):
                raise RecipeError(f"{func} was recorded with plain tensors and is now called with another kind")
            storage = item.untyped_storage()
            value = numbers.get(storage._cdata)
            if value is None:
                value = numbers[storage._cdata] = next(remaining, -1)
            view, marks = View(_NOWHERE, item, -1), (item.is_conj(), item.is_neg())
            if value in known.external or value < 0:
                kept = item.detach()
                return _Argument(value, view, *marks, None, kept, kept._version)
            return _Argument(value, view, *marks, Version(weakref.ref(storage), item._version))
        if isinstance(item, (list, tuple)):
            return type(item)(remember(part) for part in item) if type(item) in (list, tuple) else item
        return item

    args = tuple(remember(item) for item in args)
    kwargs = {name: remember(item) for name, item in kwargs.items()}
    return Call(func, args, kwargs, known.outputs, dict(known.mutated), torch.is_grad_enabled(), frozenset(numbers))


def _fresh(call: Call, given: Collection[int], result: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The values that a call made in other storages than it was ``given``, by its ``result``."""
    fresh = [value for value in call.outputs if value not in call.written.values()]
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(result if isinstance(result, (list, tuple)) else (result,)):
        if is_traceable(tensor) and (identity := tensor.untyped_storage()._cdata) not in given:
            found.setdefault(identity, tensor)
    yield from zip(fresh, found.values(), strict=False)


_NOWHERE = Holding()
_UNKNOWN = -(1 << 60)


@dataclasses.dataclass(frozen=True, slots=True)
class KnownOp:
    """What the step's record says of an op that a recipe replays."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutated: tuple[tuple[int, int], ...]
    external: frozenset[int]
    batch_norm: bool


class Recipe:
    """The calls that make one value, and the holdings of the values they start from."""

    __slots__ = ("calls", "last_use", "leaves", "order", "target")

    def __init__(self, target: int, calls: list[Call], leaves: dict[int, Holding], order: tuple[int, ...]) -> None:
        self.target = target
        self.calls = calls
        self.leaves = leaves
        self.order = order
        self.last_use: dict[int, int] = {}
        for index, call in enumerate(calls):
            for argument in _arguments(call):
                self.last_use[argument.value] = index

    def makes(self, holding: Holding, held: Callable[[int], Holding | None]) -> bool:
        """Whether the calls, as they were captured, made what ``holding`` holds from what the leaves hold.

        They were told by their place among the ops of the step, which a branch or one op more may have shifted. By
        value, ``held`` are what else has the same bytes: what has come back may have been read instead.
        """
        made = {value: leaf.versions[0] for value, leaf in self.leaves.items() if leaf.versions}
        for call in self.calls:
            for argument in _arguments(call):
                if argument.shown is not None:
                    version, other = made.get(argument.value), held(argument.value)
                    if version is None:
                        return False
                    same = other is not None and other.knows(version) and other.knows(argument.shown)
                    if not same and not is_same(version, argument.shown):
                        return False
            made.update(call.made)
        return self.target in made and holding.knows(made[self.target])

    def replay(self) -> torch.Tensor:
        """Run the calls again; returns a tensor that shows the storage of the value.

        Raises:
            RecipeError: if something external that they read has been changed since.
        """
        for value in self.order:
            self.leaves[value].arrive()
        made: dict[int, torch.Tensor] = {}
        # No tensor here requires grad, so nothing is saved whatever the mode.
        with torch._C._DisableAutocast():
            for index, call in enumerate(self.calls):
                self._run(call, made)
                for value in [v for v in made if v != self.target and self.last_use.get(v, -1) <= index]:
                    del made[value]
        return made[self.target]

    def _run(self, call: Call, made: dict[int, torch.Tensor]) -> None:
        for old, new in call.written.items():
            # A fresh copy where the older version is still wanted: it is somebody's saved tensor.
            made[new] = made.pop(old) if old in made else _copy(self.leaves[old].arrive())
            made[old] = made[new]
        args = tuple(_filled(item, made, self.leaves) for item in call.args)
        kwargs = {name: _filled(item, made, self.leaves) for name, item in call.kwargs.items()}
        given = {t.untyped_storage()._cdata for t in tensors_in((*args, *kwargs.values()))}
        with torch.set_grad_enabled(call.grad):
            result = call.func(*args, **kwargs)
        for old in call.written:
            del made[old]
        made.update(_fresh(call, given, result))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return source.clone()


def _arguments(call: Call) -> Iterator[_Argument]:
    def walk(items: Any) -> Iterator[_Argument]:
        for item in items:
            if isinstance(item, _Argument):
                yield item
            elif isinstance(item, (list, tuple)):
                yield from walk(item)

    yield from walk(call.args)
    yield from walk(call.kwargs.values())


def _filled(item: Any, made: dict[int, torch.Tensor], leaves: dict[int, Holding]) -> Any:
    if isinstance(item, _Argument):
        if item.external is not None:
            if item.external._version != item.version:
                raise RecipeError(
                    f"a tensor {list(item.external.shape)} that a value is computed again from was changed in place "
                    "between forward and backward; change it after the backward pass, or leave verify on: such "
                    "values are then found in the first planned step and kept"
                )
            return item.external
        if item.value in made:
            return item.over(made[item.value].untyped_storage())
        leaf = leaves[item.value]
        tensor = leaf.arrive()
        if not leaf.intact:
            raise changed_error(tensor, leaf.version)
        return item.over(tensor.untyped_storage())
    if type(item) in (list, tuple):
        return type(item)(_filled(part, made, leaves) for part in item)
    return item


class CaptureMode(DispatchMode):
    """Captures the calls that recipes need. It runs only over the stretches of the forward pass that hold such calls.

    NOTE [Counting ops]
    Autograd saves a tensor either between two ops, or in the middle of the one that is just being called. A mode that
    is put on in the middle of an op does not see that op; one that is taken off there leaves the op without anybody to
    run it. So the mode is taken off only between ops, and once it was put on in the middle of an op, it counts again
    from the next event that has another tick. As the last save before a backward pass may be in the middle of an op,
    the mode also goes as a pass begins, see `passes.py`. Within one it is neither put on nor taken off: autograd puts
    the stack of modes back after each node. Nor is it put on or taken off within a call of what `torch.compile`
    returned, see `compiled_calls.py`: in steps with such calls it stays on from beginning to end.

    On the stack it lies below all modes that were put on since the step began: the end of a ``with`` block of the
    user's takes off whichever mode is on top.

    Args:
        known: what the step's record says, by tick, of the ops that recipes replay.
        on_mismatch: called with a reason when an op is not the recorded one.

    Attributes:
        tick: index of the next op; set when a stretch begins.
        hidden: while true, ops are not counted; the runtime sets it around its own.
        calls: captured calls by tick.
        place: how many modes on the stack are below it, whenever it is on: those that were on as the step began.
    """

    def __init__(self, known: dict[int, KnownOp], on_mismatch: Callable[[str], None], place: int | None = None) -> None:
        super().__init__()
        self.tick = 0
        self.hidden = False
        self.entered = False
        self.calls: dict[int, Call] = {}
        self.place = place
        self._begun_at = -1
        self._known = known
        self._on_mismatch = on_mismatch

    def begin(self, tick: int, between_ops: bool) -> None:
        """Start a stretch at an event of tick ``tick``, or go on with the one under way. See NOTE [Counting ops]."""
        if not self.entered:
            self.entered = True
            self._begun_at = -1 if between_ops else tick
            self.enter(self.place)
        self.tick = tick if tick > self._begun_at else _UNKNOWN

    def take_over(self, other: CaptureMode, known: dict[int, KnownOp]) -> None:
        """Take the calls of another mode's, which looked for the ops in ``known``, that are the same here."""
        self.calls |= {tick: call for tick, call in other.calls.items() if self._known.get(tick) == known[tick]}

    def forget(self) -> None:
        """Capture nothing more; the mode itself stays until `end`."""
        self._known = {}

    def end(self) -> None:
        """End the stretch, if one is under way. Only between ops."""
        if self.entered:
            self.leave()
            self.entered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.hidden:
            return func(*args, **(kwargs or {}))
        known = self._known.get(self.tick)
        self.tick += 1
        if known is None:
            return func(*args, **(kwargs or {}))
        return self._run_known(func, args, kwargs or {}, known)

    def _run_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownOp) -> Any:
        tick = self.tick - 1
        if operator_info(func).name != known.name:
            self._on_mismatch(f"op {tick} is {func}, expected {known.name}")
            return func(*args, **kwargs)
        try:
            call = capture(func, args, kwargs, known)
        except RecipeError as fault:
            self._on_mismatch(f"op {tick}: {fault}")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        call.note(result)
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
    """Whether no op is under way as a tensor is being saved: it is the result of the op whose node was made last."""
    node = saved.grad_fn
    return node is not None and node._sequence_nr() == _nodes_made() - 1
