"""What is rare in training loops and PyTorch allows all the same does in a step what it does without a budget."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.autograd.graph import allow_mutation_on_saved_tensors, get_gradient_edge, register_multi_grad_hook
from torch.masked import masked_tensor
from torch.nn.utils import prune
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ebbtide.decisions import Keep
from ebbtide.machine import Machine
from tests.run.harness import (
    FAST_DISK,
    SLOW_DISK,
    STEPS,
    Guard,
    Program,
    Record,
    allowed_raises,
    assert_identical_within,
    run_plain,
)
from tests.run.programs import SAID_BY_PYTORCH

pytestmark = [
    pytest.mark.usefixtures("nothing_left", "quick_plans"),
    *SAID_BY_PYTORCH,
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings(
        "ignore:(The PyTorch API of MaskedTensors|It is not recommended to create a MaskedTensor)"
    ),
]

ROWS, WIDTH = 256, 128
Use = Callable[[Any, Tensor], None]


class Using(Program):
    """Four blocks, trained by steps that use something of PyTorch's."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use

    def build(self) -> nn.Module:
        blocks = ((nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        return nn.Sequential(*(nn.Sequential(*block) for block in blocks))

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            self.use(self.model, self.data(index, ROWS, WIDTH))
        return {}


def ends(made: Tensor) -> None:
    made.square().mean().backward()


def selective(model: Any, x: Tensor) -> None:
    """Checkpoints that keep what some ops have made."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for number, block in enumerate(model):
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts) if number % 2 else block(x)
    ends(x)


def nested(model: Any, x: Tensor) -> None:
    """A checkpoint in a checkpoint."""

    def inner(x: Tensor) -> Any:
        return checkpoint(block[2:], block[:2](x), use_reentrant=False)

    block = model[0]
    ends(model[1:](checkpoint(inner, x, use_reentrant=False)))


def anomaly(model: Any, x: Tensor) -> None:
    """Anomaly detection, which looks at each gradient."""
    with torch.autograd.detect_anomaly(check_nan=True):
        ends(model(x))


def tangents(model: Any, x: Tensor) -> None:
    """Derivatives by forward mode, beside gradients of them."""
    with fwad.dual_level():
        made, slope = fwad.unpack_dual(model(fwad.make_dual(x, torch.cos(x))))
        (made.square().mean() + slope.square().mean()).backward()


def tangents_in_a_part(model: Any, x: Tensor) -> None:
    """The same of the first blocks alone; the backward pass comes after it."""
    with fwad.dual_level():
        made, slope = fwad.unpack_dual(model[:3](fwad.make_dual(x, torch.cos(x))))
    (model[3:](made).square().mean() + slope.square().mean()).backward()


def hooks_of_several(model: Any, x: Tensor) -> None:
    """Hooks that are called once several tensors have their gradients, or one of them."""
    one, other, seen = model[:3](x), model[3:](x), list[int]()
    with contextlib.ExitStack() as stack:
        for mode in ("all", "any"):
            handle = register_multi_grad_hook([one, other], lambda _: seen.append(1), mode=mode)
            stack.callback(handle.remove)
        ends(one * other)
    assert len(seen) == 2


def edges(model: Any, x: Tensor) -> None:
    """Gradients of what is known by its edge alone, and a pass that begins at one."""
    middle = model[:3](x)
    edge = get_gradient_edge(middle)
    loss = model[3:](middle).square().mean()
    del middle
    (gradient,) = torch.autograd.grad(loss, [edge], retain_graph=True)
    end = get_gradient_edge(loss)
    del loss
    torch.autograd.backward([end], [gradient.square().mean() + 1.0])


def mutated(model: Any, x: Tensor) -> None:
    """Writes over what was saved, of which PyTorch keeps copies then."""
    with allow_mutation_on_saved_tensors():
        h = model[:3](x)
        made = h.sin() * h
        h.mul_(2)
        ends(model[3:](made + h))


def mutated_in_a_part(model: Any, x: Tensor) -> None:
    """The same, but that the first blocks come before it."""
    h = model[:3](x)
    with allow_mutation_on_saved_tensors():
        made = (h * 1.5).sin()
        more = made.exp()
        made.mul_(2)
        ends(model[3:](made + more))


def one_thread(model: Any, x: Tensor) -> None:
    """A backward pass in the thread that calls for it."""
    with torch.autograd.set_multithreading_enabled(False):
        ends(model(x))


def counted(model: Any, x: Tensor) -> None:
    """A mode that counts floating-point operations."""
    with FlopCounterMode(display=False):
        ends(model(x))


def deterministic(model: Any, x: Tensor) -> None:
    """Deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        ends(model(x))
    finally:
        torch.use_deterministic_algorithms(False)


def another_type(model: Any, x: Tensor) -> None:
    """Another default type in a part of the step."""
    h = model[:2](x)
    torch.set_default_dtype(torch.float64)
    try:
        h = h * torch.tensor(1.5) + (torch.arange(ROWS) / 3)[:, None].float()
        h = torch.sin(h) * torch.exp(h * 0.01)
    finally:
        torch.set_default_dtype(torch.float32)
    ends(model[2:](h))


def quantised(model: Any, x: Tensor) -> None:
    """Observers, which write down what passes by and round it."""
    for number, block in enumerate(model):
        if len(block) == 4:
            kind = FusedMovingAvgObsFakeQuantize if number % 2 else FakeQuantize
            block.append(kind(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8))
    ends(model(x))


def searched(model: Any, x: Tensor) -> None:
    """An optimizer that runs forward and backward as often as it wants, and writes to parameters in between."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def masked(model: Any, x: Tensor) -> None:
    """Masked tensors, of a class of their own, and a pass through them."""
    h = model[:3](x)
    data: Any = masked_tensor(h.detach() * 1.0, x > 0, requires_grad=True)
    (data * data).sin().sum().backward()
    h = h + data.grad.to_tensor(0.0)
    del data
    gc.collect()  # they lie in cycles
    ends(model[3:](h))


def looked_at(model: Any, x: Tensor) -> None:
    """What was saved is asked for in the forward pass."""
    h = model[:3](x)
    made = h.exp() * h
    seen = made.grad_fn._saved_other.sum()
    ends(model[3:](made + seen.detach() * 0))


def pruned(model: Any, x: Tensor) -> None:
    """A weight that is computed from another one and a mask as its layer is called."""
    layer = model[2][0]
    if not hasattr(layer, "weight_mask"):
        prune.custom_from_mask(layer, "weight", torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 > 0)
    ends(model(x))


def unseen(model: Any, x: Tensor) -> None:
    """Modes are off in a part of the step."""
    h = model[:2](x)
    with _disable_current_modes():
        h = model[2:3](h)
    ends(model[3:](h))


USES: list[Use] = [
    selective, nested, anomaly, tangents, tangents_in_a_part, hooks_of_several, edges, mutated, mutated_in_a_part,
    one_thread, counted, deterministic, another_type, quantised, searched, masked, looked_at, pruned, unseen,
]  # fmt: skip


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("use", USES)
def test_identical_to_plain(use: Use, machine: Machine, tmp_path: Path) -> None:
    build = functools.partial(Using, use)
    expected = run_plain(build, STEPS - 2)
    counts = use is not masked  # a meter counts what wraps others without saying so, too
    raises = allowed_raises(build)
    trial = assert_identical_within(build, expected, "60%", machine, tmp_path, metered=counts, may_raise_limit=raises)
    moves = any(not isinstance(decision, Keep) for decision in trial.decisions)
    assert moves == (use is not mutated), "its hooks lie above ours"
