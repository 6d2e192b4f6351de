"""More training loops: the rarer things that PyTorch allows within a step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tests.run.programs_transforms  # noqa: F401  (registers its programs)
from tests.run.harness import Guard, Program, Record
from tests.run.programs import Chain, mlp, program
from tests.run.wrapper import unwrap, wrap


@program
class Adversaries(Program):
    """Two models and two optimizers that train against each other in one step."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"make": mlp(16, 128, 128, 64), "judge": mlp(64, 128, 128, 1, activation=nn.LeakyReLU)})

    def compute(self, index: int, guard: Guard) -> Record:
        make, judge = self.model["make"], self.model["judge"]
        with guard():
            fake = make(self.data(index, 256, 16))
            real = self.data(index + 100, 256, 64)
            judged = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
            judged.backward()
            judge.requires_grad_(False)
            made = F.softplus(-judge(fake)).mean()
            made.backward()
            judge.requires_grad_(True)
        return {"judged": judged, "made": made}


@program
class SharedLayer(Chain):
    """One parameter used six times, and once more transposed."""

    def build(self) -> nn.Module:
        return nn.Linear(128, 128)

    def forward(self, index: int) -> Tensor:
        h = self.data(index, 256, 128)
        for _ in range(6):
            h = torch.tanh(self.model(h)) + h
        return h @ self.model.weight.t()


@program
class Expanded(Program):
    """Views of stride 0 and views with an offset are saved; two of them show one storage."""

    def build(self) -> nn.Module:
        return nn.Linear(64, 192)

    def loss(self, index: int) -> Tensor:
        h = self.model(self.data(index, 128, 64))
        column, rest = h[:, :1], h[:, 1:]
        wide = column.expand(-1, 191)
        h = (wide * rest).sin() * wide.exp()
        row = h.mean(0, keepdim=True).expand_as(h)
        return (row * h + h[::2].repeat_interleave(2, 0) * rest.flip(1)).square().mean()


@program
class Complex(Program):
    """Complex tensors, Fourier transforms, views of complex numbers as real ones."""

    def build(self) -> nn.Module:
        model = nn.Linear(64, 128)
        model.register_parameter("filter", nn.Parameter(torch.randn(128, 65, dtype=torch.complex64)))
        return model

    def loss(self, index: int) -> Tensor:
        h = self.model(self.data(index, 128, 64))
        spectrum = torch.fft.rfft(h) * self.model.get_parameter("filter")
        spectrum = spectrum * torch.polar(torch.ones(128, 65), spectrum.abs())
        back = torch.fft.irfft(spectrum.conj() * 1j, n=128)
        return (back.tanh() * h).mean() + torch.view_as_real(spectrum).square().mean().sqrt()


@program
class SparseEmbedding(Program):
    """Gradients that are sparse tensors."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"rows": nn.Embedding(512, 96, sparse=True), "mlp": mlp(96, 128, 128, 8)})

    def optimize(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, index: int) -> Tensor:
        picks = self.integers(index, 512, 256)
        return self.model["mlp"](self.model["rows"](picks)).square().mean()


@program
class Transposes(Program):
    """A tensor and its transpose are both saved; so are parts and reshapes of one storage."""

    recomputes = False

    def build(self) -> nn.Module:
        return nn.Linear(64, 128)

    def loss(self, index: int) -> Tensor:
        h = torch.tanh(self.model(self.data(index, 128, 64)))
        gram = h @ h.t() / 8
        left, right = gram.softmax(1).chunk(2, dim=1)
        mixed = left.t() @ h + right.t() @ h.view(128, 128)
        return (mixed @ mixed.t() * (left.t() @ left)).mean() + torch.einsum("ij,kj->ik", right, left).exp().mean()


@program
class InPlace(Program):
    """Every kind of in-place op that PyTorch allows: on views, on bases of views, several versions of one storage."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 128)])

    def loss(self, index: int) -> Tensor:
        one, two, three = self.model.children()
        h = one(self.data(index, 192, 64))
        h.mul_(2).relu_()
        g = two(h).tanh_()
        g = g + 1
        g[:, ::2].mul_(0.5)
        g[:, 1::2] = h[:, 1::2].sigmoid()
        f = F.elu(three(g), inplace=True) * 2
        f.view(-1)[:64].zero_()
        f.add_(h, alpha=0.5).sub_(f.mean(1, keepdim=True))
        return f.clamp_(min=-2).square().mean()


@program
class ModuleHooks(Chain):
    """Forward, backward and tensor hooks; one looks at activations, one changes gradients."""

    def build(self) -> nn.Module:
        model = mlp(64, 128, 128, 128, 16)
        model.register_buffer("seen", torch.zeros(()))

        def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            model.get_buffer("seen").add_(output.detach().abs().mean())
            output.register_hook(lambda grad: grad * 1.5)
            return output * 1.25

        def clip(module: nn.Module, grads: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(grad.clamp(-1e-3, 1e-3) for grad in grads)

        model[2].register_forward_hook(look)
        model[3].register_full_backward_hook(clip)
        return model


@program
class NestedHooks(Chain):
    """The user's own saved-tensor hooks inside the step: innermost ones win, as in plain PyTorch."""

    def forward(self, index: int) -> Tensor:
        h = self.model[:2](self.data(index, 256, 64))
        with save_on_cpu():
            h = self.model[2:4](h)
        with saved_tensors_hooks(lambda tensor: tensor.double(), lambda packed: packed.float()):
            h = self.model[4:6](h)
        return self.model[6:](h)


@program
class OptimizerInside(Chain):
    """Clipping and the optimizer, which makes its state in the first step, run inside the step."""

    steady = recomputes = False

    def optimize(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            self.optimizer.zero_grad()
            loss = self.loss(index)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
        return {"loss": loss, "norm": norm}

    def update(self) -> None:
        """Done inside the step."""


@program
class OptimizerInBackward(Chain):
    """Each parameter changes as soon as its gradient is there: what was computed from it cannot be computed again."""

    def optimize(self) -> torch.optim.Optimizer:
        def change(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)  # type: ignore[arg-type]
                parameter.grad = None

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(change)
        return super().optimize()


@program
class ChangedLater(Chain):
    """An input and a buffer that recipes would read are written in place between the forward and the backward."""

    def build(self) -> nn.Module:
        model = mlp(64, 128, 128, 128, 16)
        model.register_buffer("scale", torch.ones(256, 128))
        return model

    def compute(self, index: int, guard: Guard) -> Record:
        x = self.data(index, 256, 64)
        scale = self.model.get_buffer("scale")
        with guard():
            h = torch.sigmoid(torch.relu(self.model[0](x.exp())) + scale)
            loss = self.model[2:](h.exp()).square().mean()
            x.zero_()
            scale.add_(1)
            loss.backward()
        return {"loss": loss, "x": x}

    def loss(self, index: int) -> Tensor:
        raise AssertionError("not used")


@program
class RandomOps(Chain):
    """Random numbers of several kinds, from the global generator and from the user's own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(7)

    def forward(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64))
        h = h + torch.rand_like(h) * 0.1
        mask = torch.empty_like(h).bernoulli_(0.8, generator=self.generator)
        h = (h * mask)[torch.randperm(256)]
        h = F.rrelu(h, training=True) + F.gumbel_softmax(h, dim=1)
        self.kept = {"generator": self.generator.get_state()}
        return self.model[4:](F.alpha_dropout(h, 0.1, training=True))


@program
class Normalised(Program):
    """Parametrisations and norms: spectral norm writes buffers in the forward pass; weight norm; group norm."""

    def build(self) -> nn.Module:
        spectral = nn.utils.parametrizations.spectral_norm(nn.Conv1d(16, 32, 3, padding=1))
        weight = nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3, padding=1))
        sync = nn.BatchNorm1d(32, momentum=None)
        return nn.Sequential(
            spectral, nn.GroupNorm(4, 32), nn.Mish(), weight, sync, nn.InstanceNorm1d(32), nn.Softsign()
        )

    def loss(self, index: int) -> Tensor:
        return self.model(self.data(index, 8, 16, 64)).square().mean()


@program
class OddArguments(Chain):
    """Sparse tensors and inference tensors, of the user's and made on the way, are read by ops that save nothing."""

    def sparse(self, index: int) -> Tensor:
        """Of as many numbers in all steps."""
        return self.data(index, 256, 128).to_sparse()

    def forward(self, index: int) -> Tensor:
        h: Tensor = self.data(index, 256, 64)
        sparse = self.sparse(index + 1)
        with torch.inference_mode():
            mask = self.data(index + 2, 256, 128) * 0.1
        for layer in self.model:
            h = layer(h)
            with torch.inference_mode():
                made = h.detach() * 0.1
            h = (h + mask + made + sparse) if h.shape == mask.shape else h
            h = torch.tanh(h) * h
        return h


@program
class OtherSizes(OddArguments):
    """The sparse tensor holds more in some steps than in others: those are planned for anew."""

    steady = False

    def sparse(self, index: int) -> Tensor:
        return self.data(index, 256, 128).relu().to_sparse()


@program
class Graph(Chain):
    """Sparse matrices are saved, those of the user's and one made on the way, between tensors that can move."""

    def forward(self, index: int) -> Tensor:
        h: Tensor = self.data(index, 256, 64)
        edges = self.integers(index, 256, 2, 2048)
        neighbours = torch.sparse_coo_tensor(edges, torch.rand(2048), (256, 256)).coalesce()
        rows = neighbours.to_sparse_csr()
        for number, layer in enumerate(self.model):
            h = torch.sparse.mm(neighbours if number % 3 else rows, torch.tanh(layer(h)))
        return h


@program
class Ragged(Chain):
    """Nested tensors of both layouts are saved; those of one step are of no shape that another step's are of."""

    def forward(self, index: int) -> Tensor:
        h = self.model[:4](self.data(index, 256, 64))
        lengths = (50, 70, 120)
        for layout in (torch.jagged, torch.strided):
            nested = torch.nested.as_nested_tensor([*h[: sum(lengths)].split(lengths)], layout=layout)
            h = h + torch.nested.to_padded_tensor(F.relu(nested) * 2.0, 0.0).sum((0, 1))
        return self.model[4:](h)


@program
class Derivatives(Program):
    """A loss of third derivatives: what two backward passes make is saved for the last one."""

    def build(self) -> nn.Module:
        return mlp(2, 64, 64, 1, activation=nn.Tanh)

    def loss(self, index: int) -> Tensor:
        where = self.data(index, 1000, 2).requires_grad_()
        u = self.model(where)
        (slope,) = torch.autograd.grad(u.sum(), where, create_graph=True)
        (second,) = torch.autograd.grad(slope[:, 0].sum(), where, create_graph=True)
        (third,) = torch.autograd.grad(second[:, 0].sum(), where, create_graph=True)
        return (slope[:, 1] + 6 * u[:, 0] * slope[:, 0] + third[:, 0]).square().mean()


@program
class Picking(Chain):
    """Ops with indices and several outputs: sort, topk, gather, scatter, cumsum, where, masks."""

    def forward(self, index: int) -> Tensor:
        h = self.model[:2](self.data(index, 256, 64))
        ordered, places = h.sort(dim=1)
        best, where = ordered.cumsum(1).topk(64, dim=1)
        h = h.gather(1, places).scatter_add(1, where, best.log1p())
        h = torch.where(h > 0, h, h.expm1()) + ordered.masked_fill(ordered < 0, 0.1)
        h = torch.cat([h[:, :40], h.index_select(1, torch.arange(88))], 1)
        return self.model[2:](F.normalize(h).roll(3, 1))


@program
class Double(Chain):
    """Double precision, a scalar that changes from step to step, products and norms over all elements."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 16, activation=nn.SiLU).double()

    def forward(self, index: int) -> Tensor:
        h = self.model[:6](self.data(index, 128, 64).double())
        return self.model[6:]((h * (0.5 + 0.1 * index)).tanh() * (index + 1.0))


@program
class Speech(Program):
    """`ctc_loss` with lengths that are tensors, which autograd saves only where a dispatch mode is on."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"hear": nn.Conv1d(16, 64, 5, padding=2), "say": mlp(64, 128, 128, 30)})

    def loss(self, index: int) -> Tensor:
        heard = self.model["hear"](self.data(index, 8, 16, 64)).relu().transpose(1, 2)
        said = self.model["say"](heard).log_softmax(-1).transpose(0, 1)
        texts = self.integers(index, 29, 8, 12) + 1
        lengths = 64 - self.integers(index + 1, 20, 8), 12 - self.integers(index + 2, 6, 8)
        return F.ctc_loss(said, texts, *lengths) + said.mean()


@program
class OtherFormulas(Chain):
    """Products along a dimension, and filling with what is learnt: of their gradients PyTorch has two formulas, of
    which it takes the other one where a dispatch mode is on."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_parameter("level", nn.Parameter(torch.tensor(0.3)))
        return model

    def forward(self, index: int) -> Tensor:
        h = self.model[:2](self.data(index, 256, 64)).sigmoid()
        # As many each time: what is filled in is gathered for its gradient, in memory that no plan knows of.
        h = h.masked_fill(torch.arange(128) % 2 == 0, self.model.level) + 0.4
        h = h.view(256, -1, 4).prod(-1).repeat(1, 4) * h.add(0.1).masked_fill_(torch.arange(128) < 32, self.model.level)
        return self.model[2:](h)


@program
class OutOfInference(Chain):
    """Leaves inference mode, as what is called from evaluations does, and goes on afterwards."""

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            h = self.model[:4](self.data(index, 256, 64))
            with torch.inference_mode(False):
                loss = self.model[4:](h).square().mean()
                loss.backward()
            more = loss.detach() + 1
        return {"loss": loss, "more": more}


@program
class Wrapping(Chain):
    """Tensors around tensors, as those of tensor parallelism, written in place here and there."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 16)

    def forward(self, index: int) -> Tensor:
        h = self.data(index, 256, 64)
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                h = layer(h)
            else:
                wide = wrap(h)
                gate = wide.sigmoid()
                h = unwrap((wide.mul(0.7).tanh() * gate).mul_(2.0).relu_().sin()) + h.tanh()
        return h
