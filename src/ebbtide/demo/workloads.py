"""What is trained: a model, its data and its loss, made the same way from a seed in any process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.demo import data, models
from ebbtide.errors import EbbtideError

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and how to feed it.

    Attributes:
        name: as the user names it.
        model: on the CPU, in training mode.
        batch: inputs and targets of step number i.
        blocks: the modules that a user would checkpoint one by one.
        learning_rate: for AdamW.
    """

    name: str
    model: nn.Module
    batch: Callable[[int], Batch]
    blocks: tuple[nn.Module, ...]
    learning_rate: float

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the model's scores: a scalar."""
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    def step(self, batch: Batch) -> Tensor:
        """Forward, loss and backward of one batch; the loss, detached."""
        loss = self.loss(*batch)
        loss.backward()
        return loss.detach()

    def optimizer(self) -> torch.optim.Optimizer:
        """A new optimizer of the model's parameters."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)


def make_workload(name: str, *, batch_size: int | None = None, seed: int = 0) -> Workload:
    """The workload called ``name``, one of `WORKLOADS`.

    Args:
        name: of the model.
        batch_size: images or passages in a step; None for that of the benchmarks.
        seed: of weights and data.

    Raises:
        EbbtideError: if there is no such workload, or the data is not there.
    """
    if name not in WORKLOADS:
        raise EbbtideError(f"there is no demo model {name!r}; there are {', '.join(WORKLOADS)}")
    make, default_batch_size = WORKLOADS[name]
    torch.manual_seed(seed)
    workload = make(batch_size or default_batch_size, seed)
    workload.model.train()
    return workload


def digest(model: nn.Module) -> str:
    """A sha256 over all parameters, gradients and buffers, bit for bit."""
    total = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for part in (tensor, tensor.grad):
            total.update(name.encode())
            if part is not None:
                total.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _image_workload(
    name: str, model: nn.Module, blocks: nn.Module, batch_size: int, side: int, seed: int, learning_rate: float
) -> Workload:
    # oneDNN works in this layout anyway: faster, and its hidden scratch memory shrinks from 100 MiB to under 18 MiB.
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Workload(
        name=name,
        model=model,
        batch=lambda number: data.photo_crops(batch_size, side, seed=_batch_seed(seed, number)),
        blocks=tuple(blocks.children()),
        learning_rate=learning_rate,
    )


def _text_workload(
    name: str, model: nn.Module, blocks: nn.Module, batch_size: int, length: int, seed: int, learning_rate: float
) -> Workload:
    return Workload(
        name=name,
        model=model,
        batch=lambda number: data.source_text(batch_size, length, seed=_batch_seed(seed, number)),
        blocks=tuple(blocks.children()),
        learning_rate=learning_rate,
    )


def _batch_seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number


def _vgg19(batch_size: int, seed: int) -> Workload:
    model = models.VGG19(data.CROP_CLASSES, batch_norm=True)
    return _image_workload("vgg19", model, model.features, batch_size, 112, seed, 3e-4)


def _resnet50(batch_size: int, seed: int) -> Workload:
    model = models.ResNet(data.CROP_CLASSES)
    return _image_workload("resnet50", model, model.body, batch_size, 160, seed, 3e-4)


def _gpt2(batch_size: int, seed: int) -> Workload:
    model = models.GPT(data.BYTE_VALUES, width=384, layers=6, heads=6, context=512)
    return _text_workload("gpt2", model, model.blocks, batch_size, 512, seed, 1e-3)


def _vit(batch_size: int, seed: int) -> Workload:
    model = models.ViT(data.CROP_CLASSES, image=160, width=384, layers=8, heads=6)
    return _image_workload("vit", model, model.blocks, batch_size, 160, seed, 3e-4)


def _lstm(batch_size: int, seed: int) -> Workload:
    model = models.LSTMLanguageModel(data.BYTE_VALUES, width=384, layers=12)
    return _text_workload("lstm", model, model.blocks, batch_size, 128, seed, 3e-3)


WORKLOADS: dict[str, tuple[Callable[[int, int], Workload], int]] = {
    "vgg19": (_vgg19, 16),
    "resnet50": (_resnet50, 24),
    "gpt2": (_gpt2, 6),
    "vit": (_vit, 32),
    "lstm": (_lstm, 32),
}
"""By name: how to make a workload from a batch size and a seed, and the benchmarks' batch size."""
