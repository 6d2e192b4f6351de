"""What autograd is given in place of a saved tensor. It can always produce the tensor again.

NOTE [Holdings]
1. A `Holding` stands for one version of one storage, whatever number of saved tensors show it; each of those is a
   `View` of it. A saved tensor that no plan touches is a `Kept`.
2. They hold a *detached* tensor: the saved tensor itself may be the output of the node that saves it, and would keep
   that node alive for ever. A detached tensor shares the version counter, so a later in-place change is seen.
3. A holding lives exactly as long as autograd keeps one of its views, or a recipe needs it. Its slot dies with it, by
   which the tier knows that the place is free. There is no finalizer: see rule 3 in `tiers/queued.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.errors import StepError
from ebbtide.observe.ledger import is_dense
from ebbtide.observe.loads import note_memory
from ebbtide.observe.mode import is_seen, nodes_made, unseen
from ebbtide.observe.transforms import in_trace
from ebbtide.observe.wrapped import PLAIN_TYPES
from ebbtide.run.tiers.memory import bytes_of
from ebbtide.run.versions import Count, Version, changed_error, count_together, is_among, shell_of, version_of

if TYPE_CHECKING:
    from ebbtide.run.backends.base import ComputeStreams
    from ebbtide.run.recipes import Recipe
    from ebbtide.run.tiers.transfers import Load, Slot, SlowTier

_NOTHING_TO_DO: AbstractContextManager[None] = contextlib.nullcontext()


class Window:
    """How ``tensor`` shows its storage: data type, shape, strides and offset (elements)."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def is_shown_by(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which shows the same storage, shows the same part of it in the same way."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor that shows the same part of ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class Kept:
    """A saved tensor that stays where it is; made by `keep`."""

    __slots__ = ("number", "tensor", "version")
    number: int
    tensor: torch.Tensor
    version: int

    def show(self) -> torch.Tensor:
        """The saved tensor. Raises `RuntimeError` if it was changed in place, as PyTorch would."""
        if self.tensor._version != self.version:
            raise changed_error(self.tensor, self.tensor._version, self.version)
        return self.tensor


def keep(tensor: torch.Tensor, number: int) -> Kept:
    """Keep a saved tensor where it is. Most saves of most steps end here, and a constructor would be slower to enter.

    A parameter is kept as itself, as PyTorch does. FSDP, for one, swaps a parameter's ``data`` for a while, and the
    backward pass must see what it has by then.

    Args:
        tensor: any shape; it is not copied.
        number: the saved tensor's number in its step; -1 if nobody counts.
    """
    kept = Kept()
    is_itself = not tensor.requires_grad or type(tensor) is torch.nn.Parameter  # what has a node requires grad
    if not is_itself and tensor.is_leaf:
        is_itself = isinstance(tensor, torch.nn.Parameter)  # of a class of its own; to ask takes long
    kept.tensor = shown = tensor if is_itself else detached(tensor)
    kept.version = shown._version
    kept.number = number
    return kept


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` outside its graph. Modes of the user's see nothing of that, unless it has code of its own for ops:
    autograd itself saves, and shows what it has saved, by no op."""
    if not is_seen() or type(tensor) not in PLAIN_TYPES:
        return tensor.detach()
    with unseen():
        return tensor.detach()


class Holding:
    """One version of one storage, here, on its way, or away. See NOTE [Holdings].

    Attributes:
        tensor: shows the storage while it is here, else None.
        versions: what it was filled with, and whatever has had the same bytes: what came back, or was made again.
        size_bytes: bytes of the storage.
        recipe: what makes it again while it is dropped.
        recipes: for each time that it will be dropped.
        put_off: where it is to go, as soon as the op that has saved it is over.
        under_way: which op has saved it, see `_op_number`, and may fill it yet; None if none may.
        shell: of what was saved, once that is no longer held here, and ``saved``, its version then. Whoever else has it
            may write to it.
        streams: the compute streams that may use it; None where the host computes, or it stays.
    """

    __slots__ = (
        "__weakref__",
        "identity",
        "load",
        "put_off",
        "recipe",
        "recipes",
        "saved",
        "shell",
        "size_bytes",
        "slot",
        "streams",
        "tensor",
        "tier",
        "under_way",
        "version",
        "versions",
    )

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.version = 0
        self.identity = 0
        self.versions: list[Version] = []
        self.size_bytes = 0
        self.tier: SlowTier | None = None
        self.put_off: SlowTier | None = None
        self.under_way: tuple[int, int] | None = None
        self.slot: Slot | None = None
        self.load: Load | None = None
        self.recipe: Recipe | None = None
        self.recipes: tuple[Recipe, ...] = ()
        self.shell: torch.Tensor | None = None
        self.saved = 0
        self.streams: ComputeStreams | None = None

    def fill(self, tensor: torch.Tensor, *, is_saved: bool = False) -> None:
        """Hold the storage of ``tensor``; ``is_saved``: which is just being saved."""
        self.tensor, self.put_off = detached(tensor), None
        filled = not is_saved or tensor.requires_grad or tensor._version > 0 or not tensor.is_floating_point()
        self.under_way = None if filled else _op_number()
        self.shell = None
        self.version = tensor._version
        self.versions.append(version_of(tensor))
        storage = tensor.untyped_storage()
        self.identity = storage._cdata
        self.size_bytes = storage.nbytes()

    @property
    def intact(self) -> bool:
        """Whether what is here has not been written in place since it was saved."""
        return self.tensor is not None and self.tensor._version == self.version

    @property
    def empty(self) -> bool:
        """Whether there is nothing that the bytes could come from."""
        return self.tensor is None and self.recipe is None and self.slot is None

    def knows(self, version: Version) -> bool:
        """Whether this very version has been here."""
        return is_among(version, self.versions)

    def shows(self, identity: int, version: int) -> bool:
        """Whether this very version of the living storage ``identity`` is here."""
        return self.tensor is not None and self.identity == identity and self.version == version

    def other_count(self, tensor: torch.Tensor) -> Count | None:
        """What counts the versions of ``tensor``, which shows what is held, if writes to it are not seen from here."""
        known = self.tensor if self.tensor is not None else self.shell
        if known is None or count_together(known, tensor):
            return None
        return Count(shell_of(tensor), tensor._version)

    def send(self, tier: SlowTier) -> None:
        """Queue the copy out; nothing to do if it is away or was changed.

        It is put off where the op may be under way that saves it and is to fill it yet, of which no version will tell:
        `torch.nn.functional.rrelu` saves the slopes that it draws before it does.
        """
        if self.intact and self.slot is None:
            assert self.tensor is not None
            if self.under_way == _op_number():
                self.put_off = tier
                return
            self.tier, self.put_off = tier, None
            self.slot = tier.write(self.tensor.untyped_storage())
            self.slot.owner = weakref.ref(self)

    def release(self) -> None:
        """Wait until the copy out is done and let go of the bytes.

        A tensor that was changed in place stays, so that asking for it raises the error that PyTorch would raise. One
        whose copy out has to be put off stays, too.
        """
        if self.put_off is not None:
            self.send(self.put_off)
        if self.slot is not None and self.tensor is not None:
            self.slot.wait()
            if self.tensor._version == self.version:
                self._let_go()

    def drop(self, recipe: Recipe) -> None:
        """Let go of the bytes; ``recipe`` makes them again."""
        self.recipe = recipe
        self._let_go()

    def _let_go(self) -> None:
        if self.shell is None and self.tensor is not None:
            self.shell, self.saved = shell_of(self.tensor), self.version
        self.share()
        self.tensor = None

    def share(self) -> None:
        """Other compute streams than the one that its memory belongs to may be at work with it when that goes back."""
        if self.streams is not None and self.tensor is not None:
            self.streams.share(self.tensor.untyped_storage())

    def fetch(self) -> None:
        """Take memory and queue the copy back, if it is away."""
        if self.tensor is None and self.load is None and self.slot is not None:
            assert self.tier is not None
            self.load = self.tier.read(self.slot)
            note_memory(self.load.storage, self.tier)

    def arrive(self, like: View | None = None) -> torch.Tensor:
        """Make the storage present, whatever that takes, and return a tensor that shows it.

        Args:
            like: how it is to be shown if it is read back; None for as bytes.

        Raises:
            ChangedError, RecipeError: if it cannot be made again, as what that reads has been written to or taken away.
            SpillError: if it cannot be read back.
        """
        if self.tensor is not None:
            return self.tensor
        self.fetch()
        load, self.load = self.load, None
        if load is not None:
            storage = load.wait()
            assert self.slot is not None
            assert self.tier is not None
            self.tier.free(self.slot)
            self.slot = None
            with unseen() if is_seen() else _NOTHING_TO_DO:
                tensor = like.over(storage) if like is not None else bytes_of(storage)
            return self._adopt(tensor)
        if self.recipe is None:
            raise StepError("a saved tensor is asked for that was never filled; please report this with the program")
        tensor = self.recipe.replay()
        self.recipe = None
        return self._adopt(tensor)

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensor = tensor
        self.version = tensor._version
        self.identity = tensor.untyped_storage()._cdata
        self.versions.append(version_of(tensor))
        if self.streams is not None:  # whichever asks next finds it here, and waits for nothing
            self.streams.lead()
            self.share()
        return tensor


def _op_number() -> tuple[int, int]:
    """Another one once the op is over that saves something now: the nodes made so far, and the number of the backward
    pass that is under way, in which none may be made."""
    return nodes_made(), torch._C._current_graph_task_id()


def outside_inference_mode() -> AbstractContextManager[object]:
    """A context in which what is made is an ordinary tensor, in a backward pass under `torch.inference_mode`, too."""
    return _left_inference_mode() if torch.is_inference_mode_enabled() else _NOTHING_TO_DO


@contextlib.contextmanager
def _left_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class View(Window):
    """A saved tensor as a view of a holding; made by `view_of`."""

    __slots__ = ("attributes", "count", "holding", "number")
    attributes: dict[str, Any] | None
    count: Count | None
    holding: Holding
    number: int

    def show(self) -> torch.Tensor:
        """The saved tensor.

        Raises:
            ChangedError: if it was changed in place, as PyTorch would; and what `Holding.arrive` raises.
        """
        tensor = self._shown()
        if not self.attributes:
            return tensor
        # One of its own: others that were saved show the holding's, too, and have other attributes, or none.
        return self.with_attributes(detached(tensor) if tensor is self.holding.tensor else tensor)

    def with_attributes(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which stands for the saved one, with the attributes that somebody has set on that."""
        if self.attributes:
            vars(tensor).update(self.attributes)
        return tensor

    def _shown(self) -> torch.Tensor:
        holding = self.holding
        tensor, shell, count = holding.tensor, holding.shell, self.count
        if count is not None and count.shell._version != count.version:
            raise changed_error(self, count.shell._version, count.version)
        if shell is not None and shell._version != holding.saved:
            raise changed_error(self, shell._version, holding.saved)
        if tensor is None:
            tensor = holding.arrive(self)
        elif tensor._version != holding.version:
            raise changed_error(tensor, tensor._version, holding.version)
        if self.is_shown_by(tensor):
            return tensor
        with unseen() if is_seen() else _NOTHING_TO_DO:
            if tensor.dtype is self.dtype:
                # A view of it counts its versions with it; a new tensor over its storage would count its own.
                return tensor.as_strided(self.shape, self.stride, self.offset)
            shown = self.over(tensor.untyped_storage())
        if not holding.knows(version_of(shown)):
            holding.versions.append(version_of(shown))
        return shown


def view_of(holding: Holding, tensor: torch.Tensor, number: int, count: Count | None = None) -> View:
    """Saved tensor ``number``, which shows what ``holding`` holds and counts its versions by itself if ``count``."""
    view = View(tensor)
    view.attributes = attributes_of(tensor)
    view.count = count
    view.holding = holding
    view.number = number
    return view


def attributes_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """What was set on a tensor that wants no gradient, and may be yet: a custom Function that has saved it gets it
    itself. One that wants one it gets as another tensor, whatever hooks there are."""
    return vars(tensor) if type(tensor) is torch.Tensor and not tensor.requires_grad else None


def is_plain(tensor: Any) -> bool:
    """Whether a saved tensor is one that can be moved: dense, unwrapped, not lazily conjugated, of no subclass, no
    parameter (see `keep`), and none that a trace has to know."""
    return type(tensor) is torch.Tensor and is_dense(tensor) and not in_trace()
