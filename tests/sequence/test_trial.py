"""What is measured before a chain is run, the memory it is measured in, and the interval that follows."""

from __future__ import annotations

import random
import types

import pytest
import torch

from ebbtide.sequence.blocks import Blocks
from ebbtide.sequence.cells import CellChain
from ebbtide.sequence.interval_control import RECENT, IntervalController
from ebbtide.sequence.schedules import Multistage, binomial
from ebbtide.sequence.schedules.binomial import forward_steps
from ebbtide.sequence.schedules.multistage import turn_steps
from ebbtide.sequence.schedules.online import Online
from ebbtide.sequence.tensors import TensorLayout
from ebbtide.sequence.trial import MANY_CALLS, MOST_SAMPLES, Samples, Trial, time_steps


class TestSamples:
    def test_two_speeds(self) -> None:
        """A third of the calls is slow: a median would not know. Memory does not grow, and the order is no matter."""
        samples = Samples()
        for number in range(100 * MOST_SAMPLES):
            samples.add(2.0 if number // 1000 % 3 == 0 else 1.0)
        assert samples.calls == 100 * MOST_SAMPLES
        assert len(samples._means) < MOST_SAMPLES
        assert samples.typical() == pytest.approx(4 / 3, rel=0.05)

    def test_slower_calls(self) -> None:
        """Where one call in ten takes three times as long, a chain takes so much longer, too."""
        samples = Samples()
        for number in range(4 * MANY_CALLS):
            samples.add(3.0 if number % 10 == 0 else 1.0)
        assert samples.typical() == pytest.approx(1.2)

    def test_another_process(self) -> None:
        """One call in many takes a hundred times as long: it does not count, nor do the first calls if told so."""
        samples = Samples()
        for number in range(4 * MANY_CALLS):
            samples.add(100.0 if number == 2 * MANY_CALLS else 7.0 if number < MANY_CALLS else 1.0)
        assert samples.typical(warm_share=0.25) == 1.0
        few = Samples()
        for seconds in (1.0, 50.0, 1.2):
            few.add(seconds)
        assert few.typical() == 1.2


class TestBlocks:
    @pytest.mark.parametrize(("state_bytes", "for_disk"), [(1, False), (5000, True), (20 << 20, True), (0, True)])
    def test_they_do_not_overlap(self, state_bytes: int, for_disk: bool) -> None:
        blocks = Blocks(state_bytes, 3, for_disk=for_disk)
        taken = [blocks.take() for _ in range(3)]
        all_taken, extra = blocks.are_taken, blocks.extra()
        assert all_taken
        for number, block in enumerate([*taken, extra]):
            block.memory()[:] = bytes([number]) * block.storage.nbytes()
            assert block.storage.nbytes() >= state_bytes
            assert not for_disk or block.storage.data_ptr() % 4096 == block.storage.nbytes() % 4096 == 0
        for number, block in enumerate([*taken, extra]):
            assert block.memory()[0] == block.memory()[-1] == number
        blocks.give_back(taken[1])
        assert not blocks.are_taken
        assert blocks.take() is taken[1]
        assert blocks.made == 3


def test_where_the_turn_begins() -> None:
    """Against the definition: the most steps for which no part pays, and one pays from there on."""
    for slots in (1, 2, 5, 40):
        for interval in (1, 3, 12):
            part = forward_steps(interval, slots)
            left = turn_steps(interval, part, slots)
            for remaining in range(interval + 1, 3 * left + 20):
                after = forward_steps(remaining - interval, slots)
                pays = interval + part + after < forward_steps(remaining, slots)
                assert pays == (remaining > left)


def test_schedules_of_any_length_take_as_much_memory() -> None:
    """The cache of binomial counts had an entry for each part."""
    for n in (10_000, 100_000):
        binomial.repetition_number.cache_clear()
        for _ in Online(9, lambda _: 9).records(lambda _: False, n):
            pass
        assert binomial.repetition_number.cache_info().currsize < 500
    assert Multistage(10**6, 9, 9).parts > 10**5


def test_one_slow_write_changes_nothing() -> None:
    """It takes 1,000 times as long as an interval."""
    controller = IntervalController(10, 1.0)
    random.seed(1)
    for number in range(10 * RECENT):
        controller.was_late(10_000.0 if number % (2 * RECENT) == RECENT // 2 else 0.0)
        controller.steps_took(10, 10 * random.uniform(0.7, 1.6))
        assert controller.interval(0) == 10


def test_a_step_on_a_device_takes_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by a clock that goes on only as somebody waits: a step was said to take what it takes to launch it."""
    now, took = [0.0], list[float]()
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("ebbtide.sequence.trial.time", clock)
    monkeypatch.setattr("ebbtide.sequence.cells.time", clock)
    monkeypatch.setattr(TensorLayout, "wait", lambda self: now.append(now.pop() + 3.0))
    state = [torch.zeros(4)]
    layout = TensorLayout(state)
    chain = CellChain(lambda h, x: ([h[0] + 1], None), [0, 0], layout)
    trial = Trial(lambda: state, chain.trial, layout.pack, Blocks(layout.size_bytes, 3, for_disk=False))
    assert time_steps(trial, 0.0).seconds == 3.0
    chain.steps_took = lambda count, seconds: took.append(seconds / count)
    chain.advance(state, 0, 2)
    assert took == [1.5]
