"""Tests that need CUDA: not collected where there is none. With it: ``python -m pytest tests/gpu``."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Read by cuBLAS when it is first used: products in a fixed order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("ignore:steps on CUDA are untried"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
