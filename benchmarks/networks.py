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

from benchmarks.models import Bert, DenseNet, GoogLeNet, Llama, MobileNetV2, PreActivationResNet, UNet
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


def segmentation(make: Callable[[], nn.Module], *, batch: int, side: int) -> Build:
    """A step of a network that tells the class of each pixel."""

    def build() -> Callable[[], None]:
        model = make().train()
        inputs, targets = torch.randn(batch, 3, side, side), torch.zeros(batch, side, side, dtype=torch.long)
        return lambda: F.cross_entropy(model(inputs), targets).backward()

    return build


def gpt2_small() -> nn.Module:
    """GPT-2 small."""
    return GPT(VOCABULARY, width=768, layers=12, heads=12, context=CONTEXT)


NETWORKS: Mapping[str, Build] = {
    "vgg19": images(lambda: VGG19(batch_norm=False, head_features=4096), batch=64),
    "resnet50": resnet(3, 4, 6, 3, batch=64),
    "resnet101": resnet(3, 4, 23, 3, batch=32),
    "resnet152": resnet(3, 8, 36, 3, batch=32),
    "resnet1001": images(lambda: PreActivationResNet(111), batch=128, side=32),
    "densenet121": images(DenseNet, batch=64),
    "unet": segmentation(UNet, batch=8, side=256),
    "googlenet": images(GoogLeNet, batch=128),
    "mobilenetv2": images(MobileNetV2, batch=128),
    "gpt2": text(gpt2_small, batch=8, length=CONTEXT, vocabulary=VOCABULARY),
    "bert": text(Bert, batch=32, length=512, vocabulary=30522),
    "vit": images(lambda: ViT(image=224, width=768, layers=12, heads=12), batch=64),
    "llama1b": text(Llama, batch=4, length=2048, vocabulary=128256),
    "lstm": text(lambda: LSTMLanguageModel(width=1024, layers=8), batch=64, length=256, vocabulary=256),
}
"""By name. GPT-2, BERT and the vision transformer have the sizes of GPT-2 small, BERT base and ViT-B/16."""


@functools.cache
def recorded(name: str) -> tuple[Step, tuple[Work, ...]]:
    """The step of a network of `NETWORKS` and the work of its ops, with the kernels that CUDA has."""
    return record_fake(NETWORKS[name], kernels="cuda")


def step_on(name: str, machine: Machine) -> Step:
    """The step of a network as ``machine``, which must be a described one, would run it."""
    assert machine.compute is not None, f"{machine.name} is not a described machine"
    return with_durations(*recorded(name), machine.compute)
