"""The demo's models and data: shapes, determinism, and what a missing package says."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from ebbtide.demo import data
from ebbtide.demo.models import GPT, VGG19, LSTMLanguageModel, ResNet, ViT
from ebbtide.demo.workloads import WORKLOADS, digest, make_workload
from ebbtide.errors import EbbtideError


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (VGG19(10, batch_norm=True), 20_035_018 - 10_240 + 10 * 512 + 5_120),
        (ResNet(1000), 25_557_032),  # as published for ResNet-50
    ],
)
def test_parameter_counts(model: nn.Module, expected: int) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("head_features", [0, 64])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_vgg_shapes(head_features: int, batch_norm: bool) -> None:
    model = VGG19(7, batch_norm=batch_norm, head_features=head_features)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(
    ("model", "inputs", "shape"),
    [
        (ResNet(7, blocks=(1, 1)), torch.zeros(2, 3, 32, 32), (2, 7)),
        (ViT(7, image=32, width=32, layers=1, heads=2), torch.zeros(2, 3, 32, 32), (2, 7)),
        (GPT(256, width=32, layers=1, heads=2, context=16), torch.zeros(2, 9, dtype=torch.long), (2, 9, 256)),
        (LSTMLanguageModel(256, width=16, layers=2), torch.zeros(2, 9, dtype=torch.long), (2, 9, 256)),
    ],
)
def test_shapes(model: nn.Module, inputs: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert model(inputs).shape == shape


def test_gpt_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(256, width=32, layers=2, heads=2, context=16).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    first, second = model(tokens), model(changed)
    assert torch.equal(first[:, :10], second[:, :10])
    assert not torch.equal(first[:, 10:], second[:, 10:])


def test_photo_crops() -> None:
    images, labels = data.photo_crops(64, 32, seed=3)
    assert images.shape == (64, 3, 32, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert float(images.min()) >= -1
    assert float(images.max()) <= 1
    assert set(labels.tolist()) == set(range(data.CROP_CLASSES))
    assert torch.equal(images, data.photo_crops(64, 32, seed=3)[0])
    assert not torch.equal(images, data.photo_crops(64, 32, seed=4)[0])


def test_source_text() -> None:
    inputs, targets = data.source_text(4, 50, seed=3)
    assert inputs.shape == targets.shape == (4, 50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < data.BYTE_VALUES
    assert torch.equal(inputs, data.source_text(4, 50, seed=3)[0])


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data._photos.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(EbbtideError, match=r"`pip install '\.\[demo\]'` in a clone of ebbtide"):
        data.photo_crops(1, 32, seed=0)


def test_workloads_are_the_same_in_every_run() -> None:
    digests = set()
    for _ in range(2):
        workload = make_workload("gpt2", batch_size=1, seed=5)
        workload.step(workload.batch(0))
        digests.add(digest(workload.model))
    assert len(digests) == 1
    assert digest(make_workload("gpt2", batch_size=1, seed=6).model) not in digests


def test_digest_sees_one_bit() -> None:
    model = nn.BatchNorm1d(3)
    before = digest(model)
    model.running_mean[1] = -0.0  # type: ignore[index]
    assert digest(model) != before


def test_unknown_workload_names_those_that_are() -> None:
    with pytest.raises(EbbtideError, match="vgg19, resnet50, gpt2, vit, lstm"):
        make_workload("alexnet")
    assert list(WORKLOADS) == ["vgg19", "resnet50", "gpt2", "vit", "lstm"]
