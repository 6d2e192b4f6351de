"""The policies of papers on memory managers with every switch."""

from __future__ import annotations

import itertools
from functools import partial
from typing import get_args

from ebbtide.plan.judged import Planner
from ebbtide.plan.published.autoswap import Mode, Score, autoswap
from ebbtide.plan.published.capuchin import capuchin
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.offload_all import offload_all
from ebbtide.plan.published.superneurons import Offloading, Recomputation, superneurons
from ebbtide.plan.published.vdnn import vdnn
from tests.plan.random_steps import KIB

POLICIES: dict[str, Planner] = {
    "offload all": offload_all,
    **{f"vdnn {offload}": partial(vdnn, offload=offload) for offload in ("all", "conv", "dyn")},
    **{f"hascoet {layers}": partial(hascoet, layers=layers) for layers in ("conv", "all")},
    "hascoet without copy stream": partial(hascoet, layers="all", copy_stream=False),
    "hascoet without helper": partial(hascoet, layers="all", helper_thread=False),
    "hascoet without prefetch": partial(hascoet, layers="all", prefetch=False),
    **{
        f"autoswap {score}, {mode}": partial(autoswap, score=score, mode=mode, smallest_bytes=32 * KIB, trials=8)
        for score, mode in itertools.product(get_args(Score), get_args(Mode))
    },
    **{
        f"superneurons {offload}, {recompute}": partial(superneurons, offload=offload, recompute=recompute)
        for offload, recompute in itertools.product(get_args(Offloading), get_args(Recomputation))
    },
    "capuchin": capuchin,
    "capuchin without feedback": partial(capuchin, feedback=0),
    "capuchin without recomputation": partial(capuchin, recompute=False),
}
