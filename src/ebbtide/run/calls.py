"""Calls that are captured in a step, so that they can be made again.

The arguments are captured afresh in every step, because a number among them may change from step to step. Tensors
among them are remembered as values and views of them, never kept alive for their own sake, unless they are external.

All of this runs between two ops, when the processor has its caches full of their data, and what it makes lives until
the backward pass. So few objects are made, and most calls, which have one result, take the short way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.ledger import is_traceable, tensors_in
from ebbtide.observe.mode import SetExcluded
from ebbtide.observe.schema import operator_info, running_statistics
from ebbtide.run.holdings import Window
from ebbtide.run.versions import Version, version_of

_NO_STATISTICS = {torch.ops.aten._native_batch_norm_legit.default: torch.ops.aten._native_batch_norm_legit.no_stats}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_STATISTICS = 4096
"""Elements of running statistics, at most as a rule. Batch norm in training writes to them without counting a version,
so nobody is told; external tensors of up to so many elements are copied when they are captured."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownOp:
    """What the step's record says of an op that a recipe replays.

    Attributes:
        name: the op's name.
        inputs: values that it reads.
        outputs: values it makes, in the order of the step's record: those written in place, then new storages.
        mutated: values that it writes in place, old and new.
        external: those of ``inputs`` that the step did not make.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutated: tuple[tuple[int, int], ...]
    external: frozenset[int]

    def fresh(self) -> Sequence[int]:
        """The outputs that lie in new storages."""
        if not self.mutated:
            return self.outputs
        written = {new for _, new in self.mutated}
        return [value for value in self.outputs if value not in written]


class Argument(Window):
    """A tensor among the captured arguments: a view of a value, or an external tensor.

    A view may be lazily conjugated or negated: marks of the tensor, of which its storage shows nothing.

    Attributes:
        value: which one; -1 if the step's record has none there.
        shown: which version of which storage it was; None for external ones.
        external: the tensor, if it is external, and its version.
        copy: a copy of that tensor, if it may be written to without a version, as a norm's statistics are.
    """

    __slots__ = ("conjugated", "copy", "external", "negated", "shown", "value", "version")

    def __init__(self, value: int, tensor: torch.Tensor, is_external: bool) -> None:
        super().__init__(tensor)
        self.value = value
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()
        self.external: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self.version = 0
        self.shown: Version | None = None
        if is_external:
            # What an op is being made of here may get a graph, and another version counter, once it is made.
            is_parameter = type(tensor) is torch.nn.Parameter
            self.external = tensor if is_parameter else _without_graph(tensor)
            self.version = self.external._version
            if not is_parameter and _may_be_statistics(tensor):
                self.copy_it()
        else:
            self.shown = version_of(tensor)

    def copy_it(self) -> None:
        """Keep a copy, if it is external: it may be written to without a version."""
        if self.external is not None and self.copy is None:
            with torch._C._DisableTorchDispatch():  # nobody is to count it
                self.copy = self.external.clone()

    @property
    def is_rewritten(self) -> bool:
        """Whether it is external and was written in place since."""
        return self.external is not None and self.external._version != self.version

    def as_captured(self, external: torch.Tensor) -> torch.Tensor:
        """``external``, or the copy if that had other elements."""
        copy = self.copy
        if copy is None:
            return external
        with torch._C._DisableTorchDispatch():
            # Elsewhere than on the CPU, to compare them is to wait for the device.
            return external if copy.device.type == "cpu" and _has_same_bits(copy, external) else copy

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The argument, as a part of the storage that ``tensor`` shows."""
        marks = tensor.is_conj(), tensor.is_neg()
        if marks == (self.conjugated, self.negated) and self.is_shown_by(tensor):
            return tensor
        return self.over(tensor.untyped_storage())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The argument, shown by ``storage``."""
        tensor = super().over(storage)
        tensor = torch.conj(tensor) if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of floats are the same bit for bit: as numbers, NaN is not NaN, and -0 is 0."""
    bits = _BITS[one.itemsize]
    return torch.equal(one.resolve_neg().view(bits), other.resolve_neg().view(bits))


def _may_be_statistics(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a number for each channel."""
    count = tensor.numel()
    return count <= MOST_STATISTICS and max(tensor.shape, default=1) == count and tensor.is_floating_point()


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached, which counts its versions with it: within a dispatch mode that is left out otherwise."""
    with SetExcluded(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class Call:
    """One captured ATen call: what is needed to run it again.

    Attributes:
        func: the op.
        args, kwargs: the call's arguments, with an `Argument` for each tensor.
        places: positions among ``args`` of tensors and of lists of them.
        known: what the step's record says of it.
        grad: whether gradients were enabled: some kernels return more when they are.
        made: the values that it made, as they were there.
    """

    __slots__ = ("args", "func", "grad", "known", "kwargs", "made", "places")

    def __init__(
        self, func: Any, args: Sequence[Any], places: Sequence[int], kwargs: dict[str, Any], known: KnownOp
    ) -> None:
        self.func = func
        self.args = args
        self.places = places
        self.kwargs = kwargs
        self.known = known
        self.grad = torch.is_grad_enabled()
        self.made: dict[int, Version] = {}

    def note(self, result: Any, given: Collection[int]) -> None:
        """Note what the call has made, by its ``result`` and the storages that it was ``given``."""
        known = self.known
        if isinstance(result, torch.Tensor) and len(known.outputs) == 1 and not known.mutated:
            if is_traceable(result) and result.untyped_storage()._cdata not in given:
                self.made[known.outputs[0]] = version_of(result)
            return
        if known.mutated:
            shown = {argument.value: argument.shown for argument in self.arguments()}
            read = {new: shown.get(old) for old, new in known.mutated}
            self.made.update((new, version.written()) for new, version in read.items() if version is not None)
        self.made.update((value, version_of(tensor)) for value, tensor in self.fresh(result, given))

    def fresh(self, result: Any, given: Collection[int]) -> Iterable[tuple[int, torch.Tensor]]:
        """The values that it made in other storages than it was ``given``, by its ``result``."""
        found: dict[int, torch.Tensor] = {}
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else (result,)):
            if is_traceable(tensor) and (identity := tensor.untyped_storage()._cdata) not in given:
                found.setdefault(identity, tensor)
        return zip(self.known.fresh(), found.values(), strict=False)

    def arguments(self) -> Iterator[Argument]:
        """The tensors among its arguments."""
        args = self.args
        for place in self.places:
            item = args[place]
            if type(item) is Argument:
                yield item
            elif isinstance(item, (list, tuple)):
                yield from _arguments_in(item)
        if self.kwargs:
            yield from _arguments_in(self.kwargs.values())


def _arguments_in(items: Any) -> Iterator[Argument]:
    for item in items:
        if isinstance(item, Argument):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _arguments_in(item)


def capture(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownOp) -> tuple[Call, Collection[int]]:
    """Remember a call, its tensors as values in the order in which the step's record names them.

    Returns:
        The call, and the storages that it is given.

    Raises:
        RecipeError: if a tensor among its arguments is of a kind that no recipe can read.
    """
    info = operator_info(func)
    if info.replay == "batch_norm" and args[5] is True:  # the model may be switched between steps
        args = (*args[:3], *args[5:]) if func in _NO_STATISTICS else (*args[:3], None, None, *args[5:])
        func = _NO_STATISTICS.get(func, func)
        info = operator_info(func)
    numbers: dict[int, int] = {}
    captured, places = list(args), []
    for place in info.tensors:
        if place < len(args) and args[place] is not None:
            captured[place] = _captured(args[place], known, numbers)
            places.append(place)
    for place in running_statistics(func):  # a norm in training is given none here
        if isinstance(statistics := captured[place], Argument):
            statistics.copy_it()
    if kwargs:
        kwargs = {name: _captured(item, known, numbers) for name, item in kwargs.items()}
    return Call(func, captured, places, kwargs, known), numbers


def _captured(item: Any, known: KnownOp, numbers: dict[int, int]) -> Any:
    """An argument as it is remembered; ``numbers`` are the values of the storages that have been met."""
    if isinstance(item, torch.Tensor):
        if not is_traceable(item):
            raise RecipeError(f"{known.name} was recorded with plain tensors and is now called with another kind")
        identity = item.untyped_storage()._cdata
        value = numbers.get(identity)
        if value is None:
            met = len(numbers)
            value = numbers[identity] = known.inputs[met] if met < len(known.inputs) else -1
        return Argument(value, item, value < 0 or value in known.external)
    if type(item) in (list, tuple):
        return type(item)(_captured(part, known, numbers) for part in item)
    return item
