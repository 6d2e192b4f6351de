"""The models that the demo, the benchmarks and some tests train: plain PyTorch, nothing in them knows ebbtide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_VGG19_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
_RESNET_STEM_CHANNELS = 64
_BOTTLENECK_EXPANSION = 4


class VGG19(nn.Module):
    """VGG-19 (Simonyan and Zisserman 2015, configuration E) for images of any size.

    Args:
        classes: number of classes.
        batch_norm: normalise after each convolution.
        head_features: width of the two hidden layers of the original classifier; 0 for global average pooling and one
            linear layer instead.
    """

    def __init__(self, classes: int = 1000, *, batch_norm: bool = True, head_features: int = 0) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        channels = 3
        for width, convolutions in _VGG19_STAGES:
            stages.append(_vgg_stage(channels, width, convolutions, batch_norm))
            channels = width
        self.features = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(7 if head_features else 1)
        self.classifier: nn.Module = nn.Linear(channels, classes)
        if head_features:
            self.classifier = nn.Sequential(
                nn.Linear(channels * 49, head_features),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(head_features, head_features),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(head_features, classes),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, channels, height, width)``."""
        scores: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return scores


def _vgg_stage(in_channels: int, width: int, convolutions: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(convolutions):
        layers.append(nn.Conv2d(in_channels if index == 0 else width, width, 3, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.MaxPool2d(2))


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions (He et al. 2016), the stride in the 3x3 one."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * _BOTTLENECK_EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, 4 * width, height / stride, width / stride)``."""
        inner = self.relu(self.norm1(self.conv1(features)))
        inner = self.relu(self.norm2(self.conv2(inner)))
        inner = self.norm3(self.conv3(inner))
        inner += self.shortcut(features)
        result: Tensor = self.relu(inner)
        return result


class ResNet(nn.Module):
    """A residual network of bottleneck blocks; ``blocks=(3, 4, 6, 3)`` is ResNet-50.

    Args:
        classes: number of classes.
        blocks: number of blocks in each of the stages, of which each but the first halves the image.
    """

    def __init__(self, classes: int = 1000, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        channels = _RESNET_STEM_CHANNELS
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        body: list[nn.Module] = []
        for stage, count in enumerate(blocks):
            width = _RESNET_STEM_CHANNELS * 2**stage
            for index in range(count):
                body.append(Bottleneck(channels, width, 2 if index == 0 and stage > 0 else 1))
                channels = width * _BOTTLENECK_EXPANSION
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, 3, height, width)``."""
        scores: Tensor = self.head(self.body(self.stem(images)).mean((2, 3)))
        return scores


class Attention(nn.Module):
    """Multi-head self-attention through PyTorch's fused `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.joint = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, length, width)`` of the same shape."""
        batch, length, width = features.shape
        parts = self.joint(features).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """A pre-norm transformer block with dropout after attention and after the feed-forward part."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, length, width)`` of the same shape."""
        features = features + self.dropout(self.attention(self.norm1(features)))
        result: Tensor = features + self.feed_forward(self.norm2(features))
        return result


class GPT(nn.Module):
    """A GPT-2-like language model; the output layer shares the weights of the token embedding.

    Args:
        vocabulary: number of tokens; 256 for bytes.
        width, layers, heads: of the transformer.
        context: longest sequence, tokens.
        dropout: probability.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        layers: int,
        heads: int,
        context: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, length, vocabulary)`` of the tokens that follow ``tokens`` ``(batch, length)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            features = block(features)
        scores: Tensor = self.head(self.norm(features))
        return scores


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) with a class token and learned positions.

    Args:
        classes: number of classes.
        image: side of the square images, pixels; a multiple of ``patch``.
        width, layers, heads: of the transformer.
        patch: side of a patch, pixels.
        dropout: probability.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        image: int,
        width: int,
        layers: int,
        heads: int,
        patch: int = 16,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)`` of ``images`` ``(batch, 3, image, image)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        features = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.positions
        for block in self.blocks:
            features = block(features)
        scores: Tensor = self.head(self.norm(features)[:, 0])
        return scores


class LSTMLayer(nn.Module):
    """One LSTM layer that returns its sequence only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(batch, length, width)`` of the same shape."""
        sequence: Tensor = self.lstm(features)[0]
        return sequence


class LSTMLanguageModel(nn.Module):
    """A language model of stacked LSTM layers with residual connections.

    Args:
        vocabulary: number of tokens; 256 for bytes.
        width: of the embedding and of all layers.
        layers: number of layers.
    """

    def __init__(self, vocabulary: int = 256, *, width: int = 384, layers: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LSTMLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, length, vocabulary)`` of the tokens that follow ``tokens`` ``(batch, length)``."""
        features = self.tokens(tokens)
        for block in self.blocks:
            features = features + block(features)
        scores: Tensor = self.head(features)
        return scores
