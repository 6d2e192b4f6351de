"""Where memory goes if each candidate is kept, offloaded or recomputed: exact in bytes, without any clock.

A *mode* says what happens to a candidate. Under given modes the bytes of a moment are least if every offloaded value is
released at its first slot and loaded on demand; `Profile.level` are those bytes. Everything that a schedule adds to
them, a later release or an earlier load, it adds knowingly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.compiled import compiled
from ebbtide.machine import Link
from ebbtide.plan.capacity import Stays, TakesFirst, admitted
from ebbtide.plan.caution import NO_CEILING
from ebbtide.plan.needs import RECOMPUTE, Modes, Needs, Profile, bring_back
from ebbtide.plan.problem import CheckedRecipe, Facts, Problem
from ebbtide.plan.replay import check_recipe

SMALLEST_BYTES = 32 * 1024
"""Smaller values are kept: their latency would matter more than their bytes, as a rule."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """The absences worth deciding about, as columns.

    Attributes:
        absence: number of the absence.
        size_bytes, opens, closes: as in the step.
        out: slot at which its copy out is queued.
        release: first slot at which it can be released.
        out_seconds, in_seconds: time of its transfers.
        can_offload: whether a slow tier may take it.
        replays: recipes, checked: first the shortest of each candidate, or None, then the deeper ones of all.
        ops: the ops of each recipe.
        first_deeper: where the deeper ones of a candidate begin among the recipes, with one entry more than candidates.
        first_leaf, leaves: per recipe where the candidates begin that it may have to bring back first, with one entry
            more than recipes; these candidates, in order of first use.
        replay_seconds: per recipe its time, 0 without one.
        replay_bytes: per recipe the most bytes that it holds, and the same with workspaces.
        order: candidates by moment of need.
        takes_first: what slow tiers with a limit take first.
    """

    absence: Ints
    size_bytes: Ints
    opens: Ints
    closes: Ints
    out: Ints
    release: Ints
    out_seconds: Floats
    in_seconds: Floats
    can_offload: Mask
    replays: list[CheckedRecipe | None]
    ops: list[tuple[int, ...] | None]
    first_deeper: Ints
    first_leaf: Ints
    leaves: Ints
    replay_seconds: Floats
    replay_bytes: Ints
    order: Ints
    takes_first: TakesFirst

    @classmethod
    def of(cls, problem: Problem, tier: str | None, recipes: Sequence[tuple[int, ...] | None]) -> Candidates:
        """The candidates of ``problem`` with ``tier`` as the slow memory, if any."""
        step, facts = problem.step, problem.facts
        numbers = [number for number in range(len(step.absences)) if movable(facts, number)]
        absences = [step.absences[number] for number in numbers]
        sizes = np.array([step.values[absence.value].size_bytes for absence in absences], dtype=np.int64)
        opens = np.array([absence.opens for absence in absences], dtype=np.int64)
        closes = np.array([absence.closes for absence in absences], dtype=np.int64)
        outs, releases, in_time = first_slots(problem, numbers)
        out_link, in_link = problem.routes[tier] if tier is not None else (None, None)
        ops = [recipes[number] for number in numbers]
        replays = _replays(problem, numbers, ops)
        stays = Stays(sizes, outs, closes, in_time, _instead(replays), takes_first="costliest")
        tiers = [] if tier is None else [tier]
        return cls(
            absence=np.array(numbers, dtype=np.int64),
            size_bytes=sizes,
            opens=opens,
            closes=closes,
            out=outs,
            release=releases,
            out_seconds=_transfer_seconds(out_link, sizes),
            in_seconds=np.where(problem.spans.final[numbers], 0.0, _transfer_seconds(in_link, sizes)),
            can_offload=np.logical_or.reduce(admitted(problem, tiers, stays), axis=0, dtype=np.bool_),
            ops=ops,
            first_deeper=np.full(len(numbers) + 1, len(numbers), dtype=np.int64),
            order=np.argsort(closes, kind="stable"),
            takes_first="costliest",
            **_recipe_columns(problem, numbers, replays),
        )

    def deepened(self, problem: Problem, deeper: Sequence[Sequence[tuple[int, ...]]]) -> Candidates:
        """The same candidates with ``deeper`` recipes for each besides its shortest one."""
        numbers: list[int] = self.absence.tolist()
        ops = [recipe for found in deeper for recipe in found]
        makes = [number for number, found in zip(numbers, deeper, strict=True) for _ in found]
        replays = [*self.replays[: len(numbers)], *_replays(problem, makes, ops)]
        return dataclasses.replace(
            self,
            ops=[*self.ops[: len(numbers)], *ops],
            first_deeper=len(numbers) + np.cumsum([0, *map(len, deeper)], dtype=np.int64),
            **_recipe_columns(problem, numbers, replays),
        )

    def with_recipes(self, problem: Problem, recipes: Mapping[int, tuple[int, ...]]) -> Candidates:
        """The same candidates with ``recipes``, by absence, besides those that they have."""
        deeper: list[list[tuple[int, ...]]] = []
        numbers: list[int] = self.absence.tolist()
        shortest = self.ops[: len(numbers)]
        for place, number in enumerate(numbers):
            found = [recipe for recipe in self.ops[slice(*self.first_deeper[place : place + 2])] if recipe is not None]
            recipe = recipes.get(number)
            if shortest[place] is None:
                shortest[place] = recipe
            elif recipe is not None and recipe not in (shortest[place], *found):
                found.append(recipe)
            deeper.append(found)
        replays = _replays(problem, numbers, shortest)
        return dataclasses.replace(self, ops=shortest, replays=replays).deepened(problem, deeper)

    @property
    def can_recompute(self) -> Mask:
        """Whether each candidate has a recipe."""
        return np.array([replay is not None for replay in self.replays[: len(self.absence)]], dtype=np.bool_)

    def recipe(self, modes: Modes) -> Ints:
        """The number of the recipe that each mode means; of what is not computed again, that of the shortest."""
        return np.where(modes > RECOMPUTE, self.first_deeper[:-1] + modes - RECOMPUTE - 1, np.arange(len(modes)))

    def mode(self, place: int, recipe: int) -> int:
        """The mode that means a recipe of a candidate."""
        return RECOMPUTE if recipe == place else RECOMPUTE + 1 + recipe - int(self.first_deeper[place])

    def mode_of(self, place: int, ops: tuple[int, ...]) -> int:
        """The mode that means the recipe of a candidate that has these ``ops``."""
        return self.mode(place, place if self.ops[place] == ops else self.ops.index(ops, self.first_deeper[place]))

    def deepest(self) -> Modes:
        """The highest mode of each candidate."""
        return (RECOMPUTE + np.diff(self.first_deeper)).astype(np.int8)


@dataclasses.dataclass(frozen=True, slots=True)
class Trips:
    """What a trip of each candidate to each of some slow tiers takes: rows are tiers, columns candidates.

    Attributes:
        tiers: places of the tiers in `Problem.routes`.
        out_seconds, in_seconds: time of the transfers.
        compute_seconds: what they cost compute.
        possible: whether the tier may take the candidate.
    """

    tiers: Ints
    out_seconds: Floats
    in_seconds: Floats
    compute_seconds: Floats
    possible: Mask

    @classmethod
    def of(cls, problem: Problem, candidates: Candidates, tiers: Sequence[str]) -> Trips:
        """The trips of ``candidates`` to ``tiers``."""
        sizes, shape = candidates.size_bytes, (len(tiers), len(candidates.size_bytes))
        outs, _, in_time = first_slots(problem, candidates.absence)
        instead = _instead(candidates.replays[: len(sizes)])
        stays = Stays(sizes, outs, candidates.closes, in_time, instead, candidates.takes_first)
        routes, places = [problem.routes[tier] for tier in tiers], list(problem.routes)
        out_seconds = np.array([_transfer_seconds(out, sizes) for out, _ in routes]).reshape(shape)
        in_seconds = np.array([_transfer_seconds(back, sizes) for _, back in routes]).reshape(shape)
        in_seconds[:, problem.spans.final[candidates.absence]] = 0.0
        lost = [[[link.lost_seconds(size) for size in sizes.tolist()] for link in route] for route in routes]
        lost_seconds = np.array(lost, dtype=np.float64).reshape(len(tiers), 2, len(sizes))
        lost_seconds[:, 1, problem.spans.final[candidates.absence]] = 0.0
        return cls(
            tiers=np.array([places.index(tier) for tier in tiers], dtype=np.int64),
            out_seconds=out_seconds,
            in_seconds=in_seconds,
            compute_seconds=lost_seconds.sum(axis=1),
            possible=admitted(problem, tiers, stays),
        )


def first_slots(problem: Problem, numbers: Sequence[int] | Ints) -> tuple[Ints, Ints, Mask]:
    """For each absence in ``numbers``: the first slot at which its copy out can be queued, the first at which it can
    then be released, and whether that leaves time to load it again."""
    step, slots = problem.step, np.array([*problem.facts.slots, problem.step.moments + 1], dtype=np.int64)
    absences = [step.absences[number] for number in numbers]
    earliest = [problem.earliest_out[number] for number in numbers]
    latest = np.array([step.moments if moment is None else moment for moment in earliest], dtype=np.int64)
    opens = np.array([absence.opens for absence in absences], dtype=np.int64)
    closes = np.array([absence.closes for absence in absences], dtype=np.int64)
    outs = slots[np.searchsorted(slots, latest)]
    releases = slots[np.searchsorted(slots, np.minimum(np.maximum(opens, outs + 1), step.moments))]
    return outs, releases, (outs < releases) & (releases < closes)


def _transfer_seconds(link: Link | None, sizes: Ints) -> Floats:
    if link is None:
        return np.zeros(len(sizes))
    return np.array([link.seconds(size) for size in sizes.tolist()], dtype=np.float64)


def _instead(replays: Sequence[CheckedRecipe | None]) -> Floats:
    """What it takes to compute values again instead of moving them."""
    return np.array([math.inf if replay is None else replay.seconds for replay in replays], dtype=np.float64)


def movable(facts: Facts, number: int) -> bool:
    """Whether absence ``number`` is worth deciding about."""
    value = facts.step.values[facts.step.absences[number].value]
    return value.size_bytes >= SMALLEST_BYTES and value.storage not in facts.external


def _replays(
    problem: Problem, numbers: Sequence[int], recipes: Sequence[tuple[int, ...] | None]
) -> list[CheckedRecipe | None]:
    """The recipes of absences, checked."""
    values = [problem.step.absences[number].value for number in numbers]
    return [
        None if recipe is None else check_recipe(problem.facts, value, recipe, problem.machine.replay_seconds)
        for value, recipe in zip(values, recipes, strict=True)
    ]


def _recipe_columns(problem: Problem, numbers: Sequence[int], replays: list[CheckedRecipe | None]) -> dict[str, Any]:
    """Columns of `Candidates` that follow from its recipes."""
    step = problem.step
    by_storage: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        by_storage.setdefault(step.values[step.absences[number].value].storage, []).append(place)
    leaves = [
        [] if replay is None else [place for storage in replay.leaves for place in by_storage.get(storage, [])]
        for replay in replays
    ]
    replay_bytes = [(replay.peak_bytes, replay.physical_peak_bytes) if replay else (0, 0) for replay in replays]
    return {
        "replays": replays,
        "first_leaf": np.cumsum([0, *map(len, leaves)], dtype=np.int64),
        "leaves": np.array([leaf for found in leaves for leaf in found], dtype=np.int64),
        "replay_seconds": np.array([replay.seconds if replay else 0.0 for replay in replays], dtype=np.float64),
        "replay_bytes": np.array(replay_bytes, dtype=np.int64).reshape(-1, 2),
    }


def needs_of(problem: Problem, candidates: Candidates, headroom: Ints | None = None) -> Needs:
    """What `profile` has to know besides modes.

    Args:
        problem: the problem.
        candidates: its candidates.
        headroom: bytes per moment that workspaces of recomputed ops may take beyond the limit; None if they do not
            count.
    """
    if headroom is None:
        headroom = np.full(problem.step.moments, NO_CEILING, dtype=np.int64)
    columns = (getattr(candidates, name) for name in Needs._fields[2:])
    return Needs(problem.plain, headroom, *columns)


def profile(needs: Needs, modes: Modes) -> Profile:
    """Memory under ``modes``, one for each candidate."""
    return compiled(bring_back)(needs, modes)
