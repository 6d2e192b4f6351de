"""What to say, and to do, when a step asks for more memory than there is."""

from __future__ import annotations

import re

import torch

from ebbtide.decisions import Plan
from ebbtide.errors import OutOfMemoryError
from ebbtide.run.available import available_bytes
from ebbtide.run.gauges import DeviceMemory
from ebbtide.units import format_bytes, parse_bytes

_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|[KMG]iB)")
"""The bytes that were asked for, in the messages of PyTorch's allocators, on CUDA as on a CPU."""
_WHERE = re.compile(r"GPU ([0-9]+)")
"""The device that is full, in the messages of CUDA's allocator."""
_LIBRARIES = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
"""CUDA and its libraries take memory beside the allocator (for code, handles), and say so in their own ways."""


class _DeviceOutOfMemoryError(OutOfMemoryError, torch.OutOfMemoryError):
    """An error for those who catch PyTorch's own."""


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether ``fault`` is how PyTorch or Python say that memory has run out."""
    on_cpu = type(fault) is RuntimeError and "DefaultCPUAllocator" in str(fault)
    return on_cpu or isinstance(fault, MemoryError) or _of_device(fault)


def _of_device(fault: BaseException) -> bool:
    full = isinstance(fault, RuntimeError) and _LIBRARIES.search(str(fault)) is not None
    return full or isinstance(fault, torch.OutOfMemoryError)


def out_of_memory(
    fault: BaseException, device: torch.device, memory: DeviceMemory | None, plan: Plan | None, limit_bytes: int | None
) -> OutOfMemoryError:
    """The error to raise for ``fault``: what was planned, what was asked for, what would fit.

    To be called before anything else gives memory back.
    """
    asked = _asked_bytes(str(fault))
    fits = None
    advice = "Make the batch smaller, or give back memory that the step does not need"
    if not _of_device(fault):
        state = f"{format_bytes(available_bytes())} of RAM are available"
    elif memory is None or _elsewhere(fault, device):
        state = "it is not the memory that the budget is for"
    else:
        allocated, free = memory.allocated_bytes(), memory.free_bytes()
        fits = allocated + (free if asked is None else min(free, max(0, asked - 1)))
        state = f"{format_bytes(allocated)} were allocated, and {format_bytes(free)} more can be had"
        if asked is not None and free >= asked:
            state += (
                ", but not in one piece (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before the start, keeps "
                "memory in one)"
            )
        if limit_bytes is None or fits < limit_bytes:
            advice = f"A budget of {fits} bytes ({format_bytes(fits)}) would fit: from now on plans stay within that"
    what = "memory" if asked is None else format_bytes(asked)
    message = (
        f"{_first_sentence(fault)} In a step on {device}, {what} was asked for: {state}. {_planned(plan)}"
        f"{f' within a budget of {format_bytes(limit_bytes)}' if limit_bytes is not None else ''}. {advice}. The next "
        "step runs under the safe policy, is observed, and planned for anew"
    )
    kind = _DeviceOutOfMemoryError if _of_device(fault) else OutOfMemoryError
    return kind(
        message, planned_bytes=plan.peak_bytes if plan is not None else None, asked_bytes=asked, fits_bytes=fits
    )


def _elsewhere(fault: BaseException, device: torch.device) -> bool:
    """Whether CUDA's allocator says that another device is full."""
    match = _WHERE.search(str(fault))
    return device.type == "cuda" and match is not None and int(match[1]) != device.index


def _asked_bytes(message: str) -> int | None:
    match = _ASKED.search(message)
    return parse_bytes(match[1] + match[2].removesuffix("ytes")) if match is not None else None


def _first_sentence(fault: BaseException) -> str:
    """Kept at the beginning, since scripts look for it there."""
    return "CUDA out of memory." if _of_device(fault) else "Out of memory."


def _planned(plan: Plan | None) -> str:
    return "Nothing was planned yet" if plan is None else f"The planned peak is {format_bytes(plan.peak_bytes)}"
