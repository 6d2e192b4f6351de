"""Cells that write to tensors outside, as batch norm does: after a scan those have what a plain loop leaves there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import ebbtide
from ebbtide.sequence.surroundings import Surroundings, Watch, Written
from tests.run.harness import FAST_DISK
from tests.sequence.loops import WIDTH, Loop, compare, states

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = 8, WIDTH


class Counter(nn.Module):
    """Counts its calls, by which what it computes differs; has a list of means, and a copy of what it made last."""

    count: Tensor
    means: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, buffer in {"count": torch.zeros(()), "means": torch.zeros(64), "last": torch.zeros(SHAPE)}.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = (self.linear(x) * self.count.clone().sqrt()).tanh()
        self.means[int(self.count)] = y.detach().mean()
        self.last.copy_(y.detach())
        return y


def normalized(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options), nn.Tanh(), nn.Dropout(0.1))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class Queue(nn.Module):
    """Compares with what the last three calls were given, of which it writes over the oldest."""

    rows: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.ones(3, WIDTH))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) - self.rows.mean(0)).tanh()
        self.rows[self.place] = x.detach().mean(0)
        self.place.copy_((self.place + 1) % 3)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": normalized,
    "batch norm, all batches alike": lambda: normalized(momentum=None),
    "spectral norm": spectral,
    "counter": Counter,
    "queue": Queue,
}


def trained(
    make: Callable[[], nn.Module],
    n: int,
    *,
    passes: int = 1,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[[Loop], tuple[Any, list[Tensor]]]:
    """A program that runs a model as a cell; its results include all buffers, before and after each backward pass."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        model = make()
        xs = torch.randn(n, *SHAPE, requires_grad=True)
        start = torch.randn(SHAPE, requires_grad=True)

        def cell(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = model(state + x)
            return state, state.mean()

        with around():
            final, ys = loop(cell, start, xs)
            loss = final.square().sum() + torch.stack(ys).sum()
            seen = [[buffer.clone() for buffer in model.buffers()]]
            for number in range(passes):
                loss.backward(retain_graph=number + 1 < passes)
                seen.append([buffer.clone() for buffer in model.buffers()])
        return (final, ys, seen), [*model.parameters(), xs, start]

    return program


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [1, 2, 3, 40])
@pytest.mark.parametrize("passes", [1, 2])
def test_as_in_a_plain_loop(model: str, n: int, passes: int) -> None:
    compare(trained(MODELS[model], n, passes=passes), memory="40KiB", check=True)


@pytest.mark.parametrize("model", MODELS)
def test_states_on_a_disk(model: str, tmp_path: Path) -> None:
    compare(trained(MODELS[model], 60), memory="20KiB", check=True, spill=tmp_path)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("truncate", [1, 4])
def test_truncated(model: str, truncate: int) -> None:
    compare(trained(MODELS[model], 11), memory="40KiB", truncate=truncate)


@pytest.mark.parametrize("passes", [1, 2])
def test_statistics_that_step_0_leaves_as_they_were(passes: int) -> None:
    """The batch mean of zeros is the running mean that there is at first, to the bit."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        inner, outer = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        norm = nn.BatchNorm1d(WIDTH)
        mean = norm.get_buffer("running_mean")

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(norm(inner(h)) + outer(x)), None

        final, _ = loop(cell, torch.zeros(SHAPE), torch.randn(12, *SHAPE))
        seen = [mean.clone()]
        for number in range(passes):
            final.square().sum().backward(retain_graph=number + 1 < passes)
            seen.append(mean.clone())
        return (final, seen), [*inner.parameters(), *outer.parameters(), *norm.parameters()]

    compare(program, memory="40KiB", check=True)


def test_weights_are_made_once() -> None:
    """Under `cached()` spectral norm improves its vectors once, in plain loops, too; batch norm counts each step."""

    def both() -> nn.Module:
        return nn.Sequential(spectral(), normalized())

    compare(trained(both, 9, around=parametrize.cached), memory="40KiB")


@pytest.mark.parametrize("losses", ["one", "one twice", "two"])
def test_graphs_elsewhere_may_hold_what_is_written(losses: str) -> None:
    """As nothing is written after the loop, autograd has nothing to say."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, other = torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        mean = torch.zeros(WIDTH)

        def cell(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
            mean.lerp_(x, 0.3)
            return (state * weight + mean.clone()).sin(), None

        final, _ = loop(cell, torch.zeros(WIDTH), torch.randn(20, WIDTH))
        first, second = final.sum(), (other * mean).sum()
        for loss in (first, second) if losses == "two" else [first + second] * (1 + (losses == "one twice")):
            loss.backward(retain_graph=losses == "one twice")
        return (final, mean), [weight, other]

    compare(program, memory=states(4, torch.zeros(WIDTH), torch.zeros(WIDTH)))


def test_within_a_budget(tmp_path: Path) -> None:
    """Observed, planned and plain steps alike."""

    def train(memory: ebbtide.Budget | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, head = (
            normalized(),
            nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]),
        )
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
        found = []
        for _ in range(6):
            xs = torch.randn(12, *SHAPE)

            def cell(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
                return model(state + x), None

            with memory.step() if memory is not None else contextlib.nullcontext():
                final, _ = ebbtide.scan(cell, torch.zeros(SHAPE), xs, memory="40KiB")
                loss = head(final.repeat(64, 1)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach(), *(buffer.clone() for buffer in model.buffers())]
        return found

    expected = train(None)
    with ebbtide.Budget("90%", spill=tmp_path, machine=FAST_DISK) as memory:
        found = train(memory)
        assert memory.plan is not None
        assert memory.plan.binds
    assert all(map(torch.equal, expected, found))


def test_a_resized_tensor_is_refused() -> None:
    weight, mean = torch.randn(WIDTH, requires_grad=True), torch.zeros(WIDTH)

    def cell(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
        mean.lerp_(x, 0.3)
        return (state * weight).sin(), None

    final, _ = ebbtide.scan(cell, torch.zeros(WIDTH), torch.randn(20, WIDTH))
    mean.untyped_storage().resize_(4 * WIDTH + 64)
    with pytest.raises(ebbtide.SequenceError, match=f"outside of {4 * WIDTH} bytes .* must keep its size"):
        final.sum().backward()


def test_too_little_memory_is_told_before_anything_runs() -> None:
    with pytest.raises(ebbtide.SequenceError, match="is too little for states of"):
        ebbtide.scan(lambda *_: pytest.fail("ran"), torch.zeros(WIDTH), torch.zeros(4, WIDTH), memory=9)


def test_what_is_carried_may_be_too_much() -> None:
    cache = torch.zeros(1000, WIDTH)

    def cell(state: Tensor, step: int) -> tuple[Tensor, None]:
        cache[step] = state.detach()
        return (state.requires_grad_() + cache.mean(0)).sin(), None

    with pytest.raises(ebbtide.SequenceError, match=r"\(93.8 KiB of that are tensors outside that the cell reads"):
        ebbtide.scan(cell, torch.zeros(WIDTH), range(50), memory="99KiB")
    assert not cache.any()


class TestWatch:
    def watched(self, run: Callable[[], object], *own: Tensor) -> Written:
        watch = Watch(own)
        with watch:
            run()
        return watch.put_back()

    def test_what_is_read_is_carried(self) -> None:
        count, sums = torch.ones(3), torch.ones(4, 5)
        before = sums.clone()
        written = self.watched(lambda: (sums[1].add_(count[0]), count.add_(1)))
        assert {storage._cdata for storage in written.carried} == {t.untyped_storage()._cdata for t in (count, sums)}
        assert written.restored == ()
        assert torch.equal(count, torch.ones(3))
        assert torch.equal(sums, before)

    def test_what_is_written_over_is_restored(self) -> None:
        losses, last, out = torch.zeros(9), torch.zeros(3), torch.zeros(3)
        made = torch.ones(3)

        def run() -> None:
            losses[2] = made.sum()
            losses[torch.tensor([4])] = 5.0
            last.copy_(made)
            (last + 1).sum()  # by now it is this step's own
            torch.add(made, made, out=out)

        written = self.watched(run)
        assert written.carried == ()
        assert [storage.nbytes() for storage in written.restored] == [36, 12, 12]
        assert not any(t.any() for t in (losses, last, out))

    def test_what_is_written_over_by_what_it_was_is_carried(self) -> None:
        count = torch.ones(3)
        written = self.watched(lambda: torch.add(count, 1, out=count))
        assert [storage.nbytes() for storage in written.carried] == [12]
        assert torch.equal(count, torch.ones(3))
        assert written.restored == ()

    def test_a_part_written_over_is_carried_if_the_rest_is_read(self) -> None:
        rows = torch.zeros(4, 5)
        written = self.watched(lambda: (rows[0].fill_(1), rows.sum()))
        assert [storage.nbytes() for storage in written.carried] == [80]

    def test_indices_may_add_up(self) -> None:
        counts, one = torch.zeros(4), torch.ones(1)
        written = self.watched(lambda: counts.index_put_((torch.tensor([1]),), one, accumulate=True))
        assert len(written.carried) == 1

    def test_what_is_its_own_does_not_count(self) -> None:
        state, constant = torch.zeros(3), torch.ones(3)
        assert self.watched(lambda: (state.add_(constant), torch.tensor([0.0]).add_(1)), state) == Written()

    @pytest.mark.parametrize("training", [False, True])
    def test_batch_norm_writes_in_training_only(self, training: bool) -> None:
        layer = nn.BatchNorm1d(5).train(training)
        before = [buffer.clone() for buffer in layer.buffers()]
        written = self.watched(lambda: layer(torch.randn(7, 5)))
        assert len(written.carried) == (3 if training else 0)
        assert written.restored == ()
        assert all(map(torch.equal, before, layer.buffers()))

    def test_an_interrupt_leaves_no_trace(self) -> None:
        count, watch = torch.zeros(()), Watch([])
        with contextlib.suppress(KeyboardInterrupt), watch:
            count.add_(1)
            raise KeyboardInterrupt
        watch.put_back()
        assert count == 0


def test_surroundings_go_back_without_a_trace() -> None:
    count, last = torch.ones(3), torch.zeros(2)
    surroundings = Surroundings([], Written((count.untyped_storage(),), (last.untyped_storage(),)))
    before, version = surroundings.read(), count._version
    with surroundings.preserved():
        drawn = torch.rand(2)
        count.add_(1)
        last.copy_(drawn)
    assert count._version == version + 1  # the user's own write alone
    assert torch.equal(count, torch.ones(3))
    assert torch.equal(last, torch.zeros(2))
    assert torch.equal(torch.rand(2), drawn)
    surroundings.set(before)
    assert torch.equal(torch.rand(2), drawn)


class TestRandomNumbersOfTheFirstRun:
    def program(self, own: torch.Generator | None, *, called: bool) -> Callable[[Loop], tuple[Any, list[Tensor]]]:
        """A dropout whose mask is made once; ``called``: before the loop."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, requires_grad=True)
            masks: list[Tensor] = []

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                if not masks:
                    masks.append(torch.rand(WIDTH, generator=own) < 0.5)
                return torch.tanh(h * weight * masks[0] + x + 0.1 * torch.randn(WIDTH, generator=own)), None

            if called:
                cell(torch.zeros(WIDTH), torch.zeros(WIDTH))
            final, _ = loop(cell, torch.zeros(WIDTH), torch.randn(12, WIDTH))
            final.sum().backward()
            return final, [weight]

        return program

    @pytest.mark.parametrize("own", [None, torch.Generator()], ids=["PyTorch's", "its own"])
    @pytest.mark.parametrize("around", [contextlib.nullcontext, parametrize.cached])
    def test_of_a_mask_that_it_keeps_are_refused(self, own: torch.Generator | None, around: Any) -> None:
        with around(), pytest.raises(ebbtide.SequenceError, match=r"in its first run .* call it once before the scan"):
            self.program(own, called=False)(ebbtide.scan)

    def test_and_what_to_do_helps(self) -> None:
        compare(self.program(None, called=True), memory="40KiB")

    @pytest.mark.parametrize("n", [1, 12])
    def test_of_inputs_are_drawn_as_in_a_plain_loop(self, n: int) -> None:
        class Noise:
            def __len__(self) -> int:
                return n

            def __getitem__(self, step: int) -> Tensor:
                if not step < n:
                    raise IndexError
                return torch.randn(WIDTH)

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, requires_grad=True)
            drop = nn.Dropout(0.3)
            final, _ = loop(lambda h, x: (drop(torch.tanh(h * weight + x)), None), torch.zeros(WIDTH), Noise())
            final.sum().backward()
            return final, [weight]

        compare(program, memory="40KiB")
