"""Offload every layer's input, one layer at a time, and bring it back one layer ahead; each trick can be switched off.

Hascoet, Zhuang, Febvre, Ariki, Takiguchi: Reducing the Memory Cost of Training Convolutional Neural Networks by CPU
Offloading. Journal of Software Engineering and Applications 12(8), 2019, algorithms 1 and 2.

Pinned and reused host buffers are properties of the machine's links, not of a plan: plan for a slower link to see
what they are worth.
"""

from __future__ import annotations

import bisect

from ebbtide.arguments import as_switch
from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.plan.follow import Move
from ebbtide.plan.published.layers import backward_layers, during_last_reader
from ebbtide.plan.published.switches import check_choice
from ebbtide.plan.published.transfers import Ground
from ebbtide.plan.published.vdnn import Layers, layer_inputs
from ebbtide.step import Step


def hascoet(
    step: Step,
    machine: Machine,
    limit_bytes: int,
    *,
    layers: Layers = "conv",
    copy_stream: bool = True,
    helper_thread: bool = True,
    prefetch: bool = True,
) -> Plan:
    """The static policy of the paper, which does not look at the limit.

    Args:
        step, machine, limit_bytes: the problem.
        layers: whose inputs go out.
        copy_stream: transfers run beside compute: a copy out starts with the layer that reads the value. Without it,
            it starts when that layer is over and compute waits for it, and nothing is fetched ahead.
        helper_thread: a thread waits for the copy and frees the value, compute goes on. Without it, compute waits for
            the copy at the end of the layer.
        prefetch: a fetch starts with the backward pass of the layer before, in the order of the backward pass.
            Without it, when the value is asked for.

    Raises:
        BudgetError: if the plan holds more than ``limit_bytes``.
        PolicyError: if no input of such a layer is saved, the machine has no slow tier, or ``layers`` is another.
        ArgumentError: if another switch is neither True nor False.
    """
    check_choice("hascoet's layers", layers, Layers)
    copy_stream, helper_thread = as_switch("copy_stream", copy_stream), as_switch("helper_thread", helper_thread)
    prefetch = as_switch("prefetch", prefetch)
    method = f"hascoet {layers}"
    ground = Ground.of(step, machine, method)
    chosen = layer_inputs(ground, layers, method)
    loads = _one_layer_ahead(ground, chosen) if prefetch and copy_stream else {}
    trips = _copied_out(ground, chosen, loads, copy_stream=copy_stream, helper_thread=helper_thread)
    moves: dict[int, Move] = {}
    for place, (out, release) in trips.items():
        closes = int(ground.candidates.closes[place])
        load = loads.get(place, closes)
        moves[place] = ground.trip(out, release, load if load > release else closes)
    return ground.to_plan(limit_bytes, moves, method)


def _one_layer_ahead(ground: Ground, chosen: list[int]) -> dict[int, int]:
    """Slot at which each value is fetched: where the layer with an offloaded input before its own begins."""
    found: dict[int, int] = {}
    members = set(chosen)
    before: int | None = None
    for layer in backward_layers(ground.problem, ground.candidates):
        wanted = [place for place in layer.closing if place in members]
        if wanted and before is not None:
            found.update(dict.fromkeys(wanted, before))
        if wanted:
            before = layer.slot
    return found


def _copied_out(
    ground: Ground, chosen: list[int], loads: dict[int, int], *, copy_stream: bool, helper_thread: bool
) -> dict[int, tuple[int, int]]:
    """Slots of copying out and of release."""
    problem, candidates = ground.problem, ground.candidates
    slots = problem.facts.slots
    slot_seconds = problem.clock[slots].tolist()
    trips = {place: during_last_reader(problem, candidates, place) for place in chosen}
    free_seconds = 0.0
    for place in sorted(chosen, key=lambda place: (trips[place][0], place)):
        out, release = trips[place]
        if not copy_stream:
            after = bisect.bisect_right(slots, release)
            if after < len(slots) and slots[after] < candidates.closes[place]:
                trips[place] = release, slots[after]
        elif helper_thread:
            free_seconds = max(free_seconds, float(problem.clock[out])) + float(candidates.out_seconds[place])
            end = loads.get(place, int(candidates.closes[place]))
            copied = bisect.bisect_left(slot_seconds, free_seconds)
            last = bisect.bisect_left(slots, end) - 1
            trips[place] = out, max(release, slots[min(copied, last)])
    return trips
