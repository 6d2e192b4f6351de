"""Steps of well-known networks, made from fake tensors and timed by a described machine's roofline.

Gradients of parameters exist before the step, as from its second micro-batch on: like parameters and inputs they rest,
and what is above rest are activations and their gradients: what the papers call memory for activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.demo.models import GPT, VGG19, LSTMLanguageModel, ResNet, ViT
from ebbtide.machine import Machine
from ebbtide.observe.fake import record_fake
from ebbtide.roofline import Work, with_durations
from ebbtide.step import Step

Build = Callable[[], Callable[[], None]]

CONTEXT = 1024
VOCABULARY = 50257


def images(make: Callable[[], nn.Module], *, batch: int, side: int = 224) -> Build:
    """A step of a classifier of square images."""

    def build() -> Callable[[], None]:
        return _step_of(make(), torch.randn(batch, 3, side, side), torch.zeros(batch, dtype=torch.long))

    return build


def text(make: Callable[[], nn.Module], *, batch: int, length: int, vocabulary: int) -> Build:
    """A step of a language model."""

    def build() -> Callable[[], None]:
        tokens = torch.randint(vocabulary, (batch, length))
        return _step_of(make(), tokens, tokens.flatten())

    return build


def _step_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    model.train()

    def run() -> None:
        F.cross_entropy(model(inputs).flatten(0, -2), targets).backward()

    return run


def resnet(*blocks: int, batch: int) -> Build:
    """A ResNet of bottleneck blocks, by their number in each of the four stages."""
    return images(lambda: ResNet(blocks=blocks), batch=batch)


NETWORKS: Mapping[str, Build] = {
    "vgg19": images(lambda: VGG19(batch_norm=False, head_features=4096), batch=64),
    "resnet50": resnet(3, 4, 6, 3, batch=64),
    "resnet101": resnet(3, 4, 23, 3, batch=32),
    "gpt2": text(
        lambda: GPT(VOCABULARY, width=768, layers=12, heads=12, context=CONTEXT),
        batch=8,
        length=CONTEXT,
        vocabulary=VOCABULARY,
    ),
    "vit": images(lambda: ViT(image=224, width=768, layers=12, heads=12), batch=64),
    "lstm": text(lambda: LSTMLanguageModel(width=1024, layers=8), batch=64, length=256, vocabulary=256),
}
"""By name. GPT-2 and the vision transformer have the sizes of GPT-2 small and ViT-B/16."""


@functools.cache
def recorded(name: str) -> tuple[Step, tuple[Work, ...]]:
    """The step of a network of `NETWORKS` and the work of its ops, with the kernels that CUDA has."""
    return record_fake(NETWORKS[name], kernels="cuda")


def step_on(name: str, machine: Machine) -> Step:
    """The step of a network as ``machine``, which must be a described one, would run it."""
    assert machine.compute is not None, f"{machine.name} is not a described machine"
    return with_durations(*recorded(name), machine.compute)
