"""Networks that only the planner's benchmarks need, in plain PyTorch: observed on fake tensors, never trained."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias that keeps the size at stride 1, batch norm, and relu in place."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class PreActivationBlock(nn.Module):
    """A bottleneck block with norm and relu before each convolution (He et al. 2016, "Identity mappings")."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        shapes = ((in_channels, width, 1, 1), (width, width, 3, stride), (width, out_channels, 1, 1))
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inner),
                nn.ReLU(inplace=True),
                nn.Conv2d(inner, outer, kernel, pace, kernel // 2, bias=False),
            )
            for inner, outer, kernel, pace in shapes
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, 4 * width, height / stride, width / stride)``."""
        inner = features
        for layer in self.layers:
            inner = layer(inner)
        result: Tensor = inner + self.shortcut(features)
        return result


class PreActivationResNet(nn.Module):
    """A residual network for images of 32 x 32: ``9 * blocks + 2`` layers; ResNet-1001 has 111 blocks a stage.

    Args:
        blocks: number of blocks in each of the three stages.
        classes: number of classes.
    """

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        channels = 16
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        body: list[nn.Module] = []
        for width, first_stride in ((16, 1), (32, 2), (64, 2)):
            for index in range(blocks):
                body.append(PreActivationBlock(channels, width, first_stride if index == 0 else 1))
                channels = 4 * width
        self.body = nn.Sequential(*body)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, 3, 32, 32)``."""
        features = F.relu(self.norm(self.body(self.stem(images))), inplace=True)
        scores: Tensor = self.head(features.mean((2, 3)))
        return scores


class DenseLayer(nn.Module):
    """A layer of a dense block: it reads all features before it and adds ``growth`` channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        """The new channels ``(batch, growth, height, width)``."""
        inner = self.conv1(F.relu(self.norm1(torch.cat(features, 1)), inplace=True))
        result: Tensor = self.conv2(F.relu(self.norm2(inner), inplace=True))
        return result


class DenseBlock(nn.Module):
    """Layers of which each reads what all before it added."""

    def __init__(self, in_channels: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(in_channels + number * growth, growth) for number in range(count))

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, in_channels + count * growth, height, width)``."""
        parts = [features]
        for layer in self.layers:
            parts.append(layer(parts))
        return torch.cat(parts, 1)


class DenseNet(nn.Module):
    """DenseNet-BC (Huang et al. 2017); ``blocks=(6, 12, 24, 16)`` is DenseNet-121."""

    def __init__(self, blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(*conv_norm_relu(3, channels, 7, 2), nn.MaxPool2d(3, 2, padding=1))
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for place, count in enumerate(blocks):
            self.blocks.append(DenseBlock(channels, growth, count))
            channels += count * growth
            if place + 1 < len(blocks):
                halve = nn.Conv2d(channels, channels // 2, 1, bias=False)
                shrink = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), halve, nn.AvgPool2d(2))
                self.transitions.append(shrink)
                channels //= 2
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, 3, height, width)``."""
        features = self.stem(images)
        for block, transition in itertools.zip_longest(self.blocks, self.transitions):
            features = block(features)
            features = features if transition is None else transition(features)
        scores: Tensor = self.head(F.relu(self.norm(features), inplace=True).mean((2, 3)))
        return scores


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) with batch norm, and convolutions that keep the size.

    Args:
        width: channels of the first level; each of the four below has twice those above.
        classes: number of classes of a pixel.
    """

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(self._pair, [3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[-2::-1])
        self.merge = nn.ModuleList(self._pair(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(in_channels: int, out_channels: int) -> nn.Sequential:
        return nn.Sequential(
            *conv_norm_relu(in_channels, out_channels, 3), *conv_norm_relu(out_channels, out_channels, 3)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes, height, width)`` of ``images`` ``(batch, 3, height, width)``, 16 n pixels."""
        levels: list[Tensor] = []
        features = images
        for level in self.down:
            features = level(F.max_pool2d(features, 2) if levels else features)
            levels.append(features)
        for up, merge, skipped in zip(self.up, self.merge, levels[-2::-1], strict=True):
            features = merge(torch.cat([skipped, up(features)], 1))
        scores: Tensor = self.head(features)
        return scores


class Inception(nn.Module):
    """A module of four branches, joined by channels (Szegedy et al. 2015), with batch norm."""

    def __init__(self, in_channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one = conv_norm_relu(in_channels, one, 1)
        self.three = nn.Sequential(conv_norm_relu(in_channels, three[0], 1), conv_norm_relu(three[0], three[1], 3))
        self.five = nn.Sequential(conv_norm_relu(in_channels, five[0], 1), conv_norm_relu(five[0], five[1], 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm_relu(in_channels, pool, 1))
        self.out_channels = one + three[1] + five[1] + pool

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, out_channels, height, width)``."""
        return torch.cat([self.one(features), self.three(features), self.five(features), self.pool(features)], 1)


class GoogLeNet(nn.Module):
    """GoogLeNet (Szegedy et al. 2015, table 1) with batch norm, without its auxiliary classifiers."""

    SHAPES = (
        ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)),
        (
            (192, (96, 208), (16, 48), 64),
            (160, (112, 224), (24, 64), 64),
            (128, (128, 256), (24, 64), 64),
            (112, (144, 288), (32, 64), 64),
            (256, (160, 320), (32, 128), 128),
        ),
        ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)),
    )
    """Channels of the modules' branches, by stage."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
        layers += [conv_norm_relu(64, 64, 1), conv_norm_relu(64, 192, 3)]
        channels = 192
        for stage in self.SHAPES:
            layers.append(nn.MaxPool2d(3, 2, 1))
            for shape in stage:
                module = Inception(channels, *shape)
                layers.append(module)
                channels = module.out_channels
        self.body = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, 3, height, width)``."""
        scores: Tensor = self.head(self.dropout(self.body(images).mean((2, 3))))
        return scores


class InvertedResidual(nn.Module):
    """A block of MobileNetV2: expand, filter each channel for itself, project (Sandler et al. 2018)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = in_channels * expansion
        self.adds = stride == 1 and in_channels == out_channels
        self.layers = nn.Sequential(
            *(self._activated(in_channels, width, 1) if expansion > 1 else ()),
            *self._activated(width, width, 3, stride, groups=width),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    @staticmethod
    def _activated(inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(outer), nn.ReLU6(inplace=True)]

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, out_channels, height / stride, width / stride)``."""
        result: Tensor = self.layers(features)
        return features + result if self.adds else result


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al. 2018, table 2)."""

    SHAPES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    """Expansion, channels, blocks and stride of the stages."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [conv_norm_relu(3, channels, 3, 2)]
        for expansion, width, count, stride in self.SHAPES:
            for index in range(count):
                layers.append(InvertedResidual(channels, width, stride if index == 0 else 1, expansion))
                channels = width
        self.body = nn.Sequential(*layers, conv_norm_relu(channels, 1280, 1))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, 3, height, width)``."""
        scores: Tensor = self.head(self.body(images).mean((2, 3)))
        return scores


class Bert(nn.Module):
    """BERT (Devlin et al. 2019) with its masked-token head: post-norm, learned positions, tied output weights."""

    def __init__(self, vocabulary: int = 30522, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, length, vocabulary)`` of ``tokens`` ``(batch, length)``, at most 512 long."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.dropout(self.norm(self.tokens(tokens) + self.positions(places)))
        for block in self.blocks:
            features = block(features)
        scores: Tensor = self.head(self.transform(features))
        return scores


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norm, rotary positions, grouped queries, gated feed-forward part."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        small = width // heads * groups
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, small, bias=False)
        self.value, self.out = nn.Linear(width, small, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, features: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Features ``(batch, length, width)``; ``cosine`` and ``sine`` are ``(length, width / heads)``."""
        batch, length, width = features.shape
        normed = self.norm1(features)

        def split(part: Tensor, heads: int) -> Tensor:
            return part.view(batch, length, heads, -1).transpose(1, 2)

        def rotated(part: Tensor) -> Tensor:
            low, high = part.chunk(2, -1)
            return part * cosine + torch.cat([-high, low], -1) * sine

        query = rotated(split(self.query(normed), self.heads))
        key = rotated(split(self.key(normed), self.groups))
        value = split(self.value(normed), self.groups)
        key, value = (part.repeat_interleave(self.heads // self.groups, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        features = features + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm2(features)
        result: Tensor = features + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Llama(nn.Module):
    """A language model of Llama's kind in bfloat16; the defaults are those of Llama 3.2 1B, its embedding tied."""

    def __init__(
        self,
        vocabulary: int = 128256,
        width: int = 2048,
        layers: int = 16,
        heads: int = 32,
        groups: int = 8,
        hidden: int = 8192,
    ) -> None:
        super().__init__()
        self.angles = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, length, vocabulary)`` of the tokens that follow ``tokens`` ``(batch, length)``."""
        rates = 500000.0 ** (-torch.arange(0, self.angles, 2, device=tokens.device) / self.angles)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates).repeat(1, 2)
        cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()
        features = self.tokens(tokens)
        for block in self.blocks:
            features = block(features, cosine, sine)
        scores: Tensor = self.head(self.norm(features))
        return scores
