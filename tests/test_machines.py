"""The machines known by name, and what a machine file may say of compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.documents import write_json
from ebbtide.errors import RecordError
from ebbtide.machine import Machine
from ebbtide.machines import load_machine, machine_names


def test_the_machines_are_these() -> None:
    expected = {"a100-80gb", "gh200", "h100", "h200", "k40c", "rtx-4090", "titan-x-maxwell", "v100-16gb-pcie"}
    assert set(machine_names()) == expected


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_says_what_a_plan_needs(name: str, tmp_path: Path) -> None:
    machine = load_machine(name)
    assert machine.compute is not None
    capacity = machine.tier(machine.fast).capacity_bytes
    assert capacity is not None
    assert 10 * 2**30 < capacity < 150 * 2**30
    (host,) = machine.slow_tiers()
    for link in (machine.link(machine.fast, host.name), machine.link(host.name, machine.fast)):
        assert 5e9 < link.duplex_bytes_per_second <= link.bandwidth_bytes_per_second < 450e9
        assert link.bandwidth_bytes_per_second < machine.compute.memory_bytes_per_second
    said = " ".join(machine.sources)
    for subject in ("memory", "bandwidth", "host link", "efficiencies"):
        assert subject in said
    machine.save(tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == machine


def test_names_are_read_in_any_case() -> None:
    assert load_machine("H200") == load_machine("h200")


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecordError, match=r"tpu: neither .* h100, h200"):
        load_machine("tpu")


def described(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The document of a machine, after a change."""
    document: dict[str, Any] = json.loads(json.dumps(load_machine("h200").document()))
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda document: document["links"][0].update(target=document["links"][0]["source"]), "leads nowhere"),
        (lambda document: document["tiers"][0].update(capacity_bytes=10**400), "has a capacity of 10"),
        (lambda document: document["tiers"][0].update(capacity_bytes=80e9), "or mend what was written by hand"),
    ],
)
def test_machines_that_cannot_be(change: Callable[[dict[str, Any]], object], expected: str) -> None:
    with pytest.raises(RecordError, match=expected):
        Machine.from_document(described(change), "machine.json")


def test_newer_machines_compute_faster() -> None:
    generations = ("k40c", "titan-x-maxwell", "v100-16gb-pcie", "a100-80gb", "h100")
    computes = [load_machine(name).compute for name in generations]
    rates = [dict(compute.peak_flops_per_second)["float32"] for compute in computes if compute is not None]
    assert rates == sorted(rates)


def document() -> dict[str, Any]:
    return load_machine("h200").document()


def test_a_file_from_before_there_was_compute(tmp_path: Path) -> None:
    old = document()
    del old["compute"], old["sources"]
    write_json(tmp_path / "old.json", old)
    machine = Machine.load(tmp_path / "old.json")
    assert machine.compute is None
    assert machine.sources == ()
    assert machine.links == load_machine("h200").links


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kernels": "tpu"}, "must be 'cpu' or 'cuda'"),
        ({"peak_flops_per_second": {"bfloat16": 1.0}}, "says nothing of float32"),
        ({"peak_flops_per_second": {"float32": 0.0}}, "must be > 0"),
        ({"peak_flops_per_second": [1.0]}, "not a whole machine"),
        ({"memory_bytes_per_second": -1.0}, "must be > 0"),
        ({"efficiencies": {"matmul": 0.0}}, "efficiency of matmul"),
        ({"launch_seconds": -1.0}, "must be >= 0"),
        ({"voltage": 1.0}, "not a whole machine"),
    ],
)
def test_compute_that_cannot_be_is_refused(change: dict[str, Any], expected: str) -> None:
    wrong = document()
    wrong["compute"] |= change
    with pytest.raises(RecordError, match=expected):
        Machine.from_document(wrong, "wrong.json")
