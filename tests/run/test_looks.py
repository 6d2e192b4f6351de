"""Which steps are observed once the first ones were."""

from __future__ import annotations

from ebbtide.run.looks import Looks


def observed(looks: Looks, first: int, last: int) -> list[int]:
    found = []
    for number in range(first, last):
        if looks.are_due(number):
            looks.took_one()
            found.append(number)
    return found


def test_after_one_that_left_its_plan_those_next_and_the_one_as_long_after_it() -> None:
    looks = Looks()
    assert observed(looks, 0, 9) == [0, 1]
    looks.again(9, ops_only=False)
    assert observed(looks, 10, 30) == [10, 11, 12, 13, 19], "every tenth is likely to be another one"
    looks.again(30, ops_only=False)
    assert observed(looks, 31, 60)[-1] == 51


def test_one_that_ran_other_ops_is_no_other_kind() -> None:
    looks = Looks()
    assert observed(looks, 0, 30) == [0, 1]
    looks.again(30, ops_only=True)
    assert observed(looks, 31, 90) == [31, 32]
