"""Subcommands that plan for machines that are not at hand, draw frontiers, and look for the largest batch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ebbtide.bundle import Bundle
from ebbtide.cli import app
from ebbtide.machine import Machine
from ebbtide.step import Step
from tests.cli.commands import Failure, in_one_line, run


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


def test_a_plan_is_made_again_for_its_own_machine_or_another(script: Path, machine: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "plan.json", tmp_path / "again.json"
    run("plan", "--machine", "rtx-4090", "--model", script, "--budget", "80%", "-o", first)
    made = Bundle.load(first)

    run("plan", first, "--budget", "90%", "-o", again)
    found = Bundle.load(again)
    assert (found.step, found.machine) == (made.step, made.machine)
    assert found.plan.limit_bytes > made.plan.limit_bytes

    run("plan", first, "--budget", "90%", "--machine", machine, "-o", again)
    assert Bundle.load(again).machine == Machine.load(machine)


def test_a_plan_is_not_written_over_the_one_that_is_read(script: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", "--machine", "rtx-4090", "--model", script, "--budget", "80%", "-o", plan)
    result = CliRunner().invoke(app, ["plan", str(plan), "--budget", "90%", "-o", str(plan)])
    assert result.exit_code == 2
    assert "is what is read" in in_one_line(result.output)


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


def test_a_machine_at_hand_is_one_to_plan_for(
    script: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted on one step, it tells the times of others."""
    monkeypatch.setattr("ebbtide.run.calibrate.calibrate", lambda *_, **__: Machine.load(machine))
    here = tmp_path / "here.json"
    output = run("calibrate", script, "-o", here)
    assert "GFLOP/s in float32" in output
    assert f"{script}: took " in output
    found = Machine.load(here)
    assert found.compute is not None
    assert "matmul" in dict(found.compute.efficiencies)
    assert found.links == Machine.load(machine).links
    assert "plain: fits" in run("plan", "--machine", here, "--model", f"{script}:elsewhere")


def test_steps_that_are_timed_go_with_a_file(script: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", str(script)])
    assert result.exit_code == 2
    assert "steps go with -o FILE" in result.output


def test_a_spill_directory_is_looked_for_before_steps_are_timed(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    monkeypatch.setattr("ebbtide.timed_steps.fit_here", lambda *_: pytest.fail("timed"))
    said = failure("calibrate", script, "--spill", tmp_path / "none", "-o", tmp_path / "here.json")
    assert "does not exist" in said


def test_a_script_that_is_timed_is_not_written_over(script: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", str(script), "-o", str(script)])
    assert result.exit_code == 2
    assert "is what is read" in in_one_line(result.output)
    assert "def one_step" in script.read_text()


def test_a_step_that_cannot_be_timed(
    script: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    monkeypatch.setattr("ebbtide.run.calibrate.calibrate", lambda *_, **__: Machine.load(machine))
    assert "out of luck" in failure("calibrate", f"{script}:broken", "-o", tmp_path / "here.json")
    assert not (tmp_path / "here.json").exists()


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


def test_matplotlib_is_missed_before_the_work(
    script: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    run("observe", script, "-o", tmp_path / "step.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("ebbtide.plan.frontier.frontier", lambda *_, **__: pytest.fail("planned"))
    outputs = "-o", tmp_path / "page.html", "-o", tmp_path / "page.png"
    said = failure("frontier", tmp_path / "step.json", "--machine", machine, *outputs)
    assert "matplotlib, which is not installed" in said


def test_what_has_no_frontier(machine: Path, tmp_path: Path, failure: Failure) -> None:
    page = tmp_path / "page.html"
    assert "cannot be read" in failure("frontier", tmp_path / "none.json", "-o", page)
    assert "not a file of kind ebbtide-step" in failure("frontier", machine, "-o", page)
    said = failure("frontier", machine, "--policies", "magic", "-o", page)
    assert "no policy 'magic'; there are offload-all" in said
    result = CliRunner().invoke(app, ["frontier", str(machine), "-o", str(tmp_path / "page.pdf")])
    assert result.exit_code == 2
    assert ".html, .png, .json" in result.output


@pytest.mark.usefixtures("quick_batches")
def test_the_largest_batch(script: Path, tmp_path: Path) -> None:
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


def test_an_output_may_be_called_as_a_machine(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or as a demo model, which are no files that are read; the second time, too."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run("observe", script, "--fake", "--machine", "h100", "-o", "h100")
        assert Step.load("h100").ops


def test_cuda_autocast_is_refused_with_advice(tmp_path: Path, failure: Failure) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA autocast works here")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\ndef one_step():\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(torch.ones(4, 8)).sum()\n"
        "    loss.backward()\n"
    )
    said = failure("observe", script, "--fake", "--machine", "h100", "-o", tmp_path / "step.json")
    assert "convert the model and its inputs to bfloat16" in said
