"""The step of a machine that is not at hand: the user's own step, run on fake tensors, its ops timed by a roofline.

Fake tensors have shapes, types, strides and storages, but no memory, and their ops compute nothing. Storages are born,
shared, counted and freed as real ones are, so the recorder sees the same values, lifetimes and saved tensors. What
fake tensors do not have is a value: a step that looks into a tensor (``.item()``, ``if tensor``, ``nonzero``) can be
observed this way only if nothing but the program decides what is there (see `KnownValues`).

NOTE [Where a fake step differs from the real one]
1. Ops that PyTorch chooses by the device are those of the CPU, or by `cuda_choices` nearly those of CUDA.
2. Memory inside ops (`Op.workspace_bytes`) is not known and stays 0.
3. A kernel may give its result another stride than its fake one does. oneDNN's LSTM layer sizes its scratch result at
   run time: 0 bytes here; `embedding_bag` may leave memory for one number more with each list of bags.
4. Functions that look at the type of a tensor see another one: `clip_grad_norm_` takes its ops one by one, and views
   of a tensor written in place are made anew by more view ops.
5. Real tensors that the step reads (data loaded from a file, say) count as external, like inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map_only

from ebbtide.arguments import check_instance
from ebbtide.errors import RecordError, StepError
from ebbtide.machine import Kernels, Machine
from ebbtide.observe.clock import Span
from ebbtide.observe.cuda_choices import cuda_choices
from ebbtide.observe.hooks import hooks_on
from ebbtide.observe.kernel_storages import as_kernels_leave
from ebbtide.observe.known_values import UNKNOWN, KnownValues
from ebbtide.observe.ledger import has_storage, tensors_in
from ebbtide.observe.no_values import no_value, values_refused
from ebbtide.observe.recorder import Recorder
from ebbtide.observe.uncompiled import uncompiled
from ebbtide.observe.work import work_of
from ebbtide.observe.wrapped import inside
from ebbtide.roofline import Work, with_durations
from ebbtide.step import Step


def observe_fake(
    build: Callable[[], Callable[[], Any]], machine: Machine, *, modules: Sequence[nn.Module] = ()
) -> Step:
    """The step that ``build`` returns, as it would run on ``machine``, without its memory and without computing.

    Args:
        build: makes model, data and whatever else the step needs, under fake tensors, and returns a function that runs
            one step. That is called twice: the first time gradients and the optimizer's state come to be.
        machine: with a `Machine.compute`; durations are its roofline's.
        modules: real modules that the step trains. Until this returns their parameters and buffers are fake.

    Raises:
        RecordError: if ``machine`` does not say how fast it computes.
        ArgumentError: if it is none; it is a `ValueError`.
        StepError: if the step needs the value of a tensor, or an op that fake tensors do not have.
    """
    check_instance("machine", machine, Machine)
    if machine.compute is None:
        raise RecordError(f"machine {machine.name} does not say how fast it computes; name one that does")
    step, works = record_fake(build, kernels=machine.compute.kernels, modules=modules)
    return with_durations(step, works, machine.compute)


def record_fake(
    build: Callable[[], Callable[[], Any]], *, kernels: Kernels = "cpu", modules: Sequence[nn.Module] = ()
) -> tuple[Step, tuple[Work, ...]]:
    """As `observe_fake`, without durations: the step, and what each of its ops does."""
    recorder = _FakeRecorder()
    choices = cuda_choices() if kernels == "cuda" else contextlib.nullcontext()
    with (
        _one_at_a_time,
        uncompiled(),
        _FakeMode() as mode,
        choices,
        _blind_initialisers(),
        values_refused(),
        _faked(modules, mode),
    ):
        run = build()
        run()
        with hooks_on(recorder.keep, recorder.show), recorder:
            run()
        return recorder.finish(), tuple(recorder.works)


_one_at_a_time = threading.RLock()  # what is replaced for a fake step is the process's, and put back at its end
_NO_WORK = Work("none", 0, 0, "float32")


class _Converter(FakeTensorConverter):
    """Remembers no fake tensor for a meta tensor, as PyTorch does in vain.

    Its weak reference would forbid `nn.Module.to` to swap a parameter for a converted one.
    """

    def set_tensor_memo(self, t: Any, v: Any) -> None:
        """Nothing: ``t`` is about to die."""


class _FakeMode(FakeTensorMode):
    stands_for_a_step = True  # see `has_storage`

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()
        self._known = KnownValues()
        self._inside = False

    def __deepcopy__(self, _: Any) -> _FakeMode:
        return self  # copies of tensors are tensors of the same step

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_value("pickle")  # as `torch.save` writes of a tensor that has one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(tensor) is nn.Parameter for tensor in tensors_in((*args, *(kwargs or {}).values()))):
            raise StepError(
                "the step uses a real parameter, which would be left with a fake gradient: make the model inside"
                " `build`, or name it in modules=[...]"
            )
        kwargs = kwargs or {}
        # Ops that PyTorch makes of this one have their effect on known values with it.
        if self._inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._inside = True
        try:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            as_kernels_leave(func, made, args, kwargs)
            self._known.follow(func, args, kwargs, made)
            return made
        except (DataDependentOutputException, DynamicOutputShapeException) as fault:
            return self._looked_up(fault, func, args, kwargs)
        except (UnsupportedOperatorException, UnsupportedFakeTensorException) as fault:
            raise StepError(f"{func} has no fake version ({fault}): observe the step on real tensors") from fault
        finally:
            self._inside = False

    def _looked_up(
        self, fault: DataDependentOutputException | DynamicOutputShapeException, func: Any, args: Any, kwargs: Any
    ) -> Any:
        """The result of an op that PyTorch does not fake as it depends on values, if these are known."""
        found = self._known.result(func, args, kwargs)
        if found is UNKNOWN and isinstance(fault, DataDependentOutputException):
            raise no_value(fault.func) from fault
        if found is UNKNOWN:
            raise StepError(
                f"the size of a result of {fault.func} depends on values, and fake tensors have none: observe the step"
                " on real tensors"
            ) from fault
        return tree_map_only(torch.Tensor, self._fake_of, found)

    def _fake_of(self, value: torch.Tensor) -> torch.Tensor:
        fake: torch.Tensor = self.from_tensor(value)
        self._known.learn(fake, value)
        return fake


class _Watched:
    """A saved tensor; tells the recorder when autograd drops it."""

    __slots__ = ("number", "recorder", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, number: int, recorder: Recorder) -> None:
        inner = inside(tensor)
        # The mode would turn a real tensor, an input, into another one, fake.
        self.tensor = tensor.detach() if isinstance(inner, FakeTensor) else tensor
        self.version = tensor._version
        self.number = number
        self.recorder = recorder
        self.storage: Any = None
        if _is_plain(inner) and not recorder.is_external(number):
            self.storage = recorder.storage_of(number)
            recorder.storages.shown(self.storage, 1)
            recorder.storages.held(self.storage, 1)

    def __del__(self) -> None:
        storage = getattr(self, "storage", None)  # an interrupt may have come before it was set
        if storage is not None:
            self.recorder.storages.held(storage, -1)
            self.recorder.storages.shown(storage, -1)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the real tensor in its place could be moved."""
    known = type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor)
    return known and has_storage(tensor) and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


class _FakeRecorder(Recorder):
    """Writes down what each op does instead of how long it took."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch asks fake tensors for their device through the mode; real ones know it.
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _execute(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Span], int]:
        place = len(self.works)
        self.works.append(_NO_WORK)  # of an op that fails, and is one of the step's all the same
        result = func(*args, **kwargs)
        self.works[place] = work_of(func, args, kwargs, result)
        return result, [], 0

    def keep(self, tensor: torch.Tensor) -> _Watched:
        """The pack hook."""
        with self._aside():
            return _Watched(tensor, self.pack(tensor), self)

    def show(self, watched: _Watched) -> torch.Tensor:
        """The unpack hook."""
        if watched.tensor._version != watched.version:
            raise RuntimeError("a variable needed for gradient computation was modified by an inplace operation")
        with self._aside():
            self.unpack(watched.number)
            # A tensor of its own shows for how long autograd has it. External ones are never away, and need none.
            return watched.tensor if self.is_external(watched.number) else watched.tensor.detach()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self.hidden = True
        try:
            yield
        finally:
            self.hidden = False


@contextlib.contextmanager
def _blind_initialisers() -> Iterator[None]:
    """`torch.nn.init.trunc_normal_` draws again until it sees no number out of range; here it draws once."""
    name = "_no_grad_trunc_normal_"
    real = getattr(nn.init, name, None)
    if real is None:
        yield
        return

    def draw(
        tensor: torch.Tensor, mean: float, std: float, *_: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    setattr(nn.init, name, draw)
    try:
        yield
    finally:
        setattr(nn.init, name, real)


def _fake_like(tensor: Any, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor with what somebody has set on the real one, and with its hooks."""
    fake: Any = mode.from_tensor(tensor)
    vars(fake).update(vars(tensor))
    if tensor.requires_grad and tensor.is_leaf:
        fake._backward_hooks = tensor._backward_hooks
        fake._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return cast(torch.Tensor, fake)


@contextlib.contextmanager
def _faked(modules: Sequence[nn.Module], mode: FakeTensorMode) -> Iterator[None]:
    """Puts fake tensors in the place of the modules' parameters and buffers, shared ones shared."""
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    try:
        for part in (part for module in modules for part in module.modules()):
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        replaced.append((table, name, tensor))
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = _fake_like(tensor, mode)
                        table[name] = fakes[id(tensor)]
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor
