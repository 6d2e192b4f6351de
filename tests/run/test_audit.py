"""The first planned step is counted: one that holds more than the observed one did gets another plan."""

from __future__ import annotations

import contextlib
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.run import held_bytes
from ebbtide.run.meter import PeakMeter
from ebbtide.run.native import find_compiler
from ebbtide.run.scrutiny import CLOSE_LOOKS, Scrutiny
from ebbtide.run.usage import GIVEN_UP
from tests.run.harness import FAST_DISK, HELD_MORE, SLOW_DISK
from tests.run.inside import latest_kind

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

OBSERVED = 2
STEPS = 20
SIZE = 1 << 16


def steps_that_hold(more: int, limit: str, directory: Path) -> tuple[ebbtide.Budget, int]:
    """Steps of one kind that hold ``more`` numbers besides once observed: the budget, and the peak of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data = torch.randn(SIZE // 64, 64)
    meter = PeakMeter()
    with ebbtide.Budget(limit, spill=directory, machine=FAST_DISK) as memory:
        for index in range(STEPS):
            if index == STEPS - 1:
                meter.enter()
            with memory.step():
                held: list[Tensor] = [torch.zeros(more)] if index >= OBSERVED else []
                model(data).sum().backward()
                del held
            model.zero_grad()
        meter.leave()
    return memory, meter.peak_bytes


def test_a_step_that_holds_more_is_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Durations that are better known by the end of the loop would be a reason to plan for it once more.
    monkeypatch.setattr("ebbtide.run.kinds.Kind.plan_again", lambda *_: None)
    memory, peak_bytes = steps_that_hold(SIZE, "70%", tmp_path)
    assert memory.plan is not None
    assert memory.limit_bytes is not None
    assert memory.plan.peak_bytes <= memory.limit_bytes
    assert peak_bytes <= memory.limit_bytes
    assert memory.state == "planned"


def test_a_step_that_holds_too_much_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        steps_that_hold(16 * SIZE, "70%", tmp_path)
    assert any("held 4.00 MiB that the observed one did not" in note for note in caught.value.__notes__)


def test_what_is_said_to_be_enough_stays_the_same(tmp_path: Path) -> None:
    """Each step of a loop that goes on after such an error says the same, and it is enough."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data = torch.randn(SIZE // 64, 64)

    def run(limit: int | str) -> list[int]:
        asked: list[int] = []
        with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory:
            for index in range(8):
                try:
                    with memory.step():
                        held: list[Tensor] = [torch.zeros(16 * SIZE)] if index >= OBSERVED else []
                        model(data).sum().backward()
                        del held
                except BudgetError as error:
                    asked.append(error.reachable_bytes)
                model.zero_grad()
        return asked

    asked = run("70%")
    assert len(asked) > 1
    assert len(set(asked)) == 1
    assert run(asked[0]) == []


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no processes that train together")
def test_processes_that_train_together_count_twice_before_a_step_is_an_error(tmp_path: Path) -> None:
    """Others wait for the one that raises; and a buffer of a collective may be let go of late, in one of many steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data = torch.randn(SIZE // 64, 64)

    def run(late: set[int]) -> str:
        with ebbtide.Budget("70%", spill=tmp_path, machine=FAST_DISK, verify=False) as memory:
            for index in range(STEPS):
                with memory.step():
                    held = [torch.zeros(16 * SIZE)] if index in late else []
                    model(data).sum().backward()
                    del held
                model.zero_grad()
        return memory.state

    with pytest.raises(BudgetError):
        run({OBSERVED})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        assert run({OBSERVED}) == "planned"
        with pytest.raises(BudgetError):
            run({OBSERVED, OBSERVED + 1})
    finally:
        dist.destroy_process_group()


class NowAndThen:
    """A loop in which every ``EACH``-th step keeps ``more`` numbers of what each of two layers gives to look at."""

    EACH = 7
    LOOKED_AT = (3, 9)

    def __init__(self, limit: str, machine: Machine, directory: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.data = torch.randn(SIZE // 16, 64)
        self.memory = ebbtide.Budget(limit, spill=directory, machine=machine)
        self.count = 0
        self.peaks: list[int] = []

    def forward(self, more: int) -> tuple[Tensor, list[Tensor]]:
        hidden, seen = self.data, []
        for number, layer in enumerate(self.model):
            hidden = layer(hidden)
            if more and number in self.LOOKED_AT:
                seen.append(hidden.detach().flatten()[:more].clone())
        return hidden.sum(), seen

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return found

    def step(self, more: int) -> None:
        """One step of the loop; its gradients must be those of a plain one."""
        self.count += 1
        meter = PeakMeter()
        with meter if self.memory.state in ("planned", "idle") else contextlib.nullcontext(), self.memory.step():
            loss, seen = self.forward(0 if self.count % self.EACH else more)
            loss.backward()
            del seen
        if meter.peak_bytes and self.count % self.EACH == 0:
            self.peaks.append(meter.peak_bytes)
        found = self.gradients()
        self.forward(0)[0].backward()
        assert all(torch.equal(one, other) for one, other in zip(found, self.gradients(), strict=True))

    def steps(self, count: int, more: int) -> None:
        """So many steps."""
        for _ in range(count):
            self.step(more)


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_steps_that_hold_more_now_and_then(machine: Machine, tmp_path: Path) -> None:
    """What the first of them holds more than the audited one is left free from then on."""
    loop = NowAndThen("80%", machine, tmp_path)
    with loop.memory:
        for _ in range(6 * loop.EACH):
            loop.step(3 * SIZE)
        limit_bytes = loop.memory.limit_bytes
        assert limit_bytes is not None
        assert loop.memory.plan is not None
        assert loop.peaks[0] > limit_bytes
        assert max(loop.peaks[1:]) <= limit_bytes
        assert loop.memory.plan.peak_bytes <= limit_bytes


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
@pytest.mark.parametrize("before", [1, 3])
def test_steps_that_hold_more_where_nothing_binds(before: int, tmp_path: Path) -> None:
    """Of those that are hardly looked at, the first one makes the next ones be looked at."""
    loop = NowAndThen("100%", FAST_DISK, tmp_path)
    with loop.memory:
        for _ in range(before * loop.EACH):
            loop.step(0)
        assert loop.memory.state == "idle"
        for _ in range(6 * loop.EACH):
            loop.step(3 * SIZE)
        limit_bytes = loop.memory.limit_bytes
        assert limit_bytes is not None
        passed = 2 if before * loop.EACH > CLOSE_LOOKS else 1
        above = [peak_bytes > limit_bytes for peak_bytes in loop.peaks[before:]]
        assert above == [True] * passed + [False] * (len(above) - passed)
        assert len(above) >= 4


def test_where_nothing_binds_ever_more_steps_are_looked_at() -> None:
    """Of those that seldom hold more, none may be among the first ones."""
    kind: Any = SimpleNamespace(
        script=object(), samples=(), varies=False, usage=SimpleNamespace(audited=object()), state="idle"
    )
    library: Any = SimpleNamespace(has_like=lambda _: False)
    scrutiny, found, each = Scrutiny(), list[bool](), CLOSE_LOOKS + 4
    for number in range(1, 4 * each + 1):
        scrutiny.step_begins(kind, is_weighed=True, on_cpu=True)
        looks = scrutiny.claim_close_look(kind, library)
        if number % each == 0:
            found.append(looks)
            if not looks:
                scrutiny.look_again()
    assert found == [False, True, False, True]


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
def test_steps_that_hold_too_much_now_and_then_are_warned_of(tmp_path: Path) -> None:
    loop = NowAndThen("60%", FAST_DISK, tmp_path)
    with loop.memory:
        for _ in range(loop.EACH - 1):
            loop.step(0)
        plan = loop.memory.plan
        assert plan is not None
        with pytest.warns(UserWarning, match="held .* more than is planned.*budget .* cannot be met") as said:
            loop.steps(4 * loop.EACH, 8 * SIZE)
        assert len(said) == 1
        assert loop.memory.plan is not None
        assert loop.memory.plan.peak_bytes == plan.peak_bytes


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
def test_steps_that_hold_more_and_more_are_warned_of_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left free a few times, and not for ever."""
    monkeypatch.setattr("ebbtide.run.kinds.Kind.plan_again", lambda *_: None)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data, each, rises = torch.randn(SIZE // 64, 64), 6, GIVEN_UP + 1
    held_bytes = set()
    with ebbtide.Budget("90%", spill=tmp_path, machine=FAST_DISK) as memory:

        def steps(count: int) -> None:
            for index in range(count):
                with memory.step():
                    kept = [torch.zeros(5 * SIZE // 4) for _ in range(max(0, index // each - 1))]
                    model(data).sum().backward()
                    del kept
                model.zero_grad()
                kind = latest_kind(memory)
                held_bytes.add(kind.step.resting_bytes if kind is not None else 0)

        with pytest.warns(UserWarning, match=HELD_MORE) as said:
            steps((2 + rises) * each)
    assert ["not the first time" in str(each.message) for each in said] == [True]
    assert len(held_bytes) >= GIVEN_UP, "it was left free until then"


class Workspaces(NowAndThen):
    """A loop in which every ``EACH``-th step has an op that takes ``more`` numbers inside itself."""

    def forward(self, more: int) -> tuple[Tensor, list[Tensor]]:
        loss, seen = super().forward(0)
        if more:
            seen.append(self.data.expand(more // self.data.numel(), *self.data.shape).logsumexp(2))
        return loss, seen


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
def test_what_ops_take_inside_themselves_is_not_warned_of(tmp_path: Path) -> None:
    """The arena counts that, budgets do not."""
    loop = Workspaces("60%", FAST_DISK, tmp_path)
    with loop.memory, warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.steps(5 * loop.EACH, 24 * SIZE)
        limit_bytes = loop.memory.limit_bytes
        assert limit_bytes is not None
        assert max(loop.peaks) <= limit_bytes
        kind = latest_kind(loop.memory)
        assert kind is not None
        assert kind.scrutiny.recounts._like.due >= 0, "that it may have been more was noticed"


class Accumulating:
    """A loop that from step 12 on adds up the gradients of ``each`` steps; before, each step has its own."""

    BEFORE = 12

    def __init__(self, limit: str, directory: Path, each: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(160, 160), nn.Tanh())))
        self.data = torch.randn(1024, 160)
        self.memory = ebbtide.Budget(limit, spill=directory, machine=FAST_DISK)
        self.each = each

    def peaks(self, steps: int) -> list[int]:
        """Run so many steps in all; the peaks of those that accumulate."""
        found = []
        for index in range(steps):
            with PeakMeter() as meter, self.memory.step():
                self.model(self.data).sum().backward()
            if index < self.BEFORE or index % self.each == self.each - 1:
                self.model.zero_grad()
            found.append(meter.peak_bytes)
        return found[self.BEFORE :]


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
@pytest.mark.parametrize("limit", ["80%", "100%"])
@pytest.mark.parametrize("each", [2, 3, 8])
def test_gradients_that_are_there_before_a_step_count(each: int, limit: str, tmp_path: Path) -> None:
    """Steps that begin with more are counted, and that is left free if it is the steps' own."""
    loop = Accumulating(limit, tmp_path, each)
    with loop.memory:
        peaks = loop.peaks(loop.BEFORE + 4 * loop.each + 12)
        limit_bytes = loop.memory.limit_bytes
        assert limit_bytes is not None
        assert max(peaks[: 2 * loop.each]) > limit_bytes
        assert max(peaks[2 * loop.each :]) <= limit_bytes
        assert loop.memory.plan is not None
        assert loop.memory.plan.peak_bytes <= limit_bytes


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
def test_gradients_that_are_too_large_to_be_there_before_a_step_are_warned_of(tmp_path: Path) -> None:
    loop = Accumulating("100%", tmp_path, 4)
    loop.data = loop.data[:32]  # what steps hold are gradients, above all
    with loop.memory, pytest.warns(UserWarning, match="held .* more than is planned.*budget .* cannot be met") as said:
        loop.peaks(40)
    assert len(said) == 1


def test_gradients_made_in_place_of_those_that_were_there_are_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that begin without gradients hold less than the audited one, which had those of earlier steps. The first
    ones were made outside the arena, and the optimizer has made its state since."""
    monkeypatch.setattr("ebbtide.run.kinds.Kind.plan_again", lambda *_: None)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters())
    data, plans = torch.randn(512, 256), set()
    with ebbtide.Budget("85%", spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(24):
            with memory.step():  # a warning would be an error
                model(data).sum().backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            plans.add(memory.plan)
        assert max(step.peak_bytes or 0 for step in memory.measured) <= (memory.limit_bytes or 0)
        assert memory.state == "planned"
    assert len({plan.decisions for plan in plans if plan is not None}) == 1


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
@pytest.mark.parametrize("limit", ["70%", "100%"])
def test_what_others_have_before_a_step_does_not_count(limit: str, tmp_path: Path) -> None:
    """Steps are counted to see whose it is, ever more rarely."""
    loop, others, plans = NowAndThen(limit, FAST_DISK, tmp_path), [], set()
    with loop.memory:
        for _ in range(80):
            loop.step(0)
            others.append(torch.zeros(SIZE))
            plans.add(loop.memory.plan.peak_bytes if loop.memory.plan is not None else 0)
        counted = sum(step.peak_bytes is not None for step in loop.memory.measured)
    assert len(plans - {0}) <= 2  # durations that are better known are a reason to plan once more
    assert 4 <= counted <= 24


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
def test_what_other_threads_hold_meanwhile_does_not_count(tmp_path: Path) -> None:
    loop = NowAndThen("60%", FAST_DISK, tmp_path)
    held: list[Tensor] = []

    def hold(*_: object) -> None:
        thread = threading.Thread(target=lambda: held.append(torch.zeros(loop.count * SIZE)))
        thread.start()
        thread.join()

    loop.model[0].register_forward_hook(hold)
    peaks = set()
    with loop.memory:
        for _ in range(20):
            loop.step(0)
            peaks.add(loop.memory.plan.peak_bytes if loop.memory.plan is not None else 0)
    assert len(peaks - {0}) == 1


@pytest.mark.skipif(find_compiler() is None, reason="without the arena nobody counts what planned steps hold")
def test_a_count_that_another_thread_took_over_is_none() -> None:
    first, second = held_bytes.begin(), held_bytes.begin()
    assert held_bytes.end(first) is None
    assert held_bytes.end(second) is not None
    thread = threading.Thread(target=held_bytes.begin)
    thread.start()
    thread.join()
    assert held_bytes.end(second) is None


def test_a_step_beside_another_budgets_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first planned steps are, and the next ones run beside larger ones, whose bytes are not theirs."""
    monkeypatch.setattr("ebbtide.run.kinds.Kind.plan_again", lambda *_: None)
    loop, other = (NowAndThen("60%", FAST_DISK, tmp_path) for _ in range(2))
    other.data = torch.cat([other.data] * 4)

    def beside(*_: object) -> None:
        if loop.memory.state == "planned":
            thread = threading.Thread(target=other.step, args=[0])
            thread.start()
            thread.join()

    loop.model[0].register_forward_hook(beside)
    peaks = set()
    with loop.memory, other.memory:
        for _ in range(20):
            loop.step(0)
            peaks.add(loop.memory.plan.peak_bytes if loop.memory.plan is not None else 0)
        assert other.memory.state == "planned"
    assert len(peaks - {0}) == 1


def test_plans_that_are_left_now_and_then_are_seldom_looked_at_again(tmp_path: Path) -> None:
    """Steps that log something are no reason to observe the others, even right before calls that are captured."""
    steps = 100
    loop = NowAndThen("60%", SLOW_DISK, tmp_path)
    loop.LOOKED_AT = (2, 8)
    states = []
    with loop.memory:
        for _ in range(steps):
            states.append(loop.memory.state)
            loop.step(1)
    assert sum(bool(step.left) for step in loop.memory.measured) >= steps // loop.EACH // 2
    assert states.count("observe") <= 2 + 8 + 0.05 * steps + 4
    assert max(loop.peaks) <= (loop.memory.limit_bytes or 0)


@pytest.mark.parametrize("once", [False, True])
def test_a_step_that_runs_other_ops_from_now_on_is_planned_again(once: bool, tmp_path: Path) -> None:
    """Recipes are matched op by op: they would be left each time. A single step that differs changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    data = torch.randn(SIZE // 64, 64)
    with ebbtide.Budget("60%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(STEPS):
            differs = index == 12 if once else index >= 5
            with memory.step():
                hidden = data
                for layer in model:
                    hidden = layer(hidden)
                    if differs:
                        hidden.detach().abs()
                hidden.sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            model(data).sum().backward()
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                assert gradient is not None
                assert parameter.grad is not None
                assert torch.equal(gradient, parameter.grad)
            model.zero_grad()
    assert memory.plan is not None
    assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)
    left = [index for index, step in enumerate(memory.measured) if step.left]
    assert left == [12 if once else 5]
