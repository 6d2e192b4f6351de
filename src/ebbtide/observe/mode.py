"""The base of our dispatch modes, which come and go in the middle of users' code.

They are put on and taken off in any order, among modes of the user's, whatever interrupts that; a forked child has none
of them. Ops that they are shown count versions, and have autocast and autograd, as they do without them.
`torch.inference_mode` is changed so that modes may come and go within it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

import torch
import torch.utils._python_dispatch as dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.observe.ctc_loss import mode_is_off, mode_is_on
from ebbtide.observe.schema import CALLING_OTHERS
from ebbtide.observe.transforms import in_trace
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import OF_PYTORCH, is_subclass, wraps

_COMPILE_FLAG = "_is_in_any_mode_without_ignore_compile_internals"
_FLAGS: dict[str, Callable[[Any], bool]] = {
    name: is_told
    for name, is_told in {
        "_is_in_torch_dispatch_mode": lambda _mode: True,
        "_is_in_non_infra_torch_dispatch_mode": lambda mode: not mode.is_infra_mode(),
        _COMPILE_FLAG: lambda mode: not mode.ignore_compile_internals(),
    }.items()
    if hasattr(dispatch, name)
}
"""What PyTorch, by version, notes of the modes on its stack, besides the stack itself: whether any is such a one."""
_set_compile_flag = getattr(dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
"""Tells the copy of it that PyTorch keeps outside of Python."""

# The same stack, a mode at a time, without what PyTorch's own functions in Python do besides.
_push: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack
_pop: Callable[[None], object] = torch._C._pop_torch_dispatch_stack
_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
_mode_at: Callable[[int], object] = torch._C._get_dispatch_stack_at
_function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
_function_mode_at: Callable[[int], object] = torch._C._get_function_stack_at
DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
"""No mode sees ops in a ``with`` block of it: they take a third of the time."""
_AsCalled: Any = vars(torch._C)["_RestorePythonTLSSnapshot"]
SetExcluded: Any = vars(torch._C)["_SetExcludeDispatchKeyGuard"]
"""A context in which a dispatch key is left out, or not."""
_excluded: Callable[[], Any] = torch._C._dispatch_tls_local_exclude_set
_AUTOCAST = torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
nodes_made: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
"""How many nodes this thread has made: the number that the next one will have."""


def is_mode_on() -> bool:
    """Whether any mode, ours or the user's, would see an op or a function."""
    return bool(_mode_count() or _function_mode_count())


def is_seen() -> bool:
    """Whether a mode of the user's would see an op on ordinary tensors; not, if it traces what we do, too."""
    modes, functions = _mode_count(), _function_mode_count()
    if not modes and not functions:
        return False
    if in_trace():
        return False
    are_ours = all(isinstance(_mode_at(index), DispatchMode) for index in range(modes))
    return not are_ours or not all(isinstance(_function_mode_at(index), DeviceContext) for index in range(functions))


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """A context in which no mode sees anything."""
    with DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def is_between_ops(saved: torch.Tensor) -> bool:
    """Whether no op is under way as a tensor is being saved: it is the result of the op whose node was made last, and
    no copy, which that op would have made for itself."""
    kind: Any = type(saved)
    node = saved.grad_fn if not is_subclass(kind) else None  # that of its class's latest change
    return node is not None and node._sequence_nr() == nodes_made() - 1 and node.name() != "CloneBackward0"


def run_op(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that a mode was shown. Its versions count as they do without one: those of tensors that are written in
    place by the list do not go up under a mode, so that autograd would not refuse what was written to. What others than
    PyTorch have defined may call ops, which autocast and autograd see as they do without a mode."""
    runs = _runner(func)
    return func(*args, **kwargs) if runs is None else runs(func, args, kwargs)


@functools.cache
def _runner(func: Any) -> Callable[[Any, Any, Any], Any] | None:
    """What runs ``func``, if that takes more than to call it."""
    return _run_calling if _calls_ops(func) else _run_writing if _writes_lists(func) else None


def _run_calling(func: Any, args: Any, kwargs: Any) -> Any:
    with _as_without_modes(func):
        return func(*args, **kwargs)


def _run_writing(func: Any, args: Any, kwargs: Any) -> Any:
    before = [(tensor, tensor._version) for tensor in args[0] if not tensor.is_inference()]
    result = func(*args, **kwargs)
    for tensor, version in before:
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)
    return result


def _calls_ops(func: Any) -> bool:
    """Whether it may call ops that autocast or autograd has a part in."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    namespace, _, name = func._schema.name.partition("::")
    return namespace not in OF_PYTORCH or name in CALLING_OTHERS


@contextlib.contextmanager
def _as_without_modes(func: Any) -> Iterator[None]:
    """What a mode is shown, it runs with all keys left out that come before modes. Leave out what was left out as the
    op was called, and autograd where it has a kernel, which has had its turn."""
    has_formula = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Autograd")
    with _AsCalled():
        left_out = _excluded()
        keys = [key for key in _AUTOCAST if not left_out.has(key)]
        if not has_formula and not left_out.has(_AUTOGRAD[0]):
            keys += _AUTOGRAD
    with contextlib.ExitStack() as stack:
        for key in keys:
            stack.enter_context(SetExcluded(key, False))
        yield


def is_within_op() -> bool:
    """Whether the op that a mode is shown was called by another op: autograd is left out there. It is not told within
    an op that is made of several, if a mode was on as that was called."""
    with _AsCalled():
        return bool(_excluded().has(_AUTOGRAD[0]))


def is_within_autocast() -> bool:
    """Whether autocast was on, for any device, as the op was called that a mode is shown."""
    with _AsCalled():
        return torch._C._is_any_autocast_enabled()


def _writes_lists(func: Any) -> bool:
    """Whether it is one of the ops that work on lists of tensors, in place."""
    name: str = getattr(getattr(func, "_schema", None), "name", "")
    return name.startswith("aten::_foreach_") and name.endswith("_")


def modes_on() -> list[TorchDispatchMode]:
    """The modes on this thread's stack, the one that sees ops first at its end."""
    return dispatch._get_current_dispatch_mode_stack()


def correct_mode_flags() -> None:
    """Set PyTorch's flags to what is true of the modes on the stack. Each mode puts back on its way off what was true
    before it was put on, which is wrong where they do not nest."""
    stack = modes_on()
    for name, is_told in _FLAGS.items():
        setattr(dispatch, name, any(map(is_told, stack)))
    if _set_compile_flag is not None:
        _set_compile_flag(getattr(dispatch, _COMPILE_FLAG))


@functools.cache
def stand_behind_inference_mode() -> None:
    """Let PyTorch's dispatch keys say what is true of the modes on the stack as `torch.inference_mode` ends.

    It puts back the keys that were on as it began. Where a mode was taken off in between, they would say that there is
    one, and no op would run any more, in the step or after it; where one was put on, it would see nothing.
    """
    original = torch.inference_mode.__exit__

    @functools.wraps(original)
    def end(self: torch.inference_mode, *exception: Any) -> None:
        original(self, *exception)
        is_on = bool(modes_on())
        for key in ("Python", "PythonTLSSnapshot"):
            if torch._C._dispatch_tls_is_dispatch_key_included(key) is not is_on:
                torch._C._dispatch_tls_set_dispatch_key_included(key, is_on)

    torch.inference_mode.__exit__ = end  # type: ignore[method-assign]


def _arrange(stack: Sequence[TorchDispatchMode]) -> None:
    """Make these the modes on the stack."""
    try:
        _replace(stack)
    except BaseException:  # an interrupt must not lose any
        _replace(stack)
        raise


def _replace(stack: Sequence[TorchDispatchMode]) -> None:
    found = modes_on()
    most = min(len(found), len(stack))
    same = next((index for index in range(most) if found[index] is not stack[index]), most)
    for _ in found[same:]:
        dispatch._pop_mode()
    for mode in stack[same:]:
        dispatch._push_mode(mode)


class _Unnoticed(TorchDispatchMode):
    """A mode of which PyTorch's compiler takes no notice; it sees operators that take functions, each as one op."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """To PyTorch: compile as if this mode were not there. See NOTE [Compiled graphs] in `inductor.py`."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To PyTorch: no need to wrap our methods so that they are not compiled. It is told to leave our files alone
        (`inductor.py`), and the wrapper takes some microseconds an op, and a second to import what it needs."""
        return False


class DispatchMode(_Unnoticed):
    """Sees every ATen op, below autograd, between `enter` and `leave` or over a ``with`` block.

    An interrupt may come while PyTorch puts the mode on its stack or takes it off. Whichever way that leaves it,
    `leave` takes the mode off, if it is on, and corrects PyTorch's notes. It may be put on and taken off while modes of
    the user's are on that are taken off, or were put on, earlier: those stay as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nests = True

    def run_graph(self, run: Callable[[], Any], inputs: Sequence[Any], written: Collection[int]) -> Any:
        """A compiled graph is to run in place of ops: run it, once, and return what it returns.

        Args:
            run: runs it.
            inputs: its arguments. A list is emptied meanwhile, so that they can die as soon as they are not needed.
            written: places of those that it writes in place.
        """
        del inputs, written
        return run()

    def see_within(self, see: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on tensors that wrap others. See NOTE [Wrapped tensors] in `wrapped.py`.

        Args:
            see: called with each op on what they wrap that it becomes, and its arguments; returns that one's result.
        """
        within = _Within(self, see)
        try:
            _arrange([within, *modes_on()])  # those of the user's see the op first, as they do without us
            return func(*args, **kwargs)
        finally:
            _arrange([mode for mode in modes_on() if mode is not within])

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        mode_is_on(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            mode_is_off(self)
            stack = modes_on()
            if any(_is_within(mode, self) for mode in stack):
                stack = [mode for mode in stack if not _is_within(mode, self)]
                _arrange(stack)
            place = next((index for index, mode in enumerate(stack) if mode is self), None)
            if place is not None:
                if place < len(stack) - 1:  # PyTorch takes off whichever is on top
                    self._nests = False
                    _arrange([*stack[:place], *stack[place + 1 :], self])
                super().__exit__(*exception)  # type: ignore[no-untyped-call]
            if place is None or not self._nests:
                self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Undo what PyTorch did of an `enter` or left of a `leave` that was interrupted."""
        mode_is_off(self)
        _arrange([mode for mode in modes_on() if mode is not self and not _is_within(mode, self)])
        correct_mode_flags()

    def enter(self, below: int | None = None) -> None:
        """Begin to see ops.

        Args:
            below: how many modes are to stay below it on the stack, as those put on later go first; None for all.
        """
        self._nests = True
        self.__enter__()
        stack = modes_on()
        if below is not None and below < len(stack) - 1:
            self._nests = False
            _arrange([*stack[:below], self, *stack[below:-1]])

    def leave(self) -> None:
        """See no more of them."""
        self.__exit__(None, None, None)

    def put_on(self, below: int | None) -> bool:
        """`enter`, where this mode comes on top, in a sixth of the time: PyTorch notes nothing of it.

        Args:
            below: how many modes are on, which it comes above; None if nobody knows.

        Returns:
            Whether it was done. Then `take_off` undoes it.
        """
        if below is None or _mode_count() != below:
            return False
        mode_is_on(self)
        _push(self)
        return True

    @property
    def is_on_top(self) -> bool:
        """Whether it sees the next op first. A mode that runs an op is not on the stack meanwhile."""
        top = _mode_count() - 1
        return top >= 0 and _mode_at(top) is self

    def take_off(self) -> None:
        """Undo `put_on`, wherever this mode is by now."""
        if self.is_on_top:
            _pop(None)
            mode_is_off(self)
        else:
            self._put_back()


def our_modes() -> list[TorchDispatchMode]:
    """Those of ours on this thread's stack."""
    return [mode for mode in modes_on() if isinstance(mode, _Unnoticed)]


def drop_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Take these, which are ours, off the stack, as far as they are on it."""
    if any(mode in modes for mode in modes_on()):
        _arrange([mode for mode in modes_on() if mode not in modes])
        correct_mode_flags()
    for mode in modes:
        mode_is_off(mode)


def _forked() -> None:
    """What a child of a step does is no part of that, and would be written down for as long as it lives."""
    drop_modes(our_modes())


os.register_at_fork(after_in_child=_forked)


class _Within(_Unnoticed):
    """Lets ops on wrappers become what they are, and shows that; it is on for a single op."""

    def __init__(self, owner: DispatchMode, see: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self._see = see

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if types and wraps(types) else self._see(func, args, kwargs or {})


def _is_within(mode: TorchDispatchMode, owner: DispatchMode) -> bool:
    """Whether it is one that an interrupt has left there."""
    return isinstance(mode, _Within) and mode.owner is owner
