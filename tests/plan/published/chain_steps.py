"""Steps that are chains, and chains at random, for the tests of the policies that plan for them."""

from __future__ import annotations

import random

from ebbtide.plan.published.chain import Chain, Stage
from ebbtide.step import Step
from tests.plan.random_steps import KIB, Tape


def chain_step(stages: int, *, seed: int = 0, noise_every: int = 0, joining_seconds: float = 1e-3) -> Step:
    """Residual blocks: two dear ops whose inputs are saved, the second one's result added to the block's input.

    Where ``noise_every`` divides a block's number, a random op stands before it, and its result is saved.
    """
    dice = random.Random(seed)
    tape = Tape()
    value = tape.op([tape.external(64 * KIB)], [128 * KIB], seconds=1e-3)[0]
    nodes: list[tuple[int, int, float]] = []
    for stage in range(stages):
        size = 128 * KIB
        if noise_every and stage % noise_every == 0:
            mask = tape.op([], [64 * KIB], seconds=1e-4, replay="random")[0]
            nodes.append((tape.pack(mask), 64 * KIB, 1e-4))
            value = tape.op([value, mask], [size], seconds=1e-4)[0]
        inner, widths = value, [dice.randrange(1, 6) * 64 * KIB, dice.randrange(1, 6) * 64 * KIB]
        for width in widths:
            nodes.append((tape.pack(inner), size, dice.uniform(2e-3, 8e-3)))
            inner = tape.op([inner], [width], seconds=dice.uniform(1e-3, 4e-3))[0]
        nodes.append((tape.pack(inner), size, 1e-3))
        value = tape.op([value, inner], [size], seconds=joining_seconds)[0]
    gradient = tape.op([value], [KIB], seconds=1e-4, replay="opaque", phase="backward")[0]
    for saved, size, seconds in reversed(nodes):
        tape.unpack(saved)
        inputs = [gradient, tape.saved[saved][0]]
        gradient = tape.op(inputs, [size], seconds=seconds, replay="opaque", phase="backward")[0]
    return tape.step()


def equal_chain(values: int) -> Step:
    """A chain of dear ops whose results are as large as each other, each of them saved."""
    size, tape = 256 * KIB, Tape()
    value = tape.op([tape.external(64 * KIB)], [size], seconds=1e-3)[0]
    saved = []
    for _ in range(values):
        saved.append(tape.pack(value))
        value = tape.op([value], [size], seconds=1e-3)[0]
    gradient = tape.op([value], [KIB], seconds=1e-4, replay="opaque", phase="backward")[0]
    for number in reversed(saved):
        tape.unpack(number)
        inputs = [gradient, tape.saved[number][0]]
        gradient = tape.op(inputs, [size], seconds=2e-3, replay="opaque", phase="backward")[0]
    return tape.step()


def random_chain(seed: int, length: int, *, overheads: bool = False) -> Chain:
    """Small whole numbers for sizes and times."""
    dice = random.Random(seed)
    stages = []
    for _ in range(length):
        output = dice.randrange(1, 5)
        over = (dice.randrange(2), dice.randrange(3)) if overheads else (0, 0)
        stages.append(Stage(dice.randrange(1, 10), dice.randrange(1, 20), output, output + dice.randrange(0, 7), *over))
    return Chain(tuple(stages), dice.randrange(1, 4))
