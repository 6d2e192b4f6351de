"""Training loops as users write them, small, each with something that could go wrong in it.

Each saves tensors of more than 32 KiB (planners ignore smaller ones) and takes some ten milliseconds a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.run.harness import Guard, Program, Record

PROGRAMS: dict[str, type[Program]] = {}
"""Every program, by name."""
SAID_BY_PYTORCH = tuple(
    pytest.mark.filterwarnings(f"ignore:{what}")
    for what in (
        "Sparse (CSR tensor support|invariant checks):UserWarning",
        "The PyTorch API of nested tensors:UserWarning",
        "`torch.jit.script(_method)?` is deprecated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
        "Attempted to insert a get_attr Node with no underlying reference:UserWarning",
    )
)
"""Marks of tests that run all programs: what PyTorch says of tensors, transforms and operators in them."""


def program(kind: type[Program]) -> type[Program]:
    """Register a program under the name of its class."""
    PROGRAMS[kind.__name__] = kind
    return kind


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers of these widths with an activation after each but the last."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), activation()]
    return nn.Sequential(*layers[:-1])


class Chain(Program):
    """Four wide layers; the plain case that many others vary."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def forward(self, index: int) -> Tensor:
        return self.model(self.data(index, 256, 64))

    def loss(self, index: int) -> Tensor:
        return self.forward(index).square().mean()


@program
class ConvolutionalNet(Program):
    """Batch norm, in-place ReLU, dropout, a residual connection, average and max pooling."""

    def build(self) -> nn.Module:
        def block(inside: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inside, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
            )

        return nn.ModuleList([block(3), block(16), block(16), nn.Dropout2d(0.2), block(16), nn.Linear(16, 10)])

    def loss(self, index: int) -> Tensor:
        one, two, three, dropout, four, head = self.model.children()
        h = one(self.data(index, 8, 3, 20, 20))
        h = two(h) + h
        h = four(F.max_pool2d(dropout(three(h)), 2))
        target = torch.arange(8) % 10
        return F.cross_entropy(head(h.mean((2, 3))), target)


class Attention(nn.Module):
    """A pre-norm block: causal attention with dropout, then two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Two blocks; the embedding and the head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 64), nn.Embedding(48, 64)
        self.blocks = nn.Sequential(Attention(64, 4), Attention(64, 4))
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(h[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@program
class Transformer(Program):
    """Dropout, tied weights, attention, layer norm."""

    def build(self) -> nn.Module:
        return LanguageModel()

    def tokens(self, index: int) -> Tensor:
        return self.integers(index, 64, 4, 48)

    def loss(self, index: int) -> Tensor:
        return self.model(self.tokens(index))


@program
class MixedPrecision(Transformer):
    """The transformer under bf16 autocast: casts of parameters are made in the step and cached."""

    def loss(self, index: int) -> Tensor:
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            return self.model(self.tokens(index)).float()


@program
class Recurrent(Program):
    """A two-layer LSTM, one fused op or many small ones, as PyTorch likes."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"lstm": nn.LSTM(16, 64, 2, dropout=0.1), "head": nn.Linear(64, 16)})

    def loss(self, index: int) -> Tensor:
        x = self.data(index, 12, 64, 16)
        h, _ = self.model["lstm"](x)
        return F.mse_loss(self.model["head"](h[:-1]), x[1:])


@program
class UNet(Program):
    """Concatenations of early and late features, up- and down-sampling, channels last."""

    def build(self) -> nn.Module:
        widths = {"in": (3, 16), "down": (16, 32), "deep": (32, 32), "up": (64, 16), "out": (32, 3)}
        model = nn.ModuleDict({name: nn.Conv2d(a, b, 3, padding=1) for name, (a, b) in widths.items()})
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stubs lack this one

    def loss(self, index: int) -> Tensor:
        x = self.data(index, 4, 3, 24, 24).contiguous(memory_format=torch.channels_last)
        fine = F.silu(self.model["in"](x))
        middle = F.silu(self.model["down"](F.avg_pool2d(fine, 2)))
        deep = F.interpolate(F.silu(self.model["deep"](F.max_pool2d(middle, 2))), scale_factor=2)
        up = F.interpolate(F.silu(self.model["up"](torch.cat([middle, deep], 1))), scale_factor=2, mode="bilinear")
        return (self.model["out"](torch.cat([fine, up], 1)) - x).abs().mean()


class Swish(torch.autograd.Function):
    """Saves its input the right way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Stash(torch.autograd.Function):
    """Keeps tensors on its context where nobody can see them, and works in place in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.hidden = x.detach().sigmoid()
        ctx.mark_non_differentiable(ctx.hidden)
        return x * ctx.hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.hidden.mul_(grad)


class Custom(nn.Module):
    """Calls a custom autograd Function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@program
class CustomFunction(Chain):
    """`save_for_backward` in a custom Function."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 16, activation=lambda: Custom(Swish))


@program
class StashingFunction(Chain):
    """A custom Function that hides tensors on its context: they cannot move, and must not be taken for gone."""

    recomputes = False

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 16, activation=lambda: Custom(Stash))


@program
class Checkpointed(Chain):
    """The user's own activation checkpointing, with dropout inside."""

    reentrant = False
    recomputes = False

    def build(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96)) for _ in range(4)]
        return nn.Sequential(nn.Linear(64, 96), *blocks)

    def forward(self, index: int) -> Tensor:
        first, *blocks = self.model.children()
        h = first(self.data(index, 256, 64))
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant).tanh()
        return h


@program
class CheckpointedReentrant(Checkpointed):
    """The older kind, whose backward runs a backward."""

    reentrant = True


@program
class Accumulation(Chain):
    """Three forwards and backwards in one step; gradients add up."""

    def compute(self, index: int, guard: Guard) -> Record:
        losses = []
        with guard():
            for part in range(3):
                loss = self.loss(3 * index + part) / 3
                loss.backward()
                losses.append(loss.detach())
        return {"loss": torch.stack(losses)}


@program
class TwoLosses(Chain):
    """Two backward passes through one graph, a third by `autograd.grad` for some of the parameters."""

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            y = self.forward(index)
            first, second = y.square().mean(), y.abs().sum()
            first.backward(retain_graph=True)
            some = torch.autograd.grad(second, [self.model[4].weight, self.model[8].weight], retain_graph=True)
            (second * 0.1).backward(inputs=[self.model[0].weight, self.model[2].bias])
        return {"first": first, "second": second, "grad 4": some[0], "grad 8": some[1]}


@program
class TaskGradients(Chain):
    """The gradients of several tasks one after the other, through one trunk with dropout; the loop combines them."""

    def build(self) -> nn.Module:
        trunk = nn.Sequential(*[mlp(128, 128, 128), nn.Dropout(0.1), nn.LayerNorm(128), mlp(128, 128, 128)])
        return nn.ModuleDict({"trunk": trunk, "heads": nn.ModuleList([mlp(128, 128, 8) for _ in range(3)])})

    def compute(self, index: int, guard: Guard) -> Record:
        trunk, heads = self.model["trunk"], list(self.model["heads"])
        shared, losses = list(trunk.parameters()), []
        sums = [torch.zeros_like(parameter) for parameter in shared]
        with guard():
            h = trunk(self.data(index, 256, 128))
            for head in heads:
                loss = head(h).square().mean()
                own = list(head.parameters())
                grads = torch.autograd.grad(loss, [*own, *shared], retain_graph=head is not heads[-1])
                for parameter, grad in zip(own, grads, strict=False):
                    parameter.grad = grad
                for total, grad in zip(sums, grads[len(own) :], strict=True):
                    total.add_(grad.sign())
                losses.append(loss)
        for parameter, total in zip(shared, sums, strict=True):
            parameter.grad = total
        return {f"loss {number}": loss for number, loss in enumerate(losses)}


@program
class GradientPenalty(Chain):
    """Double backward, through dropout."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 1, activation=nn.Softplus)

    def loss(self, index: int) -> Tensor:
        x = h = self.data(index, 256, 64).requires_grad_()
        for layer in self.model:
            h = F.dropout(layer(h), 0.2) if isinstance(layer, nn.Softplus) else layer(h)
        y = h.sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y / 256 + (slope.norm(dim=1) - 1).square().mean()


@program
class NoGradParts(Chain):
    """A teacher without gradients, a detached branch, running averages, frozen layers."""

    def build(self) -> nn.Module:
        model = nn.ModuleDict({"pupil": mlp(64, 128, 128, 128, 16), "teacher": mlp(64, 128, 128, 16)})
        model["teacher"].requires_grad_(False)
        model["pupil"].get_submodule("2").requires_grad_(False)
        model.register_buffer("mean", torch.zeros(16))
        return model

    def loss(self, index: int) -> Tensor:
        x = self.data(index, 256, 64)
        with torch.no_grad():
            target = self.model["teacher"](x)
        with torch.inference_mode():
            scale = float(self.model["teacher"](x).abs().max())
        y = self.model["pupil"](x)
        with torch.no_grad():
            self.model.get_buffer("mean").lerp_(y.mean(0), 0.1)
        return F.mse_loss(y, target) / scale + (y.detach() * y).mean()


@program
class BackwardAfter(Chain):
    """In later steps the backward comes when the step is over, or in the next step, before or after its forward."""

    steady = False
    holds_more = True
    late: Tensor

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            if index == 6:
                self.late.backward()
            loss = self.loss(index)
            if index == 7:
                self.late.backward()
            if index not in (3, 5, 6):
                loss.backward()
        if index == 3:
            loss.backward()
        self.late = loss
        return {"loss": loss}

    def update(self) -> None:
        """No update: the graph of the last step is still needed with its parameters."""


@program
class ThrownAway(Chain):
    """In some steps the graph is dropped, whole or in part, without backward."""

    steady = False

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            aside = self.forward(index + 100).exp()
            loss = self.loss(index)
            if index not in (2, 5):
                loss.backward()
        return {"loss": loss, "aside": aside}


@program
class KeptOutput(Chain):
    """The user keeps activations across steps, one of them with its graph, and feeds one to the next step."""

    steady = False

    def loss(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64))
        if index:
            h = h + 0.1 * self.kept["state"]
        y = self.model[4:](h)
        self.kept = {"state": h.detach(), "output": y, "narrow": h[:, :3]}
        return y.square().mean()


@program
class InputGradient(Chain):
    """The input needs a gradient, and one in the middle is kept too."""

    def compute(self, index: int, guard: Guard) -> Record:
        x = self.data(index, 256, 64).requires_grad_()
        with guard():
            h = self.model[:4](x)
            h.retain_grad()
            loss = self.model[4:](h).square().mean()
            loss.backward()
        assert x.grad is not None
        assert h.grad is not None
        return {"loss": loss, "input grad": x.grad, "middle grad": h.grad}


@program
class ChangingShapes(Chain):
    """The batch is of another size in every other step, and once of a size never seen before."""

    steady = False

    def forward(self, index: int) -> Tensor:
        return self.model(self.data(index, 200 if index == 6 else 192 + 64 * (index % 2), 64))


@program
class Branching(Chain):
    """What is computed depends on the data."""

    steady = False

    def forward(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64))
        if h[0, 0].item() > -0.05:
            h = h * torch.sigmoid(h)
        for _ in range(int(h.abs().sum()) % 3):
            h = torch.tanh(self.model[4](h))
        return self.model[4:](h[h.mean(1) > h.mean()])
