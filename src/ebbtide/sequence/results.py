"""What a scan has put out, what the user may do with it until the backward pass, and what the cell may with hooks."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from ebbtide.errors import SequenceError
from ebbtide.observe.ledger import has_storage
from ebbtide.observe.wrapped import AsOrdinary
from ebbtide.sequence.steps import StepRun
from ebbtide.sequence.surroundings import counter_of, unseen

_GUARD = -1
"""The number of a hook that PyTorch gives none."""


class Hazards:
    """Alterations that make gradients others than those of a plain loop: after one no backward pass may run.

    Hooks on the state that a step is given: they would see what this step does with it, without what comes from the
    outputs of the step before. Hooks on a state that was returned are not on what the next step is given, nor are those
    on an input: if a step takes a gradient with respect to that, it ends at once.

    Alterations of results that lie in the memory of others, as a view of the last state does: in a plain loop autograd
    knows the one for a view of the other, and what is done to either in place counts for both. Results of a scan are
    told apart. Their memory is not held for this.
    """

    def __init__(self) -> None:
        self._hooked_step: int | None = None
        self._start: Sequence[Tensor] = ()
        self._hooked: list[int] = []  # places of those of the state to come that have hooks
        self._first: int | None = None  # the step that is running first
        self._counters: list[Tensor] = []
        self._versions: list[int] = []

    def begin(self, start: Sequence[Tensor]) -> None:
        """State 0 is the user's ``start``."""
        self._start, self._hooked = start, _hooked(start)

    def guard(self, state: Sequence[Tensor], step: int) -> None:
        """Let no gradient come to what should have hooks in ``state``, with which a step is to run first."""
        self._first = step
        for place in self._hooked:
            if state[place].requires_grad:
                state[place]._backward_hooks = _guard(step)

    def guard_inputs(self, inputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """The same of what a step is ``given`` for ``inputs``, if it runs first."""
        if self._first is not None:
            for part, stand_in in zip(inputs, given, strict=True):
                if part._backward_hooks:
                    stand_in._backward_hooks = _guard(self._first)

    def note(self, ran: StepRun, state: Sequence[Tensor], step: int) -> None:
        """Look at the first run of a step.

        Raises:
            SequenceError: if a backward pass of its own has come to what stands for a leaf.
        """
        self._first = None
        for part in (*state, *ran.given):
            if part._backward_hooks:
                part._backward_hooks.pop(_GUARD, None)
        if self._hooked_step is None and any(part._backward_hooks for part in state):
            self._hooked_step = step
        leaves = zip((*ran.given, *state), (*ran.inputs, *self._start), strict=False)
        if any(given.grad is not None and part.is_leaf and part.requires_grad for given, part in leaves):
            raise SequenceError(
                f"a backward pass of the cell's own in step {step} adds to .grad of its input, or of state 0; take "
                "torch.autograd.grad with respect to that"
            )
        self._start, self._hooked = (), _hooked(ran.following)

    def watch(self, results: Iterable[Tensor]) -> None:
        """Watch for alterations of ``results``, which nobody else has yet."""
        together: dict[int, list[Tensor]] = {}
        with unseen(), AsOrdinary():
            for result in filter(has_storage, results):
                together.setdefault(result.untyped_storage()._cdata, []).append(result)
            self._counters = [counter_of(group[0]) for group in together.values() if _overlap(group)]
        self._versions = [counter._version for counter in self._counters]

    def check(self) -> None:
        """Raise `SequenceError` if there was such an alteration."""
        if self._hooked_step is not None:
            raise SequenceError(
                f"step {self._hooked_step} has put a hook on the state that it was given, which would see a part of "
                "the gradient; put it on the state that the cell returns (FlopCounterMode and its like put some on "
                "what modules are called with: let the cell call them with a result of an op)"
            )
        if [counter._version for counter in self._counters] != self._versions:
            raise SequenceError(
                "a result of the scan was altered in place before the backward pass, and another one lies in the same "
                "memory, as where an output is a view of the state; alter a copy, or let the cell put out a clone"
            )


def _hooked(state: Sequence[Tensor]) -> list[int]:
    """Places of the tensors that have hooks."""
    return [place for place, part in enumerate(state) if part._backward_hooks]


def _guard(step: int) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """Hooks that let no gradient come, while ``step`` runs."""
    return collections.OrderedDict({_GUARD: functools.partial(_refuse_hooked, step)})


def _refuse_hooked(step: int, _: Tensor) -> NoReturn:
    raise SequenceError(
        f"step {step} takes a gradient with respect to its state or its input, on which there are hooks, which would "
        "not be called for it; let the cell do itself what they do, or put them on a result of an op"
    )


def refuse_batched(grads: Iterable[Tensor | None]) -> None:
    """Raise `SequenceError` where gradients are several at once: steps run again for one."""
    if any(grad is not None and (is_functorch_wrapped_tensor(grad) or is_legacy_batchedtensor(grad)) for grad in grads):
        raise SequenceError(
            "gradients of a scan cannot be batched: ask for them one after another, without is_grads_batched=True or "
            "vectorize=True"
        )


def refuse_transforms(parts: Iterable[Any]) -> None:
    """Raise `SequenceError` within a transform of `torch.func`, and where a tensor among ``parts`` has a tangent."""
    if torch._C._are_functorch_transforms_active() or _has_tangent(parts):
        raise SequenceError(
            "neither forward-mode derivatives nor transforms of torch.func go through a scan: take a plain loop or, "
            "for tangents alone, torch.no_grad()"
        )


def _has_tangent(parts: Iterable[Any]) -> bool:
    if forward_ad._current_level < 0:  # of any thread: there is one for all of them
        return False
    with unseen():
        tensors = [part for part in parts if isinstance(part, Tensor) and part.layout is torch.strided]
        return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _overlap(group: list[Tensor]) -> bool:
    """Whether the memory of one tensor begins before that of another has ended."""
    end = -1
    for start, stop in sorted(map(_span, group)) if len(group) > 1 else ():
        if start < end:
            return True
        end = max(end, stop)
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage the bytes of ``tensor`` begin and end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (int(last) + 1) * tensor.element_size() * (tensor.numel() > 0)
