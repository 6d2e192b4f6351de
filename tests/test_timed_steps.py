"""How fast this machine computes, fitted on steps that were timed on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ebbtide.errors import EbbtideError
from ebbtide.machine import Compute, Link, Machine, Tier
from ebbtide.roofline import Work
from ebbtide.run.available import capacity_bytes
from ebbtide.step import Op, Step
from ebbtide.timed_steps import fit_here, matched, peaks, quickest, with_compute
from tests.cli.commands import SCRIPT


def step_of(*names: str) -> Step:
    """A step of ops of these names, which take 1, 2, 3, ... seconds."""
    ops = (Op(name, (), (), duration_seconds=float(number)) for number, name in enumerate(names, 1))
    return Step(tuple(ops), (), (), (), ())


def works_of(*flops: int) -> tuple[Work, ...]:
    return tuple(Work("matmul", each, 8, "float32") for each in flops)


def test_ops_are_matched_in_order() -> None:
    """Attention is one op whatever its kernel; what only one of the two runs says nothing."""
    real = step_of("aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.relu", "aten.mm")
    fake = step_of("aten.mm", "aten.view", "aten._scaled_dot_product_efficient_attention.default", "aten.mm")
    found = matched(real, fake, works_of(10, 20, 30, 40))
    assert [op.duration_seconds for op in found.step.ops] == [1.0, 2.0, 4.0]
    assert [work.flops for work in found.works] == [10, 30, 40]


def test_forward_and_backward_of_attention_are_two() -> None:
    real = step_of("aten._scaled_dot_product_flash_attention_for_cpu.default")
    fake = step_of("aten._scaled_dot_product_efficient_attention_backward.default")
    assert matched(real, fake, works_of(1)).works == ()


def test_a_launch_is_what_ops_without_work_take() -> None:
    step = step_of("aten.view", "aten.mm", "aten.view", "aten.view")
    works = [Work("none" if op.name == "aten.view" else "matmul", 2, 8, "bfloat16") for op in step.ops]
    found = peaks(step, works)
    assert found.launch_seconds == 3.0
    assert [name for name, _ in found.peak_flops_per_second] == ["float32", "bfloat16"]
    assert all(rate > 0 for _, rate in found.peak_flops_per_second)
    assert found.memory_bytes_per_second > 0


def test_the_best_peaks_count() -> None:
    seen = [
        Compute("cpu", (("float32", 4e9), ("bfloat16", 1e9)), 3e9, 2e-6),
        Compute("cpu", (("float32", 5e9), ("float64", 2e9)), 2e9, 1e-6),
    ]
    rates = (("float32", 5e9), ("bfloat16", 1e9), ("float64", 2e9))
    assert quickest(seen) == Compute("cpu", rates, 3e9, 1e-6)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_fitted_step_takes_as_long_as_it_took(script: str) -> None:
    """Together, ops that are longer than a launch take what was measured; shorter ones count a launch."""
    said: list[tuple[float, str]] = []
    found = fit_here([script, f"{script}:elsewhere"], lambda done, what: said.append((done, what)))
    assert found.compute.kernels == "cpu"
    assert dict(found.compute.efficiencies).keys() >= {"matmul"}
    assert all(share > 0 for _, share in found.compute.efficiencies)
    assert list(found.seconds) == [script, f"{script}:elsewhere"]
    assert all(took > 0 and told > 0 for took, told in found.seconds.values())
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert said[-1][0] == 1.0


def test_a_step_that_did_not_run_on_the_processor(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = dataclasses.replace(step_of("aten.mm"), device="cuda")
    monkeypatch.setattr("ebbtide.timed_steps.observe_named", lambda *_: on_gpu)
    with pytest.raises(EbbtideError, match="ran on cuda, and only the processor can be fitted"):
        fit_here([script], lambda *_: None)


def test_the_machine_has_the_memory_that_there_is() -> None:
    link = Link("ram", "disk", 1e-4, 4e9, 3e9)
    machine = Machine("here", "ram", (Tier("ram", "device"), Tier("disk", "disk")), (link,))
    compute = peaks(step_of("aten.mm"), works_of(1))
    found = with_compute(machine, compute)
    assert found.compute == compute
    assert found.tier("ram").capacity_bytes == capacity_bytes()
    assert found.tier("disk") == machine.tier("disk")
