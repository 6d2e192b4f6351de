"""A mode that an interrupt hits while PyTorch puts it on or takes it off is off in the end, and nothing else is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.observe.mode import DispatchMode, correct_mode_flags, run_op
from ebbtide.observe.wrapped import wraps
from tests.conftest import modes_left
from tests.run.wrapper import Doubled


class Nothing(DispatchMode):
    """Does nothing with what it sees but count it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class User(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))

    def enter(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


SWALLOWED = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def interrupted(call: Callable[[], object], moment: int) -> bool:
    """Calls ``call`` and interrupts it before one of the bytecodes that PyTorch or the mode runs in it; whether it did.

    Of one that strikes as a generator is closed, Python makes a warning (see `SWALLOWED`). No other may get lost.
    """
    left, may_get_lost = moment, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, may_get_lost
        if frame.f_code.co_filename not in (dispatch.__file__, sys.modules[DispatchMode.__module__].__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                may_get_lost = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of opcodes only if a frame asked before it was to trace
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert left >= 0 or may_get_lost, f"the interrupt before bytecode {moment} got lost"
    return left < 0


def notes() -> tuple[Any, ...]:
    """What PyTorch knows of modes."""
    stack = [id(mode) for mode in dispatch._get_current_dispatch_mode_stack()]
    return (stack, dispatch.is_in_torch_dispatch_mode(), dispatch.is_in_torch_dispatch_mode(False))


@SWALLOWED
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("way", ["enter", "leave"])
def test_interrupt_at_any_bytecode(way: str, others: int) -> None:
    outer = [Nothing() for _ in range(others)]
    try:
        for mode in outer:
            mode.enter()
        before = notes()
        for moment in itertools.count():
            mode = Nothing()
            if way == "leave":
                mode.enter()
            hit = interrupted(getattr(mode, way), moment)
            mode.leave()
            assert notes() == before, f"interrupted before bytecode {moment}"
            if not hit:
                break
        assert moment > 20
        torch.ones(1)
        assert [mode.seen for mode in outer] == [1] * others
        assert mode.seen == 0
    finally:
        for mode in reversed(outer):
            mode.leave()
        modes_left()


@pytest.mark.parametrize("user_leaves", ["first", "last"])
@pytest.mark.parametrize("below", [0, None])
def test_modes_that_do_not_nest(below: int | None, user_leaves: str) -> None:
    """A mode that is put on within a ``with`` block of the user's stays on when that ends, and leaves it on."""
    before, user, mode = notes(), User(), Nothing()
    user.enter()
    mode.enter(below)
    assert dispatch._get_current_dispatch_mode_stack() == ([mode, user] if below == 0 else [user, mode])
    torch.ones(1)
    if user_leaves == "first" and below == 0:
        user.leave()
        torch.ones(1)
        mode.leave()
        assert (user.seen, mode.seen) == (1, 2)
    else:
        mode.leave()
        torch.ones(1)
        user.leave()
        assert (user.seen, mode.seen) == (2, 1)
    correct_mode_flags()
    assert notes() == before


@SWALLOWED
@pytest.mark.parametrize("way", ["enter", "leave"])
def test_interrupt_of_modes_that_do_not_nest(way: str) -> None:
    """The user's mode is neither lost nor left."""
    before = notes()
    for moment in itertools.count():
        user, mode = User(), Nothing()
        user.enter()
        if way == "leave":
            mode.enter(0)
        hit = interrupted(functools.partial(mode.enter, 0) if way == "enter" else mode.leave, moment)
        mode.leave()
        assert dispatch._get_current_dispatch_mode_stack() == [user], f"interrupted before bytecode {moment}"
        user.leave()
        correct_mode_flags()
        assert notes() == before
        if not hit:
            break
    assert moment > 40


class Inner(DispatchMode):
    """Sees what ops on wrappers become."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and wraps(types):
            return self.see_within(self._see, func, args, kwargs or {})
        return self._see(func, args, kwargs or {})

    def _see(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs)


@SWALLOWED
def test_interrupt_of_an_op_on_wrappers() -> None:
    before, wide = notes(), Doubled(torch.ones(2))
    user = User()
    for moment in itertools.count():
        mode = Inner()
        user.enter()
        mode.enter()
        hit = interrupted(wide.sin, moment)
        mode.leave()
        assert dispatch._get_current_dispatch_mode_stack() == [user], f"interrupted before bytecode {moment}"
        user.leave()
        assert notes() == before
        if not hit:
            break
    assert moment > 20
    assert mode.seen == ["aten.sin.default"]
    torch.ones(1)
    assert mode.seen == ["aten.sin.default"]


class Running(DispatchMode):
    """Runs what it sees."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_op(func, args, kwargs or {})


@pytest.mark.parametrize("modes", [1, 2])
def test_what_is_written_by_the_list_counts_versions_as_ever(modes: int) -> None:
    """PyTorch does not count them itself while a mode is on; autograd must refuse what was written to."""
    with contextlib.ExitStack() as stack:
        for _ in range(modes):
            stack.enter_context(Running())
        weight = torch.ones(3, requires_grad=True)
        result = weight.exp()
        lists: list[Any] = [[result.detach(), torch.ones(2)]]
        torch._foreach_mul_(lists[0], 0.5)
        assert [tensor._version for tensor in (result, *lists[0])] == [1, 1, 1]
        torch._foreach_exp(lists[0])
        result.detach().mul_(0.5)
        assert result._version == 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_written_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        numbers = [torch.ones(3)]
        with Running():
            torch._foreach_mul_(numbers, 0.5)
    assert numbers[0].tolist() == [0.5] * 3
