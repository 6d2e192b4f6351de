"""What is remembered of steps that ran."""

from __future__ import annotations

from ebbtide.measured import LATEST, Measured, Measurements


def test_only_the_latest_steps_are_remembered_and_all_are_counted() -> None:
    steps = Measurements(most=3)
    assert [steps.add(Measured(seconds=float(number))) for number in range(5)] == list(range(5))
    assert len(steps) == 5
    assert [step.seconds for step in steps] == [2.0, 3.0, 4.0]


def test_what_is_known_later_is_put_in_its_place() -> None:
    steps = Measurements(most=3)
    for _ in range(5):
        steps.add(Measured("planned"))
    steps.correct(4, Measured("planned", seconds=4.0))
    steps.correct(2, Measured("planned", seconds=2.0))
    steps.correct(1, Measured("planned", seconds=1.0))  # forgotten already
    assert [step.seconds for step in steps] == [2.0, None, 4.0]


def test_of_a_long_training_little_is_remembered() -> None:
    steps = Measurements()
    for _ in range(3 * LATEST):
        steps.add(Measured())
    assert len(list(steps)) == LATEST
