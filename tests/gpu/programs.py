"""What the tests on a GPU share: machines on paper, plain records, programs large enough for transfers to count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import tests.run.programs_rare  # noqa: F401  (registers its programs)
from ebbtide.machine import Tier
from tests.run.harness import Program, Record, fast_machine, identical, once, run_plain, slow_machine
from tests.run.programs import Chain, mlp

HOST, DISK = Tier("host", "host"), Tier("disk", "disk")
FAST, SLOW = fast_machine("gpu", HOST), slow_machine("gpu", HOST)
"""Plans offload; plans recompute whatever has a recipe."""


@once
def plain(kind: Callable[[], Program]) -> list[Record]:
    """The records of a plain run, made once. They are in RAM: on the device, every budget would have to count them."""
    return [{name: tensor.cpu() for name, tensor in record.items()} for record in run_plain(kind)]


@once
def repeats(kind: Callable[[], Program]) -> bool:
    """Whether another plain run gives the same bits."""
    again = run_plain(kind, steps=3)
    return all(
        identical(one[name], other[name]) for one, other in zip(plain(kind), again, strict=False) for name in one
    )


class Wide(Chain):
    """A chain of layers that save 64 MiB each, several times what rests: weights, momentum, workspaces.

    Its data is there before the step.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.inputs = self.data(0, 8192, 256)

    def build(self) -> nn.Module:
        return mlp(256, *[1024] * 8, 16)

    def forward(self, index: int) -> torch.Tensor:
        return self.model(self.inputs)
