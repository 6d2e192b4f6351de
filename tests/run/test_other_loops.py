"""The pieces of docs/other-loops.md, in the loops of the libraries that they are for, where these are installed."""

from __future__ import annotations

import contextlib
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide import Budget

PAGE = Path(__file__).parents[2] / "docs" / "other-loops.md"
BATCHES, BATCH = 10, 512
pytestmark = pytest.mark.filterwarnings("default")  # those libraries warn of this and that


def piece(heading: str, **names: Any) -> dict[str, Any]:
    """Run the code under a heading of the page, in which ``names`` stand for what they say; what it defines."""
    section = PAGE.read_text().split(f"## {heading}\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    exec(code[1], names)
    return names


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(128, 10))


def example(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(128, generator=generator), torch.randint(10, (), generator=generator)


def examples() -> Any:
    """A data set, as pairs."""
    return [example(number) for number in range(BATCHES * BATCH)]


def named_examples() -> Any:
    """The same, by the names of a model's arguments."""
    return [dict(zip(("inputs", "labels"), pair, strict=True)) for pair in examples()]


def assert_same(plain: nn.Module, within: nn.Module, memory: Budget) -> None:
    """The two were trained to the same bits, the latter by planned steps."""
    assert memory.state == "planned"
    for expected, found in zip(plain.parameters(), within.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_lightning(micro_batches: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, number: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) if number != 3 else None

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def train(callbacks: list[Any]) -> nn.Module:
        module = Module()
        loader = torch.utils.data.DataLoader(examples(), batch_size=BATCH)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", accumulate_grad_batches=micro_batches, callbacks=callbacks, **quiet
        )
        trainer.fit(module, loader)
        return module

    plain = train([])
    with Budget("70%", spill=tmp_path) as memory:
        assert_same(plain, train([piece("Lightning")["BudgetCallback"](memory)]), memory)


@pytest.mark.parametrize("whole", [False, True])
def test_lightning_with_two_backward_passes(whole: bool, tmp_path: Path) -> None:
    """As the page says, the first of them is in the step, and both are without `on_after_backward`."""
    lightning = pytest.importorskip("lightning")
    budgets: list[Budget] = []
    inside: list[bool] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.other, self.automatic_optimization = network(), network(), False

        def training_step(self, batch: Any, number: int) -> None:
            for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
                loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
                inside.append(any(memory._loop.running is not None for memory in budgets))
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(net.parameters()) for net in (self.net, self.other)]

    def train(callbacks: list[Any]) -> nn.Module:
        module = Module()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(examples(), batch_size=BATCH))
        return module

    plain = train([])
    with Budget("85%", spill=tmp_path) as memory:
        budgets.append(memory)
        callback = piece("Lightning")["BudgetCallback"]
        if whole:
            del callback.on_after_backward
        inside.clear()
        assert_same(plain, train([callback(memory)]), memory)
    assert inside == [True, whole] * BATCHES


def test_lightning_errors_end_the_step(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, number: int) -> Any:
            raise ValueError("of the user's")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([nn.Parameter(torch.ones(1))])

    with Budget("1GiB", spill=tmp_path) as memory:
        callback = piece("Lightning")["BudgetCallback"](memory)
        trainer = lightning.Trainer(accelerator="cpu", logger=False, max_epochs=1, callbacks=[callback])
        with pytest.raises(ValueError, match="of the user's"):
            trainer.fit(Module(), torch.utils.data.DataLoader(examples()))
        with memory.step():  # no other step is under way
            pass


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_hugging_face_trainer(micro_batches: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}

    def train(trainer_class: Any, **given: Any) -> nn.Module:
        model = Model()
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=micro_batches,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer_class(model=model, args=arguments, train_dataset=named_examples(), **given).train()
        return model

    plain = train(transformers.Trainer)
    with Budget("70%", spill=tmp_path) as memory:
        assert_same(plain, train(piece("Hugging Face Trainer")["BudgetTrainer"], memory=memory), memory)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            loss = nn.functional.cross_entropy(self.net(inputs), labels)
            return type("Output", (), {"loss": loss})

    def train(memory: Any) -> nn.Module:
        torch.manual_seed(1)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(named_examples(), batch_size=BATCH)
        prepared = accelerator.prepare(model, optimizer, loader)
        names = dict(zip(("model", "optimizer", "loader"), prepared, strict=True))
        piece("Accelerate", accelerator=accelerator, memory=memory, **names)
        return model

    plain = train(types.SimpleNamespace(step=contextlib.nullcontext))
    with Budget("70%", spill=tmp_path) as memory:
        assert_same(plain, train(memory), memory)


def test_ultralytics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes on noise; gradients add up over several batches, as the trainer has it."""
    monkeypatch.setenv("YOLO_OFFLINE", "1")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    ultralytics = pytest.importorskip("ultralytics")
    from PIL import Image
    from ultralytics.models.yolo.detect import DetectionTrainer  # type: ignore[import-not-found, unused-ignore]

    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    for number in range(16):
        pixels = torch.randint(256, (96, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "labels" / f"{number}.txt").write_text(f"{number % 2} 0.5 0.5 0.{1 + number % 4} 0.3\n")
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [one, two]\n")
    off = dict.fromkeys(("plots", "val", "save", "verbose", "amp"), False)

    def train(**trainer: Any) -> nn.Module:
        model = ultralytics.YOLO("yolov8n.yaml")
        model.train(data=data, epochs=8, imgsz=96, batch=8, workers=0, device="cpu", project=tmp_path, **off, **trainer)
        module: nn.Module = model.trainer.model
        return module

    plain = train()
    with Budget("90%", spill=tmp_path) as memory:
        assert_same(plain, train(trainer=piece("Ultralytics")["within"](memory, DetectionTrainer)), memory)
