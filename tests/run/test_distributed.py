"""Loops of several processes: each plans its own steps, and all of them train to the bits of plain PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import ebbtide
from ebbtide.run.meter import PeakMeter
from tests.run.harness import FAST_DISK, SLOW_DISK

PROCESSES, STEPS, METERED = 2, 12, 11
MACHINES = {"moves": FAST_DISK, "recomputes": SLOW_DISK}

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no processes that train together"
)


@dataclasses.dataclass
class Trained:
    """What is left of a training run."""

    state: dict[str, Tensor]
    losses: list[Tensor]
    random: Tensor
    states: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    limit_bytes: int = 0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))


def replicated(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def replicated_in_views(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)


def sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):  # each has its parameters while it runs, and no longer
            fully_shard(module)
    fully_shard(model)
    return model


WAYS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "replicated": replicated,
    "replicated in views": replicated_in_views,
    "sharded": sharded,
}


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    part = tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
    return part.detach().clone()


def train(wrap: Callable[[nn.Sequential], nn.Module], memory: ebbtide.Budget | None) -> Trained:
    model = wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1 + dist.get_rank())
    data, losses, peak_bytes = torch.randn(8, 8, 48, 48), [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        meter = PeakMeter()
        with (
            meter if step == METERED else contextlib.nullcontext(),
            memory.step() if memory else contextlib.nullcontext(),
        ):
            loss = model(data + step).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        peak_bytes = meter.peak_bytes if step == METERED else 0
    state = {name: local(tensor) for name, tensor in model.state_dict().items()}
    trained = Trained(state, losses, torch.get_rng_state(), peak_bytes=peak_bytes)
    if memory is not None:
        assert memory.plan is not None
        assert memory.plan.binds
        assert memory.limit_bytes is not None
        trained.limit_bytes = memory.limit_bytes
        trained.states = [measured.state for measured in memory.measured]
        trained.left = [measured.left for measured in memory.measured]
    return trained


def work(rank: int, directory: Path) -> None:
    """One of the processes: trains in all ways, plain and within a budget, and writes down what became of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=PROCESSES)
    for way, wrap in WAYS.items():
        runs = {"plain": train(wrap, None)}
        for name, machine in MACHINES.items():
            verify = name == "moves"  # without, what is computed again is right from the first time on
            with ebbtide.Budget("65%", spill=directory, machine=machine, verify=verify) as memory:
                runs[name] = train(wrap, memory)
        torch.save(runs, directory / f"{way} {rank}.pt")
    dist.destroy_process_group()


def test_processes_that_train_together(tmp_path: Path) -> None:
    spawn(work, (tmp_path,), PROCESSES)
    for way in WAYS:
        for rank in range(PROCESSES):
            runs: dict[str, Trained] = torch.load(tmp_path / f"{way} {rank}.pt", weights_only=False)
            plain = runs.pop("plain")
            for name, within in runs.items():
                where = f"{way}, process {rank}, {name}"
                assert within.state.keys() == plain.state.keys(), where
                for key, tensor in plain.state.items():
                    assert torch.equal(within.state[key], tensor), f"{where}: {key}"
                assert torch.equal(torch.stack(within.losses), torch.stack(plain.losses)), where
                assert torch.equal(within.random, plain.random), where
                assert within.states[-3:] == ["planned"] * 3, where
                assert within.left[-3:] == [""] * 3, where
                assert 0 < within.peak_bytes <= within.limit_bytes, where
