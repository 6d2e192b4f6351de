"""`Budget`: the one object that users see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ebbtide.arguments import as_budget, as_size, as_switch, check_instance, spill_directory
from ebbtide.decisions import Plan
from ebbtide.errors import EbbtideError, StepError
from ebbtide.machine import Machine, check_machine
from ebbtide.measured import Measured, StepState
from ebbtide.run.loop import Loop
from ebbtide.run.running import Running
from ebbtide.run.tiers import SlowTier
from ebbtide.run.tiers.choose import tiers_for
from ebbtide.step import Step

if TYPE_CHECKING:
    from ebbtide.report.summary import Summary


class _NotCopiedError(EbbtideError, TypeError):
    """A budget was to be copied or pickled: a `TypeError`, as of Python's own objects that cannot be."""


class Budget:
    """Runs training steps within a number of bytes, with gradients bit for bit those of plain PyTorch.

    * Steps 1 and 2 are observed, and up to eight more until one has a backward pass, then a plan is made. Meanwhile a
      simple policy keeps to the limit: it moves saved tensors out as live bytes come near. Step 1 may pass the limit by
      what ops take between two saved tensors, which is not known yet. With a percentage, the limit itself is not known
      yet, and nothing moves.
    * The next step compares the values that it computes again with the true ones, if the plan computes any again.
    * The one after that is counted: whether it keeps to the limit.
    * From then on steps run as planned.

    Args:
        limit: the most bytes at any moment of a step: an int, a size like ``"6GiB"``, or ``"50%"`` of the plain peak.
            That is the larger one of the steps that are observed first; those before the first training step, which
            have no backward pass and save nothing, do not count. What counts against the limit:

            * On a CPU, all tensors alive that the step touches or makes, parameters and gradients included.
            * On CUDA, all that PyTorch's allocator has handed out on the step's device: optimizer state and workspaces,
              too.
        spill: directory on a disk for tensors that leave; the system's directory for temporary files by default.
        verify: compare every value that is computed again with the truth, once. The step that does keeps to the limit,
            but for a part of 256 KiB of what it compares.
        tune_allocator: on a CPU, take large tensors from an arena while this budget lives or, without a C++ compiler,
            let glibc's allocator keep its pages. See `ebbtide.run.allocator`.
        machine: the links to plan for, between the device and slow memories in `tiers`; measured on first use by
            default.
        host: the most pinned host memory for tensors that leave CUDA devices, an int or a size like ``"6GiB"``; by
            default half of what is available, shared with the other processes of `torchrun` on this machine, or among
            its GPUs.
        checksum: check the bytes that come back from the disk.
        hard: on CUDA, cap PyTorch's allocator at the limit, whoever asks for memory, until `close`; not in the step
            that verifies. The cap counts reserved segments, so leave room for fragmentation.

    Raises:
        ArgumentError: if ``limit`` is neither a size nor a percentage, ``host`` is not a size, ``spill`` or ``machine``
            has another type, or a switch is neither True nor False. It is a `ValueError`.
        SpillError: if ``spill`` cannot be used, or there is none and no directory for temporary files can be written.
        RecordError: if ``machine`` cannot exist.
    """

    def __init__(
        self,
        limit: int | str,
        *,
        spill: str | Path | None = None,
        verify: bool = True,
        tune_allocator: bool = True,
        machine: Machine | None = None,
        host: int | str | None = None,
        checksum: bool = False,
        hard: bool = False,
    ) -> None:
        if machine is not None:
            check_instance("machine", machine, Machine)
            check_machine(machine)
        amount = as_budget("limit", limit)
        limit_bytes, fraction = (amount, None) if isinstance(amount, int) else (None, amount)
        # Absolute: it is looked at again when the disk is measured, and the process may be elsewhere by then.
        directory = spill_directory(spill).absolute()
        host_bytes = as_size("host", host) if host is not None else None
        verify, hard = as_switch("verify", verify), as_switch("hard", hard)
        tune_allocator = as_switch("tune_allocator", tune_allocator)
        tiers = tiers_for(directory, checksum=as_switch("checksum", checksum), host_bytes=host_bytes)
        self._loop = Loop(
            limit_bytes, fraction, tiers, directory, machine, verify=verify, tune_allocator=tune_allocator, hard=hard
        )

    # --- what users read -----------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes; None while it is a percentage of a peak that was not observed yet."""
        return self._loop.limit_bytes

    @property
    def machine(self) -> Machine:
        """The machine that plans are made for; measured on first use."""
        return self._loop.machine

    @property
    def tiers(self) -> dict[str, SlowTier]:
        """The slow memories by name."""
        return self._loop.tiers

    @property
    def measured(self) -> list[Measured]:
        """What was measured in each of the latest 10,000 steps."""
        return list(self._loop.measured)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest kind of step; None before the first step, and while the kind is observed."""
        kind = self._loop.kinds.current
        return kind.plan if kind is not None else None

    @property
    def observed(self) -> Step | None:
        """The latest kind of step, as observed; None before the first step has ended."""
        kind = self._loop.kinds.current
        return kind.step if kind is not None else None

    @property
    def plain_peak_bytes(self) -> int | None:
        """The peak of the latest kind of step without a plan, in bytes; None while it has no plan."""
        return self.plan.plain_peak_bytes if self.plan is not None else None

    @property
    def state(self) -> StepState:
        """What the next step is for: ``observe``, ``verify``, ``audit``, ``rehearse``, and from then on ``planned``, or
        ``idle`` if nothing binds."""
        return self._loop.state

    @property
    def settled(self) -> bool:
        """Whether the next step runs as all later ones will, unless the loop or the machine changes.

        That is so some steps after the first planned one: plans are made from observed durations, which have the
        observer in them, and made again from those of planned steps if that pays.
        """
        return self._loop.settled

    def report(self) -> Summary:
        """What was planned and measured, to print.

        Raises:
            StepError: if steps like the latest have no plan yet.
        """
        # The report is a floor above; this is the only call upwards, for the user's convenience.
        from ebbtide.report.summary import summarise

        if self._loop.ground is not None:
            self._loop.ground.readings.collect(wait=True)
        kind = self._loop.kinds.current
        if kind is None or kind.plan is None:
            raise StepError(
                "nothing to report yet: the latest step has no plan; run two steps under `with budget.step():`, "
                "the second of which makes one unless it raises"
            )
        alike = (m for m in self.measured if (m.state, m.kind) == (kind.state, kind.key) and not m.left)
        planned = sorted(m.seconds for m in alike if m.seconds)
        seconds = planned[len(planned) // 2] if planned else None
        measured = Measured(kind.state, seconds, kind.usage.audited_peak_bytes)
        return summarise(kind.step, self.machine, kind.bounded_plan(self.machine), measured)

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> Running:
        """A context in which one training step, forward and backward, runs within the budget.

        Raises:
            StepError: on entry, if another step of this budget is under way, the budget was closed, a step has begun
                in this context before, a `torch.func` transform is under way, or ``hard=True`` has no device to cap; on
                exit, in another thread than it was entered in.
            BudgetError: on exit of an observed step, if no plan can meet the limit; of one that verifies, if none does
                without what was found to differ; of the one that is counted, if that held more than any plan allows.
            PlanError: of an observed step, if the machine that was given has slow memories that this has not.
            SpillError: inside, if tensors cannot be moved.
            OutOfMemoryError: on exit, if memory ran out inside.
        """
        return Running(self._loop)

    def close(self) -> None:
        """Wait for transfers, and give back files, threads and the allocator's settings. Saved tensors that are away
        are lost. Closing twice does nothing."""
        self._loop.close()

    def __reduce__(self) -> NoReturn:
        # A copy would share the loop, or be without the threads and files of it. copy, deepcopy and pickle ask here.
        raise _NotCopiedError(
            "a Budget belongs to its process and its training loop, and can be neither copied nor pickled: "
            "make another one where it is needed, with ebbtide.Budget(...)"
        )

    def __enter__(self) -> Budget:
        """The budget itself, which the ``with`` block closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the budget: see `close`."""
        self.close()
