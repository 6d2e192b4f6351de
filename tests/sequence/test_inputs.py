"""What `scan` may be given as inputs, and when it reads them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ebbtide
from tests.sequence.loops import WIDTH, Loop, compare, plain

pytestmark = pytest.mark.usefixtures("nothing_left")

N = 12


def summed(inputs: Callable[[], Any], tensor: Callable[[Any], Tensor] = lambda x: x) -> Callable[[Loop], Any]:
    """A loop over ``inputs``, of which steps use a ``tensor``."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = torch.randn(WIDTH, requires_grad=True)
        final, _ = loop(lambda h, x: (torch.tanh(h * weight + tensor(x)), None), torch.zeros(WIDTH), inputs())
        final.sum().backward()
        return final, [weight]

    return program


@pytest.mark.parametrize("made", [list, collections.deque, collections.UserList])
def test_a_sequence_that_is_altered_afterwards(made: Callable[[Any], MutableSequence[Tensor]]) -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = torch.randn(WIDTH, requires_grad=True)
        xs = made(torch.randn(WIDTH) for _ in range(N))
        final, _ = loop(lambda h, x: (torch.tanh(h * weight + x), None), torch.zeros(WIDTH), xs)
        xs.pop()
        xs.insert(0, torch.randn(WIDTH))
        final.sum().backward()
        return final, [weight]

    compare(program, memory="30KiB")


@pytest.mark.parametrize("made", [dict, nn.ModuleDict, nn.ParameterDict])
def test_keys_of_a_mapping(made: Callable[[Any], Any]) -> None:
    """As a plain loop takes them."""
    items = {str(step): nn.Linear(2, 2) if made is nn.ModuleDict else torch.zeros(2) for step in range(N)}
    compare(summed(lambda: made(items), lambda key: torch.tensor(float(key))), memory="30KiB")


class TestOneTensorRefilled:
    """An iterator that alters what it has given."""

    def of(self, *places: Any, clones: bool = False) -> Iterator[Any]:
        memory = torch.zeros(N, WIDTH)
        for step in range(N):
            place = memory[places[step % len(places)]] if places else memory[step]
            place.copy_(torch.full((WIDTH,), 0.1 * step))
            yield {"x": (place.clone() if clones else place, step)}

    @pytest.mark.parametrize("places", [(0,), (0, 1), (slice(0, 1),)])
    def test_is_refused(self, places: Any) -> None:
        with pytest.raises(ebbtide.SequenceError, match=r"input 0 was given again.* give new tensors, or clones"):
            ebbtide.scan(lambda h, x: (h + x["x"][0].sum(), None), torch.zeros(WIDTH), self.of(*places))

    @pytest.mark.parametrize(("places", "clones"), [((), False), ((0,), True)])
    def test_others_are_fine(self, places: Any, clones: bool) -> None:
        compare(summed(lambda: self.of(*places, clones=clones), lambda x: x["x"][0]), memory="30KiB")

    def test_without_gradients_none_are_kept(self) -> None:
        def found(loop: Loop) -> Tensor:
            with torch.no_grad():
                return loop(lambda h, x: (torch.sin(h + x["x"][0]), None), torch.zeros(WIDTH), self.of(0))[0]

        assert torch.equal(found(plain), found(ebbtide.scan))

    def test_one_that_stays_as_it_is_is_fine(self) -> None:
        same = torch.randn(WIDTH)
        compare(summed(lambda: (same for _ in range(N))), memory="30KiB")


OVER: list[Callable[[Any], Any]] = [
    lambda array: array,
    torch.from_numpy,
    lambda array: [array.T],
    lambda array: Batch(torch.from_numpy(array)),
]
"""What may be made of an array in its memory."""


class TestOneContainerRefilled:
    """An iterator that gives one container or one array, with other numbers in it each time."""

    def of(self, filled: Callable[[int], Any]) -> Callable[[], Iterator[Any]]:
        return lambda: (filled(step) for step in range(N))

    def dicts(self) -> Callable[[], Iterator[Any]]:
        batch: dict[str, list[Tensor | None]] = {"x": [None]}

        def filled(step: int) -> Any:
            batch["x"][0] = torch.full((WIDTH,), 0.1 * step)
            return batch

        return self.of(filled)

    def test_with_new_tensors_it_is_fine(self) -> None:
        compare(summed(self.dicts(), lambda batch: batch["x"][0]), memory="30KiB")

    def test_objects_are_refused(self) -> None:
        batch = Batch(torch.zeros(WIDTH))

        def filled(step: int) -> Batch:
            batch.x = torch.full((WIDTH,), 0.1 * step)
            return batch

        with pytest.raises(ebbtide.SequenceError, match=r"an object of input 0 was given again as one of input 11"):
            summed(self.of(filled), lambda item: item.x)(ebbtide.scan)

    @pytest.mark.parametrize("of", OVER)
    def test_arrays_are_refused(self, of: Callable[[Any], Any]) -> None:
        buffer = np.zeros((WIDTH, 1), np.float32)

        def filled(step: int) -> Any:
            buffer[:] = 0.1 * step
            return of(buffer)

        with pytest.raises(ebbtide.SequenceError, match=r"input 0 was given again as one of input 1, .* or clones"):
            summed(self.of(filled))(ebbtide.scan)

    @pytest.mark.parametrize("of", [lambda array: array, torch.from_numpy])
    def test_arrays_that_are_others_or_stay_as_they_are_are_fine(self, of: Callable[[Any], Any]) -> None:
        rows = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
        for given in (
            self.of(lambda step: of(rows[step % 3])),
            self.of(lambda step: of(rows[: step % 3 + 1][-1] + step)),
        ):
            compare(summed(given, torch.as_tensor), memory="30KiB")
        compare(
            summed(self.of(lambda step: of(rows[: step % 3 + 1])), lambda x: torch.as_tensor(x).sum(0)), memory="30KiB"
        )


class Rows:
    """Rows of an array as they lie there, as copies, or each in the same memory; or tensors over these."""

    def __init__(self, rows: Any, way: str = "", *, tensors: bool = True) -> None:
        self.rows, self.way, self.tensors, self.memory = rows, way, tensors, np.empty_like(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, step: int) -> Any:
        row = self.rows[step]
        if self.way:
            memory = self.memory if self.way == "filled anew" else np.empty_like(row)
            memory[:] = row
            row = memory
        return torch.from_numpy(row) if self.tensors else row


class TestAlteredInPlace:
    """What is indexed anew for each run of a step must be the same again."""

    def program(self, made: Callable[[Any], Any]) -> Callable[[Loop], Any]:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, rows = torch.randn(WIDTH, requires_grad=True), torch.randn(N, WIDTH).numpy()
            rows[0] = 0  # which altering leaves as it is

            def cell(h: Tensor, x: Any) -> tuple[Tensor, None]:
                x = torch.as_tensor(x[0] if isinstance(x, tuple) else x).mul_(0.5)
                return torch.tanh(h * weight + x), None

            final, _ = loop(cell, torch.zeros(WIDTH), made(rows))
            final.sum().backward()
            return final, [weight]

        return program

    @pytest.mark.parametrize(
        "made",
        [
            lambda rows: TensorDataset(torch.from_numpy(rows + 1)),
            lambda rows: TensorDataset(torch.from_numpy(rows)),
            lambda rows: rows + 1,
            lambda rows: list(rows + 1),
            lambda rows: Rows(rows + 1),
        ],
        ids=["dataset", "dataset, as it was", "array", "list of arrays", "tensors over rows"],
    )
    def test_what_stays_so_is_refused(self, made: Callable[[Any], Any]) -> None:
        with pytest.raises(ebbtide.SequenceError, match=r"altered its input in place in step 0; it must alter a copy"):
            self.program(made)(ebbtide.scan)

    @pytest.mark.parametrize("tensors", [True, False])
    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("way", ["filled anew", "made anew"])
    def test_others_are_fine(self, way: str, offset: int, tensors: bool) -> None:
        compare(self.program(lambda rows: Rows(rows + offset, way, tensors=tensors)), memory="30KiB")


@dataclasses.dataclass
class Batch:
    """PyTorch does not look into it."""

    x: Tensor


class Slotted:
    __slots__ = ("parts",)

    def __init__(self, x: Tensor) -> None:
        self.parts = {"batch": Batch(x)}

    @property
    def x(self) -> Tensor:
        return self.parts["batch"].x


class Stored:
    """Items as they are, by index."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, step: int) -> Any:
        return self.items[step]


@pytest.mark.parametrize("given", [list, Stored])
class TestWhatEachInputHasOfItsOwn:
    """It is refused where a step alters it, also where it is no tensor that PyTorch tells of; what all share is not."""

    def program(self, made: Callable[[], list[Any]], given: Any) -> Callable[[Loop], Any]:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, items = torch.randn(WIDTH, requires_grad=True), made()

            def cell(h: Tensor, item: Any) -> tuple[Tensor, None]:
                if isinstance(item, torch.Generator):
                    return torch.tanh(h * weight + torch.rand(WIDTH, generator=item)), None
                return torch.tanh(h * weight + item.x.mul_(-0.9)), None

            final, _ = loop(cell, torch.zeros(WIDTH), given(items))
            final.sum().backward()
            return final, [weight]

        return program

    @pytest.mark.parametrize("kind", [Batch, Slotted])
    def test_objects(self, kind: Any, given: Any) -> None:
        with pytest.raises(ebbtide.SequenceError, match=r"altered its input in place in step 0; it must alter a copy"):
            self.program(lambda: [kind(torch.randn(WIDTH)) for _ in range(N)], given)(ebbtide.scan)
        compare(self.program(lambda: [kind(torch.randn(WIDTH))] * N, given), memory="30KiB")
        compare(self.program(lambda: [kind(torch.randn(WIDTH))], given))

    def test_generators(self, given: Any) -> None:
        with pytest.raises(ebbtide.SequenceError, match="each input has its own, which would draw on"):
            self.program(lambda: [torch.Generator().manual_seed(step) for step in range(N)], given)(ebbtide.scan)
        compare(self.program(lambda: [torch.Generator().manual_seed(1)] * N, given), memory="30KiB")
        compare(self.program(lambda: [torch.Generator().manual_seed(1)], given))


def test_an_object_refilled_by_an_iterator() -> None:
    batch = Batch(torch.zeros(WIDTH))

    def filled() -> Iterator[Batch]:
        for _ in range(N):
            batch.x.normal_()
            yield batch

    with pytest.raises(ebbtide.SequenceError, match=r"was given again as one of input .* give new tensors, or clones"):
        ebbtide.scan(lambda h, item: (torch.tanh(h + item.x), None), torch.zeros(WIDTH, requires_grad=True), filled())
