"""SuperNeurons: offload the outputs of costly layers, compute the cheap ones between them again.

Wang, Ye, Zhao, Wu, Li, Song, Xu, Kraska: SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks.
PPoPP 2018, arXiv 1801.04380. Liveness analysis is what autograd does anyway; the choice of convolution algorithms is
none of a plan's.
"""

from __future__ import annotations

import bisect
from collections.abc import Set
from typing import Literal

import numpy as np

from ebbtide.decisions import Plan
from ebbtide.errors import PlanError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.course import DEEPEST_NESTING
from ebbtide.plan.follow import Move
from ebbtide.plan.needs import OFFLOAD, RECOMPUTE, Profile
from ebbtide.plan.profile import needs_of, profile
from ebbtide.plan.published.layers import forward_readers, is_checkpoint, slot_after, slot_before, turn_moment
from ebbtide.plan.published.switches import check_choice
from ebbtide.plan.published.transfers import Ground, Queues, clock_with, held_until
from ebbtide.plan.replay import check_recipe
from ebbtide.step import Step

Offloading = Literal["none", "checkpoints", "cache"]
Recomputation = Literal["none", "speed", "memory", "cost"]


def superneurons(
    step: Step,
    machine: Machine,
    limit_bytes: int,
    *,
    offload: Offloading = "cache",
    recompute: Recomputation = "cost",
) -> Plan:
    """The unified tensor pool and cost-aware recomputation.

    A value is cheap if a recipe makes it again without running a checkpoint layer (see `is_checkpoint`) and no more
    than one forward op reads it (else it is a FORK). Cheap values are recomputed; all others count as checkpoints.

    Args:
        step, machine, limit_bytes: the problem.
        offload: ``checkpoints`` sends each of them out as soon as it is saved and fetches it one checkpoint ahead;
            compute waits for a copy out only where its bytes are needed to stay within the limit.
            ``cache`` evicts the least recently used value that is not recomputed when memory is short; compute waits,
            and the value comes back when it is asked for.
        recompute: ``speed`` computes each cheap value once, what lies before it stays; ``memory`` computes each from
            its checkpoint and lets go what lies between; ``cost`` takes speed for the segments whose values and
            gradients fit into the largest working set of an op, memory for the others.

    Raises:
        BudgetError: if the plan holds more than ``limit_bytes``.
        PolicyError: if a switch is none of the above; if the machine has no slow tier, but values are to be offloaded;
            if cheap values follow one another without a checkpoint for longer than recipes may wait for each other.
    """
    check_choice("superneurons' offload", offload, Offloading)
    check_choice("superneurons' recompute", recompute, Recomputation)
    method = f"superneurons, {offload} offload, {recompute} recompute"
    ground = Ground.of(step, machine, method, needs_tier=offload != "none")
    crossing, cheap = _parted(ground)
    dropped = set() if recompute == "none" else cheap
    far = _far_segments(ground, dropped, recompute)
    if far:
        ground = ground.with_recipes(_far_recipes(ground, dropped, far))
    candidates = ground.candidates
    pooled: dict[Offloading, set[int]] = {"none": set(), "checkpoints": crossing - cheap, "cache": crossing - dropped}
    pool = [place for place in sorted(pooled[offload]) if candidates.can_offload[place]]
    modes = np.zeros(len(candidates.absence), dtype=np.int8)
    modes[sorted(dropped)] = RECOMPUTE
    modes[pool] = OFFLOAD
    found = profile(needs_of(ground.problem, candidates), modes)
    if found.nested:
        raise PolicyError(
            f"{method}: more than {DEEPEST_NESTING} cheap values follow one another without a checkpoint; recompute"
            ' "memory" or plan with another method'
        )
    moves: dict[int, Move] = {}
    if offload == "checkpoints":
        moves = _offloaded(ground, found, pool, limit_bytes)
    elif offload == "cache":
        moves = _evicted(ground, found, pool, limit_bytes)
    moves.update({place: candidates.replays[place] for place in dropped})
    return ground.to_plan(limit_bytes, moves, method)


def _parted(ground: Ground) -> tuple[set[int], set[int]]:
    """Candidates whose absence spans the turn, and those of them that are cheap."""
    step, candidates = ground.problem.step, ground.candidates
    turn = turn_moment(ground.problem.facts)
    crossing = set(np.flatnonzero((candidates.opens <= turn) & (candidates.closes >= turn)).tolist())
    cheap = set()
    for place in crossing:
        number = int(candidates.absence[place])
        recipe, value = ground.recipes[number], step.absences[number].value
        costly = recipe is None or any(is_checkpoint(step, step.ops[tick]) for tick in recipe)
        if not costly and len(forward_readers(step, value)) <= 1:
            cheap.add(place)
    return crossing, cheap


def _far_segments(ground: Ground, dropped: Set[int], recompute: Recomputation) -> set[int]:
    """Cheap candidates of the segments whose values are each computed from the checkpoint."""
    if recompute in ("none", "speed"):
        return set()
    segments = _segments(ground, dropped)
    if recompute == "memory":
        return set().union(*segments)
    sets = [_working_set(ground.problem.step, tick) for tick in range(len(ground.problem.step.ops))]
    largest = max(sets, default=0)
    return set().union(*(segment for segment in segments if _segment_bytes(ground, segment) > largest))


def _segments(ground: Ground, dropped: Set[int]) -> list[set[int]]:
    """Cheap candidates, together with those that their recipes read."""
    segment: dict[int, set[int]] = {}
    for place in sorted(dropped):
        joined = {place}.union(*(segment.get(leaf, set()) for leaf in ground.leaves(place) if leaf in dropped))
        segment.update(dict.fromkeys(joined, joined))
    return list({id(joined): joined for joined in segment.values()}.values())


def _segment_bytes(ground: Ground, segment: Set[int]) -> int:
    """The values of a segment and the most that the gradients of one of its layers take."""
    step, candidates = ground.problem.step, ground.candidates
    gradients = 0
    for place in segment:
        for tick in step.values[step.absences[candidates.absence[place]].value].uses:
            if step.ops[tick].phase == "backward":
                gradients = max(gradients, _working_set(step, tick, gradients_only=True))
    return int(candidates.size_bytes[sorted(segment)].sum()) + gradients


def _working_set(step: Step, tick: int, *, gradients_only: bool = False) -> int:
    """Bytes of the storages that an op reads and makes and the step made, or those made in the backward pass."""
    op = step.ops[tick]
    sizes = {}
    for number in (*op.inputs, *op.outputs):
        value = step.values[number]
        if value.maker >= 0 and not (gradients_only and step.ops[value.maker].phase == "forward"):
            sizes[value.storage] = value.size_bytes
    return sum(sizes.values())


def _far_recipes(ground: Ground, dropped: Set[int], far: Set[int]) -> list[tuple[int, ...] | None]:
    """Recipes in which the candidates ``far`` are made from their checkpoints instead of from one another."""
    candidates, facts = ground.candidates, ground.problem.facts
    recipes = list(ground.recipes)
    ticks: dict[int, set[int]] = {}
    # A recipe reads older values than it makes, and candidates are in the order of their values: leaves come first.
    for place in sorted(dropped & far):
        number = int(candidates.absence[place])
        whole = set(ground.recipes[number] or ()).union(*(ticks.get(leaf, set()) for leaf in ground.leaves(place)))
        recipe = tuple(sorted(whole))
        try:
            lasts = (
                check_recipe(facts, facts.step.absences[number].value, recipe).valid_until > candidates.closes[place]
            )
        except PlanError:
            lasts = False
        if lasts:
            recipes[number] = recipe
        ticks[place] = set(recipes[number] or ())
    return recipes


def _offloaded(ground: Ground, found: Profile, pool: list[int], limit_bytes: int) -> dict[int, Move]:
    """All of the pool out as soon as saved, back one checkpoint ahead."""
    level = held_until(found, ground.candidates, pool)
    starts = clock_with(ground.problem.clock, found.extra_seconds)
    queues = Queues(ground, level, found.end, starts, limit_bytes)
    queues.moves(pool, early=True)
    wanted = sorted({int(found.end[place]) for place in pool})
    moves: dict[int, Move] = {}
    for place in pool:
        release, end = queues.releases[place], int(found.end[place])
        position = bisect.bisect_left(wanted, end)
        load = slot_after(ground.problem, wanted[position - 1]) if position else -1
        if not release < load < end:
            load = int(ground.candidates.closes[place])
        moves[place] = ground.trip(queues.outs[place], release, load)
    return moves


def _evicted(ground: Ground, found: Profile, pool: list[int], limit_bytes: int) -> dict[int, Move]:
    """The tensor cache: where memory is short, the least recently used values that nothing needs just then leave."""
    problem, candidates = ground.problem, ground.candidates
    level = held_until(found, candidates, pool)
    resident = sorted(pool, key=lambda place: (int(candidates.opens[place]), place))
    moves: dict[int, Move] = {}
    for moment in range(problem.step.moments):
        if level[moment] <= limit_bytes:
            continue
        release = slot_before(problem, moment - 1)
        for place in resident:
            if level[moment] <= limit_bytes:
                break
            if candidates.release[place] <= release and moment < found.end[place]:
                out = max(int(candidates.out[place]), slot_before(problem, release - 1))
                moves[place] = ground.trip(out, release, int(candidates.closes[place]))
                level[release + 1 : found.end[place]] -= candidates.size_bytes[place]
        resident = [place for place in resident if place not in moves]
    return moves
