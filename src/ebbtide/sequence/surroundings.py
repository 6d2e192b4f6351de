"""What a cell depends on and alters besides its arguments: random generators, and tensors outside that it writes to.

NOTE [What a cell writes to]
Batch norm in training mode adds to its running statistics, spectral norm improves its vectors, a counter counts. In a
plain loop each step does so once; here steps run again. So the bytes of such storages are stored with each state, as
the generators' states are, and go back with it: a step that runs again finds what it found, and what was there when a
backward pass began is there when it ends. Which storages those are, step 0 shows, run under a dispatch mode before the
chain begins. One that is written to without being read, as a list of losses is, needs no place in each state: it is
only put back at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import _disable_current_modes

from ebbtide.errors import SequenceError
from ebbtide.observe.known_values import LIFTS
from ebbtide.observe.ledger import has_storage, tensors_in, written_by
from ebbtide.observe.mode import DispatchMode, is_within_autocast, run_op
from ebbtide.observe.schema import operator_info, running_statistics, trains
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import AsOrdinary, wraps
from ebbtide.sequence.grads import Grads, SeenGrads, preserved

Reference = weakref.ref[Tensor]
_NO_MODES = contextlib.nullcontext()
_OVERWRITING = {
    *(f"aten::{name}" for name in ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")),
    *(f"aten::{name}" for name in ("index_put_", "_index_put_impl_")),
}
"""Ops that do not read what they write over, unless they are told to accumulate."""
_IN_PARTS = {"aten::index_put_", "aten::_index_put_impl_"}
"""Those that write over a part of the tensor that they are given."""


def unseen() -> contextlib.AbstractContextManager[object]:
    """No dispatch mode sees what is done inside; without any, this takes no time."""
    there = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if there else _NO_MODES


def counter_of(tensor: Tensor) -> Tensor:
    """An empty tensor that is altered whenever ``tensor`` is."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What a cell writes to outside. See NOTE [What a cell writes to].

    Attributes:
        carried: storages that it reads, too: each state has its own bytes of them.
        restored: storages that it only writes over.
        generators: of random numbers, besides PyTorch's own: each state has their states.
        counters: `counter_of` the tensors through which it writes.
        drawn_on: devices with whose generators step 0 draws.
        only_read: tensors that it reads and does not write to.
        grads: tensors whose `.grad` it writes to or replaces, by backward passes of its own.
    """

    carried: tuple[torch.UntypedStorage, ...] = ()
    restored: tuple[torch.UntypedStorage, ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    counters: tuple[Tensor, ...] = ()
    drawn_on: frozenset[torch.device] = frozenset()
    only_read: tuple[Reference, ...] = dataclasses.field(default=(), compare=False)
    grads: Grads = dataclasses.field(default=(), compare=False)

    def drawn_again(self, again: Written) -> Written:
        """The same, without generators of its own that a step makes anew each time, as its run ``again`` has shown.

        One that it draws from in its first run alone, and for which the other run has no new one, stays.
        """
        stay = tuple(one for one in self.generators if one in again.generators)
        are_replaced = len(again.generators) == len(self.generators)
        return dataclasses.replace(self, generators=stay) if are_replaced else self

    def drawing_from(self, generators: Iterable[torch.Generator], drawn_on: Iterable[torch.device]) -> Written:
        """The same, with these generators, and those of these devices, as well."""
        others = [one for one in generators if all(one is not known for known in self.generators)]
        return dataclasses.replace(self, generators=(*self.generators, *others), drawn_on=self.drawn_on.union(drawn_on))


class Surroundings:
    """What a step finds besides its arguments, and leaves altered.

    Args:
        devices: CUDA devices whose generators a cell may draw from, besides the CPU's.
        written: what the cell writes to.

    Attributes:
        carried_bytes: of what is carried of that.
        own_generators: from which the cell draws besides those of devices.
        only_read: see `Written`.
    """

    def __init__(self, devices: Sequence[torch.device], written: Written) -> None:
        self._devices = devices
        self._written = written
        self.own_generators = written.generators
        self.only_read = written.only_read
        self.carried_bytes = sum(storage.nbytes() for storage in written.carried)

    def now(self) -> list[Tensor]:
        """The generators' states and what is carried, as bytes; the latter is not copied."""
        if not self._written.carried:
            return self.generators()
        with unseen():
            return [*self.generators(), *map(bytes_of_storage, self._written.carried)]

    def read(self) -> list[Tensor]:
        """`now`, of its own memory."""
        return [*self.generators(), *_copies(self._written.carried)]

    def generators(self) -> list[Tensor]:
        """The states of the devices' generators, and of others that the cell draws from."""
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
        return [*states, *(generator.get_state() for generator in self._written.generators)]

    def drawn(self) -> list[bytes]:
        """The states of those that step 0 draws from."""
        drawn_on, own = self._written.drawn_on, self._written.generators
        if not drawn_on and not own:
            return []
        states = [torch.get_rng_state()] if torch.device("cpu") in drawn_on else []
        states += [torch.cuda.get_rng_state(device) for device in self._devices if device in drawn_on]
        states += [generator.get_state() for generator in own]
        return list(map(_as_bytes, states))

    def set(self, states: Sequence[Tensor]) -> None:
        """Go back to ``states``. Raises `SequenceError` if a storage has another size now."""
        rest = iter(states)
        self.set_generators(rest)
        _put(self._written.carried, list(rest))

    def set_generators(self, states: Iterable[Tensor]) -> None:
        """Go back to ``states``, which are those that `generators` gave, or begin with them."""
        rest = iter(states)
        torch.set_rng_state(next(rest))
        for device in self._devices:
            torch.cuda.set_rng_state(next(rest), device)
        for generator in self._written.generators:
            generator.set_state(next(rest))

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """What is drawn and written inside is as if it had not been, also to autograd, which may have saved it."""
        before, restored = self.read(), _copies(self._written.restored)
        with _unsafe_preserve_version_counter(self._written.counters), preserved(self._written.grads):
            try:
                yield
            finally:
                self.set(before)
                _put(self._written.restored, restored)


def _as_bytes(state: Tensor) -> bytes:
    """A generator's state, to be compared."""
    with torch._C.DisableTorchFunction(), unseen():  # or each of a chain's would count as at rest
        return state.numpy().tobytes()


def bytes_of_storage(storage: torch.UntypedStorage) -> Tensor:
    """A storage as bytes, with a version counter of its own: what is written so is no change that autograd minds."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _copies(storages: Sequence[torch.UntypedStorage]) -> list[Tensor]:
    if not storages:
        return []
    with torch.no_grad(), unseen():
        return [bytes_of_storage(storage).clone() for storage in storages]


def _put(storages: Sequence[torch.UntypedStorage], values: Sequence[Tensor]) -> None:
    if not storages:
        return
    with torch.no_grad(), unseen():
        for storage, value in zip(storages, values, strict=True):
            if storage.nbytes() != value.numel():
                raise SequenceError(
                    f"a tensor outside of {value.numel()} bytes that the cell writes to has {storage.nbytes()} bytes "
                    "now: it must keep its size until the backward pass has ended"
                )
            bytes_of_storage(storage).copy_(value)


@dataclasses.dataclass(slots=True)
class _Found:
    """A storage that is written to.

    Attributes:
        storage: it.
        before: its bytes before that.
        through: tensors through which that is done; for views, their bases.
        is_certain: whether an op is known to write there; else its bytes must show it.
        is_covered: whether all of it has been written over, so that no step finds what another left.
    """

    storage: torch.UntypedStorage
    before: Tensor
    through: list[Tensor] = dataclasses.field(default_factory=list)
    is_certain: bool = False
    is_covered: bool = False

    @property
    def is_altered(self) -> bool:
        """Whether it has other bytes than before."""
        return not torch.equal(bytes_of_storage(self.storage), self.before)


class Watch(DispatchMode):
    """Sees which storages a cell reads and writes that were there before, and which generators it draws from.

    Args:
        own: tensors whose storages do not count: its state and its input.

    Attributes:
        converts: whether something ran within a context of autocast that keeps what it has converted.
        drawn_on: devices with whose generators it draws.
        grads: see `SeenGrads`.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self.converts = False
        self.drawn_on: set[torch.device] = set()
        self.grads = SeenGrads()
        self._own: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._read: set[int] = set()
        self._through: dict[int, tuple[Reference, int]] = {}  # by id of what is read or viewed, with its storage's key
        self._found: dict[int, _Found] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # by id, with their states before
        self._made_written: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made_parameters: list[weakref.ref[Tensor]] = []
        self._note_made(own)
        self._given = set(self._own)

    def generators(self) -> list[torch.Generator]:
        """Those that it was seen to draw from."""
        return [generator for generator, _ in self._generators.values()]

    def rewind(self) -> None:
        """Undo what was drawn from generators, and nothing else."""
        for generator, state in self._generators.values():
            generator.set_state(state)

    def put_back(self, among: Written | None = None) -> Written:
        """Undo what was written; returns to what it was. ``among``: only to these."""
        known = None if among is None else {storage._cdata for storage in (*among.carried, *among.restored)}
        drawn = {key: one for key, one in self._generators.items() if among is None or one[0] in among.generators}
        for generator, state in drawn.values():
            generator.set_state(state)
        with torch.no_grad(), unseen(), AsOrdinary():
            found = {
                key: one
                for key, one in self._found.items()
                if (known is None or key in known) and (one.is_certain or one.is_altered)
            }
            through = [tensor for one in found.values() for tensor in one.through if not tensor.is_inference()]
            counters = tuple(map(counter_of, through))
        _put([one.storage for one in found.values()], [one.before for one in found.values()])
        return Written(
            carried=tuple(one.storage for key, one in found.items() if key in self._read),
            restored=tuple(one.storage for key, one in found.items() if key not in self._read),
            generators=tuple(generator for generator, _ in drawn.values()),
            counters=counters,
            drawn_on=frozenset(self.drawn_on),
            only_read=tuple(one for one, key in self._through.values() if key in self._read and key not in found),
            grads=self.grads.written(found.keys()),
        )

    def made(self) -> list[torch.UntypedStorage]:
        """Storages that were made inside, written to in place, and are still there.

        Raises:
            SequenceError: if there are parameters among them: where the first step makes its own weights, it draws
                other random numbers than the same step does later.
        """
        if any(reference() is not None for reference in self._made_parameters):
            raise SequenceError(
                "the cell makes weights in its first step, as a lazy module does, which runs more than once here; call "
                "it once before the scan, so that they are there"
            )
        return [storage for reference in self._made_written.values() if (storage := reference()) is not None]

    def wrote_to(self, storages: Iterable[torch.UntypedStorage]) -> bool:
        """Whether one of ``storages`` was written to."""
        return any(storage._cdata in self._found for storage in storages)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and wraps(types):
            return self.see_within(self._see, func, args, kwargs or {})
        with AsOrdinary() if not types else contextlib.nullcontext():
            return self._see(func, args, kwargs or {})

    def _see(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in LIFTS:
            self._note_made(args)
        self.grads.look_behind()
        self._note(func, args, kwargs)
        self.converts |= torch.is_autocast_cache_enabled() and is_within_autocast()
        before = _as_bytes(torch.get_rng_state()) if operator_info(func).replay == "random" else b""
        result = run_op(func, args, kwargs)
        if before:
            devices = {tensor.device for tensor in tensors_in((result,))}
            if before == _as_bytes(torch.get_rng_state()):  # attention without dropout, or another generator
                devices.discard(torch.device("cpu"))
            self.drawn_on |= devices
        self._note_made((result,))
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        info, name = operator_info(func), getattr(getattr(func, "_schema", None), "name", "")
        statistics = [args[place] for place in running_statistics(func) if place < len(args)]
        written = statistics or [tensor for tensor, *_ in written_by(info, args, kwargs)]
        read: tuple[Any, ...] = (*args, *kwargs.values())
        for tensor, storage in self._outside_of(read):  # views as well: what shares their storages is outside, too
            self._note_through(tensor, storage)
            self.grads.see(tensor)
        overwrites = bool(info.written_names) or (name in _OVERWRITING and not _accumulates(args, kwargs))
        if info.replay == "view":
            read = ()
        elif info.written_names:
            read = (*args, *(item for key, item in kwargs.items() if key not in info.written_names))
        elif overwrites:
            read = (*args[1:], *kwargs.values())
        for _, storage in self._outside_of(read):
            found = self._found.get(storage._cdata)
            if found is None or not found.is_covered:
                self._read.add(storage._cdata)
        self._note_generators(read)
        self._note_made_written(written)
        for tensor, storage in self._outside_of(written):
            if storage._cdata not in self._found:
                self._found[storage._cdata] = _Found(storage, bytes_of_storage(storage).clone())
            found = self._found[storage._cdata]
            base = tensor if tensor._base is None else tensor._base  # their versions are counted together
            if all(base is not known for known in found.through):
                found.through.append(base)
            found.is_certain |= not statistics or trains(func, args)
            is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            found.is_covered |= overwrites and is_whole and name not in _IN_PARTS

    def _note_through(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        base = tensor if tensor._base is None else tensor._base
        known = self._through.get(id(base))
        if (known is None or known[0]() is None) and not base.is_inference():
            self._through[id(base)] = weakref.ref(base), storage._cdata

    def _note_generators(self, arguments: Iterable[Any]) -> None:
        for item in arguments:
            if isinstance(item, torch.Generator) and id(item) not in self._generators:
                self._generators[id(item)] = (item, item.get_state())

    def _note_made_written(self, written: Iterable[Any]) -> None:
        for tensor in filter(has_storage, tensors_in(written)):  # a norm may have no statistics
            key = tensor.untyped_storage()._cdata
            if self._is_own(key) and key not in self._given:
                self._made_written[key] = self._own[key]
                if isinstance(tensor, torch.nn.Parameter):
                    self._made_parameters.append(weakref.ref(tensor))

    def _outside_of(self, items: Iterable[Any]) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
        """The tensors in arguments whose storages were there before, with these."""
        for tensor in filter(has_storage, tensors_in(items)):
            storage = tensor.untyped_storage()
            if not self._is_own(storage._cdata):
                self._outside[storage._cdata] = storage
                yield tensor, storage

    def _note_made(self, items: Iterable[Any]) -> None:
        for tensor in filter(has_storage, tensors_in(items)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._outside:
                self._own[storage._cdata] = weakref.ref(storage)

    def _is_own(self, key: int) -> bool:
        reference = self._own.get(key)
        return reference is not None and reference() is not None


def _accumulates(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op that puts values at indices adds them up."""
    return any(item is True for item in (*args[3:4], kwargs.get("accumulate")))
