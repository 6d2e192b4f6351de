"""Modules are known by name while they run, whatever else wraps their calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.observe.modules import ModuleTrail


class Probe(nn.Module):
    def __init__(self, trail: ModuleTrail, seen: list[str]) -> None:
        super().__init__()
        self.trail, self.seen = trail, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.trail.path)
        if x.numel() == 0:
            raise ZeroDivisionError
        return x


def test_paths_of_nested_modules_and_of_one_that_raises() -> None:
    trail, seen = ModuleTrail(), list[str]()
    net = nn.Sequential(nn.ReLU(), nn.ModuleDict({"inner": Probe(trail, seen)})["inner"])
    plain = nn.Module.__call__
    trail.start()
    net(torch.ones(1))
    with pytest.raises(ZeroDivisionError):
        net(torch.ones(0))
    assert trail.path == ""
    net[1](torch.ones(1))
    trail.pause()
    net(torch.ones(1))
    trail.go_on()
    net(torch.ones(1))
    trail.stop()
    assert nn.Module.__call__ is plain
    assert seen == ["Sequential.1", "Sequential.1", "Probe", "", "Sequential.1"]


def test_a_wrapper_that_comes_while_modules_are_followed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    trail, seen, wrapped = ModuleTrail(), list[str](), list[str]()
    net = nn.Sequential(Probe(trail, seen))
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    trail.start()
    below: Any = nn.Module.__call__

    def call(self: nn.Module, *args: Any) -> Any:
        wrapped.append(type(self).__name__)
        return below(self, *args)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    net(torch.ones(1))
    trail.stop()
    assert nn.Module.__call__ is call
    trail.start()
    net(torch.ones(1))
    trail.stop()
    assert nn.Module.__call__ is call
    net(torch.ones(1))
    assert seen == ["Sequential.0", "Sequential.0", ""]
    assert wrapped == ["Sequential", "Probe"] * 3


class Named(nn.Module):
    """Looks up attributes that it does not have among its settings, which may fail in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"gain": 2}

    def __getattr__(self, name: str) -> Any:
        return self.settings[name]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_a_module_is_asked_for_nothing_that_it_may_not_have() -> None:
    trail = ModuleTrail()
    trail.start()
    try:
        assert float(Named()(torch.ones(()))) == 2
    finally:
        trail.stop()


def test_what_was_compiled_stands_for_its_module() -> None:
    trail, seen = ModuleTrail(), list[str]()
    net = nn.Sequential(Probe(trail, seen))
    compiled: Any = torch.compile(net, backend="eager")
    trail.start()
    try:
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.ones(1))
    finally:
        trail.stop()
    assert seen == ["Sequential.0"]
