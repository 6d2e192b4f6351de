"""Turns a running training step into a `Step`.

NOTE [What is a value, and when does it die]
1. A storage is known by its address while it lives; its death is reported by a weak reference, so an address that is
   used again is a new storage.
2. A storage that is first seen as an argument was made outside: a parameter, a buffer, an input. It is external.
3. An op that writes an argument in place makes a new version of that storage: a new value. One that gives it more
   memory makes another storage, and the former one is dead.
4. A storage that is alive only because autograd saved it is *alone*: every reference to it is one of ours. This is
   looked up from its reference count at the start of each moment, so the moment found is the one at which the storage
   would have died, had autograd not saved it. Autograd then asks for it, and once it is done with it, it may be alone
   again, if the graph is kept for another backward pass. What hooks give it must be a tensor of its own for that.
5. A saved storage that was moved out under the safe policy (and so died) is the same value still: it lives until the
   last saved tensor that shows it is dropped and its restored storage has died.
6. Storages are emptied, and filled again, by no op (`resizing.py`). One that the step made dies as it is emptied; with
   memory again it is another one, as if made by the op that comes next, and stays. What was there before, as sharded
   parameters, counts on, and what reads it is never run again: looked for at autograd's first request and in the end.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ebbtide.observe.allocated import AllocatedProbe, Memory, with_everything_allocated
from ebbtide.observe.asking import AskingNodes
from ebbtide.observe.clock import Clock, HostClock, Span, total_seconds
from ebbtide.observe.compiled_calls import compiled_calls, compiled_runs
from ebbtide.observe.drafts import OpDraft, SeenStorage, absences_of
from ebbtide.observe.inductor import unwatch_compiling, watch_compiling
from ebbtide.observe.interrupts import Interrupts
from ebbtide.observe.ledger import enlarged, has_storage, is_traceable, sizes, tensors_in, written_by
from ebbtide.observe.loads import unwatch_loads, watch_loads
from ebbtide.observe.mode import DispatchMode, is_between_ops, modes_on, run_op
from ebbtide.observe.modules import ModuleTrail
from ebbtide.observe.passes import keeps_graph, phase_now, tell_no_more, tell_of_passes
from ebbtide.observe.schema import COMPILED_GRAPH, OperatorInfo, operator_info, trains
from ebbtide.observe.storages import Storages
from ebbtide.observe.transforms import in_trace, in_transform
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.workspace import WorkspaceProbe
from ebbtide.observe.wrapped import AsOrdinary, inside, runs_as_called, wraps
from ebbtide.step import Event, Phase, Saved, Step


class Recorder(DispatchMode):
    """A dispatch mode that writes down every ATen op; saved-tensor hooks report to it through `pack` and `unpack`.

    Args:
        probe: measures the memory that each op takes and gives back inside itself; without one it is read as 0.
        clock: what ops are timed by. It is read in `finish`, not before.
        memory: of the training device, if its allocator says what is taken: then all of that is counted. See
            NOTE [Everything allocated] in `allocated.py`.
        collects_all: whether all garbage is collected first, or only young objects: to collect all of it takes longer
            than the steps do where many are observed.
        note: called before each op, until it returns None: whoever moves values has to know the streams of all ops.

    Attributes:
        storages, ledger: what is known of storages and values, and what counts their bytes.
        hidden: while true, ops are run without being recorded; the runtime sets it around its own ops.
        captures_all: whether a mode that captures ops of such a step has to stay on from beginning to end, as something
            is called that `torch.compile` returned, or autograd saves within transforms. Known in the end.
        runs_compiled: whether anything that `torch.compile` made has run, with whatever backend. Known in the end.
        keeps_graphs: whether a backward pass kept the graph that it went through.
        is_blind: whether a backward pass ran in a thread of the user's, where this mode is not on.
        lock: held by the thread of autograd that runs an op, or a hook that reports here: there may be several.
        interrupts: what was raised in finalizers; it is raised again at the next op or hook, or in `finish`.
    """

    def __init__(
        self,
        probe: WorkspaceProbe | None = None,
        *,
        clock: Clock | None = None,
        memory: Memory | None = None,
        collects_all: bool = True,
        note: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.interrupts = Interrupts()
        self._ops: list[OpDraft] = []
        self.storages = Storages(memory, self._ops, self.lock)
        self.ledger = self.storages.ledger
        self._memory, self._note = memory, note
        self._oldest = 2 if collects_all else 1
        self._probe = probe if memory is None else AllocatedProbe(memory)
        self._time = clock if clock is not None else HostClock()
        self._mark = self._time.mark
        self._trail, self._asking = ModuleTrail(), AskingNodes(self)
        self._saved: list[Saved] = []
        self._saved_modules: list[str] = []
        self._unpacked: list[list[int]] = []
        self._passes: dict[int, int] = {}
        self._events: list[Event] = []
        self._left: Any = None
        self._backward_module, self._calls, self._runs = "", 0, 0
        self._is_in_node, self._is_pass_new = False, True
        self.hidden = self.captures_all = self.runs_compiled = self.keeps_graphs = self.is_blind = False

    def __enter__(self) -> Recorder:
        gc.collect(self._oldest)  # garbage of earlier steps must not die in this one
        try:
            self.storages.begin()
            self._trail.start()
            watch_compiling(self)
            self._calls, self._runs = compiled_calls(), compiled_runs()
            self.interrupts.enter()
            tell_of_passes(self._pass_begins)
            watch_loads(self)
            super().__enter__()
            self.resume()
        except BaseException:  # such as an interrupt: a ``with`` block that was not entered is not left
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self.storages.end()
        super().__exit__(*exception)
        self.hidden = True  # it stays on, if this is another thread than it was put on in
        tell_no_more(self._pass_begins)
        unwatch_loads(self)
        self._asking.forget()  # its graph, by a handle of ours, would keep this recorder
        self.interrupts.leave()
        unwatch_compiling(self)
        self.captures_all |= compiled_calls() != self._calls
        self.runs_compiled |= compiled_runs() != self._runs
        self._trail.stop()
        self.ledger.close()

    # --- ops -----------------------------------------------------------------------------------------------------

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.lock:
            kwargs = kwargs or {}
            if types or runs_as_called(func, args, kwargs):
                return self._see(func, types, args, kwargs)
            with AsOrdinary():
                return self._see(func, types, args, kwargs)

    def _see(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.hidden:
            return func(*args, **kwargs)
        self.interrupts.raise_kept()
        if types and wraps(types):
            return self.see_within(self._record_within, func, args, kwargs)
        return self._record(func, args, kwargs)

    def _record_within(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record what an op on tensors that wrap others becomes."""
        return func(*args, **kwargs) if self.hidden else self._record(func, args, kwargs, replayable=False)

    def _record(self, func: Any, args: Any, kwargs: Any, *, replayable: bool = True) -> Any:
        self._tick_over()
        info = operator_info(func)
        tick = len(self._ops)
        in_training = info.replay == "batch_norm" and trains(func, args)
        # Running statistics do not enter the result of batch norm in training.
        read = (*args[:3], *args[5:]) if in_training else args
        draft = OpDraft(info, self._inputs(read, kwargs, tick), *self._place())
        if info.replay == "batch_norm" and not in_training:
            draft.replay = "pure"
        if not replayable or not all(map(is_traceable, tensors_in((*read, *kwargs.values())))):
            draft.replay = "opaque"
        self._begin(draft)
        written = [] if in_training else written_by(info, args, kwargs)
        result, draft.spans, grown = self._execute(func, args, kwargs)
        if written:
            grown -= self._note_larger(draft, enlarged(written), tick)
            storages = dict.fromkeys(self.storages.touch(tensor) for tensor, *_ in written)
            self._note_versions(draft, storages, tick)
        if in_training:
            self._note_statistics(draft, args, tick)
        self._note_made(draft, result, tick, grown)
        self._asking.made(func, result)
        return result

    def node_begins(self) -> None:
        """What runs from now on is one op. See NOTE [Nodes that ask] in `asking.py`."""
        with self.lock:
            self._tick_over()
            self._is_in_node = True
            self.resume()

    def node_ended(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Record it."""
        with self.lock:
            ended = self._mark()
            grown = self._probe.after() if self._probe is not None else 0
            started, self._left, self._is_in_node = self._left, ended, False
            self._tick_over()
            tick = len(self._ops)
            draft = OpDraft(OperatorInfo(name, (), (), "opaque"), self._inputs(given, {}, tick), *self._place())
            draft.spans = [(started, ended)]
            self._begin(draft)
            self._note_made(draft, made, tick, grown)

    def note_load(self, memory: torch.UntypedStorage, _: object, is_on: bool) -> None:
        """Record a load of another budget's step, or of an earlier one's plan: this step's own are hidden."""
        if is_on:  # of what is loaded in another thread, this one waits for nothing
            with self.lock:
                if not self.hidden:
                    self.storages.loaded(memory)
                if self._is_in_node:
                    self.resume()

    def run_graph(self, run: Callable[[], Any], inputs: Sequence[Any], written: Collection[int]) -> Any:
        """Record a compiled graph as one op."""
        with self.lock:
            if self.hidden:
                return run()
            self._tick_over()
            tick = len(self._ops)
            draft = OpDraft(COMPILED_GRAPH, self._inputs(inputs, {}, tick), *self._place())
            storages = dict.fromkeys(self.storages.touch(inputs[i]) for i in sorted(written) if has_storage(inputs[i]))
            self._begin(draft)
            self.hidden = self.runs_compiled = True
            try:
                result, draft.spans, grown = self._execute(run, (), {})
            finally:
                self.hidden = False
            self._note_versions(draft, storages, tick)
            self._note_made(draft, result, tick, grown)
            return result

    def _begin(self, draft: OpDraft) -> None:
        self._ops.append(draft)
        self.storages.moment_ends()

    def compiling(self, begins: bool) -> None:
        """PyTorch begins to compile, or has compiled: it is no part of the step. See `inductor.py`."""
        with self.lock:
            if begins:
                self._tick_over()
                self._trail.pause()
            else:
                self._trail.go_on()
                self.resume()

    def _execute(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Span], int]:
        """Run the op: its result, when it ran, and the bytes by which memory grew inside it, outputs included."""
        if self._note is not None and self._note() is None:
            self._note = None
        if self._probe is not None:
            self._probe.before(self.ledger.made_bytes)
        self._time.fall_behind()
        started = self._mark()
        try:
            result = run_op(func, args, kwargs)
            ended = self._mark()
        finally:  # before anything else can take memory; one that fails is an op of the step, too
            grown = self._ops[-1].workspace = max(0, self._probe.after()) if self._probe is not None else 0
        return result, [(started, ended)], grown

    def _place(self) -> tuple[Phase, str]:
        phase = phase_now()
        return phase, self._trail.path if phase == "forward" else self._backward_module

    def _tick_over(self) -> None:
        """A moment begins: the time since the last one is the last op's, and it is noted which storages are alone."""
        self._asking.follow()
        if self._ops:
            now = self._mark()
            if self._time.is_behind(now):
                self._ops[-1].spans.append((self._left, now))
        self.storages.moment_begins()

    def _inputs(self, args: Any, kwargs: Any, tick: int) -> tuple[int, ...]:
        values: dict[int, None] = {}
        for tensor in tensors_in((*args, *kwargs.values())):
            if has_storage(tensor):
                value = self.storages.use(tensor)
                if value not in values:
                    values[value] = None
                    self.storages.values[value].uses.append(tick)
        return tuple(values)

    def _note_versions(self, draft: OpDraft, written: Iterable[SeenStorage], tick: int) -> None:
        """Each storage that the op wrote in place has a new version, unless that is new."""
        for storage in (each for each in written if each.versions[-1] not in draft.outputs):
            pair = storage.versions[-1], self.storages.new_version(storage, tick)
            draft.mutated += (pair,)
            draft.outputs += (pair[1],)

    def _note_larger(self, draft: OpDraft, tensors: Iterable[torch.Tensor], tick: int) -> int:
        """Bytes of storages that the op enlarged; from now on these count as new storages."""
        return self._note_new(draft, (self.storages.made_larger(tensor, tick) for tensor in tensors))

    def _note_statistics(self, draft: OpDraft, args: Any, tick: int) -> None:
        """Batch norm in training makes new versions of its running statistics, which its schema may not say.

        They are outputs, but not ``mutated``: a replay does not touch them.
        """
        seen = [self.storages.touch(tensor) for tensor in tensors_in(args[3:5])]
        draft.outputs += tuple(self.storages.new_version(storage, tick) for storage in seen)

    def _note_made(self, draft: OpDraft, result: Any, tick: int, grown: int) -> None:
        """New storages are outputs; memory that grew beyond them was the op's own."""
        tensors = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
        made = self._note_new(draft, (self.storages.made(tensor, tick) for tensor in tensors if has_storage(tensor)))
        draft.workspace = max(0, grown - made)
        self.resume()

    def _note_new(self, draft: OpDraft, found: Iterable[SeenStorage | None]) -> int:
        """The storages among ``found`` are new: they are outputs of the op. Returns their bytes."""
        made = 0
        for storage in found:
            if storage is not None:
                made += storage.size_bytes
                draft.outputs += (storage.versions[-1],)
        return made

    # --- saved tensors -------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> int:
        """Record a save; returns the number of the saved tensor."""
        self.interrupts.raise_kept()
        self._tick_over()
        self.captures_all |= in_transform()
        between = is_between_ops(tensor)
        is_parameter, tensor = isinstance(tensor, torch.nn.Parameter), inside(tensor)
        followed = has_storage(tensor) and not in_trace()
        value = self.storages.use(tensor) if followed else self.storages.nowhere().versions[-1]
        storage = self.storages.values[value].storage
        if followed and not self.storages.is_external(storage):
            # The runtime does not move tensors of these kinds: see `is_plain` in `run/holdings.py`.
            self.storages.values[value].stays |= tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
        if is_parameter and not self.storages.is_external(storage):
            storage = self.storages.nowhere()  # it is saved as what it will be by then: see `keep` in `run/holdings.py`
        number = len(self._saved)
        self._unpacked.append([])
        self._saved_modules.append(self._trail.path)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(sizes(tensor))
        stride, offset = (tuple(tensor.stride()), int(tensor.storage_offset())) if followed else ((), 0)
        self._saved.append(Saved(storage.versions[-1], dtype, shape, stride, offset, unpacked=()))
        self._events.append(Event("pack", len(self._ops), number, phase_now(), between))
        self.storages.moment_ends()
        return number

    def _pass_begins(self) -> None:
        if not self.ledger.open:  # it was left in another thread
            tell_no_more(self._pass_begins)
        self._is_pass_new = True  # whether it keeps its graph is looked at in it, not in a pass within it

    def unpack(self, number: int) -> None:
        """Record that autograd asks for saved tensor ``number``."""
        if number < 0 or not self.ledger.open:
            return
        self.interrupts.raise_kept()
        self._tick_over()
        self.is_blind |= threading.get_ident() != self._trail.thread and self not in modes_on()
        self.keeps_graphs |= self._is_pass_new and keeps_graph()
        self._is_pass_new = False
        if not self._passes:
            self.storages.look_for_emptied()
        self._events.append(Event("unpack", len(self._ops), number, phase_now()))
        self._unpacked[number].append(self.storages.moment)
        self._passes[self.storages.moment] = torch._C._current_graph_task_id()
        self.storages.watch(self.storage_of(number))
        self._backward_module = self._saved_modules[number]
        self.storages.moment_ends()

    def resume(self) -> None:
        """The recorder is done, or the hook that called `pack` or `unpack`: what passes now is the step's own time."""
        if self._is_in_node and self._probe is not None:  # a hook may have run ops: they are no part of the node
            self._probe.before(self.ledger.made_bytes)
        self._time.fall_behind()
        self._left = self._mark()

    def storage_of(self, number: int) -> SeenStorage:
        """The storage that saved tensor ``number`` shows."""
        return self.storages.values[self._saved[number].value].storage

    def is_external(self, number: int) -> bool:
        """Whether saved tensor ``number`` shows a storage that the step did not make."""
        return self.storages.is_external(self.storage_of(number))

    # --- the result ----------------------------------------------------------------------------------------------

    def finish(self) -> Step:
        """The step that was recorded, up to now. Waits until the device is done with it."""
        self.interrupts.raise_kept()
        self.storages.spare_readers()
        moments = len(self._ops) + len(self._events)
        ops = tuple(draft.op(total_seconds(self._time, draft.spans)) for draft in self._ops)
        values = tuple(draft.value(moments) for draft in self.storages.values)
        saved = tuple(dataclasses.replace(s, unpacked=tuple(self._unpacked[n])) for n, s in enumerate(self._saved))
        asked_or_saved = [index + event.tick for index, event in enumerate(self._events)]
        absences = absences_of(saved, self.storages.values, self._passes, asked_or_saved, moments)
        step = Step(ops, values, saved, tuple(self._events), absences)
        if self._memory is None:
            return step
        return with_everything_allocated(dataclasses.replace(step, device=self._memory.device.type))
