"""What is trained: VGG-19, ResNet-152, a GPT-2 XL and a Llama of a billion parameters, in bfloat16, on random data.

In full size they fit an H200 (139 GiB) without a budget, with 15 to 25 GB of activations each; the small ones have the
same layers, and take a fraction of a second on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.models import Llama
from benchmarks.networks import CONTEXT, VOCABULARY
from ebbtide.demo.models import GPT, VGG19, ResNet
from ebbtide.demo.workloads import Batch, Workload

SEED = 0
LLAMA_LENGTH = 2048
SMALL_VOCABULARY = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How to make a model and its data.

    Attributes:
        make: makes the model.
        blocks: name of the module whose children a user would checkpoint one by one.
        batch: images or sequences in a step.
        data: makes inputs and targets for a batch of that size.
    """

    make: Callable[[], nn.Module]
    blocks: str
    batch: int
    data: Callable[[int], Batch]


def _images(side: int) -> Callable[[int], Batch]:
    def data(batch: int) -> Batch:
        images = torch.randn(batch, 3, side, side, dtype=torch.bfloat16)
        return images.to(memory_format=torch.channels_last), torch.randint(1000, (batch,))

    return data


def _tokens(vocabulary: int, length: int) -> Callable[[int], Batch]:
    def data(batch: int) -> Batch:
        return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))

    return data


def _gpt2_xl() -> nn.Module:
    return GPT(VOCABULARY, width=1600, layers=48, heads=25, context=CONTEXT)


def _small_gpt2() -> nn.Module:
    return GPT(SMALL_VOCABULARY, width=64, layers=3, heads=4, context=128)


def _small_llama() -> nn.Module:
    return Llama(SMALL_VOCABULARY, width=64, layers=3, heads=4, groups=2, hidden=256)


FULL = {
    "vgg19": Shape(lambda: VGG19(batch_norm=False, head_features=4096), "features", 384, _images(224)),
    "resnet152": Shape(lambda: ResNet(blocks=(3, 8, 36, 3)), "body", 192, _images(224)),
    "gpt2-xl": Shape(_gpt2_xl, "blocks", 8, _tokens(VOCABULARY, CONTEXT)),
    "llama-1b": Shape(Llama, "blocks", 4, _tokens(128256, LLAMA_LENGTH)),
}
SMALL = {
    "vgg19": Shape(lambda: VGG19(batch_norm=False), "features", 4, _images(32)),
    "resnet152": Shape(lambda: ResNet(blocks=(1, 1, 1, 1)), "body", 4, _images(64)),
    "gpt2-xl": Shape(_small_gpt2, "blocks", 2, _tokens(SMALL_VOCABULARY, 128)),
    "llama-1b": Shape(_small_llama, "blocks", 2, _tokens(SMALL_VOCABULARY, 128)),
}
MODELS = tuple(FULL)


def make_workload(name: str, device: torch.device, *, small: bool, batch_scale: float) -> Workload:
    """The workload called ``name``, one of `MODELS`, on ``device``; every step of it has the same batch."""
    shape = (SMALL if small else FULL)[name]
    torch.manual_seed(SEED)
    with device:
        model = shape.make()
        batch = shape.data(max(1, round(shape.batch * batch_scale)))
    model.to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()  # as autocast leaves it, with what it normalises in bfloat16
    model.train()
    return Workload(name, model, lambda _: batch, tuple(model.get_submodule(shape.blocks).children()), 0.0)


def zero_gradients(model: nn.Module) -> None:
    """Gradients become zero and stay where they are: like parameters they rest, as from the second micro-batch on."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def state_of(model: nn.Module) -> list[Tensor]:
    """Copies of all buffers."""
    return [buffer.clone() for buffer in model.buffers()]
