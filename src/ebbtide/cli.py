"""The ``ebbtide`` command: demo, calibrate, observe, plan, report, frontier, batch.

Each subcommand is thin: it reads files, calls the package, writes files, prints, and imports what only it needs.
Helps are not docstrings, of which ``python -OO`` leaves nothing.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TimeElapsedColumn

from ebbtide import __version__
from ebbtide.bundle import Bundle
from ebbtide.consoles import console_beside, errors_console, progress_bar, say
from ebbtide.errors import EbbtideError, RecordError
from ebbtide.files import write_whole
from ebbtide.machines import load_machine, machine_names
from ebbtide.named_steps import observe_named, observe_named_fake, observe_named_fake_batch
from ebbtide.options import (
    DEVICE_SHARE,
    STEP_HELP,
    WHAT_FORM,
    WHAT_HELP,
    Batch,
    MachineName,
    PlanFile,
    Spill,
    check_apart,
    limit_bytes_of,
    machine_file_of,
    machine_of,
    pair_of,
    script_of,
    share_of,
    spill_or_default,
    step_and_machine,
    with_whole_lines,
    writable,
)
from ebbtide.units import format_bytes, format_seconds

_POLICIES = "offload-all, autoswap-swdoa, superneurons-cache, capuchin, rotor, pofo"
"""Policies that a frontier shows, if the user names no others: one of each sort. Spaces let the help break the line."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback(help="Train PyTorch models within a memory budget, with the same gradients bit for bit.")
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    """What may stand before a command."""


@app.command(
    help="""Train three models on real data, plain and within 50 % and 25 % of the memory, and compare.

    VGG-19 and ResNet-50 learn crops of two photographs, a byte-level GPT learns the Python standard library's sources.
    Takes some minutes. Ends with code 1 if a peak is above its budget or a number differs from plain PyTorch's.
    """
)
def demo(
    models: Annotated[str, typer.Option(help="Comma-separated models out of vgg19, resnet50, gpt2.")] = "",
    steps: Annotated[int, typer.Option(min=8, help="Training steps of each case.")] = 10,
    spill: Spill = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", callback=writable, help="Also write the rows as JSON."),
    ] = None,
) -> None:
    from ebbtide.demo.run import demo_notes, demo_table, faults, run_demo

    names = [name.strip() for name in models.split(",") if name.strip()]
    if models and not names:
        raise typer.BadParameter("it names no model", param_hint="--models")
    rows = run_demo(errors_console(), models=names, steps=steps, spill=str(spill_or_default(spill)))
    if json_path is not None:
        write_whole(json_path, (json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n").encode())
    output = console_beside(json_path)
    output.print(demo_table(rows))
    for note in demo_notes(rows):
        output.print(note, highlight=False, markup=False, style="dim")
    if found := faults(rows):
        raise EbbtideError("; ".join(found))


@app.command(
    help="""Measure how fast tensors move to the spill directory and back.

    The answer is remembered for this machine and directory, and used by every budget from then on.

    With steps it also fits how fast ops run here, so that other models need not run to be planned for:
    `ebbtide calibrate train.py -o here.json`, then `ebbtide plan --machine here.json --model larger.py`.
    """
)
def calibrate(
    steps: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=WHAT_FORM,
            help=f"Steps to time, so that the machine says how fast ops run here. {WHAT_HELP}",
            show_default=False,
        ),
    ] = None,
    spill: Spill = None,
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", callback=writable, help="Also write the machine as JSON.")
    ] = None,
) -> None:
    from ebbtide.report.sentences import compute_lines, links_table
    from ebbtide.run.calibrate import calibrate as measure
    from ebbtide.run.tiers.disk import check_directory
    from ebbtide.timed_steps import fit_here, with_compute

    check_apart([output], *map(script_of, steps or ()))
    if steps and output is None:
        raise typer.BadParameter("steps go with -o FILE, where the machine is written to that says how fast they ran")
    directory = spill_or_default(spill)
    check_directory(directory)  # before steps are timed, which takes longer
    with progress_bar() as progress:
        task = progress.add_task("calibrating", total=1.0)

        def show(done: float, what: str) -> None:
            progress.update(task, completed=done, description=what)

        fitted = fit_here(steps, show) if steps else None  # first, as it may find that there is no such step
        machine = measure(directory, progress=show)
    if fitted is not None:
        machine = with_compute(machine, fitted.compute)
    if output is not None:
        machine.save(output)
    console_beside(output).print(links_table(machine))
    if fitted is not None:
        say(*compute_lines(fitted.compute, fitted.seconds), beside=[output])


@app.command(
    help="""Record one training step: its ops, the tensors it makes and when they are needed.

    For example `ebbtide observe resnet50 --batch 16 -o step.json.gz`, or `ebbtide observe train.py:one_step -o
    step.json`, where one_step() runs one forward and backward pass. It is called twice.

    With --fake the model may be larger than any memory at hand, and durations are estimates:
    `ebbtide observe gpt.py --fake --machine h200 -o step.json.gz`. The file is then imported under fake tensors too.
    """
)
def observe(
    what: Annotated[str, typer.Argument(metavar=WHAT_FORM, help=WHAT_HELP)],
    output: Annotated[
        Path,
        typer.Option("-o", metavar="FILE", callback=writable, help="Where to write the step; .gz compresses it."),
    ],
    batch: Batch = None,
    fake: Annotated[
        bool, typer.Option("--fake", help="Without its memory and without computing, for the machine of --machine.")
    ] = False,
    machine_name: MachineName = None,
) -> None:
    from ebbtide.step_checks import check_trains

    check_apart([output], script_of(what), machine_file_of(machine_name))
    if fake != (machine_name is not None):
        raise typer.BadParameter("--fake and --machine go together: the machine says how long ops take")
    with errors_console().status("observing"):
        if machine_name is not None:
            step = observe_named_fake(what, batch, load_machine(machine_name))
        else:
            step = observe_named(what, batch)
    step.save(output)
    moved = sum(step.values[absence.value].size_bytes for absence in step.absences)
    say(
        f"{len(step.ops)} ops, {len(step.values)} values, {len(step.absences)} absences of {format_bytes(moved)}; "
        f"{format_seconds(step.plain_seconds)}; written to {output}",
        beside=[output],
    )
    try:
        check_trains(step, what)
    except RecordError as fault:
        print(f"ebbtide: warning: {fault}; if the function returned one that does, name that", file=sys.stderr)


@app.command(
    help="""Decide what each saved tensor of a step does: stay, move out and come back, or be computed again.

    The file holds the step and the machine too, so that `ebbtide report` needs nothing else.

    Without the hardware: `ebbtide plan --machine h200 --model examples/gpt2_xl.py` says whether the model fits that
    machine, plain or planned, and how fast it would be.
    """
)
def plan(
    step_path: Annotated[Path | None, typer.Argument(metavar="STEP|PLAN", help=STEP_HELP, show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(metavar=WHAT_FORM, help=f"Instead of a step: {WHAT_HELP} Observed as with --fake.")
    ] = None,
    machine_name: MachineName = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help='Most bytes to hold: "6GiB", "750MB", or "50%" of the plain peak. '
            f"Default: {DEVICE_SHARE:.0%} of the machine's device memory, where it is known."
        ),
    ] = None,
    output: PlanFile = None,
    batch: Batch = None,
    spill: Spill = None,
) -> None:
    from ebbtide.plan import solve
    from ebbtide.report.sentences import foreign_times, verdict
    from ebbtide.report.summary import summarise
    from ebbtide.step_checks import check_trains

    check_apart([output], step_path, script_of(model), machine_file_of(machine_name))
    if (step_path is None) == (model is None):
        raise typer.BadParameter("name a step file or a --model, one of the two")
    if model is not None and machine_name is None:
        raise typer.BadParameter("--model needs --machine, which says how long ops take")
    if model is None and batch is not None:
        raise typer.BadParameter("--batch goes with --model: the step of a file has its batch already")
    with errors_console().status("planning"):
        if step_path is not None:
            step, machine = step_and_machine(step_path, machine_name, spill)
        else:
            assert model is not None
            machine = machine_of(machine_name, spill)
            step = observe_named_fake(model, batch, machine)
        check_trains(step, str(model or step_path))
        made = solve(step, machine, limit_bytes_of(budget, step, machine))
    if output is not None:
        Bundle(step, machine, made).save(output)
    if machine.compute is not None:
        say(*verdict(machine, made), *foreign_times(step, machine), "", beside=[output])
    console_beside(output).print(summarise(step, machine, made))
    if output is not None:
        say(f"written to {output}", beside=[output])


@app.command(
    help="""Find the largest batch that a machine can train within a budget and a share of extra time, without the
    machine.

    The step is observed as with `ebbtide observe --fake` at two sizes of the batch; others are told from these. The
    answer is observed too, and taken back if it does not hold: `ebbtide batch train.py --machine h100 --overhead 5%`,
    where one_step(batch_size) in train.py runs one forward and backward pass.
    """
)
def batch(
    what: Annotated[
        str, typer.Argument(metavar=WHAT_FORM, help=f"{WHAT_HELP} It is called with the size of the batch.")
    ],
    machine_name: Annotated[
        str, typer.Option("--machine", metavar="NAME|FILE", help=f"One of {', '.join(machine_names())}, or a file.")
    ],
    overhead: Annotated[str, typer.Option(help="Most time beyond a plain step's with the same batch.")] = "5%",
    budget: Annotated[
        str | None,
        typer.Option(help=f'Most bytes to hold: "60GiB". Default: {DEVICE_SHARE:.0%} of the device memory.'),
    ] = None,
    between: Annotated[str, typer.Option(metavar="N,M", help="Two sizes of the batch to observe first.")] = "8,16",
    output: PlanFile = None,
) -> None:
    from ebbtide.plan.batch import largest_batch
    from ebbtide.report.sentences import batch_lines

    check_apart([output], script_of(what), machine_file_of(machine_name))
    machine = load_machine(machine_name)
    limit_bytes = limit_bytes_of(budget, None, machine)
    with errors_console().status("observing") as status:
        found = largest_batch(
            lambda size: observe_named_fake_batch(what, size, machine),
            machine,
            limit_bytes,
            overhead=share_of(overhead, "--overhead"),
            between=pair_of(between, "--between"),
            progress=status.update,
        )
    if output is not None:
        Bundle(found.step, machine, found.plan).save(output)
    say(*batch_lines(machine, found), beside=[output])
    if output is not None:
        say(f"written to {output}", beside=[output])


@app.command(
    help="""Draw memory over the step with and without the plan, and the transfers under it, as one HTML page."""
)
def report(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan from `ebbtide plan`.")],
    output: Annotated[
        Path, typer.Option("-o", metavar="FILE", callback=writable, help="Where to write the page: .html.")
    ],
) -> None:
    from ebbtide.report.timeline import write_timeline

    check_apart([output], plan_path)
    if output.suffix not in (".html", ".htm"):
        raise typer.BadParameter(f"{output}: its name must end in .html", param_hint="-o")
    bundle = Bundle.load(plan_path)
    with errors_console().status("drawing"):
        write_timeline(bundle.step, bundle.machine, bundle.plan, output)
    say(f"written to {output}", beside=[output])


@app.command(
    help="""Draw what memory costs in time: overhead for budgets from the least reachable peak to the plain one.

    Shows the solver's plans, the bound that no plan can beat, and policies from papers, all judged by one simulator, as
    if each transfer took as long as predicted; `ebbtide plan` leaves time free around them, and takes somewhat longer:
    `ebbtide frontier step.json.gz --machine h200 -o frontier.html -o frontier.png`.
    """
)
def frontier(
    step_path: Annotated[Path, typer.Argument(metavar="STEP|PLAN", help=STEP_HELP)],
    output: Annotated[
        list[Path],
        typer.Option(
            "-o", metavar="FILE", callback=writable, help="Where to write: .html, .png or .json. May be repeated."
        ),
    ],
    machine_name: MachineName = None,
    points: Annotated[int, typer.Option(min=2, help="Budgets, both ends included.")] = 12,
    policies: Annotated[
        str,
        typer.Option(metavar="NAMES", help='Published policies, comma-separated, "all" or "none"; docs/policies.md.'),
    ] = _POLICIES,
    seconds: Annotated[float, typer.Option(min=0.0, help="Search of the solver for each budget.")] = 1.0,
    spill: Spill = None,
) -> None:
    from ebbtide.plan.frontier import frontier as compute
    from ebbtide.plan.published.registry import POLICIES, policies_named
    from ebbtide.report.frontier import WRITERS, check_drawable, frontier_tables
    from ebbtide.report.sentences import foreign_times

    check_apart(output, step_path, machine_file_of(machine_name))
    for path in output:
        if path.suffix not in WRITERS:
            raise typer.BadParameter(f"{path}: its name must end in {', '.join(WRITERS)}", param_hint="-o")
        if path.suffix == ".png":
            check_drawable()
    given = [name.strip() for name in policies.split(",") if name.strip()]
    names = {"all": list(POLICIES), "none": []}.get(policies, given)
    chosen = policies_named(names)
    step, machine = step_and_machine(step_path, machine_name, spill)
    with progress_bar(TimeElapsedColumn()) as bar:
        task = bar.add_task("planning", total=1.0)
        found = compute(
            step,
            machine,
            points=points,
            policies=chosen,
            seconds=seconds,
            progress=lambda done, what: bar.update(task, completed=done, description=what),
        )
    for path in output:  # before anything is printed: whoever would read that may be gone
        WRITERS[path.suffix](found, path)
    console = console_beside(*output)
    for table in frontier_tables(found, console.width):
        console.print(table)
    refusals = [f"{curve.name}: {curve.refused}" for curve in found.policies if curve.refused]
    say(*foreign_times(step, machine), *refusals, *(f"written to {path}" for path in output), beside=output)


with_whole_lines(app)


def main() -> None:
    """Run the command line. Ends with code 1 after an error of ours or the system's, 2 after a wrong command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a file's name need not be text
    try:
        app()
    except (EbbtideError, OSError) as error:
        print(f"ebbtide: {' '.join([str(error), *getattr(error, '__notes__', ())])}", file=sys.stderr)
        sys.exit(1)
