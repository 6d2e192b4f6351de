"""The steps of a cell: as just run, and what must be known of them to reverse them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ebbtide.errors import SequenceError

_LEAF_TYPES = (Tensor, int, type(None))
LEAF: TreeSpec = tree_flatten(None)[1]
"""The structure of what is no tree."""


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Stands in an output for a tensor with a gradient."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepRun:
    """A step as just run, with its graph.

    Attributes:
        inputs, given: tensors of its input that require grad, and what the cell was given in their place.
        following: tensors of the next state.
        parts, spec: its output, flat.
        versions: of the tensors of its input, before it ran.
    """

    inputs: list[Tensor]
    given: list[Tensor]
    following: list[Tensor]
    parts: list[Any]
    spec: TreeSpec
    versions: tuple[int, ...]

    def outputs(self) -> dict[int, Tensor]:
        """The tensors of its output that require grad, each once, by their place in it."""
        found: dict[int, int] = {}
        for place, part in enumerate(self.parts):
            if has_gradient(part):
                found.setdefault(id(part), place)
        return {place: self.parts[place] for place in found.values()}


@dataclasses.dataclass(frozen=True, slots=True)
class CellStep:
    """What reversing one step needs to know of its first run.

    Attributes:
        inputs, uses: numbers in `Outside` of its inputs and of what else it uses.
        uses_once: whether it uses each of the latter once.
        outputs: places in its output, flat, of the tensors that require grad, each once.
        same: for each of those, the tensor of the next state that it is, or -1.
        needs_grad: for each tensor of the next state, whether it requires grad.
        versions: see `StepRun`.
        twice: numbers that are among the inputs and among what else it uses.
    """

    inputs: tuple[int, ...]
    uses: tuple[int, ...]
    uses_once: tuple[bool, ...]
    outputs: tuple[int, ...]
    same: tuple[int, ...]
    needs_grad: tuple[bool, ...]
    versions: tuple[int, ...]
    twice: frozenset[int]

    def in_several_parts(self, start: Iterable[int | None]) -> frozenset[int]:
        """Numbers of what step 0 has several times: from outside, as an input, as state 0, whose numbers are ``start``.

        Such a tensor is given to it as it is, as those that are `twice` are to other steps, so that gradients of all
        its uses arrive in one place, in a plain loop's order. See NOTE [The same order of additions] in `graphs.py`.
        """
        return self.twice.union(number for number in start if number in self.inputs or number in self.uses)

    def with_whole(self, numbers: frozenset[int]) -> CellStep:
        """The step where these are what it uses from outside, several times, and not inputs."""
        once = dict(zip(self.uses, self.uses_once, strict=True)) | dict.fromkeys(numbers, False)
        inputs = tuple(number for number in self.inputs if number not in numbers)
        return dataclasses.replace(self, inputs=inputs, uses=tuple(once), uses_once=tuple(once.values()))


class Steps:
    """The steps of a chain, in order; those that are alike share one record."""

    def __init__(self) -> None:
        self._steps: list[CellStep] = []
        self._alike: dict[object, CellStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> CellStep:
        return self._steps[step]

    def note(
        self,
        inputs: tuple[int, ...],
        uses: Mapping[int, bool],
        outputs: tuple[int, ...],
        same: tuple[int, ...],
        needs_grad: tuple[bool, ...],
        versions: tuple[int, ...],
    ) -> None:
        """Add one: see `CellStep`; ``uses`` says of each number whether it is used once."""
        key = (inputs, *uses.items(), outputs, same, needs_grad, versions)
        record = self._alike.get(key)
        if record is None:
            twice = frozenset(inputs).intersection(uses)
            record = CellStep(inputs, tuple(uses), tuple(uses.values()), outputs, same, needs_grad, versions, twice)
            self._alike[key] = record
        self._steps.append(record)

    def forget(self, numbers: Collection[int]) -> None:
        """The step noted last does not use these."""
        last = self._steps.pop()
        uses = {k: once for k, once in zip(last.uses, last.uses_once, strict=True) if k not in numbers}
        self.note(last.inputs, uses, last.outputs, last.same, last.needs_grad, last.versions)

    def outputs(self) -> int:
        """How many tensors all of them put out."""
        return sum(len(step.outputs) for step in self._steps)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a tree and its structure; quicker than PyTorch's where the tree is a leaf."""
    return ([tree], LEAF) if type(tree) in _LEAF_TYPES else tree_flatten(tree)


def unflatten(parts: list[Any], spec: TreeSpec) -> Any:
    """The tree of which `flatten` gave these; as quick."""
    return parts[0] if spec is LEAF else tree_unflatten(parts, spec)


def versions_of(parts: Iterable[Any]) -> tuple[int, ...]:
    """How often each ordinary tensor among ``parts`` has been altered in place, where PyTorch counts that."""
    return tuple(part._version for part in parts if type(part) is Tensor and not part.is_inference())


def returned(found: Any, step: int) -> tuple[Any, Any]:
    """The state and the output that a cell has returned. Raises `SequenceError` if that is something else."""
    if not (isinstance(found, tuple) and len(found) == 2):
        raise SequenceError(f"the cell must return (state, y), but returned a {type(found).__name__} in step {step}")
    return found


def has_gradient(part: Any) -> bool:
    """Whether it is a tensor that requires grad."""
    return isinstance(part, Tensor) and part.requires_grad


def needs_grad(state: Iterable[Tensor]) -> tuple[bool, ...]:
    """Which tensors of a state require grad."""
    return tuple(part.requires_grad for part in state)


def other_graph(step: int) -> SequenceError:
    """What a step raises that is another one when it runs again."""
    return SequenceError(
        f"step {step} gave another graph when it was run again: the cell must depend on the state and the input alone; "
        "check=True finds the first step that differs"
    )


def other_draws(step: int) -> SequenceError:
    """What a step raises that has left random generators elsewhere than the first time."""
    return SequenceError(
        f"step {step} drew other random numbers when it was run again: whenever it runs, it must draw as it did the "
        "first time, in the same mode (training or not), and no other thread may draw from the same generator "
        "meanwhile; give that thread a torch.Generator of its own"
    )
