"""Tensors around tensors count, move and come back as what they wrap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ebbtide.decisions import Offload
from ebbtide.machine import Machine
from ebbtide.observe.recorder import Recorder
from ebbtide.observe.wrapped import inside
from ebbtide.run.meter import PeakMeter
from tests.observe.test_mode import User
from tests.run.harness import FAST_DISK, SLOW_DISK, assert_identical_within, run_plain
from tests.run.programs import Chain, mlp
from tests.run.test_identical import Forbidden
from tests.run.wrapper import unwrap, wrap

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


def test_they_count_with_the_size_of_what_they_wrap() -> None:
    given = torch.randn(256, 64)
    with PeakMeter() as meter:
        wide = wrap(given).sin()
        wide.mul_(2.0)
        shown = unwrap(wide.cos())
    assert shown.shape == given.shape
    assert wide.shape == (512, 64)
    assert meter.resting_bytes == 256 * 64 * 4
    assert meter.end_bytes == 3 * 256 * 64 * 4


def test_ops_are_those_on_what_they_wrap_and_are_not_run_again() -> None:
    given = torch.randn(256, 64)
    with Recorder() as recorder:
        unwrap(wrap(given).sin()).cos()
    ops = {op.name: op for op in recorder.finish().ops}
    assert ops["aten.sin.default"].replay == "opaque"
    assert ops["aten.cos.default"].replay == "pure"
    assert len([name for name in ops if "sin" in name]) == 1


class Noted(torch.Tensor):
    """A tensor around a tensor that says so to nobody; products with it are ordinary ones."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Noted:
        made: Noted = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stubs have another protocol
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner: Any = tree_map_only(Noted, lambda noted: noted.wrapped, (args, kwargs or {}))
        made = func(*inner[0], **inner[1])
        if func is torch.ops.aten.mm.default:
            return made
        return return_and_correct_aliasing(func, args, kwargs or {}, tree_map_only(torch.Tensor, Noted, made))


def test_ops_on_what_has_code_of_its_own_are_not_run_again() -> None:
    """Of all that they read, it has a storage without memory, over which a view of it would be made."""
    given, weight = torch.randn(256, 64), torch.randn(64, 64)
    with Recorder() as recorder:
        noted = Noted(given * 2.0)
        made = (noted * 0.9).view(-1, 64) @ weight
        made.sin()
    ops = [(op.name, op.replay) for op in recorder.finish().ops]
    assert type(made) is torch.Tensor
    assert ops[0] == ("aten.mul.Tensor", "pure")
    assert ("aten.mm.default", "opaque") in ops
    assert ops[-1] == ("aten.sin.default", "pure")
    assert {replay for _, replay in ops[1:-1]} == {"opaque"}


def test_modes_of_the_user_see_what_they_see_anyway() -> None:
    below, above, recorder = User(), User(), Recorder()
    below.enter()
    with recorder:
        above.enter()
        unwrap(wrap(torch.randn(256, 64)).sin())
        above.leave()
    seen = below.seen, above.seen
    below.leave()
    alone = User()
    alone.enter()
    unwrap(wrap(torch.randn(256, 64)).sin())
    alone.leave()
    assert seen == (alone.seen, alone.seen)
    assert "aten.sin.default" in [op.name for op in recorder.finish().ops]


class Wide(Chain):
    """All that is saved is wrapped but for what the first layer and the last one save."""

    def build(self) -> nn.Module:
        return mlp(64, 256, 16)

    def forward(self, index: int) -> torch.Tensor:
        first, _, last = self.model
        wide = wrap(first(self.data(index, 256, 64)))
        for _ in range(8):
            wide = wide.mul(0.9).tanh().sin()
        return last(unwrap(wide))


class Ragged(Chain):
    """Attention over texts of several lengths, in a jagged tensor, which wraps their numbers and where each begins."""

    def build(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, index: int) -> torch.Tensor:
        offsets = torch.tensor([0, 37, 101, 113, 163, 243, 266])
        texts = torch.nested.nested_tensor_from_jagged(self.data(index, 266, 64), offsets)
        for _ in range(3):
            parts = [layer(texts).unflatten(-1, [4, 16]).transpose(1, 2) for layer in self.model[:3]]
            seen = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)
            texts = texts + nn.functional.gelu(self.model[3](seen))
        return texts.values()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("program", "limit"), [(Wide, "70%"), (Wide, "40%"), (Ragged, "80%"), (Ragged, "60%")])
def test_they_move(program: type[Chain], limit: str, tmp_path: Path) -> None:
    trial = assert_identical_within(program, run_plain(program), limit, FAST_DISK, tmp_path)
    assert trial.plan is not None
    assert sum(isinstance(decision, Offload) for decision in trial.plan.decisions) > 3
    assert trial.plan.peak_bytes < 0.8 * trial.plan.plain_peak_bytes


def test_what_wraps_several_of_a_size_is_nobodys_wrapper() -> None:
    both = TwoTensor(torch.ones(64, 64), torch.ones(64, 64))
    assert inside(both) is both


class WrittenLater(Forbidden):
    """The same where what is written over is shown by a wrapper."""

    def begin(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        wide = wrap(self.model[:4](self.data(index, 256, 64))).sigmoid()
        return wide, self.model[4:](unwrap(wide.sin())).square().mean()


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
@pytest.mark.parametrize("limit", ["90%", "60%"])
def test_a_forbidden_in_place_op_is_still_refused(limit: str, machine: Machine, tmp_path: Path) -> None:
    assert_identical_within(WrittenLater, run_plain(WrittenLater), limit, machine, tmp_path)
