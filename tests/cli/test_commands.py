"""The command line: what each subcommand writes, and that errors are one line and a code."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import ebbtide
from ebbtide import Budget
from ebbtide.bundle import Bundle
from ebbtide.cli import app
from ebbtide.documents import read_json, write_json
from ebbtide.errors import RecordError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.machines import load_machine
from ebbtide.options import check_apart, share_of
from ebbtide.report.sentences import links_table
from ebbtide.step import Step
from tests.cli.commands import SCRIPT, Failure, in_one_line, run
from tests.plan.random_steps import network_step


def test_subcommands_are_these() -> None:
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert names == {"demo", "calibrate", "observe", "plan", "report", "frontier", "batch"}


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["calibrate"], ["observe"], ["plan"], ["report"], ["frontier"], ["batch"]]
)
def test_help_says_something(command: list[str]) -> None:
    assert "Usage" in run(*command, "--help")


def test_observe_plan_report(script: Path, machine: Path, tmp_path: Path) -> None:
    step, plan, page = tmp_path / "step.json.gz", tmp_path / "plan.json", tmp_path / "timeline.html"

    assert "absences" in run("observe", f"{script}:one_step", "-o", step)
    observed = Step.load(step)
    assert any(op.phase == "backward" for op in observed.ops)

    output = run("plan", step, "--budget", "80%", "--machine", machine, "-o", plan)
    assert "limit" in output
    bundle = Bundle.load(plan)
    assert bundle.step == observed
    assert bundle.machine == Machine.load(machine)
    assert bundle.plan.limit_bytes == int(0.8 * bundle.plan.plain_peak_bytes)
    assert bundle.plan.peak_bytes <= bundle.plan.limit_bytes

    run("report", plan, "-o", page)
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_file_names_that_are_no_text(script: Path, machine: Path, tmp_path: Path) -> None:
    """They are written as they are, and shown with escapes."""
    step, plan = tmp_path / "step.json", tmp_path / os.fsdecode(b"pl\xe4n.json")
    run("observe", f"{script}:one_step", "-o", step)
    command = ["plan", step, "--budget", "80%", "--machine", machine, "-o", plan]
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", *map(str, command)],
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},  # as in any locale but C
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/pl\\udce4n.json" in done.stdout
    assert Bundle.load(plan).plan.binds


def test_nobody_listens(script: Path, machine: Path, tmp_path: Path) -> None:
    """Standard output was closed, as for programs that run in the background: the file is what counts."""
    step, plan = tmp_path / "step.json", tmp_path / "plan.json"
    run("observe", f"{script}:one_step", "-o", step)
    command = [sys.executable, "-m", "ebbtide", "plan", step, "--budget", "80%", "--machine", machine, "-o", plan]
    closed = shlex.join(map(str, command)) + " >&-"
    done = subprocess.run(["sh", "-c", closed], check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Bundle.load(plan).plan.binds


def test_plan_takes_bytes(script: Path, machine: Path, tmp_path: Path) -> None:
    step, plan = tmp_path / "step.json", tmp_path / "plan.json"
    run("observe", f"{script}:one_step", "-o", step)
    run("plan", step, "--budget", "1GiB", "--machine", machine, "-o", plan)
    assert Bundle.load(plan).plan.limit_bytes == 2**30
    assert not Bundle.load(plan).plan.binds


def test_a_budget_that_cannot_be_met_is_one_line(script: Path, machine: Path, tmp_path: Path, failure: Failure) -> None:
    step = tmp_path / "step.json"
    run("observe", f"{script}:one_step", "-o", step)
    arguments = ("plan", step, "--budget", "1KiB", "--machine", machine, "-o", tmp_path / "plan.json")
    said = failure(*arguments)
    assert "least reachable peak" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("{script}:broken", "out of luck"),
        ("{script}:leaving", "train.py:leaving: SystemExit: 0"),
        ("{script}:missing", "has no function 'missing'"),
        ("{script}:number", "has no function 'number'"),
        ("{script}x:one_step", "no such Python file"),
        ("alexnet", "there are vgg19"),
    ],
)
def test_what_cannot_be_observed(
    what: str,
    expected: str,
    script: Path,
    tmp_path: Path,
    failure: Failure,
) -> None:
    said = failure("observe", what.format(script=script), "-o", tmp_path / "step.json")
    assert expected in said
    assert "Traceback" not in said


@pytest.mark.parametrize("fake", [(), ("--fake", "--machine", "h200")], ids=["real", "fake"])
def test_a_script_with_classes_of_its_own(fake: tuple[str, ...], script: Path, tmp_path: Path) -> None:
    """Dataclasses with annotations as text, and pickle, look up the module that a class is of."""
    classes = (
        "@dataclasses.dataclass\nclass Settings:\n    width: int = 128\n\npickle.loads(pickle.dumps(Settings()))\n"
    )
    imports = "from __future__ import annotations\nimport dataclasses, pickle\n"
    script.write_text(imports + classes + SCRIPT)
    run("observe", script, *fake, "-o", tmp_path / "step.json")
    assert Step.load(tmp_path / "step.json").absences


@pytest.mark.parametrize("fake", [(), ("--fake", "--machine", "h200")], ids=["real", "fake"])
def test_a_script_finds_no_arguments(
    fake: tuple[str, ...], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this process are ebbtide's; `parse_args` would take them for the script's own, or end with them."""
    given = ["ebbtide", "observe", str(script)]
    monkeypatch.setattr(sys, "argv", given)
    looks = f"import sys\n\nassert sys.argv == [{str(script)!r}]\n"
    script.write_text(f"{looks}{SCRIPT}\ndef looking():\n    assert sys.argv == [{str(script)!r}]\n    one_step()\n")
    run("observe", f"{script}:looking", *fake, "-o", tmp_path / "step.json")
    assert Step.load(tmp_path / "step.json").absences
    assert sys.argv is given


def test_files_that_are_not_ours(machine: Path, tmp_path: Path, failure: Failure) -> None:
    page = tmp_path / "page.html"
    assert "cannot be read" in failure("report", tmp_path / "missing.json", "-o", page)
    assert "not a file of kind ebbtide-bundle" in failure("report", machine, "-o", page)
    assert "as `ebbtide plan -o` writes, but of kind ebbtide-machine" in failure("report", machine, "-o", page)
    write_json(tmp_path / "half.json", {"format": "ebbtide-bundle", "version": 1})
    assert "has no step" in failure("report", tmp_path / "half.json", "-o", page)


def test_no_name_of_a_machine(tmp_path: Path, failure: Failure) -> None:
    network_step(3).save(tmp_path / "step.json")
    said = failure("plan", tmp_path / "step.json", "--machine", "")
    assert "the empty name: neither a machine file nor one of" in said


def test_a_bundle_whose_parts_do_not_fit(script: Path, machine: Path, tmp_path: Path) -> None:
    step, plan = tmp_path / "step.json", tmp_path / "plan.json"
    run("observe", f"{script}:one_step", "-o", step)
    run("plan", step, "--budget", "80%", "--machine", machine, "-o", plan)
    document = read_json(plan, "ebbtide-bundle", 1)
    document["plan"]["decisions"].pop()
    write_json(plan, document)
    with pytest.raises(RecordError, match="for another step"):
        Bundle.load(plan)


@pytest.mark.parametrize(
    "budget", ["5x", "0%", "-3", "0.5", "50 percent", "9" * 400 + "GiB", "9" * 400 + "%", "9" * 306 + "%"]
)
def test_a_budget_that_is_no_size_is_a_usage_error(budget: str, script: Path, machine: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.json"
    run("observe", f"{script}:one_step", "-o", step)
    arguments = ["plan", str(step), f"--budget={budget}", "--machine", str(machine), "-o", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--budget" in result.output
    with pytest.raises(ValueError, match=r"written \"50%\"|some share above 0 %"):
        Budget(budget)


@pytest.mark.parametrize(
    "arguments",
    [
        ["observe", "{script}", "--fake", "-o", "step.json"],
        ["observe", "{script}", "--machine", "h200", "-o", "step.json"],
        ["plan", "--model", "{script}", "--budget", "50%"],
        ["plan", "--machine", "h200"],
        ["plan", "step.json", "--model", "{script}", "--machine", "h200"],
        ["plan", "step.json", "--batch", "8"],
        ["plan", "step.json", "--machine", "h200", "--spill", "."],
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], script: Path) -> None:
    result = CliRunner().invoke(app, [argument.format(script=script) for argument in arguments])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["observe", "script.py", "-o"],
        ["plan", "step.json", "--budget", "50%", "-o"],
        ["batch", "script.py:batched", "--machine", "h200", "-o"],
        ["report", "plan.json", "-o"],
        ["frontier", "step.json", "-o", "there.html", "-o"],
        ["calibrate", "-o"],
        ["demo", "--json"],
    ],
)
def test_outputs_are_looked_at_before_the_work(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the inputs is there: whoever looks at these first says something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    for output, reason in (
        ("nowhere/it.html", "there is no directory"),
        ("folder.html", "name a file in it"),
        ("-", "or /dev/stdout"),
    ):
        result = CliRunner().invoke(app, [*arguments, output])
        assert result.exit_code == 2
        assert reason in in_one_line(result.output)


def test_a_page_is_written_to_a_file_of_that_kind() -> None:
    result = CliRunner().invoke(app, ["report", "plan.json", "-o", "page.png"])
    assert result.exit_code == 2
    assert "page.png: its name must end in .html" in result.output


def test_what_is_read_is_not_written_over(script: Path, machine: Path, tmp_path: Path) -> None:
    step, plan, link = tmp_path / "step.json", tmp_path / "plan.json", tmp_path / "link.json"
    network_step(6).save(step)
    run("plan", step, "--budget", "80%", "--machine", machine, "-o", plan)
    link.symlink_to(plan)
    commands: list[tuple[Path, list[str | Path]]] = [
        (script, ["observe", script, "-o", script]),
        (script, ["observe", f"{script}:one_step", "-o", script]),
        (script, ["batch", f"{script}:batched", "--machine", "h200", "-o", script]),
        (step, ["plan", step, "--budget", "80%", "--machine", machine, "-o", step]),
        (machine, ["plan", step, "--budget", "80%", "--machine", machine, "-o", machine]),
        (plan, ["report", plan, "-o", plan]),
        (plan, ["report", plan, "-o", link]),
        (plan, ["frontier", plan, "-o", tmp_path / "page.html", "-o", plan]),
    ]
    for read, command in commands:
        before = read.read_bytes()
        result = CliRunner().invoke(app, [str(argument) for argument in command])
        assert result.exit_code == 2
        assert "is what is read; name another file" in in_one_line(result.output)
        assert read.read_bytes() == before


def test_an_output_may_be_called_as_what_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("None").write_text("of an earlier run")
    check_apart([Path("None"), None], "step.json", None)


def test_nothing_is_said_on_standard_error_where_all_is_well(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no terminal, so that there is no bar, nor a line of it."""
    network_step(3).save(tmp_path / "step.json")
    few = ("--points", "2", "--seconds", "0", "--policies", "none")
    app(
        ["frontier", *map(str, (tmp_path / "step.json", "--machine", machine, *few, "-o", tmp_path / "page.html"))],
        standalone_mode=False,
    )
    assert capsys.readouterr().err == ""


def test_no_part_of_a_file_stays_where_it_cannot_be_written(machine: Path, tmp_path: Path, failure: Failure) -> None:
    step, plan = tmp_path / "step.json", tmp_path / "plan.json"
    network_step(6).save(step)
    run("plan", step, "--budget", "80%", "--machine", machine, "-o", plan)
    few = ("--points", "2", "--seconds", "0", "--policies", "none")
    commands: list[tuple[str | Path, ...]] = [
        ("plan", step, "--budget", "80%", "--machine", machine, "-o", tmp_path / "out.json"),
        ("report", plan, "-o", tmp_path / "out.html"),
        ("frontier", plan, *few, "-o", tmp_path / "out.html"),
        ("frontier", plan, *few, "-o", tmp_path / "out.png"),
        ("frontier", plan, *few, "-o", tmp_path / "out.json"),
    ]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for command in commands:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
        try:
            said = failure(*command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert said.strip() == f"ebbtide: [Errno 27] File too large: '{command[-1]}'"
        assert not Path(command[-1]).exists()


@pytest.mark.usefixtures("quick_batches")
def test_paths_are_relative_to_where_the_command_is_called(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the script goes."""
    monkeypatch.chdir(tmp_path)
    run("observe", "train.py:elsewhere", "-o", "real.json")
    run("observe", "train.py:elsewhere", "--fake", "--machine", "h200", "-o", "fake.json")
    run("plan", "--model", "train.py:elsewhere", "--machine", "h200", "-o", "plan.json")
    run("batch", "train.py:elsewhere", "--machine", "h200", "--budget", "8MiB", "-o", "batch.json")
    assert {path.name for path in tmp_path.glob("*.json")} == {"real.json", "fake.json", "plan.json", "batch.json"}
    assert script.parent == Path.cwd()


def test_a_function_chooses_its_own_batch(script: Path, tmp_path: Path, failure: Failure) -> None:
    said = failure("observe", script, "--batch", "8", "-o", tmp_path / "step.json")
    assert "a function chooses its own" in said


def test_brackets_are_no_markup(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "[red]runs[/x] in a folder whose name is so long that its lines are wider than the page is"
    folder.mkdir(parents=True)
    assert str(folder / "step.json") in run("observe", script, "-o", folder / "step.json")
    links = (Link("a [b", "disk", 1e-4, 4e9, 3e9), Link("disk", "a [b", 1e-4, 2e9, 1e9))
    named = Machine("a [/machine]", "a [b", (Tier("a [b", "device", 2**30), Tier("disk", "disk")), links)
    dataclasses.replace(named, compute=load_machine("h200").compute).save(folder / "machine.json")
    assert "a [/machine], 1.00 GiB of memory" in run("plan", folder / "step.json", "--machine", folder / "machine.json")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(links_table(named))
    assert "a [/machine]" in console.export_text(clear=False)
    assert "a [b to disk" in console.export_text()


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0", 0.0), ("0%", 0.0), (" 0.0 % ", 0.0), ("250%", 2.5)])
def test_shares(text: str, share: float) -> None:
    assert share_of(text, "--overhead") == share


def test_a_budget_is_needed_where_the_memory_is_not_known(script: Path, machine: Path, tmp_path: Path) -> None:
    run("observe", script, "-o", tmp_path / "step.json")
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "step.json"), "--machine", str(machine)])
    assert result.exit_code == 2
    assert "--budget" in result.output


@pytest.mark.parametrize(
    ("function", "expected"), [(lambda: torch.ones(512), "has no backward pass"), (lambda: None, "has no ops")]
)
@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_steps_that_do_not_train(
    command: str,
    function: Callable[[], Any],
    expected: str,
    tmp_path: Path,
    failure: Failure,
) -> None:
    step = tmp_path / "step.json"
    ebbtide.observe_step(function).save(step)
    more = ("--budget", "1GiB") if command == "plan" else ("-o", tmp_path / "page.html")
    said = failure(command, step, "--machine", "h200", *more)
    assert expected in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", ["plan", "frontier"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("cut short", "not JSON, or cut short"),
        ("damaged", "damaged, or cut short"),
        ("negative", "has duration -1.0; it must be >= 0"),
        ("nan", "has duration nan; it must be >= 0"),
        ("bandwidth", "has bandwidth 0.0; it must be > 0"),
    ],
)
def test_bad_files_are_one_line(
    command: str,
    what: str,
    expected: str,
    machine: Path,
    tmp_path: Path,
    failure: Failure,
) -> None:
    step = tmp_path / ("step.json.gz" if what == "damaged" else "step.json")
    network_step(3).save(step)
    if what == "cut short":
        step.write_text(step.read_text()[:500])
    elif what == "damaged":
        step.write_bytes(step.read_bytes()[:200] + b"\0" * 20 + step.read_bytes()[220:])
    elif what == "bandwidth":
        document = json.loads(machine.read_text())
        document["links"][0]["bandwidth_bytes_per_second"] = 0.0
        machine.write_text(json.dumps(document))
    else:
        document = json.loads(step.read_text())
        document["ops"]["rows"][0][4] = float(what) if what == "nan" else -1.0
        step.write_text(json.dumps(document))
    more = ("--budget", "1GiB") if command == "plan" else ("-o", tmp_path / "page.html")
    said = failure(command, step, "--machine", machine, *more)
    assert expected in said
    assert len(said.splitlines()) == 1


def test_a_budget_below_the_largest_op_is_one_line(machine: Path, tmp_path: Path, failure: Failure) -> None:
    step = tmp_path / "step.json"
    network_step(5).save(step)
    said = failure("plan", step, "--budget", "64KiB", "--machine", machine)
    assert "the least reachable peak is" in said
    assert "at op " in said
    assert len(said.splitlines()) == 1


def test_calibrate_prints_both_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = run("calibrate", "--spill", tmp_path, "-o", tmp_path / "machine.json")
    for link in Machine.load(tmp_path / "machine.json").links:
        assert f"{link.source} to {link.target}" in output


def test_a_directory_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a variable that is not set: it would be the working directory, measured for good."""
    monkeypatch.setattr("ebbtide.run.calibrate.calibrate", lambda *_, **__: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["calibrate", "--spill", "", "-o", str(tmp_path / "machine.json")])
    assert result.exit_code == 2
    assert "--spill" in result.output
    assert "it is empty; name a directory" in result.output


def test_a_directory_with_a_colon_in_its_name(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run-10:30"
    folder.mkdir()
    moved = folder / "train.py"
    moved.write_bytes(script.read_bytes())
    for what in (str(moved), f"{moved}:one_step"):
        run("observe", what, "-o", tmp_path / "step.json")
        assert Step.load(tmp_path / "step.json").ops


def test_a_demo_model_with_too_large_a_batch(tmp_path: Path, failure: Failure) -> None:
    for model, batch, error in (("gpt2", 10**15, "Memory"), ("gpt2", 10**19, "Value"), ("resnet50", 10**15, "Value")):
        said = failure("observe", model, "--batch", batch, "-o", tmp_path / "step.json")
        assert said.startswith(f"ebbtide: {model}: {error}Error: ")
        assert "\n" not in said


def test_a_plan_on_standard_output(script: Path, machine: Path, tmp_path: Path) -> None:
    """It may be a pipe."""
    step = tmp_path / "step.json"
    run("observe", script, "-o", step)
    command = [sys.executable, "-m", "ebbtide", "plan", str(step), "--machine", str(machine), "--budget", "90%"]
    done = subprocess.run([*command, "-o", "/dev/stdout"], capture_output=True, check=True)
    assert json.loads(done.stdout)["plan"]["format"] == "ebbtide-plan"
    assert b"written to /dev/stdout" in done.stderr


def test_version() -> None:
    assert run("--version") == f"ebbtide {ebbtide.__version__}\n"


def test_models_may_have_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def nothing(*_: object, models: list[str], **__: object) -> list[str]:
        asked.extend(models)
        return []

    monkeypatch.setattr("ebbtide.demo.run.run_demo", nothing)
    run("demo", "--models", "gpt2, vgg19 ,")
    assert asked == ["gpt2", "vgg19"]


def test_a_list_of_models_that_names_none() -> None:
    result = CliRunner().invoke(app, ["demo", "--models", ","])
    assert result.exit_code == 2
    assert "it names no model" in result.output
