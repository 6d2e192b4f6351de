"""A page that shows a planned step: memory over time, the transfers under it, and what becomes of each value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.files import write_whole
from ebbtide.machine import Machine
from ebbtide.plan import Outcome, simulate
from ebbtide.report.pages import template
from ebbtide.report.summary import SavedValue, Summary, saved_values, short_name, summarise, tier_lines
from ebbtide.step import Absence, Step
from ebbtide.units import format_bytes, format_seconds

_MOST_VALUES = 10


def write_timeline(step: Step, machine: Machine, plan: Plan, path: str | Path) -> None:
    """Write the timeline of ``plan`` as one HTML page that needs no network.

    Args:
        step: the observed step.
        machine: what the plan was made for.
        plan: its decisions must be those of the absences of ``step``.
        path: where to write; an existing file is replaced.

    Raises:
        PlanError: if the plan does not fit the step or the machine.
        OSError: if the file cannot be written.
    """
    data = _script_json(timeline_data(step, machine, plan))  # first, as it checks that the plan fits
    summary = summarise(step, machine, plan)
    page = template("timeline.html.j2").render(
        data=data,
        summary=summary,
        tiles=_tiles(summary),
        tier_lines=tier_lines(summary),
        widest=max((row.total_bytes for row in summary.rows), default=0) or 1,
        biggest=_biggest(step, plan, machine.replay_seconds),
        title=_title(step),
        subtitle=f"{len(step.ops)} ops on {step.device}, planned for {machine.name}",
        method=plan.method,
    )
    write_whole(path, page.encode())


def timeline_data(step: Step, machine: Machine, plan: Plan) -> dict[str, Any]:
    """Everything the page draws, as plain JSON types. Times are in seconds from the start of the step.

    ``events`` holds the tick of each event, from which the page finds which moments are ops (see NOTE [The clock] in
    step.py). ``plain`` and ``planned`` have, by moment, the time at which it starts (and, last, the end of the step)
    and the bytes in memory. ``ops`` and ``modules`` are indices into ``words``.

    Raises:
        PlanError: if the plan does not fit the step or the machine.
    """
    plain = simulate(step, machine, tuple(Keep() for _ in step.absences))
    planned = simulate(step, machine, plan.decisions)
    words: dict[str, int] = {}
    return {
        "ops": [_word(words, short_name(op.name)) for op in step.ops],
        "modules": [_word(words, op.module) for op in step.ops],
        "words": list(words),
        "events": step.event_ticks(),
        "plain": _curve(plain),
        "planned": _curve(planned),
        "limit_bytes": plan.limit_bytes,
        "resting_bytes": plan.resting_bytes,
        "peak_moment": planned.peak_moment,
        "phases": _phases(step),
        "absent": _absent(step, plan.decisions, planned, machine.replay_seconds),
        "transfers": [
            {
                "absence": transfer.absence,
                "direction": transfer.direction,
                "issued": _microsecond(transfer.issued_seconds),
                "start": _microsecond(transfer.start_seconds),
                "end": _microsecond(transfer.end_seconds),
            }
            for transfer in planned.transfers
        ],
        "recomputes": [
            {
                "absence": run.absence,
                "start": _microsecond(run.start_seconds),
                "end": _microsecond(run.start_seconds + run.seconds),
            }
            for run in planned.recomputations
        ],
        "stalls": _stalls(planned),
    }


def _curve(outcome: Outcome) -> dict[str, list[Any]]:
    times = [_microsecond(time) for time in (*outcome.start_seconds, outcome.seconds)]
    return {"times": times, "bytes": list(outcome.memory)}


def _phases(step: Step) -> list[dict[str, Any]]:
    """Runs of ops of one phase, as ticks ``[first, end)``."""
    runs: list[dict[str, Any]] = []
    for tick, op in enumerate(step.ops):
        if not runs or runs[-1]["phase"] != op.phase:
            runs.append({"phase": op.phase, "first": tick, "end": tick})
        runs[-1]["end"] = tick + 1
    return runs


def _absent(
    step: Step, decisions: Sequence[Decision], planned: Outcome, replay_seconds: float
) -> dict[int, dict[str, Any]]:
    """What leaves memory, by index of absence, and from when until when its bytes are free."""
    back = {run.absence: run.start_seconds for run in planned.recomputations}
    back |= {copy.absence: copy.issued_seconds for copy in planned.transfers if copy.direction == "in"}
    times, op_moments = [*planned.start_seconds, planned.seconds], [*step.op_moments(), step.moments]
    described = {}
    for index, (absence, decision) in enumerate(zip(step.absences, decisions, strict=True)):
        if not isinstance(decision, Keep):
            value = step.values[absence.value]
            op = step.ops[value.maker]
            gone = op_moments[decision.release] if isinstance(decision, Offload) else absence.opens
            described[index] = {
                "value": absence.value,
                "op": short_name(op.name),
                "module": op.module,
                "bytes": value.size_bytes,
                "decision": decision_words(step, absence, decision, replay_seconds),
                "gone": _microsecond(times[gone]),
                "back": _microsecond(times[absence.closes] if step.is_final(absence) else back[index]),
            }
    return described


def _stalls(planned: Outcome) -> list[dict[str, Any]]:
    """Waits of compute, each of which ends with the copy that it is for."""
    ends = {(transfer.absence, transfer.direction): transfer.end_seconds for transfer in planned.transfers}
    bars = []
    for stall in planned.stalls:
        end = ends[stall.absence, "out" if stall.reason == "release" else "in"]
        start = end - stall.seconds
        bars.append(
            {"absence": stall.absence, "start": _microsecond(start), "end": _microsecond(end), "reason": stall.reason}
        )
    return bars


def decision_words(step: Step, absence: Absence, decision: Decision, replay_seconds: float) -> str:
    """A decision as one reads it; ``replay_seconds`` as in `Machine`."""
    match decision:
        case Keep():
            return "stays"
        case Offload(tier, out, release, load):
            back = "not asked for again" if step.is_final(absence) else f"back at {load}"
            return f"{tier}: out at op {out}, free at {release}, {back}"
        case Recompute(ops):
            names = ", ".join(short_name(step.ops[tick].name) for tick in ops)
            seconds = sum(step.ops[tick].duration_seconds + replay_seconds for tick in ops)
            return f"computed again by {names} in {format_seconds(seconds)}"


def _biggest(step: Step, plan: Plan, replay_seconds: float) -> list[tuple[SavedValue, str, str]]:
    """The saved values with the most bytes, each with its decision and, where it has one, the length of its absence."""
    rows = []
    for saved in saved_values(step, plan.decisions)[:_MOST_VALUES]:
        if saved.absence is None:
            rows.append((saved, "stays: something besides autograd holds it", "-"))
            continue
        absence = step.absences[saved.absence]
        ops = _tick(step, absence.closes) - _tick(step, absence.opens)
        words = decision_words(step, absence, plan.decisions[saved.absence], replay_seconds)
        rows.append((saved, words, f"{ops} ops"))
    return rows


def _tick(step: Step, moment: int) -> int:
    """Number of ops that ran before ``moment``."""
    events_before = sum(1 for start in step.event_moments() if start < moment)
    return moment - events_before


def _tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: label, figure, explanation."""
    total, resting, plain = summary.total, summary.resting_bytes, summary.plain_peak_bytes
    above = summary.predicted_peak_bytes - resting
    share = above / (plain - resting) if plain > resting else 1.0

    def ratio(seconds: float) -> str:
        return f"{seconds / summary.plain_seconds:.3f}\u00d7" if summary.plain_seconds else "-"

    bound = "" if summary.bound_seconds is None else f", bound {ratio(summary.bound_seconds)}"
    return [
        ("peak", format_bytes(summary.predicted_peak_bytes), f"limit {format_bytes(summary.limit_bytes)}"),
        ("peak without the plan", format_bytes(plain), f"of it resting: {format_bytes(resting)}"),
        ("above resting", format_bytes(above), f"{share:.0%} of plain"),
        ("step time", format_seconds(summary.predicted_seconds), f"{ratio(summary.predicted_seconds)} plain{bound}"),
        ("moved out and back", format_bytes(total.moved_bytes), f"{total.moved_count} of {total.total_count} values"),
        ("computed again", format_bytes(total.recomputed_bytes), f"{total.recomputed_count} values"),
    ]


def _title(step: Step) -> str:
    """The root of the first module that is known."""
    named = [op.module for op in step.ops if op.module]
    return named[0].split(".")[0] if named else "Step"


def _word(words: dict[str, int], word: str) -> int:
    return words.setdefault(word, len(words))


def _microsecond(seconds: float) -> float:
    """``seconds`` to the microsecond, which keeps the page small."""
    return round(seconds, 6)


def _script_json(data: dict[str, Any]) -> Markup:
    """``data`` as JSON that cannot end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
