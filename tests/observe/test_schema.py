"""How an operator may be run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.observe.schema import operator_info

aten = torch.ops.aten


@pytest.mark.parametrize("operator", [aten._ctc_loss.default, aten._ctc_loss.Tensor, aten.mkldnn_rnn_layer.default])
def test_what_is_partly_unwritten_is_not_computed_again(operator: Any) -> None:
    assert operator_info(operator).replay == "opaque"


@pytest.mark.parametrize("operator", [aten.tanh.default, aten.native_layer_norm.default, aten.mm.default])
def test_what_depends_on_arguments_alone_is(operator: Any) -> None:
    assert operator_info(operator).replay == "pure"
