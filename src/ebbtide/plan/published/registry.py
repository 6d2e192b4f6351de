"""Every published policy by name, all in one shape. Importing this imports them all: only where they are compared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import get_args

from ebbtide.arguments import check_instance
from ebbtide.decisions import Plan
from ebbtide.errors import PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.finals import with_finals_kept, without_finals
from ebbtide.plan.judged import Planner
from ebbtide.plan.published.autoswap import Score, autoswap
from ebbtide.plan.published.beaumont import dynamic_program, greedy
from ebbtide.plan.published.capuchin import capuchin
from ebbtide.plan.published.checkpointing import every_block, square_root
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.offload_all import offload_all
from ebbtide.plan.published.pofo import pofo
from ebbtide.plan.published.remembered import remembered
from ebbtide.plan.published.rotor import rotor
from ebbtide.plan.published.superneurons import superneurons
from ebbtide.plan.published.vdnn import vdnn
from ebbtide.step import Step
from ebbtide.step_checks import check_step

_check_step = remembered(check_step)


def _about_what_is_asked_for(policy: Callable[..., Plan]) -> Planner:
    """``policy`` for steps that may have final absences, of which no paper says anything: their values stay."""

    @functools.wraps(policy.func if isinstance(policy, partial) else policy)
    def planned(step: Step, machine: Machine, limit_bytes: int) -> Plan:
        check_instance("step", step, Step)
        _check_step(step)
        plan = policy(without_finals(step), machine, limit_bytes)
        return dataclasses.replace(plan, decisions=with_finals_kept(step, plan.decisions))

    return planned


_PUBLISHED: dict[str, Callable[..., Plan]] = {
    "offload-all": offload_all,
    "vdnn-all": partial(vdnn, offload="all"),
    "vdnn-conv": partial(vdnn, offload="conv"),
    "vdnn-dyn": partial(vdnn, offload="dyn"),
    "hascoet-conv": partial(hascoet, layers="conv"),
    "hascoet-all": partial(hascoet, layers="all"),
    "beaumont-greedy": greedy,
    "beaumont-dp": dynamic_program,
    **{f"autoswap-{score}": partial(autoswap, score=score) for score in get_args(Score)},
    "superneurons-offload": partial(superneurons, offload="checkpoints", recompute="none"),
    "superneurons-recompute": partial(superneurons, offload="none", recompute="cost"),
    "superneurons-both": partial(superneurons, offload="checkpoints", recompute="cost"),
    "superneurons-cache": partial(superneurons, offload="cache", recompute="cost"),
    "capuchin": capuchin,
    "rotor": rotor,
    "pofo": pofo,
    "every-block": every_block,
    "square-root": square_root,
}

POLICIES: Mapping[str, Planner] = MappingProxyType(
    {name: _about_what_is_asked_for(policy) for name, policy in _PUBLISHED.items()}
)
"""The policies with the switches that their papers compare; docs/policies.md lists all switches."""


def policies_named(names: Sequence[str]) -> dict[str, Planner]:
    """The policies called ``names``.

    Raises:
        PolicyError: if there is none of such a name.
    """
    for name in names:
        if name not in POLICIES:
            raise PolicyError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return {name: POLICIES[name] for name in names}
