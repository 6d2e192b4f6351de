"""A plan written out for the conductor: in a time that grows as the step does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ebbtide.decisions import Recompute
from ebbtide.plan import simulate
from ebbtide.run.script import write_script
from ebbtide.step import Value
from tests.plan.limits import limit_at, solve_or_least
from tests.plan.random_steps import lone_machine, network_step


class Watched(tuple[Value, ...]):
    """The values of a step, which count how often somebody looks through them."""

    looks = 0

    def __iter__(self) -> Iterator[Value]:
        Watched.looks += 1
        return super().__iter__()


def looks(layers: int) -> int:
    """How often all values of a network are looked through while a plan that computes again is written out."""
    step, machine = network_step(layers), lone_machine()
    plan = solve_or_least(step, machine, limit_at(step, 0.5))
    assert any(isinstance(decision, Recompute) for decision in plan.decisions)
    memory = simulate(step, machine, plan.decisions).memory
    watched = dataclasses.replace(step, values=Watched(step.values))
    before = Watched.looks
    write_script(watched, plan, memory)
    return Watched.looks - before


def test_values_are_looked_through_as_often_in_long_steps_as_in_short_ones() -> None:
    assert 0 < looks(4) == looks(12)
