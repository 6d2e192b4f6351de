"""Training loops with transforms of `torch.func` in them, and with operators that take functions."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx

from tests.run.harness import Program
from tests.run.programs import Chain, mlp, program


@program
class Transformed(Chain):
    """Transforms of `torch.func`, which allow no hooks on saved tensors, run within the step."""

    def forward(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64))
        last = {name: parameter.detach() for name, parameter in self.model[4].named_parameters()}

        def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(self.model[4], parameters, (row,)).square().mean()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(last, h.detach()[:64])
        curved = torch.func.hessian(lambda row: row.tanh().prod())(h.detach()[0, :16])
        self.kept = {f"gradients of {name}": gradients for name, gradients in each.items()} | {"curved": curved}
        return self.model[4:](h * (1 + torch.func.jacrev(torch.sin)(h[:1, 0]).mean()))


@program
class Batched(Chain):
    """Gradients in batches, by the older `vmap` that PyTorch has for them, through nodes that ask for modes."""

    def forward(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64)).sigmoid() + 0.5
        bias = self.model[2].bias
        (rows,) = torch.autograd.grad(h[:4].prod(1), bias, torch.eye(4), is_grads_batched=True, retain_graph=True)
        few = bias.detach()[:16]

        def products(bias: Tensor) -> Tensor:
            return torch.stack([(bias * k).exp().prod(0) for k in (0.01, 0.02, 0.03)])

        jacobian = torch.autograd.functional.jacobian(products, few, vectorize=True)
        self.kept = {"rows": rows, "jacobian": jacobian}
        return self.model[4:](h)


@program
class Ensemble(Program):
    """Four models in one, by `vmap`: autograd saves below it, in the middle of its ops."""

    def build(self) -> nn.Module:
        models = [mlp(32, 64, 64, 64, 64, 8) for _ in range(4)]
        self.one = models[0]
        parameters, _ = torch.func.stack_module_state(models)
        return nn.ParameterDict({name.replace(".", "_"): tensor for name, tensor in parameters.items()})

    def loss(self, index: int) -> Tensor:
        parameters = {name.replace("_", "."): tensor for name, tensor in self.model.items()}

        def answer(parameters: dict[str, Tensor], data: Tensor) -> Tensor:
            hidden: Tensor = torch.func.functional_call(self.one, parameters, (data,))
            return torch.tanh(hidden * 2) * hidden.exp()

        answers = torch.vmap(answer, in_dims=(0, None))(parameters, self.data(index, 256, 32))
        return (torch.tanh(answers) * answers).square().mean()


@program
class Tangents(Chain):
    """A loss of a derivative by forward mode: `jvp` within the graph of the step."""

    def build(self) -> nn.Module:
        return mlp(32, 128, 128, 128, 8, activation=nn.Tanh)

    def loss(self, index: int) -> Tensor:
        data, along = self.data(index, 256, 32), self.data(index + 50, 256, 32)
        answers, slopes = torch.func.jvp(self.model, (data,), (along,))[:2]
        gates = torch.sigmoid(answers * 2) * torch.tanh(slopes)
        return answers.square().mean() + (slopes - gates).square().mean()


@program
class LateTransforms(Program):
    """From some step on `vmap` runs what other code ran before, and saves the same."""

    steady = False

    def build(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(5)])

    def loss(self, index: int) -> Tensor:
        h = self.data(index, 4, 128, 64)
        for weight in self.model:
            h = torch.vmap(self._between)(h @ weight) if index > 5 else self._between(h @ weight)
        return h.square().mean()

    def _between(self, h: Tensor) -> Tensor:
        gate = torch.tanh(h * 2) * torch.sigmoid(h)
        return torch.sigmoid(gate * 3) * gate


@program
class Traced(Chain):
    """What has a gradient in it is traced, on real tensors, between ops that are captured, and runs on others."""

    def forward(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64))
        h = (torch.tanh(h) * torch.sigmoid(h)).exp().sin()
        graph = make_fx(_slope)(torch.ones(128, 128))
        _, tangent = torch.func.linearize(torch.tanh, h.detach())
        h = torch.tanh(h * 1.5) * h + graph(self.data(index, 128, 128)).mean() + tangent(self.data(index, 256, 128))
        del graph, tangent
        gc.collect()  # traces hold each other, and what they were made from, until somebody happens to collect them
        return self.model[4:](h)


def _slope(where: Tensor) -> Tensor:
    where = where.detach().requires_grad_()
    height = (torch.tanh(where) * torch.sigmoid(where)).exp().sum()
    return torch.autograd.grad(height, where)[0]


@program
class Conditional(Chain):
    """`torch.cond` and `scan`, operators that take functions: what these do inside is one op."""

    def loss(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 64, 64))
        h = torch.cond(h.square().sum() > 0, lambda h: (h * 2).sin() * h, lambda h: h.cos() * 3, (h,))
        carried, gone_by = scan(_carry, torch.zeros(8, 128), (torch.tanh(h * 2) * h).view(8, 8, 128))
        return self.model[4:](gone_by).square().mean() + carried.sum() * 1e-3


def _carry(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    return (carried + row) * 0.5, torch.tanh(carried * row)
