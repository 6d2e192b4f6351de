"""All cases of a run, one after the other, within a time limit; what goes wrong in one of them is written down."""

from __future__ import annotations

import collections
import dataclasses
import gc
import time
import traceback
from collections.abc import Sequence

from rich.console import Console

from benchmarks.gpu.cases import Bench, Facts, measure_budget, measure_peer
from benchmarks.gpu.devices import Device, measure_bandwidths
from benchmarks.gpu.methods import COMPILE_BUDGET, Options, UnavailableError
from benchmarks.gpu.records import Journal, Record
from benchmarks.gpu.workloads import make_workload
from ebbtide.demo.workloads import Workload
from ebbtide.run.budget import Budget
from ebbtide.units import format_seconds

REASON_CHARACTERS = 3000
"""How much of an error's trace is written down, from its end."""
BANDWIDTH_REPEATS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for.

    Attributes:
        models, methods: names.
        fractions: of the plain bytes above rest that budgets leave.
        repeats: timed steps of a case.
        batch_scale: factor for the batch of each model.
        small: models for a CPU.
        copy_bytes: size of the copies by which bandwidths are measured.
    """

    models: tuple[str, ...]
    fractions: tuple[float, ...]
    methods: tuple[str, ...]
    repeats: int
    batch_scale: float
    small: bool
    copy_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A method, and its fraction if it has one."""

    method: str
    fraction: float | None

    def __str__(self) -> str:
        return self.method if self.fraction is None else f"{self.method} {self.fraction:.0%}"


class Runner:
    """Runs all cases. Each model has an equal share of the time that is left when its turn comes.

    Args:
        settings: what to run.
        options: for budgets; links that are not given are measured by the first of them.
        device: where to run it.
        journal: gets the records.
        console: is told what goes on.
        end: the time of `time.perf_counter` after which no case is begun, nor one that is likely to last longer.
    """

    def __init__(
        self, settings: Settings, options: Options, device: Device, journal: Journal, console: Console, end: float
    ) -> None:
        self._settings = settings
        self._options = options
        self._device = device
        self._journal = journal
        self._console = console
        self._end = end
        self._longest: collections.defaultdict[str, float] = collections.defaultdict(float)

    def run(self) -> None:
        """Bandwidths, then every model."""
        try:
            found = measure_bandwidths(self._device, self._settings.copy_bytes, BANDWIDTH_REPEATS)
            self._journal.note(bandwidths=dataclasses.asdict(found))
        except Exception as error:
            self._journal.note(bandwidths={"error": _told(error)})
        self._device.give_back()
        models = self._settings.models
        for index, model in enumerate(models):
            now = time.perf_counter()
            self._run_model(model, now + (self._end - now) / (len(models) - index))

    def _run_model(self, model: str, until: float) -> None:
        bench: Bench | None = None
        fault = ""
        if time.perf_counter() < until:
            try:
                bench = Bench(self._workload(model), self._device)
            except Exception as error:
                fault = f"no plain step: {_told(error)}"
        for case in cases_of(self._settings):
            if fault:
                self._add(Record(model, case.method, case.fraction, "error", fault))
            elif bench is None or self._is_late(case, until):
                self._add(Record(model, case.method, case.fraction, "skipped", "the time limit was reached"))
            else:
                self._add(self._run_case(model, bench, case, until))
        del bench
        self._clean()

    def _workload(self, model: str) -> Workload:
        settings = self._settings
        return make_workload(model, self._device.torch_device, small=settings.small, batch_scale=settings.batch_scale)

    def _is_late(self, case: Case, until: float) -> bool:
        now = time.perf_counter()
        return now >= until or now + self._longest[case.method] > self._end

    def _run_case(self, model: str, bench: Bench, case: Case, until: float) -> Record:
        began = time.perf_counter()
        named = (model, case.method, case.fraction)
        try:
            record = Record(*named, "measured", **self._measure(bench, case, until))
        except UnavailableError as error:
            record = Record(*named, "skipped", str(error))
        except Exception as error:
            record = Record(*named, "error", _told(error))
        self._clean()
        seconds = time.perf_counter() - began
        self._longest[case.method] = max(self._longest[case.method], seconds)
        return dataclasses.replace(record, case_seconds=seconds)

    def _measure(self, bench: Bench, case: Case, until: float) -> Facts:
        repeats = self._settings.repeats
        if case.method == "ebbtide":
            assert case.fraction is not None
            return measure_budget(bench, case.fraction, self._options, repeats, until, self._learn_links)
        return measure_peer(bench, case.method, repeats, until)

    def _learn_links(self, memory: Budget) -> None:
        """The links that the first budget measured serve all others."""
        self._options = dataclasses.replace(self._options, machine=memory.machine)
        self._journal.note(links=[dataclasses.asdict(link) for link in memory.machine.links])

    def _clean(self) -> None:
        """Nothing of a case is left for the next one, even if it failed."""
        gc.collect()
        try:
            self._device.give_back()
        except RuntimeError as error:  # after a fault of its own a device does nothing any more: each case says so
            self._journal.note(device_fault=_told(error))

    def _add(self, record: Record) -> None:
        self._journal.add(record)
        case = Case(record.method, record.fraction)
        outcome = (
            f"{record.status}: {record.reason.splitlines()[0]}" if record.reason else f"{record.ratio:.3f} x plain"
        )
        took = "" if record.case_seconds is None else f", {format_seconds(record.case_seconds)}"
        self._console.print(f"{record.model}, {case}: {outcome}{took}", highlight=False, markup=False)


def cases_of(settings: Settings) -> list[Case]:
    """The cases of each model, in order."""
    fractions: dict[str, Sequence[float | None]] = {"ebbtide": settings.fractions, "compile-budget": (COMPILE_BUDGET,)}
    return [Case(method, share) for method in settings.methods for share in fractions.get(method, (None,))]


def _told(error: Exception) -> str:
    """What an error says, and the end of its trace."""
    kind = type(error).__name__
    trace = "".join(traceback.format_exception(error))
    return f"{kind}: {error}\n{trace[-REASON_CHARACTERS:]}"
