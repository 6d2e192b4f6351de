"""Programs on a CUDA device give bit for bit the numbers of plain PyTorch under a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.machine import Link, Machine, Tier
from tests.run.harness import Guard, Record, compare
from tests.run.programs import Attention, mlp

STEPS = 8


def machine_with(bandwidth_bytes_per_second: float, latency_seconds: float) -> Machine:
    rate = bandwidth_bytes_per_second
    links = tuple(Link(a, b, latency_seconds, rate, rate) for a, b in (("gpu", "host"), ("host", "gpu")))
    return Machine("paper", "gpu", (Tier("gpu", "device"), Tier("host", "host")), links)


FAST, SLOW = machine_with(1e12, 1e-7), machine_with(1e6, 1.0)
"""Plans offload; plans recompute whatever has a recipe."""


def chain() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    return mlp(64, 512, 512, 512, 512, 16), lambda model, index: model(_data(index, 4096, 64)).square().mean()


def convolutions() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    def block(inside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))

    model = nn.Sequential(block(3), block(32), nn.Dropout2d(0.2), block(32), nn.AvgPool2d(4), nn.Flatten())
    return model, lambda model, index: F.softplus(model(_data(index, 16, 3, 32, 32))).mean()


def transformer() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    def loss(model: nn.Module, index: int) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(_data(index, 8, 128, 64)).float().square().mean()

    return nn.Sequential(Attention(64, 4), Attention(64, 4)), loss


def _data(index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index)).cuda()


def run(program: Callable[[], tuple[nn.Module, Callable[[nn.Module, int], Tensor]]], guard: Guard) -> list[Record]:
    """The loss, the gradients, the parameters and the random state after each step."""
    torch.manual_seed(0)
    model, loss_of = program()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    records = []
    for index in range(STEPS):
        with guard():
            loss = loss_of(model, index)
            loss.backward()
        record = {"loss": loss.detach().clone(), "random state": torch.cuda.get_rng_state()}
        record |= {f"grad of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        record |= {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        records.append(record)
    return records


@pytest.mark.usefixtures("deterministic", "quick_plans")
@pytest.mark.parametrize("machine", [FAST, SLOW], ids=["offload", "recompute"])
@pytest.mark.parametrize("limit", ["80%", "65%"])
@pytest.mark.parametrize("program", [chain, convolutions, transformer])
def test_identical_to_plain(program: Callable[[], object], limit: str, machine: Machine, tmp_path: Path) -> None:
    expected = run(program, contextlib.nullcontext)
    with ebbtide.Budget(limit, spill=tmp_path, machine=machine) as memory:
        found = run(program, memory.step)
        assert memory.plan is not None
        kinds = {type(decision) for decision in memory.plan.decisions}
    assert kinds & {Offload, Recompute}, "nothing was moved or computed again"
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        compare(one, other, f"step {index}")
