"""The command line: what each subcommand writes, and that errors are one line and a code."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ebbtide import Budget
from ebbtide.bundle import Bundle
from ebbtide.cli import app, main
from ebbtide.errors import RecordError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.machines import load_machine
from ebbtide.options import share_of
from ebbtide.plan import solve
from ebbtide.report.sentences import links_table
from ebbtide.step import Step, read_json, write_json
from tests.plan.random_steps import network_step

SCRIPT = """
import torch

model = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())])

def one_step():
    model.zero_grad()
    model(torch.ones(512, 128)).square().mean().backward()

def broken():
    raise RuntimeError("out of luck")

def batched(size):
    model.zero_grad()
    model(torch.ones(size, 128)).square().mean().backward()

def forward_only():
    model(torch.ones(512, 128))

def idle():
    pass

def peeking():
    if model(torch.ones(1, 128)).sum() > 0:
        one_step()

number = 3
"""


def run(*arguments: str | Path) -> str:
    """Output of a subcommand that must succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


Failure = Callable[..., str]


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Failure:
    """What is said on standard error by a command that must end with code 1."""

    def said(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["ebbtide", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == 1
        return capsys.readouterr().err.strip()

    return said


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    links = (
        Link("ram", "disk", 1e-4, 4e9, 3e9, 0.02),
        Link("disk", "ram", 1e-4, 2e9, 1e9, 0.1),
    )
    path = tmp_path / "machine.json"
    Machine("a described machine", "ram", (Tier("ram", "device"), Tier("disk", "disk")), links).save(path)
    return path


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


def test_files_that_are_not_ours(machine: Path, tmp_path: Path, failure: Failure) -> None:
    page = tmp_path / "page.html"
    assert "cannot be read" in failure("report", tmp_path / "missing.json", "-o", page)
    assert "not a file of kind ebbtide-bundle" in failure("report", machine, "-o", page)
    assert "as `ebbtide plan -o` writes, but of kind ebbtide-machine" in failure("report", machine, "-o", page)
    write_json(tmp_path / "half.json", {"format": "ebbtide-bundle", "version": 1})
    assert "has no step" in failure("report", tmp_path / "half.json", "-o", page)


def test_a_bundle_whose_parts_do_not_fit(script: Path, machine: Path, tmp_path: Path) -> None:
    step, plan = tmp_path / "step.json", tmp_path / "plan.json"
    run("observe", f"{script}:one_step", "-o", step)
    run("plan", step, "--budget", "80%", "--machine", machine, "-o", plan)
    document = read_json(plan, "ebbtide-bundle", 1)
    document["plan"]["decisions"].pop()
    write_json(plan, document)
    with pytest.raises(RecordError, match="for another step"):
        Bundle.load(plan)


@pytest.mark.parametrize("budget", ["5x", "0%", "-3", "0.5", "50 percent", "9" * 400 + "GiB", "9" * 400 + "%"])
def test_a_budget_that_is_no_size_is_a_usage_error(budget: str, script: Path, machine: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.json"
    run("observe", f"{script}:one_step", "-o", step)
    arguments = ["plan", str(step), f"--budget={budget}", "--machine", str(machine), "-o", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--budget" in result.output
    with pytest.raises(ValueError, match=r"written \"50%\"|some share above 0 %"):
        Budget(budget)


def test_plan_without_the_hardware(script: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    output = run("plan", "--machine", "rtx-4090", "--model", script, "--budget", "80%", "-o", plan)
    assert "RTX 4090" in output
    assert "plain: does not fit" in output
    assert "planned: fits" in output
    bundle = Bundle.load(plan)
    assert bundle.step.device == "cuda"
    assert bundle.machine.compute is not None
    assert bundle.plan.peak_bytes <= bundle.plan.limit_bytes


def test_plan_for_the_memory_of_a_machine(script: Path) -> None:
    output = run("plan", "--machine", "h200", "--model", f"{script}:one_step")
    assert "plain: fits 125 GiB" in output
    assert "planned" not in output
    assert "written" not in output


def test_observe_without_the_hardware(script: Path, tmp_path: Path) -> None:
    real, fake = tmp_path / "real.json", tmp_path / "fake.json"
    run("observe", script, "-o", real)
    run("observe", f"{script}:one_step", "--fake", "--machine", "k40c", "-o", fake)
    steps = [Step.load(path) for path in (real, fake)]
    assert [op.name for op in steps[0].ops] == [op.name for op in steps[1].ops]
    assert steps[0].saved == steps[1].saved


def test_times_of_another_sort_of_device_are_said_to_be(script: Path, tmp_path: Path) -> None:
    """A CPU's 2.66 s were given as those of an A100."""
    step, said = tmp_path / "step.json", "observed on cpu, and its ops count with the times they took there, not on"
    page = ("--policies", "none", "--points", "2", "--seconds", "0", "-o", tmp_path / "page.html")
    run("observe", script, "-o", step)
    assert said in run("plan", step, "--machine", "a100-80gb")
    assert said in run("frontier", step, "--machine", "a100-80gb", *page)
    run("observe", script, "--fake", "--machine", "a100-80gb", "-o", step)
    assert said not in run("plan", step, "--machine", "a100-80gb")
    assert said not in run("frontier", step, "--machine", "a100-80gb", *page)


def test_a_demo_model_without_the_hardware(tmp_path: Path) -> None:
    output = run("observe", "gpt2", "--batch", "1000", "--fake", "--machine", "h100", "-o", tmp_path / "step.json")
    assert "absences of" in output
    assert Step.load(tmp_path / "step.json").saved[0].shape[0] == 1000


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
    for output, reason in (("nowhere/it.html", "there is no directory"), ("folder.html", "name a file in it")):
        result = CliRunner().invoke(app, [*arguments, output])
        assert result.exit_code == 2
        assert reason in " ".join(result.output.replace("│", " ").split())


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
    ("machine", "function", "expected"),
    [("tpu", "one_step", "neither a machine file"), ("h200", "peeking", "fake tensors have no values")],
)
def test_what_cannot_be_planned_without_the_hardware(
    machine: str,
    function: str,
    expected: str,
    script: Path,
    failure: Failure,
) -> None:
    said = failure("plan", "--machine", machine, "--model", f"{script}:{function}")
    assert expected in said
    assert len(said.splitlines()) == 1


def test_frontier(script: Path, machine: Path, tmp_path: Path) -> None:
    step, plan = tmp_path / "step.json.gz", tmp_path / "plan.json"
    run("observe", script, "-o", step)
    quick = ("--points", "3", "--seconds", "0.02")
    page, picture, data = (tmp_path / f"frontier.{suffix}" for suffix in ("html", "png", "json"))
    output = run(
        "frontier",
        step,
        "--machine",
        machine,
        *quick,
        "--policies",
        "offload-all",
        "-o",
        page,
        "-o",
        picture,
        "-o",
        data,
    )
    assert "offload-all" in output
    assert "solver" in output
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert read_json_points(data) == 3

    run("plan", step, "--budget", "80%", "--machine", machine, "-o", plan)
    output = run("frontier", plan, *quick, "--policies", "rotor,vdnn-conv", "-o", data)
    assert "offload-all" not in output
    assert "vdnn-conv: " in output
    assert read_json_points(data) == 3


def read_json_points(path: Path) -> int:
    """Number of the solver's points in a frontier's JSON."""
    return len(json.loads(path.read_text())["solver"]["points"])


def test_what_has_no_frontier(machine: Path, tmp_path: Path, failure: Failure) -> None:
    page = tmp_path / "page.html"
    assert "cannot be read" in failure("frontier", tmp_path / "none.json", "-o", page)
    assert "not a file of kind ebbtide-step" in failure("frontier", machine, "-o", page)
    said = failure("frontier", machine, "--policies", "magic", "-o", page)
    assert "no policy 'magic'; there are offload-all" in said
    result = CliRunner().invoke(app, ["frontier", str(machine), "-o", str(tmp_path / "page.pdf")])
    assert result.exit_code == 2
    assert ".html, .png, .json" in result.output


def test_the_largest_batch(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(solve, seconds=0.02)
    monkeypatch.setattr("ebbtide.plan.batch.solve", lambda step, machine, limit, seconds: quick(step, machine, limit))
    plan = tmp_path / "plan.json"
    arguments = ("--machine", "k40c", "--budget", "64MiB", "--overhead", "10%", "--between", "256,512")
    output = run("batch", f"{script}:batched", *arguments, "-o", plan)
    bundle = Bundle.load(plan)
    batch = bundle.step.saved[0].shape[0]
    assert batch > 512
    assert f"planned: batch {batch}, " in output
    assert re.search(rf"observed with 256, 512, .*\b{batch} samples", output)
    assert bundle.plan.peak_bytes <= bundle.plan.limit_bytes == 64 * 2**20
    assert bundle.plan.seconds <= 1.1 * bundle.plan.plain_seconds


@pytest.mark.parametrize(
    ("option", "item"),
    [
        *[("--overhead", text) for text in ("five", "5", "-5%", "nan%", "5%%")],
        *[("--between", text) for text in ("8", "16,8", "8,16,32")],
        ("--budget", "50%"),
    ],
)
def test_options_of_batch(option: str, item: str, script: Path) -> None:
    result = CliRunner().invoke(app, ["batch", str(script), "--machine", "k40c", option, item])
    assert result.exit_code == 2
    assert option in result.output


def test_a_function_that_takes_no_batch(script: Path, failure: Failure) -> None:
    said = failure("batch", script, "--machine", "k40c")
    assert "takes 0 positional arguments but 1 was given" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("function", "expected"), [("forward_only", "has no backward pass"), ("idle", "has no ops")])
@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_steps_that_do_not_train(
    command: str,
    function: str,
    expected: str,
    script: Path,
    tmp_path: Path,
    failure: Failure,
) -> None:
    step = tmp_path / "step.json"
    run("observe", f"{script}:{function}", "-o", step)
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
