"""Offload everything: every value that may leave does, as soon as it is saved.

The policy that the papers compare with: vDNN's choice without its synchronisation (arXiv 1602.08124), as in
`torch.autograd.graph.save_on_cpu` made asynchronous.
"""

from __future__ import annotations

import numpy as np

from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.plan.published.transfers import Ground, Queues
from ebbtide.step import Step

METHOD = "offload all"


def offload_all(step: Step, machine: Machine, limit_bytes: int) -> Plan:
    """Offload every absence; compute waits for copies out where the limit needs it, loads come back in time or when
    there is room.

    Raises:
        BudgetError: if the step does not stay within ``limit_bytes`` even so.
        PolicyError: if the machine has no slow tier.
    """
    ground = Ground.of(step, machine, METHOD)
    candidates, problem = ground.candidates, ground.problem
    queues = Queues(ground, problem.plain, candidates.closes, problem.clock, limit_bytes)
    return ground.to_plan(
        limit_bytes, queues.moves(np.flatnonzero(candidates.can_offload).tolist(), early=True), METHOD
    )
