"""The benchmark for GPUs, whole, on the CPU with small models."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.gpu.run as gpu_run
from benchmarks.gpu import cases, fit, workloads
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.devices import Peak
from benchmarks.gpu.methods import METHODS, Options
from benchmarks.gpu.records import Journal, Record
from benchmarks.gpu.workloads import MODELS, make_workload
from ebbtide.errors import BudgetError
from ebbtide.machines import load_machine
from ebbtide.roofline import Work
from ebbtide.step import Step
from tests.run.harness import FAST_DISK

pytestmark = pytest.mark.usefixtures("quick_plans", "nothing_left")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The file that a run with these arguments writes."""
    file = tmp_path / "gpu.json"
    main(["--device", "cpu", "--json", str(file), "--spill", str(tmp_path), "--repeats", "2", *arguments], FAST_DISK)
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_every_method_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # PyTorch's `save_on_cpu` gives back contiguous copies. With whole batches some processors hand these to other
    # kernels than the strided originals, and those round otherwise; with half of one they do not.
    document = run(tmp_path, "--models", "llama-1b", "--fractions", "1,0.5", "--batch-scale", "0.5")
    records = [Record(**record) for record in document["records"]]
    assert [record.method for record in records] == ["ebbtide", *METHODS]
    *measured, compiled = records
    for record in measured:
        assert record.status == "measured", record.reason
        assert record.gradients == "identical", record
        assert record.plain_spread == 0
        assert record.left == ""
        assert record.buffers_identical
        assert record.peak_bytes is not None
        assert record.seconds is not None
        assert record.plain_seconds is not None
        assert record.ratio == record.seconds / record.plain_seconds
        assert len(record.all_seconds) == len(record.all_plain_seconds) == 2
    whole, half, checkpoint, *_ = measured
    assert whole.peak_bytes == whole.plain_peak_bytes == whole.limit_bytes
    assert whole.moved_bytes == whole.remade_values == 0
    assert half.peak_bytes == half.predicted_peak_bytes
    assert half.peak_bytes <= half.limit_bytes < half.plain_peak_bytes  # type: ignore[operator]
    assert half.share == pytest.approx(0.5, abs=0.05)
    assert half.moved_bytes > 0 or half.remade_values > 0  # type: ignore[operator]
    assert half.least_reachable_bytes is None
    assert checkpoint.peak_bytes < checkpoint.plain_peak_bytes  # type: ignore[operator]
    assert (compiled.status, compiled.reason[:9]) == ("skipped", "compiling")
    assert min(document["bandwidths"].values()) > 0
    assert document["links"] == [dataclasses.asdict(link) for link in FAST_DISK.links]
    assert document["versions"]["torch"] == torch.__version__
    assert "against plain PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_blocks_and_learns(name: str) -> None:
    workload = make_workload(name, CPU, small=True, batch_scale=0.5)
    assert len(workload.blocks) >= 3
    loss = workload.step(workload.batch(0))
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())
    assert {parameter.dtype for block in workload.blocks for parameter in block.parameters()} >= {torch.bfloat16}
    inputs, _ = workload.batch(0)
    assert len(inputs) == workloads.SMALL[name].batch // 2


def test_a_budget_that_cannot_be_met_is_asked_for_again_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def make(share: float, *_: Any) -> Any:
        shares.append(share)
        return SimpleNamespace(close=lambda: None, memory=None)

    def measure(*_: Any) -> dict[str, Any]:
        if len(shares) == 1:
            raise BudgetError("no", limit_bytes=200, reachable_bytes=330, tick=0, op="", module="")
        return {"ratio": 1.1}

    monkeypatch.setattr(cases, "make_budget", make)
    monkeypatch.setattr(cases, "_planned", lambda method: {})
    bench: Any = SimpleNamespace(plain=Peak(100, 1100, None), device=None, measure=measure)
    facts = cases.measure_budget(bench, 0.1, Options(None, "1GiB"), 5, 0.0, lambda memory: None)
    assert facts == {"ratio": 1.1, "least_reachable_bytes": 330}
    assert shares == [pytest.approx(200 / 1100), pytest.approx(1.01 * 330 / 1100)]


@pytest.fixture
def hollow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: VGG-19 does not run at all, checkpointing fails, and everything else takes no time."""

    def bench(workload: Any, _device: Any) -> Any:
        if workload.name == "vgg19":
            raise MemoryError("too large")
        return workload

    def measure(_bench: Any, name: str, *_: Any) -> dict[str, Any]:
        if name == "checkpoint":
            raise RuntimeError("as if the device had no memory")
        if name == "offload-checkpoint":
            raise KeyboardInterrupt
        return {"ratio": 1.0, "gradients": "identical", "buffers_identical": True}

    monkeypatch.setattr(gpu_run, "Bench", bench)
    monkeypatch.setattr(gpu_run, "measure_peer", measure)


@pytest.mark.usefixtures("hollow")
def test_an_error_is_written_down_and_the_rest_goes_on(tmp_path: Path) -> None:
    document = run(tmp_path, "--models", "vgg19,llama-1b", "--methods", "checkpoint,save-on-cpu", "--deterministic")
    records = document["records"]
    assert [record["status"] for record in records] == ["error", "error", "error", "measured"]
    assert records[1]["reason"].startswith("no plain step: MemoryError: too large\nTraceback")
    assert records[2]["reason"].startswith("RuntimeError: as if the device had no memory\nTraceback")


@pytest.mark.usefixtures("hollow")
def test_what_was_measured_is_there_if_the_run_is_cut_short(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--models", "llama-1b", "--methods", "save-on-cpu,offload-checkpoint")
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert [record["method"] for record in document["records"]] == ["save-on-cpu"]


def test_cases_beyond_the_time_limit_are_skipped(tmp_path: Path) -> None:
    document = run(tmp_path, "--time-limit", "0")
    assert len(document["records"]) == len(MODELS) * (5 + len(METHODS) - 1)
    for record in document["records"]:
        assert (record["status"], record["reason"]) == ("skipped", "the time limit was reached")


@pytest.mark.parametrize("arguments", [["--models", "vgg20"], ["--methods", "magic"]])
def test_unknown_names(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"there is no {arguments[1]}; there are" in capsys.readouterr().err


def test_differences_are_relative_and_not_a_number_is_one() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert cases._difference([one], [one]) == 0
    assert cases._difference([one, one], [one, other]) == pytest.approx(0.1)
    assert cases._difference([one], [one * math.nan]) == math.inf
    assert [cases._verdict(*pair) for pair in ((0, 0), (2e-3, 1e-3), (3e-3, 1e-3), (1e-9, 0))] == [
        "identical",
        "spread",
        "differs",
        "differs",
    ]


def test_the_file_is_always_whole(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    journal = Journal(file, {"device": "none"})
    assert json.loads(file.read_text()) == {"device": "none", "records": []}
    journal.note(took_seconds=1.0)
    journal.add(Record("vgg19", "checkpoint", None, "skipped", "no time"))
    document = json.loads(file.read_text())
    assert document["took_seconds"] == 1.0
    assert document["records"] == json.loads(json.dumps([dataclasses.asdict(record) for record in journal.records]))
    assert list(tmp_path.iterdir()) == [file]


def test_fits_begin_with_shares_that_nobody_fitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or a model would be predicted with what was fitted on itself, where the fitted one has no such ops."""
    seen = Step.load(Path(__file__).parents[1] / "fixtures/gpt2.json.gz")
    copy = dataclasses.replace(seen, ops=(dataclasses.replace(seen.ops[0], duration_seconds=1e-3),))
    monkeypatch.setattr(fit, "matched_step", lambda *_: (copy, (Work("copy", 0, 10**9, "float32"),)))
    fit.main()
    fitted = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fitted on ")]
    machine = load_machine("h100").compute
    assert machine is not None
    assumed = dict(machine.efficiencies)
    assert len(fitted) == 3
    for line in fitted:
        shares = dict(part.split(" ") for part in line.split(": ")[1].split(", "))
        assert {kind for kind, share in assumed.items() if f"{share:.2f}" != shares[kind]} == {"copy"}
