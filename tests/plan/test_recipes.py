"""Which values can be computed again, and from what."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.errors import PlanError
from ebbtide.plan import find_recipes
from ebbtide.plan.problem import Facts
from ebbtide.plan.recipes import NEAREST, deeper_recipes
from ebbtide.plan.replay import check_recipe, operands
from ebbtide.step import Op, Phase, Replay, Step
from tests.plan.random_steps import KIB, Tape

PURE: tuple[Replay, ...] = ("pure",)


def saved_chain(*replays: Replay, save_all: bool = False) -> Step:
    """A chain of ops of which the last result is saved (or all are), with an absence at the turn."""
    tape = Tape()
    value = tape.external(64 * KIB)
    numbers: list[int] = []
    for place, replay in enumerate(replays):
        writes = value if replay == "in_place" else None
        value = tape.op([value], [] if writes is not None else [64 * KIB], writes=writes, replay=replay)[-1]
        if save_all or place == len(replays) - 1:
            numbers = [*numbers, tape.pack(value)]
    tape.op(tape.op([value], [KIB], replay="opaque"), [KIB], replay="opaque")
    for number in reversed(numbers):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [KIB], phase="backward")
    return tape.step()


def test_goes_back_to_the_external_value() -> None:
    assert find_recipes(saved_chain("pure", "pure", "pure")) == [(0, 1, 2)]


def test_stops_at_saved_values() -> None:
    assert find_recipes(saved_chain("pure", "pure", "pure", save_all=True)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("replay", ["random", "opaque", "view"])
def test_never_through_what_cannot_be_replayed(replay: Replay) -> None:
    assert find_recipes(saved_chain("pure", replay, "pure")) == [None]


def test_follows_versions_written_in_place() -> None:
    assert find_recipes(saved_chain("pure", "in_place", "pure", "in_place")) == [(0, 1, 2, 3)]


def test_long_recipes_are_not_worth_it() -> None:
    assert find_recipes(saved_chain(*PURE * 12)) == [tuple(range(12))]
    assert find_recipes(saved_chain(*PURE * 13)) == [None]


def test_banned_values_are_made_neither_for_themselves_nor_on_the_way() -> None:
    step = saved_chain("pure", "pure", save_all=True)
    assert find_recipes(step, {0}) == [None, (1,)]
    assert find_recipes(step, {0, 1}) == [None, None]


def test_batch_norm_leaves_its_statistics_alone() -> None:
    tape = Tape()
    x, statistics = tape.external(64 * KIB), tape.external(KIB)
    y = tape.op([x, statistics], [64 * KIB], writes=statistics, replay="batch_norm")[0]
    saved = tape.pack(y)
    tape.op(tape.op([y], [KIB]), [KIB])
    tape.unpack(saved)
    tape.op([y], [KIB], phase="backward")
    assert find_recipes(tape.step()) == [(0,)]


class Counted(int):
    """A number that counts how often numbers like it were hashed or compared."""

    looked_at = 0

    def __hash__(self) -> int:
        Counted.looked_at += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looked_at += 1
        return super().__eq__(other)


def test_operands_of_ops_that_write_many_tensors() -> None:
    """Each once, in the order in which they are named; each is looked at a few times, not 2,000 times."""
    count = 2_000
    numbers = [Counted(number) for number in range(4 * count)]
    pairs = tuple(zip(numbers[:count], numbers[3 * count :], strict=True))
    read = (*numbers[count : 3 * count], numbers[5], numbers[5])
    op = Op("aten._foreach_addcmul_.ScalarList", read, (), pairs, 1e-3, 0, "in_place", "forward")
    Counted.looked_at = 0
    in_place = operands(op)
    in_batch_norm = operands(dataclasses.replace(op, replay="batch_norm"))
    assert Counted.looked_at <= 5 * len(read)
    assert in_place == [*range(count, 3 * count), 5, *(number for number in range(count) if number != 5)]
    assert in_batch_norm == [*range(count, 3 * count)]


def test_leaf_saved_after_the_value_is_made_on_the_way() -> None:
    tape = Tape()
    x = tape.external(64 * KIB)
    (a,) = tape.op([x], [64 * KIB])
    (b,) = tape.op([a], [64 * KIB])
    saved_b = tape.pack(b)
    saved_a = tape.pack(a)
    tape.op(tape.op([b], [KIB]), [KIB])
    for saved, value in ((saved_b, b), (saved_a, a)):
        tape.unpack(saved)
        tape.op([value], [KIB], phase="backward")
    assert find_recipes(tape.step()) == [(0,), (0, 1)]


def in_two_passes(between: Phase, wanted_later: bool) -> Step:
    """What a backward pass has made is saved, and wanted later, or in that pass already."""
    tape = Tape()
    x = tape.external(64 * KIB)
    (a,) = tape.op([x], [64 * KIB], phase="backward")
    saved = tape.pack(a)
    tape.op(tape.op([a], [KIB], phase="backward"), [KIB], phase="backward" if not wanted_later else between)
    tape.unpack(saved)
    tape.op([a], [KIB], phase="backward")
    tape.op([x], [KIB], phase=between)
    return tape.step()


def test_ops_of_the_last_backward_pass_are_not_replayed() -> None:
    step = in_two_passes("backward", wanted_later=True)
    assert find_recipes(step) == [None]
    with pytest.raises(PlanError, match="which is pure, backward"):
        check_recipe(Facts.of(step), step.absences[0].value, (0,))


def test_ops_of_an_earlier_backward_pass_are_replayed() -> None:
    assert find_recipes(in_two_passes("forward", wanted_later=True)) == [(0,)]


def test_no_recipe_is_looked_for_within_the_pass() -> None:
    """Such as for what a checkpoint makes in it: the capture mode would be on for all of the pass."""
    assert find_recipes(in_two_passes("forward", wanted_later=False)) == [None]


def test_deeper_recipes_make_again_what_shorter_ones_read() -> None:
    step = saved_chain(*PURE * 4, save_all=True)
    facts = Facts.of(step)
    assert deeper_recipes(facts, step.absences[3], (3,)) == [(2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert deeper_recipes(facts, step.absences[3], (3,), {2}) == [(2, 3)]
    assert deeper_recipes(facts, step.absences[0], (0,)) == []


def test_deeper_recipes_far_back_read_a_single_value() -> None:
    """Two chains are joined: going back along one of them, recipes read its value and all that the other one needs."""
    tape = Tape()
    x = tape.external(64 * KIB)
    (left,) = (right,) = (x,)
    numbers = []
    for _ in range(NEAREST):
        (left,), (right,) = tape.op([left], [64 * KIB]), tape.op([right], [64 * KIB])
        numbers += [tape.pack(left), tape.pack(right)]
    (joined,) = tape.op([left, right], [64 * KIB])
    numbers.append(tape.pack(joined))
    tape.op(tape.op([joined], [KIB], replay="opaque"), [KIB], replay="opaque")
    for number in reversed(numbers):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [KIB], phase="backward")
    step = tape.step()
    last = len(step.absences) - 1
    found = deeper_recipes(Facts.of(step), step.absences[last], find_recipes(step)[last] or ())
    ops = 2 * NEAREST + 1
    assert [len(recipe) for recipe in found] == [*range(2, NEAREST + 2), ops - 1, ops]
