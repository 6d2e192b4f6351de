"""The stand-ins for devices: streams keep their order and no other, and memory is given away at once."""

from __future__ import annotations

import ctypes
import functools
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.observe.mode import DispatchMode
from ebbtide.run.backends import cuda
from tests.run.backends.ordered import OrderedMemory
from tests.run.backends.threads import InlineBackend, QueuedBackend, Temper

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_stream_keeps_its_order() -> None:
    with InlineBackend(temper=Temper.MOODY) as backend:
        stream = backend.new_stream("one")
        done: list[int] = []
        for number in range(50):
            stream.launch(functools.partial(done.append, number))
        backend.finish(stream)
        assert done == list(range(50))


def test_an_event_orders_two_streams() -> None:
    for seed in range(10):
        with InlineBackend(seed) as backend:
            one, other = backend.new_stream("one"), backend.new_stream("other")
            done: list[str] = []
            one.launch(functools.partial(done.append, "one"))
            other.wait_event(one.record_event())
            other.launch(functools.partial(done.append, "other"))
            backend.finish(other)
            assert done == ["one", "other"]


def test_the_host_does_not_wait_for_a_queued_device() -> None:
    with QueuedBackend(memory_bytes=4096, temper=Temper.PROMPT) as backend:
        kernel = threading.Event()
        backend.compute().launch(lambda: kernel.wait(20))
        event = backend.compute().record_event()
        backend.new_stream("copies").wait_event(event)
        assert not event.query()
        kernel.set()
        event.synchronize()
        assert event.query()


def test_what_was_queued_on_an_inline_device_is_done() -> None:
    with InlineBackend() as backend:
        assert backend.compute().record_event().query()
        assert backend.compute() == backend.compute()


@pytest.mark.parametrize("temper", Temper)
def test_a_copy_copies_all_of_it(temper: Temper) -> None:
    with InlineBackend(temper=temper) as backend:
        stream = backend.new_stream("copies")
        for size in (0, 1, 3, 4, 1000, 100_003):
            source = torch.randint(256, (size,), dtype=torch.uint8)
            target = torch.zeros(size, dtype=torch.uint8)
            backend.copy(stream, target.untyped_storage(), source.untyped_storage())
            backend.finish(stream)
            assert torch.equal(target, source)


def test_memory_is_given_to_the_next_of_the_same_stream() -> None:
    memory = OrderedMemory(1 << 16, lambda before, after: None)
    first = memory.take("a", 5000)
    address = first.data_ptr()
    assert first.nbytes() == 5000
    assert address % 512 == memory.take("b", 1).data_ptr() % 512
    del first
    assert memory.take("b", 5000).data_ptr() != address
    assert memory.take("a", 4000).data_ptr() == address
    with pytest.raises(MemoryError, match="of this device"):
        memory.take("a", 1 << 16)


def test_memory_that_others_use_is_given_back_behind_them() -> None:
    waits: list[tuple[str, str]] = []
    memory = OrderedMemory(1 << 16, lambda before, after: waits.append((before, after)))
    block = memory.take("a", 1000)
    for stream in ("a", "b", "b"):
        memory.used_on(block, stream)
    memory.used_on(memory.take("a", 0), "c")
    assert waits == []
    address = block.data_ptr()
    del block
    assert waits == [("b", "a")]
    again = memory.take("a", 1000)
    assert again.data_ptr() == address
    del again
    assert waits == [("b", "a")]


def test_memory_outlives_its_device() -> None:
    storage = OrderedMemory(4096, lambda before, after: None).take("a", 100)
    ctypes.memset(storage.data_ptr(), 7, 100)
    assert storage.tolist() == [7] * 100


@pytest.mark.parametrize("node", ["0", "1", "-1"])
def test_cpus_near_a_device(node: str, tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for number, cpus in enumerate(("0-1,4\n", "2-3,5-6\n")):
        directory = tmp_path / f"devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(cpus)
    expected = {"0": {0, 1, 4}, "1": {2, 3, 5, 6}, "-1": set()}[node]
    assert cuda.cpus_near("0000:3b:00.0", tmp_path) == expected
    assert cuda.cpus_near("0000:00:00.0", tmp_path) == frozenset()


@pytest.mark.parametrize("current_device", [0, 1])
def test_no_dispatch_mode_sees_a_copy_of_the_cuda_kind(current_device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: what hides the copy, and what makes a stream current, is PyTorch's; that they are asked is tested."""

    class Refuse(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was seen")

    class Side:
        stream_id, device_index, device_type = 7, 0, 1

    class Current:
        def __init__(self, stream: Side) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            made_current.append((self.stream.stream_id, self.stream.device_index, self.stream.device_type))

        def __exit__(self, *_: object) -> None:
            made_current.append(before)

    before, made_current = (3, 0, 1), list[tuple[int, int, int]]()
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current_device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: before, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda *stream: made_current.append(stream), raising=False)
    source, target = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    with Refuse():
        cuda.CudaBackend(0).copy(Side(), target.untyped_storage(), source.untyped_storage())
    assert torch.equal(source, target)
    assert made_current == [(7, 0, 1), before]


def test_cudas_allocator_is_told_who_else_uses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: told.append((self.data_ptr(), stream)))
    backend, storage = cuda.CudaBackend(0), torch.UntypedStorage(100)
    backend.device = storage.device
    backend.used_on(storage, "side")
    assert told == [(storage.data_ptr(), "side")]


def test_caps_of_several_budgets_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least holds, and when the last one goes, what was allowed before the first, in whatever order they go."""
    allowed = [0.9]
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: allowed[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: allowed.append(share))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    monkeypatch.setattr(cuda.CudaMemory, "_count", lambda self, what, which: 60)
    one, other, elsewhere = (cuda.CudaMemory(torch.device("cuda", index)) for index in (0, 0, 1))
    for memory, cap, expected in (
        (one, 50, 0.5), (other, 70, 0.5), (one, None, 0.7), (one, 60, 0.6), (other, None, 0.6), (one, 95, 0.9),
        (one, None, 0.9), (other, 40, 0.4), (other, 45, 0.45), (other, None, 0.9), (elsewhere, 10, 0.1),
    ):  # fmt: skip
        memory.cap(cap)
        assert allowed[-1] == expected
    assert len(emptied) == 5, "where more is reserved than may be"
    elsewhere.cap(None)


def test_an_interrupt_as_a_copy_begins_leaves_the_stream_that_was_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is raised as the call returns that has made another one current."""
    current: list[tuple[int, ...]] = [(0, 0, 1)]

    def set_stream(*stream: int) -> None:
        current[0] = stream
        if stream == (7, 0, 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda _: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", set_stream, raising=False)
    backend: Any = types.SimpleNamespace(device=torch.device("cuda", 0))
    stream = types.SimpleNamespace(stream_id=7, device_index=0, device_type=1)
    with pytest.raises(KeyboardInterrupt):
        cuda.CudaBackend._copy(backend, stream, torch.UntypedStorage(8), torch.UntypedStorage(8))
    assert current == [(0, 0, 1)]
