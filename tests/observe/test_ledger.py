"""What is asked of each saved tensor: whether it has a storage, whether that says all, and who counts versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from ebbtide.observe import ledger

Ask = Callable[[Tensor], bool]
BY_KEYS: list[tuple[Ask, Ask]] = [
    (ledger.has_storage, ledger._has_storage),
    (ledger.is_dense, ledger._is_dense),
    (ledger.is_traceable, ledger._has_versions),
]
"""What is told by a tensor's dispatch keys, and what tells it of the tensor itself."""


def kinds() -> Iterator[tuple[str, Tensor]]:
    """Tensors of all kinds whose class is PyTorch's own, each with another one that has the same keys."""
    for size in (2, 5):
        plain = torch.randn(size, size)
        yield "plain", plain
        yield "parameter", nn.Parameter(plain)
        yield "view", plain.t()[1:]
        yield "result", plain.clone().requires_grad_().exp()
        yield "detached", plain.clone().requires_grad_().exp().detach()
        yield "empty", plain[:0]
        yield "half", plain.to(torch.bfloat16)
        yield "complex", torch.complex(plain, plain)
        yield "conjugated", torch.complex(plain, plain).conj()
        yield "negated", torch._neg_view(plain)
        yield "both", torch.complex(plain, plain).conj().imag
        yield "meta", torch.empty(size, device="meta")
        yield "sparse", plain.to_sparse()
        yield "rows", plain.to_sparse_csr()
        yield "mkldnn", plain.to_mkldnn()
        yield "zero", torch._efficientzerotensor((size,))
        yield "quantized", torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
        yield "nested", torch.nested.nested_tensor([plain, plain])
        with torch.inference_mode():
            yield "inference", torch.ones(size)
        with forward_ad.dual_level():
            yield "dual", forward_ad.make_dual(plain, plain)
        batched: list[Tensor] = []
        torch.vmap(lambda row, keep=batched: (keep.append(row), row)[1])(plain)
        torch.func.grad(lambda each, keep=batched: (keep.append(each), each.sum())[1])(plain)
        torch.func.functionalize(lambda each, keep=batched: (keep.append(each), each * 2)[1])(plain)
        yield from zip(("batched", "differentiated", "functional"), batched, strict=True)


def test_dispatch_keys_tell_what_the_tensor_would(recwarn: pytest.WarningsRecorder) -> None:
    """Whichever of its kind was looked into first: its keys say what PyTorch says of the tensor itself."""
    del recwarn  # some of these kinds are prototypes, or on their way out
    found: dict[str, list[tuple[bool, ...]]] = {}
    for name, tensor in kinds():
        told = tuple(by_keys(tensor) for by_keys, _ in BY_KEYS)
        assert told == tuple(of_tensor(tensor) for _, of_tensor in BY_KEYS), name
        found.setdefault(name, []).append(told)
    assert all(one == other for one, other in found.values())
    assert found["plain"][0] == found["parameter"][0] == found["result"][0] == (True, True, True)
    assert found["conjugated"][0] == found["negated"][0] == found["quantized"][0] == (True, False, True)
    assert found["inference"][0] == (True, True, False)
    without = {name for name, (told, _) in found.items() if not any(told)}
    assert without >= {"meta", "sparse", "rows", "mkldnn", "zero", "nested", "batched", "differentiated", "functional"}


def test_classes_of_others_are_looked_into_each_time() -> None:
    class Named(Tensor):
        """Has no code of its own for ops."""

    class Logged(Tensor):
        """Has."""

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # its stubs have another protocol
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    plain = torch.ones(2)
    assert ledger.is_traceable(plain)
    assert ledger.is_traceable(plain.as_subclass(Named))
    assert not ledger.is_traceable(plain.as_subclass(Logged))
