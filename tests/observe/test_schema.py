"""How an operator may be run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.observe.schema import is_partly_written, operator_info

aten = torch.ops.aten


@pytest.mark.parametrize("operator", [aten._ctc_loss.default, aten._ctc_loss.Tensor, aten.mkldnn_rnn_layer.default])
def test_what_is_partly_unwritten(operator: Any) -> None:
    assert is_partly_written(operator)
    assert operator_info(operator).replay == "pure"


@pytest.mark.parametrize("operator", [aten.tanh.default, aten.native_layer_norm.default, aten.mm.default, len])
def test_what_is_not(operator: Any) -> None:
    assert not is_partly_written(operator)
