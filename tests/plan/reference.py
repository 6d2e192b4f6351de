"""The rules of a planned step, carried out one moment at a time as plainly as possible: the oracle for `simulate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ebbtide.decisions import Decision, Offload, Recompute
from ebbtide.machine import Machine
from ebbtide.step import EXTERNAL, Step


@dataclasses.dataclass
class Measured:
    """What the oracle found."""

    memory: list[int]
    physical: list[int]
    starts: list[float]
    seconds: float


class Walk:
    """A step under a plan: which storages are there, what else is held, what time it is."""

    def __init__(self, step: Step, machine: Machine, decisions: Sequence[Decision]) -> None:
        self.step, self.machine, self.decisions = step, machine, decisions
        self.there: dict[int, int] = {v.storage: v.size_bytes for v in step.values if v.maker == EXTERNAL}
        self.resting = set(self.there)
        self.extra: list[int] = []
        self.now = 0.0
        self.free: dict[tuple[str, str], float] = {}
        self.written: dict[int, float] = {}
        self.loaded: dict[int, float] = {}
        self.moment = 0
        self.high = self.physical_high = 0

    def run(self) -> Measured:
        step = self.step
        op_at = {moment: tick for tick, moment in enumerate(step.op_moments())}
        event_at = {moment: index for index, moment in enumerate(step.event_moments())}
        found = Measured([], [], [], 0.0)
        for self.moment in range(step.moments):
            found.starts.append(self.now)
            self.depart()
            self.high = self.physical_high = self.held()
            if self.moment in op_at:
                self.run_op(op_at[self.moment])
            else:
                self.run_event(event_at[self.moment])
            found.memory.append(self.high)
            found.physical.append(self.physical_high)
        found.seconds = self.now
        return found

    def held(self) -> int:
        return sum(self.there.values()) + sum(self.extra)

    def look(self, workspace: int = 0) -> None:
        self.high = max(self.high, self.held())
        self.physical_high = max(self.physical_high, self.held() + workspace)

    def depart(self) -> None:
        for value in self.step.values:
            if value.dies == self.moment and value.storage not in self.resting:
                self.there.pop(value.storage, None)
        for number, decision in enumerate(self.decisions):
            absence = self.step.absences[number]
            if isinstance(decision, Recompute) and absence.opens == self.moment:
                self.there.pop(self.step.values[absence.value].storage)

    def run_op(self, tick: int) -> None:
        op = self.step.ops[tick]
        for number in op.outputs:
            value = self.step.values[number]
            if value.storage not in self.there:
                self.there[value.storage] = value.size_bytes
        self.look(op.workspace_bytes)
        self.now += op.duration_seconds

    def run_event(self, index: int) -> None:
        tick = self.step.events[index].tick
        for number, absence in enumerate(self.step.absences):
            if absence.closes == self.moment and not self.step.is_final(absence):
                self.present(absence.value, number)
        if index + 1 < len(self.step.events) and self.step.events[index + 1].tick == tick:
            return
        offloads = [(n, d) for n, d in enumerate(self.decisions) if isinstance(d, Offload)]
        for number, decision in offloads:
            if decision.release == tick:
                self.now = max(self.now, self.written[number])
                del self.there[self.storage(number)]
        for number, decision in offloads:
            if decision.out == tick:
                self.written[number] = self.send(number, self.machine.fast, decision.tier, 0.0)
        for number, decision in sorted(offloads, key=lambda pair: (self.step.absences[pair[0]].closes, pair[0])):
            late = self.moment >= self.step.absences[number].closes
            late = late or self.step.is_final(self.step.absences[number])
            if decision.load == tick and not late and self.storage(number) not in self.there:
                self.load(number, decision)

    def storage(self, number: int) -> int:
        return self.step.values[self.step.absences[number].value].storage

    def load(self, number: int, decision: Offload) -> None:
        self.there[self.storage(number)] = self.step.values[self.step.absences[number].value].size_bytes
        self.look()
        self.loaded[number] = self.send(number, decision.tier, self.machine.fast, self.written[number])

    def send(self, number: int, source: str, target: str, earliest: float) -> float:
        link = self.machine.link(source, target)
        seconds = link.seconds(self.step.values[self.step.absences[number].value].size_bytes)
        end = max(self.now, earliest, self.free.get((source, target), 0.0)) + seconds
        self.free[source, target] = end
        self.now += link.compute_seconds + link.compute_slowdown * seconds
        return end

    def present(self, value: int, number: int) -> None:
        """Materialise a value whose absence is ``number``."""
        decision = self.decisions[number]
        storage = self.step.values[value].storage
        if isinstance(decision, Offload):
            if storage not in self.there:
                self.load(number, decision)
            self.now = max(self.now, self.loaded.get(number, 0.0))
        elif isinstance(decision, Recompute) and storage not in self.there:
            self.recompute(value, decision)

    def absence_now(self, storage: int) -> int | None:
        for number, absence in enumerate(self.step.absences):
            away = absence.opens <= self.moment < absence.closes
            if self.storage(number) == storage and away and number is not None:
                return number
        return None

    def recompute(self, target: int, decision: Recompute) -> None:
        made_later: set[int] = set()
        for tick in decision.ops:
            for leaf in self.reads(tick):
                if leaf not in made_later:
                    number = self.absence_now(self.step.values[leaf].storage)
                    if number is not None:
                        self.present(leaf, number)
            made_later |= set(self.step.ops[tick].outputs)
        fresh: dict[int, int] = {}
        for place, tick in enumerate(decision.ops):
            op = self.step.ops[tick]
            rewritten = {new: old for old, new in op.mutated}
            for output in op.outputs:
                if output not in rewritten:
                    fresh[output] = self.step.values[output].size_bytes
                elif op.replay != "batch_norm":
                    fresh.pop(rewritten[output], None)
                    fresh[output] = self.step.values[output].size_bytes
            self.extra.append(sum(fresh.values()))
            self.look(op.workspace_bytes)
            self.extra.pop()
            self.now += op.duration_seconds + self.machine.replay_seconds
            later = {value for after in decision.ops[place + 1 :] for value in self.reads(after)}
            fresh = {value: size for value, size in fresh.items() if value in later or value == target}
        assert list(fresh) == [target]
        self.there[self.step.values[target].storage] = fresh[target]

    def reads(self, tick: int) -> list[int]:
        op = self.step.ops[tick]
        olds = [old for old, _ in op.mutated]
        if op.replay == "batch_norm":
            return [value for value in op.inputs if value not in olds]
        return [*op.inputs, *(old for old in olds if old not in op.inputs)]
