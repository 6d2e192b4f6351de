"""The storages that a running step uses, and their values: see NOTE [What is a value, and when does it die] in
`recorder.py`."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager

import torch

from ebbtide.errors import StepError
from ebbtide.observe.allocated import Memory
from ebbtide.observe.drafts import OpDraft, SeenStorage, ValueDraft
from ebbtide.observe.garbage import HeldOff
from ebbtide.observe.ledger import Ledger, StorageRecord, storage_wrapper_count, use_count
from ebbtide.observe.resizing import tell_no_more_of_resizing, tell_of_resizing
from ebbtide.step import EXTERNAL

COLLECTS_BYTES = 1 << 30
"""Bytes that a step has made and that live at which garbage is collected; later, each time that they have doubled."""


class Storages:
    """What is known of storages and values up to the present moment.

    Args:
        memory: of the training device, if its allocator says what is taken: then storages count for that.
        ops: those of the step so far; whoever runs one adds it first.
        lock: held while they change.

    Attributes:
        moment: the present one; whoever notes an op or an event moves it on.
        ledger: counts their bytes.
        values: all values, in order.
        emptied: by number, storages that were found alive and without memory.
    """

    def __init__(self, memory: Memory | None, ops: list[OpDraft], lock: AbstractContextManager[object]) -> None:
        self._ops, self._lock = ops, lock
        self.moment = 0
        self.ledger = Ledger(self._died) if memory is None else Ledger(self._died, memory.size_of)
        self.values: list[ValueDraft] = []
        self.emptied: dict[int, SeenStorage] = {}
        self._garbage_bytes = self._left_bytes = 0
        self._is_collecting, self._collects_at = False, COLLECTS_BYTES
        self._collector = HeldOff()
        self._count = 0
        self._records: dict[StorageRecord, SeenStorage] = {}
        self._resized_now: list[SeenStorage] = []
        self._watched: dict[int, SeenStorage] = {}
        self._no_storage: SeenStorage | None = None
        self._wrapper = storage_wrapper_count()

    def begin(self) -> None:
        """The step begins."""
        self._collector.begin()
        tell_of_resizing(self._resized)

    def end(self) -> None:
        """It ends."""
        tell_no_more_of_resizing(self._resized)
        self._left_bytes = self.ledger.made_here_bytes
        self._collector.end()

    # --- what ops use and make -----------------------------------------------------------------------------------

    def touch(self, tensor: torch.Tensor) -> SeenStorage:
        """The storage of a tensor that is used; one that was never seen before is external."""
        record = self.ledger.touch(tensor.untyped_storage())
        return self._records.get(record) or self._add(record, tensor, EXTERNAL)

    def use(self, tensor: torch.Tensor) -> int:
        """The value that a tensor shows which is read or saved.

        A few tensors count their versions by themselves, from 0 on: those by which `torch.kron` reads what it is given,
        and those that ``data`` gives. If such a tensor was written to, its version does not tell what it shows. So
        values with such tensors must stay, and what reads them must not run again. External values are an exception:
        there the runtime looks after each tensor by itself.
        """
        storage = self.touch(tensor)
        value = storage.versions[-1]
        if not tensor.is_inference() and not self.is_external(storage):  # those of inference count no versions
            draft, version = self.values[value], tensor._version
            draft.stays |= draft.seen_version not in (-1, version)
            if draft.seen_version < 0 and len(storage.versions) > 1:
                written = self.values[storage.versions[-2]]
                draft.is_counted_twice |= written.seen_version not in (-1, version - 1)
                written.seen_version = -1  # it is looked at once: if it goes, what comes back is another tensor
            draft.seen_version = version
        return value

    def made(self, tensor: torch.Tensor, tick: int) -> SeenStorage | None:
        """The storage of a tensor that the op at ``tick`` has returned, if it has made it."""
        record, is_new = self.ledger.make(tensor.untyped_storage())
        return self._add(record, tensor, tick) if is_new else None

    def made_larger(self, tensor: torch.Tensor, tick: int) -> SeenStorage | None:
        """The storage that takes the place of a tensor's, to which the op at ``tick`` has given more memory; None if
        autograd has saved the former one, which it will refuse to use."""
        former, storage = self.touch(tensor), tensor.untyped_storage()
        if former.views or storage.nbytes() <= former.size_bytes:
            return None
        return self._add(self.ledger.resized(storage), tensor, tick)

    def _resized(self, memory: torch.UntypedStorage) -> None:
        """Somebody has given memory to a storage, or taken it, by no op: see rule 6. Its values so far are those of one
        that is dead; holdings have the present one."""
        with self._lock:
            former = self.ledger.outdated(memory)
            storage = self._records.get(former) if former is not None else None
            if storage is None:
                return
            record = self.ledger.resized(memory)
            self._records[record] = storage
            if storage not in self._resized_now:
                past = SeenStorage(storage.number, storage.size_bytes, storage.cdata)
                past.versions, past.alone, past.dies = storage.versions, storage.alone, self.moment
                for value in past.versions:
                    self.values[value].storage = past
                storage.number, storage.versions, storage.alone, storage.is_resized = self._count, [], [], True
                self._count += 1
                self.new_version(storage, EXTERNAL)
                self._resized_now.append(storage)
            storage.dies, storage.size_bytes = -1, record.size_bytes

    def moment_ends(self) -> None:
        """The present moment ends: an op has begun, or an event is over."""
        if self._resized_now:
            self._find_makers()
        self.moment += 1

    def _find_makers(self) -> None:
        """Storages with memory that they were given by no op count as made by the op that begins, or, before an event,
        by the last one. It does not make them if it runs again."""
        resized, self._resized_now = self._resized_now, []
        for storage in resized:
            if storage.dies >= 0:
                storage.size_bytes = 0
            elif storage.size_bytes:
                number, *later = storage.versions  # an op that resizes what it writes has made another version already
                tick = self.values[later[0]].maker if later else len(self._ops) - 1
                op, value = self._ops[tick], self.values[number]
                value.maker, value.uses = tick, []
                op.inputs = tuple(read for read in op.inputs if read != number)
                op.mutated = tuple(pair for pair in op.mutated if pair[0] != number)
                op.outputs, op.replay = (*op.outputs, number), "opaque"

    def loaded(self, memory: torch.UntypedStorage) -> None:
        """Memory that no op has made is there from now on. It counts as made by the latest op, which is never run
        again: as an op of its own it would be one that no mode sees. Before the first op, it is external."""
        record, is_new = self.ledger.make(memory) if self._ops else (None, False)
        if record is not None and is_new:
            latest = self._ops[-1]
            latest.outputs += tuple(self._add(record, memory, len(self._ops) - 1).versions)
            latest.replay = "opaque"

    def nowhere(self) -> SeenStorage:
        """What stands for the storage of saved tensors that have none: nothing can be done with them."""
        if self._no_storage is None:
            self._no_storage = self._new(0, 0, EXTERNAL)
        return self._no_storage

    def new_version(self, storage: SeenStorage, maker: int) -> int:
        """The number of a value that lies in ``storage`` from now on."""
        self.values.append(ValueDraft(storage, maker))
        storage.versions.append(len(self.values) - 1)
        return len(self.values) - 1

    def is_external(self, storage: SeenStorage) -> bool:
        """Whether the step did not make it."""
        return self.values[storage.versions[0]].maker == EXTERNAL

    def _add(self, record: StorageRecord, found: torch.Tensor | torch.UntypedStorage, maker: int) -> SeenStorage:
        if found.device.type not in ("cpu", "cuda"):
            raise StepError(f"a tensor on {found.device} was used; this version plans steps on CPU and CUDA only")
        storage = self._records[record] = self._new(record.size_bytes, record.cdata, maker)
        return storage

    def _new(self, size_bytes: int, cdata: int, maker: int) -> SeenStorage:
        storage = SeenStorage(self._count, size_bytes, cdata)
        self._count += 1
        self.new_version(storage, maker)
        return storage

    # --- who has them --------------------------------------------------------------------------------------------

    def moment_begins(self) -> None:
        """The present moment begins: note which storages are alone, and collect garbage where much is alive."""
        self.see_who_is_alone()
        if self.ledger.made_bytes >= self._collects_at:
            self.collect_garbage()
            self._collects_at = max(COLLECTS_BYTES, 2 * self.ledger.made_bytes)

    def see_who_is_alone(self) -> None:
        """Note, as the present moment begins, which storages nobody has besides autograd."""
        if self._watched:
            for number, storage in list(self._watched.items()):
                if self._is_alone(storage):
                    storage.alone.append(self.moment)
                    del self._watched[number]

    def _is_alone(self, storage: SeenStorage) -> bool:
        return use_count(storage.cdata) <= storage.aliases + self._wrapper - 1

    def collect_garbage(self) -> None:
        """Let Python collect all garbage. Later steps may not: what dies here, or is alone from now on, is in the hands
        of garbage until the step ends. See rule 7."""
        self.see_who_is_alone()
        self._is_collecting = True
        try:
            gc.collect()
        finally:
            self._is_collecting = False
        for number, storage in list(self._watched.items()):
            if self._is_alone(storage):
                self._is_garbage(storage)
                del self._watched[number]

    def _is_garbage(self, storage: SeenStorage) -> None:
        if not self.is_external(storage):
            self._garbage_bytes += storage.size_bytes * (not storage.is_garbage)
            storage.is_garbage = True

    def garbage_bytes(self) -> int:
        """Bytes that the step, which is over, has made and left to the garbage collector, which runs for that."""
        gc.collect()
        return self._garbage_bytes + self._left_bytes - self.ledger.made_here_bytes

    def look_for_emptied(self) -> None:
        """Storages that live and have no memory any more."""
        for record, storage in self._records.items():
            if record.is_emptied:
                self.emptied[storage.number] = storage

    def spare_readers(self) -> None:
        """What reads storages that are emptied, or values that stay as they are, is never run again, nor what makes
        values that are counted twice."""
        self._find_makers()
        self.look_for_emptied()
        emptied = [self.values[value] for storage in self.emptied.values() for value in storage.versions]
        for draft in (*emptied, *(draft for draft in self.values if draft.stays)):
            for tick in draft.uses:
                if self._ops[tick].replay != "view":
                    self._ops[tick].replay = "opaque"
        for draft in self.values:
            if draft.is_counted_twice:
                self._ops[draft.maker].replay = "opaque"

    def watch(self, storage: SeenStorage) -> None:
        """Somebody has ``storage`` besides autograd, if it is here: see from when on nobody has."""
        if storage.aliases > 0 and not (storage.evicted or storage.is_garbage) and storage.versions:
            self._watched[storage.number] = storage

    def held(self, storage: SeenStorage, aliases: int) -> None:
        """A holding took (+1) or let go of (-1) its own tensor of ``storage``."""
        storage.aliases += aliases
        if aliases > 0:
            self.watch(storage)

    def shown(self, storage: SeenStorage, views: int) -> None:
        """Autograd took (+1) or dropped (-1) a saved tensor that shows ``storage``."""
        storage.views += views
        if storage.views == 0 and storage.evicted and storage.dies < 0 and self.ledger.open:
            self._note_death(storage)

    def evicted(self, storage: SeenStorage) -> None:
        """``storage`` leaves under the safe policy: its death is not the value's."""
        storage.evicted = True
        self.values[storage.versions[-1]].seen_version = -1  # what comes back is another tensor
        self._watched.pop(storage.number, None)

    def restored(self, storage: SeenStorage, memory: torch.UntypedStorage) -> None:
        """``storage`` is back, in new memory."""
        record, _ = self.ledger.make(memory)
        storage.cdata = record.cdata
        storage.evicted = False
        self._records[record] = storage

    def _died(self, record: StorageRecord) -> None:
        storage = self._records.pop(record, None)
        if storage is not None and not storage.evicted:
            self._note_death(storage)
            self._watched.pop(storage.number, None)

    def _note_death(self, storage: SeenStorage) -> None:
        if self._is_collecting:
            self._is_garbage(storage)
        if not storage.is_garbage:
            storage.dies = self.moment
