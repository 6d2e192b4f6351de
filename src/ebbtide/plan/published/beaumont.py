"""Offloading the activations of a chain: two heuristics.

Beaumont, Eyraud-Dubois, Shilova: "Optimal GPU-CPU offloading strategies for deep neural network training", Euro-Par
2020, doi 10.1007/978-3-030-57675-2_10. The paper is known in outline; the formulas are a reconstruction.

NOTE [The model]
1. Item ``j`` is what stage ``j`` reads, with all that the stage before it saved; item 0 is the chain's input. An item
   that is offloaded is copied once stage ``j-1`` has made it, one at a time, in order, and is gone when its copy and
   the forward op of stage ``j`` are both done. Compute waits where memory is short, and at the loss until all is out.
2. The backward pass is the same read backwards in time, but that an item must be back before the backward op of stage
   ``j`` starts: so it is not copied while that runs. A set of items costs the idle time of two such phases.
3. Whether some set costs nothing is NP-complete in the strong sense. It is not if memory is freed byte by byte
   (`fluid_set`).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ebbtide.decisions import Plan
from ebbtide.errors import PolicyError
from ebbtide.machine import Link, Machine
from ebbtide.plan.published.chain import Chain, ChainPlan, store_all
from ebbtide.plan.published.cut import Cut, stages_of
from ebbtide.plan.published.labels import Labels, trail, waiting
from ebbtide.plan.published.mapping import fastest, fitted, mapped_all, slow_links
from ebbtide.plan.published.switches import check_count
from ebbtide.step import Step

SLOTS = 50
"""Into how many equal parts memory is divided to tell states of the dynamic program apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """One direction of a chain, in the order in which items are made.

    Attributes:
        seconds: duration of each stage.
        item_bytes: size of each item; the last one is what the last stage makes.
        need_bytes: per stage ``i`` what it needs besides items ``0..i``: item ``i+1`` and what only it holds.
        bytes_per_second: of the link.
        copies_what_is_read: whether item ``i`` may be copied while stage ``i`` runs: forward it may.
    """

    seconds: tuple[float, ...]
    item_bytes: tuple[int, ...]
    need_bytes: tuple[int, ...]
    bytes_per_second: float
    copies_what_is_read: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """A phase carried out exactly.

    Attributes:
        idle_seconds: time for which compute waits; infinite if memory cannot suffice.
        copies: item, start and end of each copy, in seconds from the start of the phase.
    """

    idle_seconds: float
    copies: tuple[tuple[int, float, float], ...]


def phases(chain: Chain, out_bytes_per_second: float, in_bytes_per_second: float) -> tuple[Phase, Phase]:
    """The forward phase of ``chain``, and its backward phase read backwards in time."""
    items = (chain.input_bytes, *(stage.saved_bytes + stage.fixed_bytes for stage in chain.stages))
    read = chain.boundary_bytes
    forward, backward = [], []
    for place, stage in enumerate(chain.stages):
        forward.append(items[place + 1] + stage.forward_overhead_bytes)
        backward.append(items[place + 1] + read[place] + read[place + 1] + stage.backward_overhead_bytes)
    return (
        Phase(tuple(stage.forward_seconds for stage in chain.stages), items, tuple(forward), out_bytes_per_second),
        Phase(
            tuple(stage.backward_seconds for stage in chain.stages), items, tuple(backward), in_bytes_per_second, False
        ),
    )


def timed(phase: Phase, offloaded: frozenset[int], memory_bytes: float) -> Timed:
    """Carry out ``phase`` with the items ``offloaded``. Time O(stages)."""
    leaving: list[tuple[float, int]] = []
    copies: list[tuple[int, float, float]] = []
    now = idle = link_free = 0.0
    held, gone = phase.item_bytes[0], 0
    for stage, seconds in enumerate(phase.seconds):
        size, made = phase.item_bytes[stage], now
        start = now
        while gone < len(leaving) and (leaving[gone][0] <= start or held + phase.need_bytes[stage] > memory_bytes):
            start = max(start, leaving[gone][0])
            held -= leaving[gone][1]
            gone += 1
        if held + phase.need_bytes[stage] > memory_bytes:
            return Timed(math.inf, ())
        idle += start - now
        now = start + seconds
        if stage in offloaded:
            begin = max(made if phase.copies_what_is_read else now, link_free)
            link_free = begin + size / phase.bytes_per_second
            copies.append((stage, begin, link_free))
            leaving.append((max(link_free, now), size))
        held += phase.item_bytes[stage + 1]
    return Timed(idle + max(0.0, link_free - now), tuple(copies))


def idle_seconds(both: tuple[Phase, Phase], offloaded: frozenset[int], memory_bytes: float) -> float:
    """Idle time of a set of offloaded items, exactly; infinite if it does not fit."""
    return math.fsum(timed(phase, offloaded, memory_bytes).idle_seconds for phase in both)


def fluid_set(
    both: tuple[Phase, Phase], memory_bytes: float, slots: int = SLOTS
) -> tuple[float, frozenset[int]] | None:
    """The least idle time if memory is freed byte by byte, and a set of items that attains it; None if none fits.

    A dynamic program over stages and `Labels`; exact if ``slots`` are many. Time O(stages slots^3).
    """
    forward, backward = both
    fronts = {0: Labels.start()}
    for stage in range(len(forward.seconds)):
        labels, item = fronts[stage], forward.item_bytes[stage]
        room = memory_bytes - labels.kept - item
        short_out = np.maximum(0.0, forward.need_bytes[stage] - (room - labels.out))
        short_in = np.maximum(0.0, backward.need_bytes[stage] - (room - labels.back))
        fits = room >= max(forward.need_bytes[stage], backward.need_bytes[stage])
        idle = waiting(short_out, forward.bytes_per_second) + waiting(short_in, backward.bytes_per_second)
        seconds = np.where(fits, labels.seconds + idle, np.inf)
        crossed_out = forward.seconds[stage] * forward.bytes_per_second + short_out
        # `Labels.moved` lets the item cross forward and not backward: see `Phase.copies_what_is_read`.
        crossed_in = backward.seconds[stage] * backward.bytes_per_second + short_in
        choices = [labels.moved(stage, item, crossed_out, crossed_in, seconds, offload) for offload in (False, True)]
        fronts[stage + 1] = Labels.joined(choices).thinned(memory_bytes / slots)
    last = fronts[len(forward.seconds)]
    if not len(last.seconds):
        return None
    drained = last.seconds + waiting(last.out, forward.bytes_per_second) + waiting(last.back, backward.bytes_per_second)
    best = int(np.lexsort((-last.kept, drained))[0])
    chosen = frozenset(stage for stage, _, offloaded in trail(fronts, len(forward.seconds), best) if offloaded)
    return float(drained[best]), chosen


def offload_plan(chain: Chain, both: tuple[Phase, Phase], offloaded: frozenset[int], memory_bytes: float) -> ChainPlan:
    """The schedule that offloads a set of items, exactly evaluated."""
    idle = idle_seconds(both, offloaded, memory_bytes)
    return dataclasses.replace(store_all(chain), seconds=chain.plain_seconds + idle, offloaded=offloaded)


def greedy(step: Step, machine: Machine, limit_bytes: int) -> Plan:
    """Offload what the first stages of a chain save: as many as take the least time.

    The prefixes are compared by the simulator, exactly, as in the paper.

    Raises:
        BudgetError: if none of them stays within ``limit_bytes``.
        PolicyError: if the step is no chain, or the machine has no slow tier.
    """
    stages, _, _ = _chain_and_links(step, machine)
    prefixes = (frozenset(range(1, count + 1)) for count in range(len(stages.chain.stages)))
    found = mapped_all(stages, store_all(stages.chain).actions, prefixes)
    chosen = fastest(found, limit_bytes) or min(found, key=lambda choice: choice.peak_bytes)
    return chosen.plan(limit_bytes, "beaumont greedy")


def dynamic_program(step: Step, machine: Machine, limit_bytes: int, *, slots: int = SLOTS) -> Plan:
    """Offload the set of stages' saved values that is best if memory is freed byte by byte.

    Raises:
        BudgetError: if no such set was found that stays within ``limit_bytes``.
        PolicyError: if the step is no chain, the machine has no slow tier, or ``slots`` is less than 1.
    """
    check_count("beaumont's slots", slots)
    stages, out_link, in_link = _chain_and_links(step, machine)
    both = _phases_of(stages, out_link, in_link)

    def schedule(memory_bytes: int) -> ChainPlan | None:
        found = fluid_set(both, memory_bytes, slots)
        return None if found is None else offload_plan(stages.chain, both, found[1], memory_bytes)

    return fitted(stages, limit_bytes, stages.chain.plain_bytes, schedule, "beaumont dynamic program")


def _chain_and_links(step: Step, machine: Machine) -> tuple[Cut, Link, Link]:
    links = slow_links(machine)
    if links is None:
        raise PolicyError(f"this policy offloads, and machine {machine.name} has no slow tier with links both ways")
    return stages_of(step, machine), *links


def _phases_of(stages: Cut, out_link: Link, in_link: Link) -> tuple[Phase, Phase]:
    return phases(stages.chain, out_link.bandwidth_bytes_per_second, in_link.bandwidth_bytes_per_second)
