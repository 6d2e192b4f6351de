"""vDNN: offload the inputs of layers, wait at the end of each layer, fetch one layer at a time.

Rhu, Gimelshein, Clemons, Zulfiqar, Keckler: vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient
Neural Network Design. MICRO 2016, arXiv 1602.08124.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.follow import Move
from ebbtide.plan.published.layers import (
    BackwardLayer,
    backward_layers,
    during_last_reader,
    forward_readers,
    is_convolution,
    spanning,
    turn_moment,
)
from ebbtide.plan.published.switches import check_choice
from ebbtide.plan.published.transfers import Ground
from ebbtide.step import Step

Layers = Literal["conv", "all"]
"""Layers whose inputs go out: convolutions, or all."""
Offloading = Literal["all", "conv", "dyn"]


def vdnn(step: Step, machine: Machine, limit_bytes: int, *, offload: Offloading = "all") -> Plan:
    """vDNN's plan. It does not look at the limit, except for ``dyn``.

    An input goes out while the last layer that reads it runs; compute waits for the copy when that layer ends. In the
    backward pass each layer, as it begins, starts one fetch: see `prefetches`.

    Args:
        step, machine, limit_bytes: the problem.
        offload: inputs of ``all`` layers; of convolutions (``conv``); or ``dyn``, the first of none, conv and all that
            stays within the limit. vDNN's own dynamic policy also chooses convolution algorithms, which a plan cannot.

    Raises:
        BudgetError: if the plan holds more than ``limit_bytes``.
        PolicyError: if no input of such a layer is saved, the machine has no slow tier, or ``offload`` is another.
    """
    check_choice("vdnn's offload", offload, Offloading)
    method = f"vdnn {offload}"
    ground = Ground.of(step, machine, method)
    if offload != "dyn":
        return _plan(ground, limit_bytes, layer_inputs(ground, offload, method), method)
    with contextlib.suppress(BudgetError):
        return _plan(ground, limit_bytes, [], method)
    with contextlib.suppress(BudgetError, PolicyError):
        return _plan(ground, limit_bytes, layer_inputs(ground, "conv", method), method)
    return _plan(ground, limit_bytes, layer_inputs(ground, "all", method), method)


def layer_inputs(ground: Ground, layers: Layers, method: str) -> list[int]:
    """Candidates that leave in the forward pass, return in the backward pass, and are read by one of ``layers``.

    Raises:
        PolicyError: if there are none, so that ``method`` has nothing to do.
    """
    step = ground.problem.step
    found = []
    for place in spanning(ground.candidates, turn_moment(ground.problem.facts)):
        readers = forward_readers(step, step.absences[ground.candidates.absence[place]].value)
        if readers and (layers == "all" or any(is_convolution(step.ops[tick]) for tick in readers)):
            found.append(place)
    if not found:
        kind = "convolution" if layers == "conv" else "layer"
        raise PolicyError(f"{method}: this step saves no input of a {kind} that may leave; plan with another method")
    return found


def prefetches(layers: Sequence[BackwardLayer], offloaded: dict[int, int]) -> dict[int, int]:
    """Slot at which each offloaded candidate is fetched; none for those that are only fetched when asked for.

    Each layer, as its backward pass begins, looks at the layers to come, up to and with the next convolution, and
    fetches what the first of them that has anything outstanding needs.

    Args:
        layers: the backward pass.
        offloaded: release moment of each offloaded candidate.
    """
    found: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for later in layers[index + 1 :]:
            wanted = [place for place in later.closing if place in offloaded and place not in found]
            wanted = [place for place in wanted if offloaded[place] < layer.slot]
            found.update(dict.fromkeys(wanted, layer.slot))
            if wanted or later.convolution:
                break
    return found


def _plan(ground: Ground, limit_bytes: int, chosen: Sequence[int], method: str) -> Plan:
    trips = {place: during_last_reader(ground.problem, ground.candidates, place) for place in chosen}
    layers = backward_layers(ground.problem, ground.candidates)
    loads = prefetches(layers, {place: release for place, (_, release) in trips.items()})
    closes = ground.candidates.closes
    moves: dict[int, Move] = {
        place: ground.trip(out, release, loads.get(place, int(closes[place])))
        for place, (out, release) in trips.items()
    }
    return ground.to_plan(limit_bytes, moves, method)
