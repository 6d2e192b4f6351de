"""Which modules a cell reaches."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from torch import nn

from ebbtide.sequence.cell_modules import reached_modules

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))


class Trainer:
    """Has a model, and a method that is a cell."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def step(self, h: Any, x: Any) -> Any:
        return self.model(h) + x, None


class Slotted:
    """Has a model, but no dict."""

    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model


class Disguised:
    """Says that it is of another class, which it makes only then."""

    @property  # type: ignore[misc]
    def __class__(self) -> NoReturn:  # type: ignore[override]
        raise AssertionError("asked for its class")

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"asked for {name}")


def use(_: Any) -> Any:
    return MODEL[0]


def in_closure(model: Any) -> Callable[..., Any]:
    return lambda h, x: (model(h) + x, None)


def in_a_function_within(model: Any) -> Callable[..., Any]:
    inner = in_closure(model)
    return lambda h, x: inner(h, x)[::-1]


def in_defaults(model: Any) -> Callable[..., Any]:
    return lambda h, x, model=model: (model(h) + x, None)


def wrapped(model: Any) -> Callable[..., Any]:
    return functools.wraps(in_closure(model))(lambda h, x: (h, x))


CELLS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "closure": in_closure,
    "function": in_a_function_within,
    "defaults": in_defaults,
    "default by name": lambda model: lambda h, x, *, own=model: (own(h) + x, None),
    "wrapped": wrapped,
    "partial": lambda model: functools.partial(max, key=model),
    "method": lambda model: Trainer(model).step,
    "object": lambda model: in_closure(Trainer({"models": [(model,)]})),
    "within another": lambda model: in_closure(Slotted(Trainer(model))),
    "global": lambda _: lambda h, _x: MODEL(h),
    "global of a function": lambda _: lambda h, _x: [use(part) for part in h],
    "beside data": lambda model: in_closure(([[0.5] * 5_000] * 5_000, {str(k): k for k in range(5_000)}, model)),
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS.keys())
def test_whatever_holds_them(cell: Callable[[Any], Any]) -> None:
    assert set(map(id, reached_modules([cell(MODEL)]))) == set(map(id, MODEL.modules()))


@pytest.mark.parametrize(
    "cell",
    [
        lambda: in_closure(Slotted(Slotted(Slotted(MODEL)))),
        lambda: in_closure([*range(5_000), MODEL]),
        lambda: types.FunctionType(use.__code__, {}),
        lambda: in_closure(Disguised()),
        lambda: Trainer,
    ],
    ids=["deep", "late in a list", "not there", "disguised", "class"],
)
def test_what_is_not_looked_into(cell: Callable[[], Any]) -> None:
    assert not reached_modules([cell()])


def test_modules_that_hold_one_another_and_none() -> None:
    first, second = nn.Sequential(), nn.Sequential()
    first.second, second.first = second, first
    first.register_module("nothing", None)
    assert {id(part) for part in reached_modules([first, second, first])} == {id(first), id(second)}


def test_one_that_is_not_initialized() -> None:
    assert len(reached_modules([nn.Linear.__new__(nn.Linear)])) == 1
