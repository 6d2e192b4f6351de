"""A mode that an interrupt hits while PyTorch puts it on or takes it off is off in the end, and nothing else is."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch as dispatch

from ebbtide.observe.mode import DispatchMode
from tests.conftest import modes_left


class Nothing(DispatchMode):
    """Does nothing with what it sees but count it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def interrupted(call: Callable[[], None], moment: int) -> bool:
    """Calls ``call`` and interrupts it before one of the bytecodes that PyTorch or the mode runs in it."""
    left = moment

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (dispatch.__file__, sys.modules[DispatchMode.__module__].__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def notes() -> tuple[Any, ...]:
    """What PyTorch knows of modes."""
    stack = [id(mode) for mode in dispatch._get_current_dispatch_mode_stack()]
    return (stack, dispatch.is_in_torch_dispatch_mode(), dispatch.is_in_torch_dispatch_mode(False))


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("way", ["enter", "leave"])
def test_interrupt_at_any_bytecode(way: str, others: int) -> None:
    try:
        outer = [Nothing() for _ in range(others)]
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
        modes_left()
