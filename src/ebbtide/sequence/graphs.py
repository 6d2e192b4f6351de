"""The autograd graph of one step of a cell: what it reaches outside, and running it back without going there.

NOTE [Where a step's graph ends]
The cell gets detached tensors for its state and inputs, so its graph ends there, and where it meets tensors made
outside: parameters, and results of other ops that the cell closes over. Nodes made since the step began are its own;
each edge from one of them to any other node is such an end. A leaf is known from its node. Of a result of another op
the node is known but not the tensor, so the step is run once more under a dispatch mode that looks at all arguments.

NOTE [The same order of additions]
Autograd runs nodes newest first, and adds up what arrives for a tensor one by one, in that order. So for the same bits
the running sum over the later steps must arrive first, then each use in this step. The sum is therefore fed in through
an `alias` of the tensor, made after everything else in the graph. Of a tensor that a step uses once, one gradient
arrives: it is added to the sum afterwards, in place, which takes less time.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from ebbtide.errors import SequenceError
from ebbtide.observe.leaves import LEAF_NODE
from ebbtide.observe.mode import nodes_made
from ebbtide.observe.wrapped import AsOrdinary
from ebbtide.run.versions import nothing
from ebbtide.sequence.fence import Fence, fence_here

_hooks = torch._C._autograd
_alias = torch.ops.aten.alias.default
_NOBODY = nothing(torch.device("cpu"))

Edge = tuple[Node, int]


class Outside:
    """Tensors made outside the cell that its steps use and that require grad, numbered as they are found.

    Attributes:
        tensors: they, by number; empty ones that require none where a step's own leaf was.
        fence: to be up while a step's graph is run back.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.fence = Fence()
        self._numbers: dict[Hashable, int] = {}
        self._new_leaves: dict[int, weakref.ref[Tensor]] = {}  # by id
        self._free: list[int] = []  # numbers of leaves that are gone
        self._began = nodes_made()
        self._elsewhere: set[Node] = set()  # nodes of other threads, numbered as some of a later step might be
        self._others: Set[Node] = frozenset()  # those, and all that made `tensors`, while steps are reversed

    def input_number(self, tensor: Tensor) -> int:
        """The number of a tensor that a step has as an input."""
        return self._number(tensor, _key(tensor))

    def find(self, tensor: Tensor) -> int | None:
        """The number of a tensor that requires grad, if it has one."""
        return self._numbers.get(_key(tensor)) if tensor.requires_grad else None

    def _number(self, tensor: Tensor, key: Hashable) -> int:
        if key not in self._numbers:
            if not self._free:
                self._free.append(len(self.tensors))
                self.tensors.append(_NOBODY)
            self._numbers[key] = number = self._free.pop()
            self.tensors[number] = tensor
        return self._numbers[key]

    def _leaf_number(self, leaf: Tensor) -> int:
        """A new one is not held before `settle`."""
        key = id(leaf)
        if key not in self._numbers:
            self._new_leaves[key] = weakref.ref(leaf)
            self.tensors[self._number(leaf, key)] = _NOBODY
        return self._numbers[key]

    def settle(self) -> list[int]:
        """Hold the new leaves of the last step, whose graph is gone, or forget them; the numbers of the latter."""
        gone = []
        for key, held in self._new_leaves.items():
            leaf = held()
            if leaf is None:
                gone.append(self._numbers.pop(key))
            else:
                self.tensors[self._numbers[key]] = leaf
        self._new_leaves = {}
        self._free += gone
        return gone

    def used(
        self, outputs: Iterable[Tensor], own: Sequence[Tensor], since: int, step: int, again: Callable[[], object]
    ) -> dict[int, bool]:
        """The numbers of those that the graph of a step uses, and whether once. See NOTE [Where a step's graph ends].

        Args:
            outputs: of the step.
            own: detached tensors that the step was given.
            since: `nodes_made` when it began.
            step: its number, for messages.
            again: runs it again.

        Raises:
            SequenceError: if it uses what an earlier step made, other than through the state, or what is not found.
        """
        outputs = list(outputs)
        leaves, results, until = self._ends_of(outputs, own, since, self._elsewhere)
        counts = {self._leaf_number(leaf): count for leaf, count in leaves}
        unknown = {edge for edge in results if edge not in self._numbers}
        if unknown:
            if any(self._began <= node._sequence_nr() < until for node, _ in unknown):
                raise SequenceError(
                    f"step {step} uses a tensor that an earlier step made and that is not in its state, or that "
                    "another thread did; return it as a part of the state, or make it before, in the thread that calls "
                    "scan (a weight that `parametrize.cached()` keeps is made where it is first asked for)"
                )
            with _disable_current_modes(), _Finder(unknown) as finder:
                finder.look(outputs)  # one may have been passed on as it was
                again()
            missing = unknown - finder.found.keys()
            if missing:
                raise SequenceError(
                    f"step {step} uses a result of {next(iter(missing))[0].name()} from outside, or from a thread of "
                    "its own, that cannot be found; pass it as a part of the state or of the inputs"
                )
            for edge, tensor in finder.found.items():
                self._number(tensor, edge)
            self._elsewhere.update(node for node, _ in unknown if node._sequence_nr() >= until)
        for edge, count in results.items():
            counts[self._numbers[edge]] = counts.get(self._numbers[edge], 0) + count
        return {number: count == 1 for number, count in sorted(counts.items())}

    def check_reached(
        self, numbers: Iterable[int], outputs: Iterable[Tensor], own: Sequence[Tensor], since: int, step: int
    ) -> None:
        """Check that a step that has run again used the tensors of these numbers, though no gradient came to them.

        Args:
            numbers: of tensors that it used the first time.
            outputs, own, since, step: see `used`.

        Raises:
            SequenceError: if it used others in their place.
        """
        # Maybe in another thread than the first time, which numbers nodes anew.
        leaves, results, _ = self._ends_of(outputs, own, since, self._others)
        reached = {self._numbers.get(id(leaf)) for leaf, _ in leaves} | {self._numbers.get(edge) for edge in results}
        if not reached.issuperset(numbers):
            raise SequenceError(
                f"step {step} used a tensor from outside that it does not use now that it runs again, in the backward "
                "pass: what the cell takes from outside must be the same until that has ended (so a "
                "torch.func.functional_call around the scan must include the backward pass)"
            )

    def _ends_of(
        self, outputs: Iterable[Tensor], own: Sequence[Tensor], since: int, others: Set[Node]
    ) -> tuple[list[tuple[Tensor, int]], dict[Edge, int], int]:
        """`_ends` of a step that has just run, and `nodes_made` by then; ``others`` are known not to be the step's."""
        # Before that: a view whose base was altered in place gets a new node when its own is asked for.
        edges: list[tuple[Node | None, int]] = [
            (get_gradient_edge(output).node if output.grad_fn is None else output.grad_fn, output.output_nr)
            for output in outputs
            if output.requires_grad
        ]
        until = nodes_made()
        return *_ends(edges, {id(tensor) for tensor in own}, since, until, others), until

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        """Inside, steps are reversed; where `fence` is up, their gradients stop at these tensors."""
        self._others = self._elsewhere.union(tensor.grad_fn for tensor in self.tensors if tensor.grad_fn is not None)
        self.fence = fence_here()
        with self.fence.around(self.tensors):
            yield


def local_gradients(
    roots: list[tuple[Tensor, Tensor]], targets: Sequence[Tensor], sums: Sequence[Tensor | None], *, keep: bool
) -> list[Tensor | None]:
    """Gradients of one step's graph, added to what is there already. See NOTE [The same order of additions].

    Args:
        roots: outputs of the step, each with its gradient.
        targets: the tensors at which it ends.
        sums: by target, the gradient that has arrived before.
        keep: leave the graph as it is, as some of it may not be the step's own.
    """
    fed = [
        (_alias(target) if target.layout is torch.strided else target.clone(), held)  # what is sparse has no alias
        for target, held in zip(targets, sums, strict=True)
        if held is not None
    ]
    outputs, grads = zip(*roots, *fed, strict=True)
    if has_torch_function((*outputs, *targets)):
        return list(torch.autograd.grad(outputs, targets, grads, retain_graph=keep, allow_unused=True))
    # What `torch.autograd.grad` comes to. It looks at shapes and types first, which the engine does, too.
    return list(_engine_run_backward(outputs, grads, keep, False, tuple(targets), True, accumulate_grad=False))


def is_dense(tensor: Tensor | None) -> bool:
    """Whether a sum, if there is one, can be added to in place."""
    return tensor is None or tensor.layout is torch.strided


def close_off(tensors: Iterable[Tensor]) -> None:
    """No gradient may come to these any more, which a step was given the first time that it ran.

    Another run's graph takes gradients back. If this one is still there, something unknown holds a part of it.
    """
    # What `Tensor.register_hook` comes to, in a tenth of the time.
    hooks: dict[int, Callable[[Tensor], Tensor | None]] = collections.OrderedDict({-1: _refuse})
    for tensor in tensors:
        if tensor.requires_grad:
            tensor._backward_hooks = hooks


def _refuse(_: Tensor) -> NoReturn:
    raise SequenceError(
        "a gradient goes back through a tensor that a step of the scan made and that the cell has kept, or put out "
        "inside an object that PyTorch does not look into; return it as a part of the state or of y, as a tensor or in "
        "tuples, lists, dicts or what torch.utils._pytree.register_pytree_node knows"
    )


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Hooks that others have put on saved tensors do not see what is saved inside; those put on inside work."""
    top: Callable[[bool], tuple[Any, Any] | None] = _hooks._top_saved_tensors_default_hooks
    taken: list[tuple[Any, Any]] = []
    while (pair := top(True)) is not None:
        taken.append(pair)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)


class _Finder(TorchDispatchMode):
    """Looks for tensors by the edges that lead to them."""

    def __init__(self, wanted: set[Edge]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Edge, Tensor] = {}
        self._wanted = wanted

    def look(self, parts: Iterable[Any]) -> None:
        """Note those of ``parts`` that are wanted."""
        for part in parts:
            if isinstance(part, Tensor) and part.grad_fn is not None:
                edge = (part.grad_fn, part.output_nr)
                if edge in self._wanted:
                    self.found.setdefault(edge, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look(tree_iter((args, kwargs)))
        if types:
            return func(*args, **(kwargs or {}))
        with AsOrdinary():
            return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> Hashable:
    return id(tensor) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _ends(
    edges: Sequence[tuple[Node | None, int]], own: set[int], since: int, until: int, others: Set[Node]
) -> tuple[list[tuple[Tensor, int]], dict[Edge, int]]:
    """Leaves and edges to results of other ops at which a step's graph ends, and how often it does.

    Args:
        edges: to the outputs of the step, as if there were a node that takes them.
        own: see `Outside.used`.
        since: `nodes_made` when the step began.
        until: `nodes_made` now.
        others: nodes that are not the step's, whatever their numbers.
    """
    leaves: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    results: dict[Edge, int] = {}
    seen: set[Node] = set()
    left: list[Node] = []
    while True:  # all this runs once for each step, which is why it is so terse
        for edge in edges:
            node = edge[0]
            if node is None or node in seen:
                continue
            if type(node) is LEAF_NODE:
                leaf: Tensor = node.variable  # type: ignore[attr-defined]
                key = id(leaf)
                if key not in own:
                    leaves[key] = leaf
                    counts[key] = counts.get(key, 0) + 1
            elif not since <= node._sequence_nr() < until or node in others:
                results[edge] = results.get(edge, 0) + 1  # type: ignore[index, arg-type]
            else:
                seen.add(node)
                left.append(node)
        if not left:
            return [(leaf, counts[key]) for key, leaf in leaves.items()], results
        edges = left.pop().next_functions
