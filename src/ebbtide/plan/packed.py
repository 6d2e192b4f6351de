"""How much memory a plan takes if each of its blocks has a fixed place: more than it holds where blocks do not pack.

Plans that hold as much as they may in every moment are the hard ones: a block that comes when another one goes is
seldom of its size.
"""

from __future__ import annotations

from ebbtide.place import Block, place
from ebbtide.place.layout import ALIGNMENT_BYTES
from ebbtide.plan.course import Scene
from ebbtide.plan.follow import Course, Moves
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import SMALLEST_BYTES
from ebbtide.plan.relax import wanted_moments
from ebbtide.step import MOST_BYTES

TRIES = 20
"""Orders in which blocks are placed. Four hundred found 0 to 2 % less, and the same plans to be the worse ones."""
MOST_BLOCKS = 1500
"""Most blocks that are placed: that takes time by the square of their number, 0.1 s for so many."""


def packed_bytes(problem: Problem, scene: Scene, moves: Moves, course: Course) -> int | None:
    """Bytes above rest that suffice to give each block a place; None if they are too many, or too large."""
    blocks = _blocks(problem, scene, moves, course)
    if len(blocks) > MOST_BLOCKS or sum(block.size_bytes + ALIGNMENT_BYTES for block in blocks) > MOST_BYTES:
        return None
    return place(blocks, tries=TRIES).footprint_bytes


def _blocks(problem: Problem, scene: Scene, moves: Moves, course: Course) -> list[Block]:
    """What is taken over the moments of a step: values, in pieces where they are absent, and workspaces."""
    step, facts = problem.step, problem.facts
    remade = dict(zip(course.replayed.absence.tolist(), course.replayed.moment.tolist(), strict=True))
    wanted = wanted_moments(scene, moves, course).tolist()
    gaps: dict[int, list[tuple[int, int]]] = {}
    for number, absence in enumerate(step.absences):
        gap = None
        if moves.tier[number] >= 0:
            gap = int(moves.release[number]) + 1, min(int(moves.load[number]), wanted[number])
        elif moves.replay[number] >= 0:
            gap = absence.opens, remade.get(number, absence.closes)
        if gap is not None:
            gaps.setdefault(step.values[absence.value].storage, []).append(gap)
    blocks = [Block(size, moment, moment + 1) for moment, size in enumerate(problem.workspace.tolist())]
    for number, value in enumerate(step.values):
        if facts.makes_storage[number]:
            born = facts.op_moments[value.maker]
            for leaves, returns in sorted(gaps.get(value.storage, ())):
                blocks.append(Block(value.size_bytes, born, max(leaves, born + 1)))
                born = returns
            blocks.append(Block(value.size_bytes, born, max(facts.dies[number], born + 1)))
    return [block for block in blocks if block.size_bytes >= SMALLEST_BYTES]
