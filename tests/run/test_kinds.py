"""Steps of several kinds: the budget holds in each, whichever was expected, and so do the bits."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.run.forks import KnownScripts
from ebbtide.run.keys import step_key
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from ebbtide.run.observing import observe_step
from ebbtide.run.scrutiny import CLOSE_LOOKS
from ebbtide.step import Step
from tests.run.harness import FAST_DISK, SLOW_DISK
from tests.run.inside import expected_kind, kinds_of

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

BLOCKS, WIDTH, BATCH = 8, 64, 256
EVERY = tuple(range(BLOCKS))


class Blocks(nn.Module):
    """Residual blocks, of which each step leaves some out, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)
        )
        self.ends = nn.ModuleList(nn.Linear(WIDTH, WIDTH - each) for each in range(BLOCKS + 1))

    def forward(self, x: Tensor, blocks: Sequence[int], looks: int) -> Tensor:
        h = self.blocks[0](x)
        for _ in range(looks):  # saves nothing, but numbers what comes after it
            h.detach().abs().sum()
        for block in blocks:
            h = h + self.blocks[block](h)
        ended: Tensor = self.ends[len(blocks)](h)
        return ended.square().mean()


class Dropped(Blocks):
    """The same, but that no step saves anything that the one with all blocks does not."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleList([self.ends[0]] * (BLOCKS + 1))


Steps = Sequence[tuple[Sequence[int], int]]


class Seen(NamedTuple):
    """Of one step: what it was expected to be for, its peak, why it left its plan, and whether it only was to be held
    to the budget: the safe policy observes near it, and the step that verifies has true values besides."""

    state: str
    peak_bytes: int
    left: str
    counts: bool


def counted(memory: ebbtide.Budget, step: Callable[[int], None], number: int, model: nn.Module) -> Seen:
    """Take step ``number`` with its bytes counted, and clear the gradients of ``model`` behind it."""
    state = memory.state
    with PeakMeter() as meter, memory.step():
        step(number)
    model.zero_grad()
    return Seen(state, meter.peak_bytes, memory.measured[-1].left, state not in ("observe", "verify"))


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def run(
    steps: Steps,
    limit_bytes: int,
    machine: Machine,
    directory: Path,
    rows: Sequence[int] = (),
    build: Callable[[], Blocks] = Blocks,
) -> list[Seen]:
    """Steps under a budget, each with its number of ``rows``, if any; their gradients are those without a budget."""
    plain, model, found = build(), build(), []
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    with ebbtide.Budget(limit_bytes, spill=directory, machine=machine) as memory:
        for (blocks, looks), count in zip(steps, rows or [BATCH] * len(steps), strict=True):
            plain(data[:count], blocks, looks).backward()
            expected, state = gradients(plain), memory.state
            verified = all(kind.state != "verify" for kind in kinds_of(memory))
            with PeakMeter() as meter, memory.step():
                model(data[:count], blocks, looks).backward()
            for one, other in zip(expected, gradients(model), strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(one, other)
            left = memory.measured[-1].left
            found.append(Seen(state, meter.peak_bytes, left, verified and state != "observe" and not left))
    return found


def plain_peak(blocks: Sequence[int], build: Callable[[], Blocks] = Blocks) -> int:
    model = build()
    data = torch.randn(BATCH, WIDTH)
    with PeakMeter() as meter:
        model(data, blocks, 0).backward()
    return meter.peak_bytes


def assert_within(found: Sequence[Seen], limit_bytes: int, steps: int) -> None:
    """At least so many steps were to stay within the budget, and did."""
    assert sum(seen.counts for seen in found) >= steps
    assert [(index, seen) for index, seen in enumerate(found) if seen.counts and seen.peak_bytes > limit_bytes] == []


def mixed(kinds: Steps, count: int = 30) -> list[tuple[Sequence[int], int]]:
    """Steps of each kind one after the other, until all are planned; then ``count`` in no order."""
    dice = random.Random(0)
    settled = [kind for kind in kinds for _ in range(5)] * 2
    return [*settled, *(dice.choice(kinds) for _ in range(count))]


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("share", [0.7, 0.8, 0.95])
def test_kinds_that_begin_alike(machine: Machine, share: float, tmp_path: Path) -> None:
    """Which kind a step is of shows when some of it has been saved as if it were of another."""
    limit_bytes = int(share * plain_peak(EVERY))
    found = run(mixed([(EVERY, 0), (EVERY[:-1], 0), (EVERY[:-3], 0)]), limit_bytes, machine, tmp_path)
    assert_within(found, limit_bytes, steps=30)
    assert not any(seen.left for seen in found[-30:])


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_kinds_that_number_values_differently(machine: Machine, tmp_path: Path) -> None:
    """Ops that save nothing shift the numbers of all later values, and the places of all later ops."""
    limit_bytes = int(0.7 * plain_peak(EVERY))
    found = run(mixed([(EVERY, 0), (EVERY[:-1], 1), (EVERY[:-3], 2)]), limit_bytes, machine, tmp_path)
    assert_within(found, limit_bytes, steps=30)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_a_larger_kind_comes_where_nothing_binds(machine: Machine, tmp_path: Path) -> None:
    limit_bytes = int(1.02 * plain_peak(EVERY[:4]))
    assert limit_bytes < 0.95 * plain_peak(EVERY)
    found = run(mixed([(EVERY[:4], 0), (EVERY, 0)]), limit_bytes, machine, tmp_path)
    assert_within(found, limit_bytes, steps=30)
    assert {"idle", "planned"} <= {seen.state for seen in found[-30:]}


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("each", [7, 16])
def test_a_kind_that_comes_now_and_then(each: int, machine: Machine, tmp_path: Path) -> None:
    """A term of the loss, say, that is computed each so many steps: it is soon known when such a step comes."""
    limit_bytes = int(0.8 * plain_peak(EVERY))
    kinds: list[tuple[Sequence[int], int]] = [(EVERY, 0) if i % each == 5 else (EVERY[:-2], 0) for i in range(9 * each)]
    found = run(kinds, limit_bytes, machine, tmp_path)
    assert_within(found, limit_bytes, steps=4 * each)
    assert sum(bool(seen.left) for seen in found) <= 2
    assert sum(seen.state == "observe" for seen in found) <= 2 + 4 + 8 + 2
    assert {seen.state for seen in found[-each:]} <= {"planned", "idle"}
    before = [seen.state for seen in found[:-each]]
    assert before.count("audit") >= 2, "not each of the kinds was counted"


@pytest.mark.usefixtures("plans_stay")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_leaves_out_some_is_run_by_the_plan_of_all(share: float, machine: Machine, tmp_path: Path) -> None:
    """Blocks are dropped at random: each step may be of a kind that never came, and only the largest one is known."""
    limit_bytes = int(share * plain_peak(EVERY))
    dice = random.Random(0)
    dropped = [(tuple(block for block in EVERY if dice.random() > 0.2), 0) for _ in range(20)]
    found = run([*[(EVERY, 0)] * 9, *dropped], limit_bytes, machine, tmp_path, build=Dropped)
    assert [seen.left for seen in found if seen.left] == []
    assert {seen.state for seen in found[-20:]} == {"planned"}
    assert_within(found, limit_bytes, steps=20)


@pytest.mark.parametrize("never", [(), (BLOCKS - 1,)], ids=["some", "one_for_ever"])
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_what_leaves_out_some_is_evidence_enough(machine: Machine, never: tuple[int, ...], tmp_path: Path) -> None:
    """A plan is verified and audited though a step with all that it was made for does not come again."""
    limit_bytes = int(0.6 * plain_peak(EVERY))
    dice, dropped = random.Random(0), list[tuple[Sequence[int], int]]()
    while len(dropped) < 28:
        left_out = (*never, *(block for block in EVERY if dice.random() < 0.2))
        dropped += [(tuple(block for block in EVERY if block not in left_out), 0)] * bool(left_out)
    found = run([*[(EVERY, 0)] * 2, *dropped, *[(EVERY, 0)] * 2], limit_bytes, machine, tmp_path, build=Dropped)
    assert [seen.left for seen in found if seen.left] == []
    assert [seen.state for seen in found[-8:]] == [*["rehearse"] * 7, "planned"]
    assert_within(found, limit_bytes, steps=10)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("share", [0.75, 0.9])
def test_known_kinds_that_leave_out_some_stay_within(share: float, machine: Machine, tmp_path: Path) -> None:
    """What comes after what was left out may need memory that the larger kind makes room for only later."""

    class Wide(Dropped):
        def __init__(self) -> None:
            super().__init__()
            self.ends = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH)] * (BLOCKS + 1))

    limit_bytes = int(share * plain_peak(EVERY, Wide))
    found = run(mixed([(EVERY, 0), (EVERY[:-1], 0), (EVERY[:-5], 0)]), limit_bytes, machine, tmp_path, build=Wide)
    assert_within(found, limit_bytes, steps=30)


@pytest.mark.usefixtures("plans_stay")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_where_kinds_come_in_no_order_the_largest_is_begun_with(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To go over to another plan is dear, to leave out some is not."""
    kinds = [(EVERY[:-3], 0), (EVERY[:-1], 0), (EVERY, 0)]  # the others would not be observed after the largest
    dice = random.Random(0)
    model = Dropped()
    data = torch.randn(BATCH, WIDTH)
    with ebbtide.Budget(int(0.7 * plain_peak(EVERY)), spill=tmp_path, machine=machine) as memory:
        for blocks, looks in mixed(kinds):
            with memory.step():
                model(data, blocks, looks).backward()
            model.zero_grad()
        scripts = [kind.script for kind in sorted(kinds_of(memory), key=lambda kind: -len(kind.step.saved))]
        every, some, few = (script for script in scripts if script is not None)
        library = KnownScripts([])
        roomy, tight = (dataclasses.replace(every, limit_bytes=times * every.limit_bytes) for times in (2, 0))
        assert [library.covers(one, some, 0) for one in (roomy, some, few, tight)] == [True, True, False, False]
        assert library.covers(roomy, few, len(few.saves))

        monkeypatch.setattr("ebbtide.run.forks.can_run", lambda one, other, _: len(one.saves) > len(other.saves))
        memory._loop.kinds._library = library  # what it has worked out is known no more
        for blocks, looks in [dice.choice(kinds) for _ in range(12)]:
            assert expected_kind(memory) is max(kinds_of(memory), key=lambda kind: len(kind.step.saved))
            with memory.step():
                model(data, blocks, looks).backward()
            model.zero_grad()
        assert [measured.left for measured in memory.measured[-12:] if measured.left] == []


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


@pytest.mark.parametrize("tunes", [True, False])
@pytest.mark.parametrize("sort", ["type", "dimensions"])
def test_a_kind_that_begins_otherwise_than_one_in_which_nothing_binds(sort: str, tunes: bool, tmp_path: Path) -> None:
    """Of steps of the latter hardly anything is looked at later: each that came passed the limit without the arena."""
    torch.manual_seed(0)
    large, data = layers(12), torch.randn(4 * BATCH, WIDTH)
    loops: list[tuple[nn.Module, Tensor]] = [(nn.Conv1d(8, 8, 3), torch.randn(64, 8, 32)), (large, data)]
    if sort == "type":
        loops = [(large, data), (layers(12).double(), data.double())]

    def step(which: int) -> None:
        model, given = loops[which]
        model(given).square().mean().backward()

    def alone(which: int) -> int:
        with PeakMeter() as meter:
            step(which)
        loops[which][0].zero_grad()
        return meter.peak_bytes

    limit_bytes = int(1.15 * alone(0)) if sort == "type" else int(0.6 * alone(1))
    assert alone(0) <= limit_bytes < alone(1)

    gaps = (20, 4, 7, 5, 6, 9)
    order = [0] * 6 + [1] * 6 + [0] * 4 + [1] * 4 + [which for gap in gaps for which in (*[0] * gap, 1)]
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK, tune_allocator=tunes) as memory:
        seen = [counted(memory, step, which, loops[which][0]) for which in order]
        assert {kind.state for kind in kinds_of(memory)} == {"idle", "planned"}
    late = [each for each, which in zip(seen, order, strict=True) if which][-len(gaps) :]
    assert not any(each.left for each in late), late
    assert all(each.peak_bytes <= limit_bytes for each in late), [each.peak_bytes / limit_bytes for each in late]


def test_a_first_tensor_of_another_type_tells_of_an_unknown_kind(tmp_path: Path) -> None:
    """Of a step in which nothing binds no more is looked at; without the arena nothing else tells."""
    model, data = layers(4), torch.randn(BATCH, WIDTH)
    with ebbtide.Budget("1GiB", spill=tmp_path, machine=FAST_DISK, tune_allocator=False) as memory:
        for number in range(CLOSE_LOOKS + 6):
            if number == CLOSE_LOOKS + 5:
                model, data = model.double(), data.double()
            with memory.step():
                model(data).square().mean().backward()
            model.zero_grad()
        assert memory.measured[-1].left == "the first saved tensor is of float64, expected float32"
        assert memory.state == "observe"


def test_what_the_user_keeps_stays_where_a_step_goes_over_late(tmp_path: Path) -> None:
    """Moved out, it came back as a second copy: steps that turned out to be another kind's in their backward pass held
    1.09 times the limit, until they were expected."""
    torch.manual_seed(0)
    sizes = (64, 256, 256, 256, 256, 64)
    parts: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        parts += [nn.Linear(one, other), nn.GELU()]
    model, below = nn.Sequential(*parts[:-1]), nn.Sequential(*parts[:5])
    data = torch.randn(1024, 64)

    def step(number: int) -> None:
        h = below(data)
        loss = model[5:](h).square().mean()
        other = h.abs().mean()
        if number % 5 == 4:
            torch.autograd.grad(other, list(below.parameters()), retain_graph=True)
        (loss + other).backward()

    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        seen = [counted(memory, step, number, model) for number in range(30)]
    late = [each.peak_bytes <= (memory.limit_bytes or 0) for each in seen[19::5] if each.state == "planned"]
    assert late
    assert all(late), seen


def test_a_value_that_is_saved_again_and_another_one_in_its_place(tmp_path: Path) -> None:
    """Behind the last block most steps save what the middle one has made once more, and every fourth a new value of
    that shape: it took no other plan up, left its own each time, and passed the limit by a tenth."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8))
    data = torch.randn(1024, 128)

    def step(number: int) -> None:
        h = middle = data
        for place, block in enumerate(blocks):
            h = block(h)
            middle = h if place == 2 else middle
        if number % 4 == 3:
            h = h * h.sigmoid()
        (h.square().mean() + middle.abs().mean()).backward()

    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        seen = [counted(memory, step, number, blocks) for number in range(28)][16:]
        assert {kind.state for kind in kinds_of(memory)} == {"planned"}
    assert not any(each.left for each in seen), seen
    assert all(each.peak_bytes <= (memory.limit_bytes or 0) for each in seen if each.state == "planned"), seen


def seen_where_one_is_left_out(
    blocks: nn.ModuleList, out: int, middle: int, every: int, budget: str, spill: Path
) -> list[Seen]:
    """Steps of which some leave a block out, and all save what the middle one has made once more at their end."""
    data = torch.randn(512, 128)

    def step(number: int) -> None:
        h = tapped = data
        for place, block in enumerate(blocks):
            if place == out and number % every == every - 1:
                continue
            h = block(h)
            tapped = h if place == middle else tapped
        (h.square().mean() + tapped.abs().mean()).backward()

    with ebbtide.Budget(budget, spill=spill, machine=SLOW_DISK) as memory:
        return [counted(memory, step, number, blocks) for number in range(40)]


def test_a_plan_whose_values_are_others_does_not_run_steps_that_leave_some_out(tmp_path: Path) -> None:
    """By size alone what is left fits into the whole: into a block that saves one value twice where it saves two."""
    torch.manual_seed(0)
    acts = (nn.GELU, nn.Tanh, nn.ReLU, nn.ReLU, nn.GELU, nn.Tanh, nn.GELU, nn.Tanh)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), act()) for act in acts)
    for place in (0, 7):
        blocks[place].append(nn.LayerNorm(128))  # type: ignore[operator]
    seen = seen_where_one_is_left_out(blocks, 2, 3, 2, "80%", tmp_path)[20:]
    assert not any(each.left for each in seen), seen


def test_a_value_that_is_saved_again_where_a_new_one_is_expected(tmp_path: Path) -> None:
    """Later the plan of such steps cannot be taken up: two values are held of which that knows as one."""
    torch.manual_seed(0)
    acts = (nn.Tanh, nn.SiLU, nn.SiLU, nn.ReLU, nn.Tanh, nn.ReLU, nn.GELU)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), act()) for act in acts)
    seen = seen_where_one_is_left_out(blocks, 2, 3, 5, "80%", tmp_path)[24:]
    assert not any(each.left for each in seen), seen


def test_a_step_that_leaves_some_out_is_known_by_what_is_left() -> None:
    model, data = Dropped(), torch.randn(BATCH, WIDTH)

    def kind(blocks: Sequence[int]) -> Kind:
        return Kind(observe_step(lambda: model(data, blocks, 0).backward(), torch.device("cpu")))

    whole, part = kind(EVERY), kind(EVERY[:4] + EVERY[5:])
    less = len(whole.step.saved) - len(part.step.saved)
    assert less > 0
    parts = (frozenset(range(first, first + less)) for first in range(len(part.step.saved)))
    assert any(step_key(whole.step, missing, keeps_graphs=False) == part.key for missing in parts)
    assert step_key(whole.step, keeps_graphs=False) == whole.key != part.key
    assert step_key(whole.step, keeps_graphs=True) != whole.key


def test_the_kind_that_came_longest_ago_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.run.known_kinds.MOST_KINDS", 2)
    limit_bytes = int(0.8 * plain_peak(EVERY))
    found = run(mixed([(EVERY, 0), (EVERY[:-1], 0), (EVERY[:-3], 0)]), limit_bytes, FAST_DISK, tmp_path)
    assert_within(found, limit_bytes, steps=10)
    assert any(seen.left for seen in found[-30:])


def test_kinds_in_turns_are_expected(tmp_path: Path) -> None:
    kinds = [(EVERY, 0), (EVERY[:-1], 0), (EVERY[:4], 0)]
    found = run(kinds * 12, int(1.02 * plain_peak(EVERY[:4])), FAST_DISK, tmp_path)
    assert [seen.state for seen in found[-6:]] == ["planned", "planned", "idle"] * 2


def test_strangers_are_planned_for_once_they_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_plans: Callable[..., Plan]
) -> None:
    """Where each step may be of another kind, a plan for each would cost more than it could save."""
    planned: list[int] = []

    def solve(step: Step, *arguments: Any, **options: Any) -> Plan:
        planned.append(len(step.saved))
        return quick_plans(step, *arguments, **options)

    monkeypatch.setattr("ebbtide.run.solving.solve", solve)
    monkeypatch.setattr("ebbtide.run.loop.MOST_STRANGERS", 2)
    limit_bytes = int(0.8 * plain_peak(EVERY))
    strangers = [(EVERY[:count], 0) for count in range(BLOCKS)]
    found = run([*strangers, *[(EVERY, 0)] * 8], limit_bytes, FAST_DISK, tmp_path)
    assert len(planned) == 2, "one stranger, and the kind that comes again"
    assert [seen.state for seen in found[-3:]] == ["planned"] * 3
    assert_within(found, limit_bytes, 4)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_smaller_steps_are_evidence_enough(machine: Machine, tmp_path: Path) -> None:
    """A plan is verified and audited though the sizes that it was made for do not come again."""
    limit_bytes = int(0.8 * plain_peak(EVERY))
    rows = [BATCH] * 2 + [BATCH - 16, BATCH - 40] * 4
    found = run([(EVERY, 0)] * len(rows), limit_bytes, machine, tmp_path, rows)
    assert [seen.left for seen in found if seen.left] == []
    assert [seen.state for seen in found[-3:]] == ["rehearse"] * 3
    assert_within(found, limit_bytes, 5)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_a_larger_step_than_expected_goes_over_to_a_larger_plan(machine: Machine, tmp_path: Path) -> None:
    limit_bytes = int(0.8 * plain_peak(EVERY))
    known = [BATCH // 2] * 5 + [BATCH] * 8
    others = [BATCH // 2, BATCH - 16, BATCH // 2, BATCH // 2, BATCH - 16, BATCH - 40, BATCH // 2, BATCH]
    rows = [*known, *others * 2]
    found = run([(EVERY, 0)] * len(rows), limit_bytes, machine, tmp_path, rows)
    assert [seen.left for seen in found[len(known) :] if seen.left] == []
    assert {seen.state for seen in found[len(known) :]} <= {"idle", "verify", "audit", "rehearse", "planned"}
    assert_within(found[len(known) :], limit_bytes, len(others))
