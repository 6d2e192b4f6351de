"""A step is cut where everything passes through one saved value, and a chain schedule is told by one fate per stage."""

from __future__ import annotations

import itertools

import pytest

from ebbtide.errors import PolicyError
from ebbtide.plan import plain_peak_bytes
from ebbtide.plan.problem import Problem
from ebbtide.plan.published.chain import Action, Chain, Fate, Origin, Stage, fates
from ebbtide.plan.published.cut import Cut, cut
from ebbtide.step import Step
from tests.plan.published.chain_steps import chain_step
from tests.plan.random_steps import KIB, Tape, lone_machine, network_step


def cut_of(step: Step) -> Cut:
    return cut(Problem.of(step, lone_machine()))


def residual_step(*, skip: bool = False) -> Step:
    """Three residual blocks; with ``skip`` the first block's result is read again by the last one."""
    tape = Tape()
    value = tape.op([tape.external(64 * KIB)], [64 * KIB], seconds=1.0)[0]
    first, saved = value, []
    for block in range(3):
        saved.append(tape.pack(value))
        inner = tape.op([value], [96 * KIB], seconds=2.0)[0]
        saved.append(tape.pack(inner))
        branch = tape.op([inner], [64 * KIB], seconds=3.0)[0]
        inputs = [value, branch, *([first] if skip and block == 2 else [])]
        value = tape.op(inputs, [64 * KIB], seconds=1.0)[0]
    saved.append(tape.pack(value))
    gradient = tape.op([value], [KIB], phase="backward")[0]
    for number in reversed(saved):
        tape.unpack(number)
        gradient = tape.op([gradient, tape.saved[number][0]], [64 * KIB], seconds=4.0, phase="backward")[0]
    return tape.step()


def test_blocks_are_stages() -> None:
    found = cut_of(residual_step())
    assert found.first_ticks == (0, 1, 4, 7)
    chain = found.chain
    assert [stage.forward_seconds for stage in chain.stages] == [1.0, 6.0, 6.0, 6.0]
    assert [stage.output_bytes // KIB for stage in chain.stages] == [64, 64, 64, 0]
    # The last stage's result ends its absence at the first backward op: it is one of what that stage saves, or gone.
    assert [stage.saved_bytes // KIB for stage in chain.stages[:3]] == [64, 160, 160]
    assert sum(stage.backward_seconds for stage in chain.stages) == pytest.approx(7 * 4.0 + 1e-3)
    assert all(stage.fixed_bytes == 0 for stage in chain.stages)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 12, 50])
def test_neighbours_are_joined(most: int) -> None:
    whole = cut_of(chain_step(12))
    joined = cut(Problem.of(chain_step(12), lone_machine()), most)
    assert len(joined.chain.stages) == min(most, len(whole.chain.stages))
    assert set(joined.first_ticks) <= set(whole.first_ticks)
    assert joined.chain.plain_seconds == pytest.approx(whole.chain.plain_seconds)
    lengths = [end - start for start, end in itertools.pairwise(joined.first_ticks)]
    assert max(lengths, default=1) <= 2 * min(lengths, default=1) + 4


def test_a_long_skip_joins_the_stages_it_spans() -> None:
    assert cut_of(residual_step(skip=True)).first_ticks == (0, 1)


def test_overwritten_and_unsaved_values_are_no_cut() -> None:
    """Batch norm's result is overwritten in place by ReLU: only what comes before and after both can be kept."""
    found = cut_of(network_step(4))
    assert found.first_ticks == (0, 1, 3, 4, 6, 7, 9, 10)


@pytest.mark.parametrize("stages", [2, 5, 9])
def test_without_a_plan_the_chain_holds_what_the_step_does(stages: int) -> None:
    step = chain_step(stages)
    assert cut_of(step).chain.plain_bytes >= plain_peak_bytes(step) - step.resting_bytes
    assert cut_of(step).chain.plain_seconds == pytest.approx(step.plain_seconds)


def test_what_no_recipe_can_make_is_fixed() -> None:
    found = cut_of(chain_step(4, noise_every=2))
    assert sum(stage.fixed_bytes for stage in found.chain.stages) == 2 * 64 * KIB


def two_streams() -> Step:
    tape = Tape()
    left, right = tape.op([tape.external(64 * KIB)], [64 * KIB, 64 * KIB])
    saved = []
    for _ in range(3):
        saved += [tape.pack(left), tape.pack(right)]
        left, right = tape.op([left], [64 * KIB])[0], tape.op([right], [64 * KIB])[0]
    loss = tape.op([left, right], [KIB])[0]
    gradient = tape.op([loss], [KIB], phase="backward")[0]
    for number in reversed(saved):
        tape.unpack(number)
        gradient = tape.op([gradient, tape.saved[number][0]], [64 * KIB], phase="backward")[0]
    return tape.step()


def forward_only() -> Step:
    tape = Tape()
    tape.pack(tape.op([tape.external(64 * KIB)], [64 * KIB])[0])
    return tape.step()


def two_passes() -> Step:
    tape = Tape()
    value = tape.op([tape.external(64 * KIB)], [64 * KIB])[0]
    tape.op([value], [64 * KIB], phase="backward")
    tape.pack(tape.op([value], [64 * KIB])[0])
    return tape.step()


@pytest.mark.parametrize(
    ("step", "words"),
    [(two_streams(), "is none"), (forward_only(), "no backward pass"), (two_passes(), "saves tensors after")],
)
def test_what_is_no_chain_is_refused(step: Step, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        cut_of(step)


def test_impossible_chains_are_refused() -> None:
    with pytest.raises(PolicyError, match="at least one"):
        Chain(())
    with pytest.raises(PolicyError, match="less than its output"):
        Chain((Stage(1, 1, 4, 3),))
    with pytest.raises(PolicyError, match="negative"):
        Chain((Stage(1, -1, 4, 4),))


def test_fates_of_a_nested_schedule() -> None:
    """Sweep to 3; then from 0 again, keeping the input of 1; 1 and 2 in one go from there."""
    kinds = {"a": "forward_all", "k": "forward_keep", "d": "forward_drop", "b": "backward"}
    text = "k0 d1 d2 a3 b3 k0 a1 a2 b2 b1 a0 b0"
    actions = [Action(kinds[word[0]], int(word[1])) for word in text.split()]  # type: ignore[arg-type]
    assert fates(actions) == [
        Fate(True, None),
        Fate(True, Origin(0, through=False)),
        Fate(True, Origin(1, through=True)),
        Fate(False, None),
    ]


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(PolicyError, match="without what it needs"):
        fates([Action("forward_keep", 0), Action("backward", 0)])
    with pytest.raises(PolicyError, match="before the one in front"):
        fates([Action("forward_all", 1)])
