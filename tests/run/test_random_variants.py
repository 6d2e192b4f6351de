"""Random programs of which each step runs one of several variants, bit for bit as in plain PyTorch.

Variants save tensors of the same shapes more often than real steps that differ: little tells one from another. See
`test_random_programs` for the programs, and for how to try many more.
"""

from __future__ import annotations

import functools
import random
import re
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.machine import Tier
from tests.run.harness import HELD_MORE, Guard, Record, compare, paper_machine, rightly_warned_step
from tests.run.programs import SAID_BY_PYTORCH
from tests.run.test_random_programs import PIECES, Choice, Written, let_go, plainly, write

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

STEPS = 20
ADDED = [
    "{a} * 3.0",
    "{a}.relu()",
    "torch.rand(3)",
    "{a} = {a} * 3.0",
    "{a} = {a} + 0.5",
    "{a} = {a}.clone()",
    "{a}.add_(0.5)",
    "{a}.mul_(1.01)",
    "{a} = {b} if {a}.shape == {b}.shape else {a}",
]
"""What may come in between; as in `PIECES`, but nothing that was not there is there afterwards."""


FOLLOWED = [(piece, 0, 0) for piece in (0, 63, 0, 15, 0, 53, 0, 30, 59)]
"""A program whose variants write in place to what others let go of, or make values again from."""


class Varied(Written):
    """Runs, at step ``index``, the source text whose number ``turns`` has there."""

    def __init__(self, sources: list[str], turns: list[int], keeps: bool = False) -> None:
        self.codes = [compile(source, f"<variant {number}>", "exec") for number, source in enumerate(sources)]
        self.turns = turns
        super().__init__(sources[0], steady=False, keeps=keeps)

    def compute(self, index: int, guard: Guard) -> Record:
        self.code = self.codes[self.turns[index]]
        return super().compute(index, guard)


def variant(dice: random.Random, choices: list[Choice]) -> str:
    """The program of ``choices`` with one statement more, one less, or one that reads something else."""
    kind, place = dice.randrange(4), dice.randrange(len(choices))
    one = dice.randrange(len(PIECES)), dice.randrange(9), dice.randrange(9)
    if kind == 0:
        return write([*choices[:place], *choices[place + 1 :]])
    if kind == 1:
        return write([*choices[:place], (choices[place][0], *one[1:]), *choices[place + 1 :]])
    if kind == 2:
        return write([*choices[:place], one, *choices[place:]])
    lines = write(choices).split("\n")
    place = dice.randrange(1, len(lines))
    names = [line.partition(" = ")[0] for line in lines[:place] if line[0] in "ht" and " = " in line[:6]]
    added = dice.choice(ADDED).format(a=dice.choice(names), b=dice.choice(names))
    return "\n".join([*lines[:place], added, *lines[place:]])


def runs(source: str) -> bool:
    """Whether plain PyTorch gets through a program, refused as its backward pass may be."""
    records = plainly(lambda: Written(source), 1)
    return records is not None and bool(records[0]["loss"].isfinite().all())


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 4)
@hypothesis.given(
    choices=st.lists(
        st.tuples(st.integers(0, len(PIECES) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=8, max_size=20
    ),
    seed=st.integers(0, 2**32),
    percent=st.integers(40, 95),
    bandwidth=st.sampled_from([1e6, 1e6, 1e8, 1e9, 1e12]),
    every=st.sampled_from([0, 3, 4, 99]),
    keeps=st.sampled_from([False, False, True]),
)
@hypothesis.example(  # one variant holds what the others, which save the same, do not: it is warned of
    choices=[(0, 0, 0), (0, 0, 0), (3, 0, 0), (48, 3, 0), *[(0, 0, 0)] * 11, (0, 0, 3)],
    seed=40,
    percent=40,
    bandwidth=1e6,
    every=0,
    keeps=False,
)
@hypothesis.example(  # one holds more of large blocks, at a time when there is less of small ones: no limit is passed
    choices=[(0, 0, 0), (0, 0, 0), (2, 2, 2), (33, 0, 0), (0, 0, 0), (0, 2, 0), (0, 0, 0), (0, 0, 0)],
    seed=0,
    percent=40,
    bandwidth=1e6,
    every=0,
    keeps=False,
)
@hypothesis.example(  # one writes to what the plan it goes over to has been made to drop: its backward pass is refused
    choices=[*FOLLOWED, (0, 9, 0), (0, 0, 0), (63, 6, 0)],
    seed=284,
    percent=40,
    bandwidth=1e6,
    every=0,
    keeps=False,
)
@hypothesis.example(  # one writes to what a dropped value is made again from: its forward pass is not refused
    choices=FOLLOWED,
    seed=0,
    percent=40,
    bandwidth=1e6,
    every=0,
    keeps=False,
)
@hypothesis.example(  # the same, where it is made again from an input, as the step goes over to a plan that keeps it
    choices=[
        *[(piece, 0, 0) for piece in (56, 40, 24)],
        *[(36, 4, 2), (24, 0, 0), (57, 0, 0), (39, 0, 7), (75, 4, 0), (35, 0, 0), (85, 8, 0)],
        *[(piece, 0, 0) for piece in (39, 17, 0)],
    ],
    seed=0,
    percent=40,
    bandwidth=1e6,
    every=0,
    keeps=False,
)
@hypothesis.example(  # one writes to what a value is made again from, and is refused before autograd comes to refuse it
    choices=[(67, 0, 0), (0, 0, 0), (0, 0, 0), (30, 0, 0), (34, 0, 0), (51, 0, 0), (84, 5, 0), (0, 0, 0)],
    seed=5237210,
    percent=40,
    bandwidth=1e6,
    every=0,
    keeps=False,
)
def test_variants_in_random_turns(
    choices: list[Choice], seed: int, percent: int, bandwidth: float, every: int, keeps: bool
) -> None:
    dice = random.Random(seed)
    sources = [write(choices), *(variant(dice, choices) for _ in range(dice.randrange(1, 4)))]
    sources = [let_go(source, every) for source in sources] if every else sources
    sources = [source for source in sources if runs(source)]
    hypothesis.assume(len(sources) > 1)
    turns = [0] * dice.randrange(7)
    while len(turns) < STEPS:
        turns += [dice.randrange(len(sources))] * dice.choice([1, 1, 2, 4])
    hypothesis.note("\n--\n".join(sources) + f"\n{turns}, keeps={keeps}")
    expected = plainly(lambda: Varied(sources, turns, keeps), STEPS)
    if expected is None:
        hypothesis.reject()
    machine = paper_machine("ram", Tier("disk", "disk"), bandwidth_bytes_per_second=bandwidth, latency_seconds=1e-4)
    limit: int | str = f"{percent}%"
    for _ in range(2 * len(sources)):  # the largest kind may come late
        try:
            with tempfile.TemporaryDirectory() as spill:
                budget = functools.partial(ebbtide.Budget, limit, spill=Path(spill), machine=machine)
                try:
                    check(Varied(sources, turns, keeps), expected, budget())
                except UserWarning as warned:
                    if not re.match(HELD_MORE, str(warned)):
                        raise
                    # A variant may hold more than another one that saves the same, but then it is so.
                    check(Varied(sources, turns, keeps), expected, budget(), metered=True)
            return
        except BudgetError as refused:
            limit = int(refused.reachable_bytes * 1.02)
    pytest.fail(f"no plan for all kinds within {limit} bytes")


def check(program: Varied, expected: list[Record], memory: ebbtide.Budget, *, metered: bool = False) -> None:
    """Run under a budget and compare every step; ``metered``: what is warned of has to be so."""

    def guard() -> AbstractContextManager[object]:
        return rightly_warned_step(memory) if metered else memory.step()

    with memory:
        for index, record in enumerate(expected):
            where = f"step {index} ({memory.state}), variant {program.turns[index]}, limit {memory.limit_bytes}"
            compare(record, program.run(index, guard), where)


def test_variants_differ_and_run() -> None:
    dice, choices = random.Random(0), [(PIECES.index("{t} = {a}.tanh()"), 0, 0)] * 8
    variants = {variant(dice, choices) for _ in range(40)} - {write(choices)}
    assert sum(map(runs, variants)) > 20
