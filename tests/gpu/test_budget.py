"""How budgets use a CUDA device: the host runs ahead, three tiers, the pinned arena, a peer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.decisions import Offload
from ebbtide.machine import Tier
from ebbtide.run.tiers import QueuedTier, StreamTier
from ebbtide.run.tiers.devices import DeviceTiers
from tests.gpu.programs import DISK, FAST, HOST, Wide, plain
from tests.run.harness import STEPS, Solver, compare, divided, fast_machine

pytestmark = pytest.mark.usefixtures("deterministic", "on_cuda", "quick_plans")

SLEEP_CYCLES = 400_000_000
"""Some 200 ms of kernel: longer than the host takes for a step of small ops."""


def tier_of(memory: ebbtide.Budget, name: str) -> StreamTier | QueuedTier:
    """The tier of that name for the current device."""
    tier = memory.tiers[name]
    assert isinstance(tier, DeviceTiers)
    found = tier.of(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(found, StreamTier | QueuedTier)
    return found


def run_all(memory: ebbtide.Budget) -> None:
    """Every step of `Wide`, each compared with plain PyTorch."""
    program = Wide()
    for index, record in enumerate(plain(Wide)):
        compare(record, program.run(index, memory.step), f"step {index}")
    assert memory.state == "planned"


def test_the_host_waits_for_nothing_in_a_planned_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A whole step is queued while the device still sleeps, and no op of PyTorch's had to wait."""
    program = Wide()

    def step() -> None:
        with memory.step():
            program.loss(0).backward()

    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST) as memory:
        for _ in range(STEPS + 4):  # the allocator has by now what it needs
            step()
            program.optimizer.zero_grad()
        assert memory.state == "planned"
        assert memory.plan is not None
        assert any(isinstance(decision, Offload) for decision in memory.plan.decisions)
        torch.cuda.synchronize()
        request.getfixturevalue("strict_about_waiting")
        for _ in range(3):
            torch.cuda._sleep(SLEEP_CYCLES)
            slept = torch.cuda.current_stream().record_event()
            step()
            assert not slept.query(), "the host waited for the device, or is too slow for this test"
            program.optimizer.zero_grad()
            torch.cuda.current_stream().record_event().synchronize()


def test_a_plan_over_three_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_plans: Solver) -> None:
    """Every other value goes to the disk, by way of pinned stages, the others to host memory."""
    monkeypatch.setattr("ebbtide.run.solving.solve", divided(quick_plans, "host", "disk"))
    with ebbtide.Budget("60%", spill=tmp_path, machine=fast_machine("gpu", HOST, DISK)) as memory:
        run_all(memory)
        assert tier_of(memory, "host").read_bytes > 0
        assert tier_of(memory, "disk").read_bytes > 0


def test_what_has_no_place_in_host_memory_goes_to_the_disk(tmp_path: Path) -> None:
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST, host="96MiB") as memory:
        run_all(memory)
        assert tier_of(memory, "host").read_bytes > 0
        assert tier_of(memory, "disk").read_bytes > 0


def test_the_pinned_arena_becomes_as_large_as_the_plan_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first planned step it is empty; in later ones nothing overflows to the disk."""
    monkeypatch.setattr("ebbtide.run.tiers.choose.START_BYTES", 0)
    program, overflowed = Wide(), []
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST) as memory:
        disk = tier_of(memory, "disk")
        for index, record in enumerate(plain(Wide)):
            compare(record, program.run(index, memory.step), f"step {index}")
            overflowed.append(disk.written_bytes)
        assert tier_of(memory, "host").read_bytes > 0
    assert overflowed[-1] == overflowed[-3]


def test_steps_that_no_plan_knows_add_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a number of bytes something moves in the first steps already, and nothing to the disk."""
    monkeypatch.setattr("ebbtide.run.tiers.choose.START_BYTES", 0)
    monkeypatch.setattr("ebbtide.run.tiers.choose.PIECE_BYTES", 64 << 20)
    expected = plain(Wide)
    torch.cuda.reset_peak_memory_stats()
    Wide().run(0, contextlib.nullcontext)
    limit = int(0.6 * torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
    with ebbtide.Budget(limit, spill=tmp_path, machine=FAST) as memory:
        program = Wide()
        for index, record in enumerate(expected[:2]):
            assert memory.state == "observe"
            compare(record, program.run(index, memory.step), f"step {index}")
        assert tier_of(memory, "host").read_bytes > 0
        assert tier_of(memory, "disk").written_bytes == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device only")
def test_a_peer_as_the_slower_memory(tmp_path: Path) -> None:
    peer = Tier("cuda:1", "device")
    with ebbtide.Budget("60%", spill=tmp_path, machine=fast_machine("gpu", peer)) as memory:
        run_all(memory)
        assert tier_of(memory, "cuda:1").read_bytes > 0
