"""How an operator may be run again."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebbtide.observe.schema import is_partly_written, operator_info

aten = torch.ops.aten


@pytest.mark.parametrize("operator", [aten._ctc_loss.default, aten._ctc_loss.Tensor, aten.mkldnn_rnn_layer.default])
def test_what_is_partly_unwritten(operator: Any) -> None:
    assert is_partly_written(operator)
    assert operator_info(operator).replay == "pure"


@pytest.mark.parametrize("operator", [aten.tanh.default, aten.native_layer_norm.default, aten.mm.default, len])
def test_what_is_not(operator: Any) -> None:
    assert not is_partly_written(operator)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no processes that train together")
def test_collectives_write_what_they_are_given_first() -> None:
    """Which their schemas do not say."""
    for name in ("allreduce_", "broadcast_", "allgather_", "_allgather_base_", "reduce_scatter_", "recv_"):
        assert operator_info(getattr(torch.ops.c10d, name).default).written == (0,)
    for name in ("send", "barrier"):
        assert operator_info(getattr(torch.ops.c10d, name).default).written == ()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told what to fill memory with")
def test_no_gradient_depends_on_what_is_unwritten() -> None:
    """Which is why it need not be the same where it is computed again."""
    done = subprocess.run([sys.executable, "-m", "tests.observe.unwritten"], capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert counts["run"] >= 16
    assert counts["other"] > counts["run"] / 2
    assert counts["different"] == 0
