"""Random programs under random budgets on random machines, bit for bit as in plain PyTorch.

A failing program is printed as source text; paste it into `PASTED` to keep it as a regression test. The environment
variable EBBTIDE_HYPOTHESIS=long tries many more.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import strategies as st
from torch import Tensor, nn

from ebbtide.machine import Tier
from tests.run.harness import (
    STEPS,
    Guard,
    Program,
    Record,
    allowed_raises,
    assert_identical_within,
    paper_machine,
    run_plain,
)
from tests.run.pieces import MORE_PIECES
from tests.run.programs import SAID_BY_PYTORCH

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

MAX_ELEMENTS = 40_000

PIECES = [
    "{t} = F.linear({a}, w0, b0)",
    "{t} = {a} @ w1",
    "{t} = {a} @ {b}.transpose(-1, -2) / 10",
    "{t} = {a}.reshape(128, 96)",
    "{t} = {a}.view(16, 8, 8, 12)",
    "{t} = F.conv2d({a}, kernel, padding=1)",
    "{t} = F.batch_norm({a}, mean, variance, gain, bias, training=True)",
    "{t} = F.layer_norm({a}, {a}.shape[-1:])",
    "{t} = F.layer_norm({a}, (96,), b0, b1)",
    "{t} = F.group_norm({a}, 4, gain, bias)",
    "{t} = F.relu({a})",
    "{t} = F.gelu({a})",
    "{t} = F.silu({a})",
    "{t} = F.leaky_relu({a}, 0.2)",
    "{t} = {a}.tanh()",
    "{t} = {a}.sigmoid() * {b}",
    "{t} = {a}.clamp(-3, 3).exp()",
    "{t} = {a}.softmax(-1)",
    "{t} = {a}.log_softmax(0)",
    "{t} = F.dropout({a}, 0.3)",
    "{t} = {a} + {b}",
    "{t} = {a} * {b}",
    "{t} = {a} / (1 + {b}.abs())",
    "{t} = {a} * (index + 1)",
    "{t} = {a} - {b}.mean()",
    "{t} = torch.where({a} > {b}, {a}, {b})",
    "{t} = torch.maximum({a}, {b})",
    "{t} = {a}.transpose(0, 1)",
    "{t} = {a}.contiguous()",
    "{t} = {a}[..., ::2]",
    "{t} = {a}[:64]",
    "{t} = {a}.narrow(-1, 1, 5)",
    "{t} = {a}[0]",
    "{t} = {a}.flip(0)",
    "{t} = {a}.unsqueeze(1)",
    "{t} = torch.cat([{a}, {b}], 0)",
    "{t} = torch.stack([{a}, {b}])",
    "{t} = {a}.chunk(2, -1)[1]",
    "{t} = torch.cat({a}.split(5, -1)[::-1], -1)",
    "{t} = {a}.expand_as({b})",
    "{t} = {a}.mean(-1, keepdim=True)",
    "{t} = {a}.sum(0)",
    "{t} = {a}.amax(-1, keepdim=True)",
    "{t} = ({a}.var(-1, keepdim=True) + 1e-5).rsqrt()",
    "{t} = {a}.norm(dim=0)",
    "{t} = F.scaled_dot_product_attention(*[{a}.reshape(1, 4, 128, 24)] * 3).transpose(1, 2)",
    "{t} = F.max_pool2d({a}, 2)",
    "{t} = F.interpolate({a}, scale_factor=2)",
    "{t} = F.pad({a}, (1, 1))",
    "{t} = {a}.masked_fill({a} < 0, 0.5)",
    "{t} = {a}.cumsum(-1) / 10",
    "{t} = {a}.sort(-1).values",
    "{t} = {a}.gather(-1, {b}.argsort(-1))",
    "{t} = {a}[{a}.argsort(0)[:, 0]]",
    "{t} = F.embedding({a}.argmax(-1) % 50, table)",
    "{t} = {a}.bfloat16().float()",
    "{t} = {a}.double().square().float()",
    "{t} = {a}.detach() * {b}",
    "{t} = {a}.clone()",
    "{a}.relu_()",
    "{a}.mul_(0.9)",
    "{a}.add_({b})",
    "{a}.sigmoid_()",
    "{a}[..., 0].zero_()",
    "{a}[:8] = {b}[:8]",
    "{a}.copy_({b})",
    "with torch.no_grad(): {t} = {a}.exp().clamp(max=9)",
    "{t} = torch.vmap(lambda row: torch.tanh(row * 2) * row.sigmoid())({a})",
    "{t} = torch.func.jvp(lambda t: t.sin() * t, ({a},), ({b}.expand_as({a}),))[1]",
    "{t} = torch.autograd.grad({a}.sin().square().sum(), {a}, create_graph=True)[0]",
    "{t} = torch.autograd.grad(F.linear({a}, w0, b0).tanh().sum(), {a}, create_graph=True)[0] * {a}",
    "del {a}",
    "{t} = F.rrelu({a}, training=True)",
    "{t} = torch.fft.fft({a}).conj().imag",
    "{t} = F.gumbel_softmax({a}, dim=-1)",
    "{t} = {a} * torch.rand({a}.shape, generator=torch.Generator().manual_seed(5))",
    "{t} = {a} * {a}.sum().item()",
    "{t} = {a}.topk(3, -1).values",
    "{t} = {a}.unfold(-1, 3, 2)",
    "{t} = {a}.scatter_add(-1, {a}.argsort(-1), {a}.sin())",
    "{t} = F.instance_norm({a})",
    "{t} = F.conv_transpose2d({a}, kernel)",
    "{t} = torch.cdist({a}, {b})",
    "with torch.autocast('cpu', torch.bfloat16): {t} = F.linear({a}, w0, b0).float()",
    "torch._foreach_mul_([{a}], 0.9)",
    "{a}.masked_fill_({a} > 1, 0.5)",
    "{a}.register_hook(lambda gradient: gradient * 2)",
    "{a}.sum().backward(retain_graph=True)",
]
"""Statements; ``t`` is a new name, ``a`` and ``b`` are tensors that are there. What does not run is left out."""
EVERY_PIECE = [*PIECES, *MORE_PIECES]

NAME = re.compile(r"\b(?:h|t\d+)\b")
"""What statements call the tensors that they make."""
PENALTY = "loss = loss + torch.autograd.grad(loss, w0, create_graph=True)[0].square().mean()"
Choice = tuple[int, int, int]


class Pieces(nn.Module):
    """The parameters and buffers that statements name."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"w0": (96, 96), "w1": (96, 96), "b0": (96,), "b1": (96,), "gain": (8,), "bias": (8,)}
        for name, shape in {**shapes, "kernel": (8, 8, 3, 3), "table": (50, 96)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.1))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def names(self) -> dict[str, Any]:
        """What a statement can name."""
        return {"torch": torch, "F": F, **dict(self.named_parameters()), **dict(self.named_buffers())}


class Written(Program):
    """Runs source text that computes ``loss`` from ``x`` and ``index``, and may keep its graph into the next step."""

    def __init__(self, source: str, passes: int = 1, steady: bool = True, keeps: bool = False) -> None:
        self.code = compile(source, "<random program>", "exec")
        self.passes = passes
        self.steady = steady
        self.keeps = keeps
        super().__init__()

    def build(self) -> nn.Module:
        return Pieces()

    def compute(self, index: int, guard: Guard) -> Record:
        names: dict[str, Any] = {"x": self.data(index, 128, 96), "index": index}
        names |= self.model.names()
        refused = torch.tensor(False)
        with guard():
            try:
                exec(self.code, names)
                for number in range(self.passes):
                    names["loss"].backward(retain_graph=self.keeps or number + 1 < self.passes)
                self.last = names["loss"] if self.keeps else None
            except RuntimeError as error:
                known = (
                    "modified by an inplace operation",
                    "was changed in place between forward and backward",  # ours, where it comes before autograd's
                    "is not implemented",  # some gradients have no gradient
                )
                assert any(reason in str(error) for reason in known), error  # noqa: PT017
                refused = torch.tensor(True)
        if refused:  # how far it came before it was refused says nothing about the next step
            self.optimizer.zero_grad()
        return {"loss": names.get("loss", refused), "refused": refused}


def plainly(make: Callable[[], Written], steps: int = STEPS) -> list[Record] | None:
    """What plain PyTorch computes, its backward passes refused as they may be; None if it does not get through.

    What could run when it was written may fail later: indices, labels and sizes follow from the data.
    """
    try:
        return run_plain(make, steps)
    except (AssertionError, RuntimeError, NameError, ValueError, IndexError):
        return None


def write(choices: list[Choice], penalty: bool = False) -> str:
    """Source text from choices (statement, first operand, second operand): what can run, in this order.

    A ``penalty`` on the gradient makes the backward pass one through another backward pass.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fixed = Pieces().names()
        there: dict[str, Tensor] = {"x": torch.randn(128, 96), "h": torch.randn(128, 96)}
        lines = ["h = F.linear(x, w0, b0)"]
        there["h"] = F.linear(there["x"], fixed["w0"], fixed["b0"])
        for piece, first, second in choices:
            names = list(there)
            a, b = names[-1 - first % len(names)], names[-1 - second % len(names)]
            line = EVERY_PIECE[piece].format(t=f"t{len(lines)}", a=a, b=b)
            after = _after(line, there, fixed)
            if after is not None:
                there = after
                lines.append(line)
    sums = " + ".join(f"{name}.square().mean()" for name, tensor in there.items() if tensor.requires_grad)
    # PyTorch has another formula for second derivatives of products while a mode is on, as docs/limits.md says.
    penalty = penalty and not any("prod(" in line for line in lines)
    return "\n".join([*lines, f"loss = {sums}", *([PENALTY] if penalty else [])])


def let_go(source: str, every: int) -> str:
    """The same program, but that what is not used any more goes right after it was added to the loss.

    Without that, the user's names hold most of what autograd saves, as long as the step takes; one of ``every`` so many
    still does.
    """
    body, _, end = source.partition("\nloss = ")
    lines, (sums, *penalty) = body.split("\n"), end.split("\n")
    summed = NAME.findall(sums)
    used = {name: place for place, line in enumerate(lines) for name in NAME.findall(line)}
    gone = {name: used[name] for name in summed if int(name[1:] or 0) % every}
    found = ["part = 0.0"]
    for place, line in enumerate(lines):
        found.append(line)
        for name in (name for name, last in gone.items() if last == place):
            found += [f"part = part + {name}.tanh().mean() + {name}.mean()", f"del {name}"]
    rest = [f"{name}.square().mean()" for name in summed if name not in gone]
    return "\n".join([*found, f"loss = {' + '.join(['part', *rest])}", *penalty])


def _after(line: str, there: dict[str, Tensor], fixed: dict[str, Any]) -> dict[str, Tensor] | None:
    """The tensors that are there after a statement, or None if it fails or is of no use."""
    names = {**fixed, **there, "index": 1}
    try:
        exec(line, names)
        kept = {name: tensor for name, tensor in names.items() if name == "x" or _is_made(name)}
        kept = {name: tensor for name, tensor in kept.items() if isinstance(tensor, Tensor)}
        if "h" in names:
            kept = {"h": names["h"], **kept}
        # Some views must not be read any more once another one was written.
        sane = all(t.numel() <= MAX_ELEMENTS and t.dim() <= 4 and bool(t.isfinite().all()) for t in kept.values())
    except (RuntimeError, IndexError, ValueError, TypeError, UserWarning):
        return None
    return kept if sane and any(tensor.requires_grad for tensor in kept.values()) else None


def _is_made(name: str) -> bool:
    return name[0] in "th" and name[1:].isdigit()


def check(
    source: str, limit: int | str, bandwidth: float, latency: float, passes: int, spill: Path, *, keeps: bool = False
) -> None:
    """Run source text plain and under a budget; hypothesis leaves out what plain PyTorch does not get through."""
    expected = plainly(lambda: Written(source, passes, keeps=keeps))
    if expected is None:
        hypothesis.reject()
    steady = not any(bool(record["refused"]) for record in expected)
    disk = Tier("disk", "disk")
    machine = paper_machine("ram", disk, bandwidth_bytes_per_second=bandwidth, latency_seconds=latency)
    build = functools.partial(Written, source, passes, steady, keeps)
    assert_identical_within(build, expected, limit, machine, spill, may_raise_limit=allowed_raises(build))


@hypothesis.given(
    choices=st.lists(
        st.tuples(st.integers(0, len(EVERY_PIECE) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=8, max_size=30
    ),
    percent=st.integers(30, 95),
    bandwidth=st.sampled_from([1e6, 1e8, 1e9, 1e10, 1e12]),
    latency=st.sampled_from([1e-7, 1e-4, 1e-2]),
    passes=st.sampled_from([1, 1, 1, 2, 3]),
    penalty=st.sampled_from([False, False, False, True]),
    every=st.sampled_from([1, 3, 4, 99]),
    keeps=st.sampled_from([False, False, True]),
)
def test_random_programs(
    choices: list[Choice], percent: int, bandwidth: float, latency: float, passes: int, penalty: bool, every: int,
    keeps: bool,
) -> None:  # fmt: skip
    source = let_go(write(choices, penalty), every)
    hypothesis.note(f'("""\n{source}\n""", "{percent}%", {bandwidth}, {latency}, {passes}), keeps={keeps}')
    with tempfile.TemporaryDirectory() as spill:
        check(source, f"{percent}%", bandwidth, latency, passes, Path(spill), keeps=keeps)


PASTED = [
    (
        """
h = F.linear(x, w0, b0)
t1 = h.view(16, 8, 8, 12)
t2 = F.batch_norm(t1, mean, variance, gain, bias, training=True)
t2.relu_()
t4 = F.conv2d(t2, kernel, padding=1)
t5 = torch.cat([t4, t2], 0)
t6 = F.silu(t5)
t7 = t6.transpose(0, 1)
loss = t7.square().mean() + t1.exp().mean() + (t4 * t2).sigmoid().mean()
""",
        "60%",
        1e6,
        1e-4,
        1,
    ),
    # argsort saves the order, drops the node that saved it, and gather saves it again.
    (
        """
h = F.linear(x, w0, b0)
t1 = F.linear(h, w0, b0)
t2 = F.linear(t1, w0, b0)
t3 = t2.gather(-1, t2.argsort(-1))
loss = h.square().mean() + t1.square().mean() + t2.square().mean() + t3.square().mean()
""",
        "30%",
        1e6,
        1e-7,
        1,
    ),
    # The product reads, and saves, what was written to by tensors that count their versions by themselves.
    (
        """
h = F.linear(x, w0, b0)
t1 = h.square()
t1.add_(t1)
t2 = t1 / (1 + t1.abs())
t3 = torch.kron(t1[:4, :4], t2[:8, :8])
t4 = F.linear(F.linear(torch.hypot(t2, t2), w0, b0), w0, b0)
loss = t1.square().mean() + t2.square().mean() + t3.square().mean() + t4.square().mean()
""",
        "30%",
        1e6,
        1e-7,
        1,
    ),
    # The same, before the tensor itself is saved; and computed again with it.
    (
        """
h = F.linear(x, w0, b0)
t1 = h.clone()
t1.sigmoid_()
t2 = torch.kron(t1[:1, :1], t1)
t3 = t2.tanh() / (1 + t1.tanh())
del t1, t2
t4 = F.linear(F.linear(t3, w0, b0), w0, b0)
loss = h.square().mean() + t3.square().mean() + t4.square().mean()
""",
        "40%",
        1e6,
        1e-2,
        1,
    ),
    # Its parameters become NaN, and are the same as their copies nonetheless.
    (
        """
h = F.linear(x, w0, b0)
t1 = F.linear(h, w0, b0)
t2 = F.linear(t1, w0, b0)
t3 = torch.searchsorted(b0.detach() - 0.1, t2.detach()).float() * t2
loss = h.square().mean() + t1.square().mean() + t2.square().mean() + t3.square().mean()
""",
        "30%",
        1e6,
        1e-7,
        1,
    ),
]
"""Programs that are always tried: (source, limit, bandwidth, latency, backward passes)."""


@pytest.mark.parametrize("case", PASTED, ids=range(len(PASTED)))
def test_pasted_programs(case: tuple[str, str, float, float, int], tmp_path: Path) -> None:
    check(*case, spill=tmp_path)


@pytest.mark.parametrize("piece", range(len(EVERY_PIECE)), ids=EVERY_PIECE)
def test_every_piece_gets_used(piece: int) -> None:
    """After one of the others at least."""
    for before in range(len(EVERY_PIECE)):
        if len(write([(before, 0, 1), (piece, 0, 1)]).splitlines()) > len(write([(before, 0, 1)]).splitlines()):
            return
    pytest.fail("no program contains it")


def test_programs_let_go_of_what_they_use_no_more() -> None:
    source = "h = F.linear(x, w0, b0)\nt1 = h.exp()\nt2 = h * t1\nloss = h.square().mean() + t1.square().mean()"
    assert let_go(source, 1) == "part = 0.0\n" + source.replace("loss = ", "loss = part + ")
    assert let_go(source, 2).split("\n")[3:] == [
        "t2 = h * t1",
        "part = part + t1.tanh().mean() + t1.mean()",
        "del t1",
        "loss = part + h.square().mean()",
    ]
