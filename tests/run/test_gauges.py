"""Which device steps are expected on, and what is asked about it."""

from __future__ import annotations

import pytest
import torch

from ebbtide.errors import StepError
from ebbtide.run.gauges import gauges_of, likely_device


def test_without_cuda_steps_are_expected_on_the_cpu() -> None:
    if not torch.cuda.is_available():
        assert likely_device() == torch.device("cpu")
    assert gauges_of(torch.device("cpu")).memory is None


def test_a_cuda_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All storages of a step would be elsewhere, and count nothing. CUDA may not be in use yet."""
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: used.append("init"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    for named, index in (("cuda", 1), ("cuda:0", 0)):
        gauges = gauges_of(torch.device(named))
        assert gauges.memory is not None
        assert gauges.device == gauges.memory.device == torch.device("cuda", index)
    assert used == ["init", "init"]


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    with pytest.raises(RuntimeError, match="there are 2 CUDA devices"):
        gauges_of(torch.device("cuda", 2))


def test_an_allocator_in_place_of_pytorch_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of what it hands out, and the first op would end in an error that names no budget."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    with pytest.raises(StepError, match="allocator of CUDA memory was replaced"):
        gauges_of(torch.device("cuda", 0))
