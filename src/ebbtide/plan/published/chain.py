"""Chains of stages, the shape that the papers on checkpointing plan for, and schedules for them.

A chain has stages ``0..L-1``. Forward, stage ``i`` turns ``a_i`` into ``a_{i+1}``; ``a_0`` is the input of the chain.
Backward, it needs ``abar_{i+1}``, all that its forward op saved, ``a_{i+1}`` included, and turns the gradient of
``a_{i+1}`` into that of ``a_i``. A gradient is as large as its value. The loss is stage ``L``, of no time and no size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from ebbtide.errors import PolicyError


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain.

    Attributes:
        forward_seconds, backward_seconds: durations, ``uF`` and ``uB`` in the papers.
        output_bytes: what the next stage reads, ``|a|``.
        saved_bytes: what its own backward needs and may be dropped, its output included, ``|abar|``.
        forward_overhead_bytes, backward_overhead_bytes: held besides only while it runs, ``f`` and ``b``.
        fixed_bytes: saved too, but cannot be computed again: stays from the first forward to the backward, unless it
            is offloaded. No part of ``saved_bytes``. The papers' chains have none.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    fixed_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Stages in order, and the bytes of what the first one reads."""

    stages: tuple[Stage, ...]
    input_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise PolicyError("a chain needs at least one stage")
        for place, stage in enumerate(self.stages):
            sizes = dataclasses.astuple(stage)[2:]
            seconds = (stage.forward_seconds, stage.backward_seconds)
            if min(sizes) < 0 or not all(math.isfinite(value) and value >= 0 for value in seconds):
                raise PolicyError(f"stage {place} of the chain has a negative or endless size or time: {stage}")
            if stage.saved_bytes < stage.output_bytes:
                raise PolicyError(f"stage {place} of the chain saves less than its output: {stage}")

    @property
    def boundary_bytes(self) -> list[int]:
        """``|a_0|..|a_L|``: what each stage reads, and what the loss reads."""
        return [self.input_bytes, *(stage.output_bytes for stage in self.stages)]

    @property
    def plain_seconds(self) -> float:
        """Duration of all stages, once forward and once backward."""
        return math.fsum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)

    @property
    def plain_bytes(self) -> int:
        """Most bytes held if everything is kept, the input included."""
        sizes = self.boundary_bytes
        held = most = self.input_bytes
        for stage, read in zip(self.stages, sizes, strict=False):
            held += stage.saved_bytes + stage.fixed_bytes
            backward = read + stage.output_bytes + stage.backward_overhead_bytes
            most = max(most, held + max(stage.forward_overhead_bytes, backward))
        return most


ActionKind = Literal["forward_all", "forward_keep", "forward_drop", "backward"]


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One thing done to a stage.

    ``forward_all`` is read as: run its forward op and keep all that it saves (``F_all`` in the papers);
    ``forward_keep``: keep its input only (``F_ck``); ``forward_drop``: keep nothing and delete its input
    (``F_empty``); ``backward``: run its backward op, after which its input and what it saved are gone.
    """

    kind: ActionKind
    stage: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChainPlan:
    """A schedule for a chain.

    Attributes:
        actions: what is run, in order.
        seconds: end of the schedule in its paper's own model.
        offloaded: stages whose input goes out after the first forward op that reads it and comes back before their
            backward: all that the stage before saved, if that was kept, or its output alone.
    """

    actions: tuple[Action, ...]
    seconds: float
    offloaded: frozenset[int] = frozenset()


def store_all(chain: Chain) -> ChainPlan:
    """The schedule that keeps everything."""
    actions = [Action("forward_all", stage) for stage in range(len(chain.stages))]
    actions += [Action("backward", stage) for stage in reversed(range(len(chain.stages)))]
    return ChainPlan(tuple(actions), chain.plain_seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where the input that the backward of a stage needs comes from, when it was made by more than the first forward.

    Attributes:
        stage: the stage from whose input it was computed again.
        through: whether what that stage saves was kept on the way, so that it was computed from that.
    """

    stage: int
    through: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Fate:
    """What a schedule does to one stage.

    Attributes:
        remade: whether what it saves is computed again; if not, it is there since the first forward.
        origin: how its input is computed again; None if it is there since the first forward.
    """

    remade: bool
    origin: Origin | None


def fates(actions: Sequence[Action]) -> list[Fate]:
    """What ``actions`` do to each stage.

    In a persistent schedule what is stored stays until its backward. So the input of a stage is stored once, and that
    which its backward uses is the product of the last sweep before the last forward op of the stage: its origin. This
    is why such a schedule, however nested, is told by one origin per stage.

    Raises:
        PolicyError: if a stage is not run as it must be: a backward without what it needs.
    """
    runs: dict[int, int] = {}
    origins: dict[int, Origin | None] = {0: None}
    found: dict[int, Fate] = {}
    saved: set[int] = set()
    done: dict[int, Fate] = {}
    for action in actions:
        stage = action.stage
        if action.kind == "backward":
            if stage not in saved:
                raise PolicyError(f"the schedule runs the backward of stage {stage} without what it needs")
            done[stage] = found[stage]
            continue
        if stage not in origins:
            raise PolicyError(f"the schedule runs stage {stage} before the one in front of it")
        again = runs[stage] = runs.get(stage, 0) + 1
        if action.kind == "forward_all":
            saved.add(stage)
            found[stage] = Fate(again > 1, origins[stage])
        if again == 1:
            origins[stage + 1] = None
        elif action.kind == "forward_drop":
            origins[stage + 1] = origins[stage]
        else:
            origins[stage + 1] = Origin(stage, action.kind == "forward_all")
    return [done[stage] for stage in sorted(done)]
