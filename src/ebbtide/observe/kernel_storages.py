"""Results that have more memory than their elements need, as the kernels that made them leave it.

Some kernels put more into the memory of their result, or what the result is not as large as, and make the tensor
smaller in the end; its storage stays. A loss that is reduced within its op has memory for each of its terms until it
dies, and `unfold` and its gradient have memory for the larger one of picture and columns. Fake kernels make results no
larger than their elements. Kernels of CUDA are written alike, as far as their sources say; none was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten: Any = torch.ops.aten


def as_kernels_leave(func: Any, made: Any, args: Any, kwargs: Any) -> None:
    """Give ``made``, the fake result of an ATen call, a storage as large as the real one has."""
    count_of = OPS.get(func)
    if count_of is None:
        return
    storage, size_bytes = made.untyped_storage(), count_of(*args, **kwargs) * made.element_size()
    if storage.nbytes() < size_bytes:
        storage.resize_(size_bytes)


def _terms(scores: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> int:
    count: int = torch.broadcast_shapes(scores.shape, target.shape).numel()
    return count


def _like_the_first(one: torch.Tensor, *_: Any, **__: Any) -> int:
    return one.numel()


OPS: dict[Any, Callable[..., int]] = {
    _aten.binary_cross_entropy.default: _terms,
    _aten.mse_loss.default: _terms,
    _aten.smooth_l1_loss.default: _terms,
    _aten.soft_margin_loss.default: _terms,
    _aten.col2im.default: _like_the_first,
    _aten.im2col.default: _like_the_first,
}
"""For how many elements there is memory at least, by op, from the arguments of a call."""
