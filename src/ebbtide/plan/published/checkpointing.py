"""Fixed checkpointing of chains: every block, or a square root of them.

Chen, Xu, Zhang, Guestrin: "Training deep nets with sublinear memory cost", arXiv 1604.06174 (2016). Neither schedule
depends on the limit: it fits or it does not.
"""

from __future__ import annotations

import itertools
import math

from ebbtide.decisions import Plan
from ebbtide.errors import PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.published.chain import Action, Chain, ChainPlan
from ebbtide.plan.published.cut import stages_of
from ebbtide.plan.published.mapping import mapped
from ebbtide.step import Step


def every_block(step: Step, machine: Machine, limit_bytes: int) -> Plan:
    """Keep the input of every stage of the chain and compute all that a stage saves again, right before its backward.

    Raises:
        BudgetError: if that does not stay within ``limit_bytes``.
        PolicyError: if the step is no chain.
    """
    stages = stages_of(step, machine)
    return mapped(stages, block_plan(stages.chain)).plan(limit_bytes, "recompute every block")


def square_root(step: Step, machine: Machine, limit_bytes: int, *, segments: int | None = None) -> Plan:
    """Keep the inputs of some equal segments of the chain; compute a segment again, as a whole, before its backward.

    Args:
        step, machine, limit_bytes: as always.
        segments: how many, or None for the square root of the number of stages.

    Raises:
        BudgetError: if that does not stay within ``limit_bytes``.
        PolicyError: if the step is no chain, or has fewer stages than segments.
    """
    stages = stages_of(step, machine)
    return mapped(stages, segment_plan(stages.chain, segments)).plan(limit_bytes, "checkpoint segments")


def block_plan(chain: Chain) -> ChainPlan:
    """The schedule of `every_block`."""
    count = len(chain.stages)
    actions = [Action("forward_keep", stage) for stage in range(count)]
    for stage in reversed(range(count)):
        actions += [Action("forward_all", stage), Action("backward", stage)]
    again = math.fsum(stage.forward_seconds for stage in chain.stages)
    return ChainPlan(tuple(actions), chain.plain_seconds + again)


def segment_plan(chain: Chain, segments: int | None = None) -> ChainPlan:
    """The schedule of `square_root`. The last segment is kept as it is: its backward follows at once.

    Raises:
        PolicyError: if the chain has fewer stages than segments, or these are none.
    """
    count = len(chain.stages)
    segments = round(math.sqrt(count)) if segments is None else segments
    if not 1 <= segments <= count:
        raise PolicyError(f"a chain of {count} stages cannot be divided into {segments} segments")
    borders = [count * place // segments for place in range(segments + 1)]
    last = borders[-2]
    firsts = set(borders)
    actions = [Action("forward_keep" if stage in firsts else "forward_drop", stage) for stage in range(last)]
    for start, end in reversed(list(itertools.pairwise(borders))):
        actions += [Action("forward_all", stage) for stage in range(start, end)]
        actions += [Action("backward", stage) for stage in reversed(range(start, end))]
    again = math.fsum(stage.forward_seconds for stage in chain.stages[:last])
    return ChainPlan(tuple(actions), chain.plain_seconds + again)
