"""What an op does: its class, its floating-point operations by PyTorch's own count, and the bytes it must move."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ebbtide.observe.ledger import has_storage, tensors_in
from ebbtide.observe.schema import operator_info
from ebbtide.roofline import OpClass, Work

_CLASSES: tuple[tuple[OpClass, tuple[str, ...]], ...] = (
    ("convolution_backward", ("convolution_backward",)),
    ("convolution", ("convolution", "conv_")),
    ("attention", ("attention",)),
    ("recurrent", ("rnn", "lstm", "gru")),
    ("normalization", ("batch_norm", "layer_norm", "group_norm", "rms_norm")),
    ("matmul", ("addmm", "baddbmm", "bmm", "mm", "addmv", "mv", "dot", "scaled_mm")),
    ("pooling", ("pool", "upsample", "grid_sampler")),
    ("index", ("embedding", "index", "gather", "scatter", "take", "nll_loss", "select_backward", "slice_backward")),
    (
        "transcendental",
        ("softmax", "gelu", "silu", "mish", "tanh", "sigmoid", "exp", "log", "erf", "sin", "cos", "pow"),
    ),
    (
        "reduction",
        ("sum", "mean", "amax", "amin", "max", "min", "norm", "var", "std", "argmax", "cumsum", "any", "all"),
    ),
    ("copy", ("clone", "copy", "cat", "stack", "contiguous", "fill", "zero", "ones", "full", "constant_pad", "repeat")),
)
"""Words in the names of ops, the classes they tell, in the order in which they are tried.

A word of at most three letters must be a whole part of the name: `max` is not in `softmax_backward`, nor `mm` in
`common`; longer ones, and those with `_`, may stand anywhere in it.
"""
_IDLE = ("empty", "new_empty", "empty_like", "empty_strided", "resize_", "_resize_output_", "set_", "_unsafe_view")
"""Ops that take memory or show it, but neither read nor write it, and are no views by their schema."""
_GATHERS = ("embedding", "index_select", "index", "gather", "take")
"""Ops that read as much of their first argument as they return."""
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@cache
def kind_of(func: Any) -> OpClass:
    """Class of an op by its name; what fits nowhere works element by element."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "elementwise"
    base = schema.name.split("::")[1]
    if operator_info(func).replay == "view" or base in _IDLE:
        return "none"
    if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in base and "rnn" not in base:
        return "random"
    parts = set(base.strip("_").split("_"))
    for kind, words in _CLASSES:
        if any(word in base if "_" in word or len(word) > 3 else word in parts for word in words):
            return kind
    return "elementwise"


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """What a call of ``func`` with these arguments did; ``result`` is what it returned."""
    kind = kind_of(func)
    outputs = list(tensors_in((result,)))
    inputs = list(tensors_in((*args, *kwargs.values())))
    if kind == "none" or not (inputs or outputs):
        return Work("none", 0, 0, "float32")
    flops = _flops(func, args, kwargs, result)
    return Work(kind, flops, _moved_bytes(func, inputs, outputs), _dtype(kind, flops, inputs))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    # PyTorch counts the kernels of accelerators, but not those of the CPU that compute the same.
    name = getattr(packet, "__name__", "")
    if name == _CPU_ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if name == f"{_CPU_ATTENTION}_backward":
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    if name == "mkldnn_rnn_layer":
        return _recurrent_flops(list(tensors_in(args)))
    if name == "mkldnn_rnn_layer_backward":
        return 2 * _recurrent_flops(list(tensors_in(args)))
    return 0


def _recurrent_flops(tensors: list[torch.Tensor]) -> int:
    """Both weight matrices of a layer multiply each element of the batch in each step of the sequence."""
    sequence, *weights = tensors[:3]
    return 2 * math.prod(sequence.shape[:2]) * sum(weight.numel() for weight in weights)


def _moved_bytes(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    written = sum(map(_tensor_bytes, outputs))
    base = func._schema.name.split("::")[1] if hasattr(func, "_schema") else ""
    if base in _GATHERS and inputs:
        return 2 * written + sum(map(_tensor_bytes, inputs[1:]))
    read = sum(map(_tensor_bytes, inputs))
    # Ops on lists that write in place return nothing; half of what they are given is written.
    return read + (written if outputs else read // 2)


def _tensor_bytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    # An expanded tensor shows fewer bytes than it has elements.
    return min(size, tensor.untyped_storage().nbytes()) if has_storage(tensor) else size


def _dtype(kind: OpClass, flops: int, inputs: list[torch.Tensor]) -> str:
    """The type in which an op multiplies: that of its inputs, or TensorFloat-32 where PyTorch allows it on CUDA."""
    found = next((tensor.dtype for tensor in inputs if tensor.dtype.is_floating_point), torch.float32)
    if found is not torch.float32 or not flops:
        return str(found).removeprefix("torch.")
    convolves = kind in ("convolution", "convolution_backward")
    cudnn: Any = torch.backends.cudnn
    settings = cudnn.conv if convolves else cudnn.rnn if kind == "recurrent" else torch.backends.cuda.matmul
    return "tfloat32" if settings.fp32_precision == "tf32" else "float32"
