"""When what comes now and then is due again, and how often it may be looked for in vain."""

from __future__ import annotations

from ebbtide.run.recurrence import Allowance, Recurrence


def test_due_as_long_after_the_latest_as_that_came_after_the_one_before() -> None:
    strange = Recurrence()
    assert strange.due == -1
    strange.note(3)
    assert strange.due == 7, "as long after it as it came after the loop began, at step -1"
    strange.note(10)
    assert (strange.latest, strange.due) == (10, 17)


def test_some_steps_and_a_share_of_all_may_be_counted() -> None:
    allowance = Allowance(count=2, share=0.1)
    assert [number for number in range(30) if allowance.claim(number)] == [0, 1, 2, 10, 20]
