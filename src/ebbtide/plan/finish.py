"""The last touches to a plan: the memory that it leaves unused is spent, as far as its blocks still pack.

Time left free around transfers is memory that is full while nobody needs it. Where memory is full throughout, a block
that comes when others go finds no hole of its size: blocks do not pack, and the holes between them are resident, too.
So a plan whose blocks do not pack is scheduled again with less time left free, down to the share `EXPECTED`, by which
plans are compared. That costs it nothing unless transfers are later still. The blocks of ResNet-50 then took 1.043
times the bytes alive at once in the mean, not 1.075: at 0.45, 0.5 and 0.6 of its bytes above rest, on a disk of
0.7 GB/s, with six seeds each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ebbtide.plan.caution import EXPECTED
from ebbtide.plan.follow import Course, Follower, Moves
from ebbtide.plan.packed import packed_bytes
from ebbtide.plan.relax import ROUNDS, relaxed
from ebbtide.plan.search import Found, Search

SAME_SECONDS = 1e-9
"""Times that differ by less are the same."""
SURE_ROUNDS = 4
"""Rounds of `relaxed` that hardly ever make blocks pack worse."""
MORE_PACKED = 0.02
"""Share by which a plan's blocks may take more bytes after `relaxed` than before: after all rounds ResNet-50 at a
quarter took 1.13 times its live bytes, not 1.01."""
EASED = (0.8, 0.65, EXPECTED)
"""Shares of the time that is left free around transfers to try one after the other where blocks do not pack."""
LOOSE = 0.03
"""Share of the bytes alive at once that blocks may take besides before they are said not to pack."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Finished:
    """Moves, the bytes above rest that suffice for their blocks, and the most alive at once.

    ``packed_bytes`` is None if there are too many blocks to find out.
    """

    moves: Moves
    packed_bytes: int | None
    live_bytes: int

    @property
    def looseness(self) -> float:
        """How many times the bytes alive at once the blocks take, as far as that is known."""
        return 1.0 if self.packed_bytes is None else self.packed_bytes / max(1, self.live_bytes)


def spend_unused_memory(search: Search) -> Moves:
    """Let the best moves of ``search`` use the memory that they leave unused, and return them.

    Where the search has no caution, as for plans on paper, they are returned as they are.
    """
    assert search.best is not None
    if not search.caution.allows_for_lateness:
        return search.best.moves
    finishes = []
    for found in _schedule_looser(search, search.best):
        finishes.append(_spend_on(search, found))
        if finishes[-1].looseness <= 1 + LOOSE:
            break
    return min(finishes, key=lambda finish: finish.looseness).moves


def _schedule_looser(search: Search, best: Found) -> Iterator[Found]:
    """Yield ``best``, then schedule it with less and less time left free around its transfers: what is no slower."""
    yield best
    for share in EASED:
        found = search.eased(best, share)
        if found is not None and found.course.seconds <= best.course.seconds + SAME_SECONDS:
            yield found


def _spend_on(search: Search, found: Found) -> _Finished:
    """Move releases of ``found`` later and its loads earlier, where that costs nothing and blocks still pack."""
    room, problem, scene = search.room, search.problem, search.follower.scene
    slots = np.array(problem.facts.slots, dtype=np.int64)
    unused = np.minimum(room.limit_bytes - found.course.memory, room.ceiling - found.course.physical)
    before = _measure(search, found.moves, found.course)
    on_time = Follower(problem, search.candidates.replays)
    longest = found.course.seconds + SAME_SECONDS, on_time.follow(found.moves).seconds + SAME_SECONDS
    for rounds in (SURE_ROUNDS,) if before.packed_bytes is None else (len(ROUNDS), SURE_ROUNDS):
        moves = relaxed(scene, slots, found.moves, found.course, unused, ROUNDS[:rounds])
        course = search.judge(moves)
        # A load costs compute something when it is queued. Queued earlier, it must not make the plan slower, whether
        # transfers are as late as caution allows or on time.
        if course is None or course.seconds > longest[0] or on_time.follow(moves).seconds > longest[1]:
            continue
        after = _measure(search, moves, course)
        if before.packed_bytes is None or after.packed_bytes is None:
            return after
        if after.packed_bytes <= (1 + MORE_PACKED) * before.packed_bytes:
            return after
    return before


def _measure(search: Search, moves: Moves, course: Course) -> _Finished:
    problem = search.problem
    live_bytes = int(course.physical.max(initial=problem.resting_bytes)) - problem.resting_bytes
    return _Finished(moves, packed_bytes(problem, search.follower.scene, moves, course), live_bytes)
