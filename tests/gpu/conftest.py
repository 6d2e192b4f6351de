"""Tests that need CUDA: not collected where there is none. With it: ``python -m pytest tests/gpu -n 0``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Read when cuBLAS is first used: products in a fixed order, and workspaces (one a thread, for good) that are small
# beside what the programs here save. By default they take 32 MiB each, and no budget by share of the peak would bind.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

IGNORED = (
    # Plain steps that differ among themselves are told by running them twice.
    ".*deterministic",
    # PyTorch says these once a process.
    "Synchronization debug mode is a prototype feature",
    "Attempting to run cuBLAS, but there was no current CUDA context",
    "RNN module weights are not part of single contiguous chunk",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            for message in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    """No test finds blocks that another one left to the allocator: larger ones than asked for count in full."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, where there are such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_cuda() -> Iterator[None]:
    """Programs make their models and data on the current CUDA device."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture
def strict_about_waiting() -> Iterator[None]:
    """PyTorch raises an error where one of its ops makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
