"""Every program gives on a CUDA device bit for bit the numbers of plain PyTorch under a budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.machine import Machine
from tests.gpu.programs import FAST, SLOW, Wide, plain, repeats
from tests.run.harness import assert_identical_within, compare
from tests.run.programs import PROGRAMS, SAID_BY_PYTORCH

pytestmark = [pytest.mark.usefixtures("deterministic", "on_cuda", "quick_plans"), *SAID_BY_PYTORCH]

CASES = {"offload": ("50%", FAST), "recompute": ("70%", SLOW)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_identical_to_plain(name: str, case: str, tmp_path: Path) -> None:
    """Among the programs: convolutions, attention, autocast, checkpointing, double backward, changing shapes."""
    kind = PROGRAMS[name]
    limit, machine = CASES[case]
    if not repeats(kind):
        pytest.skip("plain runs differ among themselves: some kernel of this program has no deterministic form")
    # What libraries took in the first run lies there in the next, and counts.
    assert_identical_within(kind, plain(kind), limit, machine, tmp_path, metered=False, may_raise_limit=6)


@pytest.mark.parametrize(("machine", "decision"), [(FAST, Offload), (SLOW, Recompute)], ids=["offload", "recompute"])
def test_plans_do_what_they_are_for(machine: Machine, decision: type, tmp_path: Path) -> None:
    assert repeats(Wide)
    trial = assert_identical_within(Wide, plain(Wide), "60%", machine, tmp_path, metered=False, may_raise_limit=1)
    assert trial.states[-1] == "planned"
    assert any(isinstance(each, decision) for each in trial.decisions)


def test_a_step_on_a_stream_of_its_own(tmp_path: Path) -> None:
    """The user's stream is the compute stream then, in the backward pass too."""
    # One for all steps: cuBLAS takes a workspace for each stream, and keeps it.
    program, side = Wide(), torch.cuda.Stream()
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST) as memory:
        for index, record in enumerate(plain(Wide)):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = program.run(index, memory.step)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            compare(record, found, f"step {index}")
        assert memory.state == "planned"


def test_a_budget_that_does_not_bind(tmp_path: Path) -> None:
    """Nothing is done, and nothing more is allocated."""
    program = Wide()

    def peak_bytes(index: int) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        compare(plain(Wide)[index], program.run(index, memory.step), f"step {index}")
        return torch.cuda.max_memory_allocated()

    with ebbtide.Budget("150%", spill=tmp_path, machine=FAST) as memory:
        peaks = [peak_bytes(index) for index in range(len(plain(Wide)))]
        assert memory.state == "idle"
    program = Wide()
    torch.cuda.reset_peak_memory_stats()
    for index in range(3):
        program.run(index, torch.enable_grad)
    assert peaks[-1] <= torch.cuda.max_memory_allocated() + (1 << 20)
