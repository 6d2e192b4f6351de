"""The benchmark's own parts on a CUDA device: it runs, and its peers compute the right gradients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.cases import Bench
from benchmarks.gpu.devices import CudaDevice
from benchmarks.gpu.methods import METHODS, make_peer
from benchmarks.gpu.workloads import make_workload

COMPILED = "compile-budget"


class SlowCopies(CudaDevice):
    """Whatever is launched on a side stream begins late."""

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            yield


@pytest.mark.usefixtures("quick_plans")
def test_a_small_run(tmp_path: Path) -> None:
    """All methods but the compiled one, which takes longest, measure two models and change no gradient."""
    file = tmp_path / "gpu.json"
    methods = ",".join(name for name in METHODS if name != COMPILED)
    small = ["--small", "--device", "cuda", "--repeats", "3", "--deterministic", "--spill", str(tmp_path)]
    main([*small, "--json", str(file), "--models", "resnet152,llama-1b", "--fractions", "1,0.5", "--methods", methods])
    document = json.loads(file.read_text())
    assert min(document["bandwidths"].values()) > 1e9
    for record in document["records"]:
        assert record["status"] == "measured", record
        if (record["model"], record["method"]) == ("resnet152", "save-on-cpu"):
            # PyTorch's own hook brings tensors back without their strides, and then other kernels run, in bfloat16.
            assert record["gradient_difference"] < 0.2, record
        else:
            assert record["gradients"] in ("identical", "spread"), record


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["offload-activations", "offload-checkpoint"])
def test_the_offloading_peer_is_right_when_its_copies_are_slow(name: str) -> None:
    device = SlowCopies()
    bench = Bench(make_workload("llama-1b", device.torch_device, small=True, batch_scale=1.0), device)
    facts = bench.measure(make_peer(name, bench.workload, device), repeats=3, until=0.0)
    assert facts["gradient_difference"] <= 2 * facts["plain_spread"]
