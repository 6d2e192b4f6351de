"""Ops that PyTorch would choose on a CUDA device, chosen where there is none.

Fake tensors on a ``cuda`` device cannot run a backward pass in a process without CUDA: autograd asks the missing
device for its streams. So tensors stay on the CPU, and what differs is put in place: fused dropout, which saves one
byte an element, and fused attention, flash or memory-efficient, which saves no scores. Devices that the user names are
read as the CPU. Other kernels of CUDA save the same tensors as the CPU's, or nearly (cuDNN's batch norm and LSTM keep
reserve space besides).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ebbtide.errors import StepError

_NO_CUDA = "CUDA is not available"
_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8
"""Both fused kernels want heads of a multiple of this width, and PyTorch pads others."""


@contextlib.contextmanager
def cuda_choices() -> Iterator[None]:
    """While it lasts, tensors of this process on the CPU go through the ops that CUDA tensors would.

    Raises:
        StepError: for CUDA autocast, which PyTorch would silently leave out.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    try:
        with _OnCpu(), warnings.catch_warnings():
            warnings.filterwarnings("always", message=f".*{_NO_CUDA}.*")
            warnings.showwarning = _refusing(warnings.showwarning)
            yield
    finally:
        library._destroy()


def _refusing(show: Callable[..., None]) -> Callable[..., None]:
    """What shows warnings as ``show`` does, but raises the one of CUDA that is not there."""

    def showing(message: Warning | str, *where: Any, **more: Any) -> None:
        if _NO_CUDA in str(message):
            raise StepError(
                f"{message}; without CUDA, PyTorch leaves CUDA autocast out: convert the model and its inputs to"
                " bfloat16, or write torch.autocast('cpu', dtype=torch.bfloat16)"
            )
        show(message, *where, **more)

    return showing


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return inputs
    return torch.native_dropout(inputs, p, train)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention` decides on CUDA: flash, else memory-efficient, else plain arithmetic."""
    width = query.shape[-1]
    fused = _may_fuse(query, key, value, enable_gqa)
    scale = scale if scale is not None else width**-0.5
    aten: Any = torch.ops.aten
    in_flash_form = attn_mask is None and query.dtype in _FLASH_TYPES and width <= _FLASH_WIDEST_HEAD
    if fused and in_flash_form and torch.backends.cuda.flash_sdp_enabled():
        operands = _padded(query, key, value)
        result = aten._scaled_dot_product_flash_attention(*operands, dropout_p, is_causal, False, scale=scale)[0]
    elif fused and not enable_gqa and torch.backends.cuda.mem_efficient_sdp_enabled():
        operands, bias = _padded(query, key, value), _bias(attn_mask, query, key)
        keep = any(part.requires_grad for part in (query, key, value))
        call: Callable[..., Any] = aten._scaled_dot_product_efficient_attention
        result = call(*operands, bias, keep, dropout_p, is_causal, scale=scale)[0]
    else:
        call = aten._scaled_dot_product_attention_math
        result = call(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    found: Tensor = result[..., : value.shape[-1]] if result.shape[-1] != value.shape[-1] else result
    return found


def _may_fuse(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether the shapes are those that fused kernels take: they broadcast neither batches nor heads."""
    parts = (query, key, value)
    if any(part.dim() != 4 or part.shape[-1] != query.shape[-1] for part in parts):
        return False
    batches, heads = ({part.shape[dim] for part in parts} for dim in (0, 1))
    return len(batches) == 1 and (enable_gqa or len(heads) == 1)


def _padded(*parts: Tensor) -> list[Tensor]:
    more = -parts[0].shape[-1] % _HEAD_MULTIPLE
    return [torch.nn.functional.pad(part, (0, more)) for part in parts] if more else list(parts)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """An attention mask as the additive bias that the memory-efficient kernel takes."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:3], key.shape[2])


class _OnCpu(TorchFunctionMode):
    """Reads every CUDA device that is named as the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        named = {name: _on_cpu(argument) for name, argument in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(argument: Any) -> Any:
    cuda = isinstance(argument, torch.device) and argument.type == "cuda"
    if cuda or (isinstance(argument, str) and (argument == "cuda" or argument.startswith("cuda:"))):
        return torch.device("cpu")
    return argument
