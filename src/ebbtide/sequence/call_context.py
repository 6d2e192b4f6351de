"""What a scan's forward pass ran under: autocast, defaults, modes, also of modules, which kernels compute attention."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from ebbtide.observe.uncompiled import never_compiled, uncompiled
from ebbtide.observe.wrapped import AsOrdinary
from ebbtide.sequence.cell_modules import reached_modules
from ebbtide.sequence.graphs import without_saved_tensor_hooks

_Autocast = list[tuple[str, bool, torch.dtype]]
_NO_CONTEXT = contextlib.nullcontext()


class CallContext:
    """The state of PyTorch in which a scan was called, and in which the backward pass must run its steps again.

    Under autocast PyTorch keeps the converted weights from step to step; here each step converts them, as in a plain
    loop with ``cache_enabled=False``, or they would have to be kept from the first step to the last.

    Attributes:
        converts: whether steps run within contexts of autocast that keep what they have converted.
    """

    def __init__(self, device_types: list[str]) -> None:
        self.converts = False
        self._device_types = device_types
        self._autocast = _autocast_on(device_types)
        self._keeps = keeps_conversions(device_types)
        self._inference = torch.is_inference_mode_enabled()
        self._current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._device, self._dtype = torch.get_default_device(), torch.get_default_dtype()
        self._attention = _cur_sdpa_kernel_backends(with_priority=True)
        self._parametrized = parametrize._cache_enabled, dict(parametrize._cache)
        # Functions of subclasses: if the loss is of a subclass, PyTorch runs the whole backward pass without these.
        self._function_modes = _function_modes()
        self._functions = torch._C._EnableTorchFunction if torch._C._is_torch_function_enabled() else AsOrdinary
        self._modules: list[tuple[weakref.ref[torch.nn.Module], bool]] = []  # and whether they are in training mode

    @contextlib.contextmanager
    def noting_modules(self, *roots: object) -> Iterator[None]:
        """Steps are to run with modules in the mode, training or not, that they have when what is inside ends.

        These are the modules that are called inside and `reached_modules`, from ``roots`` and from the called ones.
        """
        thread, called = threading.get_ident(), dict[int, torch.nn.Module]()

        @never_compiled
        def note(module: torch.nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                called[id(module)] = module

        with register_module_forward_pre_hook(note):
            yield
        # Later steps may call others, and ask modules for their mode that none calls.
        modules = reached_modules((*called.values(), *roots))
        modes = ((module, getattr(module, "training", None)) for module in modules)  # one may not be initialized yet
        self._modules = [(weakref.ref(module), trains) for module, trains in modes if trains is not None]

    @contextlib.contextmanager
    def _cached(self) -> Iterator[None]:
        """Parametrized weights as `torch.nn.utils.parametrize.cached` had them, which may have ended since or begun."""
        before, cache = parametrize._cache_enabled, parametrize._cache
        enabled, parametrize._cache = self._parametrized[0], dict(self._parametrized[1])  # a step may fill it
        parametrize._cache_enabled += enabled - before
        try:
            yield
        finally:  # another thread may have begun or ended meanwhile
            parametrize._cache_enabled += before - enabled
            parametrize._cache = cache if parametrize._cache_enabled else {}

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Run what is inside in the state of PyTorch that there was when this was made."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._cached())
            if torch.is_inference_mode_enabled() != self._inference:  # as in a backward pass that one is around
                stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(uncompiled())
            stack.enter_context(without_saved_tensor_hooks())
            stack.enter_context(self._functions())
            if self._current is not None:  # autograd's threads have one each, and "cuda" means that
                stack.enter_context(torch.cuda.device(self._current))
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            if torch.get_default_dtype() != self._dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            if _cur_sdpa_kernel_backends(with_priority=True) != self._attention:
                stack.enter_context(sdpa_kernel(self._attention, set_priority=True))
            if any(enabled for _, enabled, _ in self._autocast) or _autocast_on(self._device_types) != self._autocast:
                # Elsewhere contexts of the cell's are the outermost ones, which let go of what they have converted.
                stack.enter_context(_autocast(self._autocast))
            stack.enter_context(keeping_conversions(self._keeps))
            for reference, trains in self._modules:
                module = reference()
                if module is not None and module.training != trains:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = trains
            on = set(map(id, _function_modes()))
            for mode in self._function_modes:
                if id(mode) not in on:  # as in a backward pass that one on the way has intercepted
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            yield

    def callers_autocast(self) -> Callable[[], AbstractContextManager[object]]:
        """A function that makes contexts, to be entered within `set`, in which autocast is as it is now.

        Formulas of the backward pass run under it: PyTorch runs them under that of whoever calls the backward pass.
        """
        now = _autocast_on(self._device_types)
        return (lambda: _NO_CONTEXT) if now == self._autocast else (lambda: _autocast(now))


def keeps_conversions(device_types: list[str]) -> bool:
    """Whether contexts of autocast that a cell makes keep what they convert: if there is none around it."""
    return torch.is_autocast_cache_enabled() and not any(enabled for _, enabled, _ in _autocast_on(device_types))


@contextlib.contextmanager
def keeping_conversions(keeps: bool) -> Iterator[None]:
    """Contexts of autocast that are made inside keep what they convert, or not."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(keeps)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _function_modes() -> list[TorchFunctionMode]:
    """The function modes that are on, outermost first, without that of the default device."""
    return [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]


def _autocast_on(device_types: list[str]) -> _Autocast:
    """Autocast as it is now."""
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in device_types
        if torch.amp.is_autocast_available(kind)
    ]


@contextlib.contextmanager
def _autocast(found: _Autocast) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in found:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield
