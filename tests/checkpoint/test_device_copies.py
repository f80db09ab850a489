"""Tensors of an accelerator on their way into a file: through pinned memory, in a stream of their own."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import accel_trainer.checkpoint.safetensors_file as safetensors_file
from accel_trainer.checkpoint.safetensors_file import LazyTensor, StagingMemory, copy_stored, write_tensor_file
from tests.waits import DEVICE, RecordedStreams, counting_waits, report, stand_in_device


@pytest.fixture
def streams() -> Iterator[RecordedStreams]:
    with stand_in_device() as streams, counting_waits() as waits:
        yield streams
    assert not waits, report(waits)


def on_device(rows: int) -> Tensor:
    return torch.empty(rows, 4, device=DEVICE)


COPY = ["copy waits for compute", "copy keeps"]
END = ["copy records", "compute waits for copy"]


def without_shapes(log: list[str]) -> list[str]:
    return [event.partition(" (")[0] for event in log]


def test_a_staged_copy_waits_nowhere_but_on_the_device_before_it_computes_further(streams: RecordedStreams):
    memory = StagingMemory(DEVICE)
    made = LazyTensor(torch.float32, (3, 4), lambda: on_device(3))
    copies = memory.copy({"a": on_device(2), "made": made, "host": torch.ones(5)})

    assert without_shapes(streams.log) == ["pins 192", *COPY, *COPY, *END]
    assert torch.equal(copies["host"], torch.ones(5))
    assert {name: tuple(copy.shape) for name, copy in copies.items()} == {"a": (2, 4), "made": (3, 4), "host": (5,)}
    streams.log.clear()
    memory.wait()
    memory.wait()
    assert streams.log == ["host waits for copy"], "on the thread that writes"


def test_pinned_memory_serves_the_next_save(streams: RecordedStreams):
    memory = StagingMemory(DEVICE)
    for _ in range(3):
        memory.begin()
        memory.copy({"a": on_device(8)})
    assert [event for event in streams.log if event.startswith("pins")] == ["pins 128"]


def test_tensors_of_another_device_are_copied_before_the_copy_returns(streams: RecordedStreams):
    copies = StagingMemory(torch.device("meta", 1)).copy({"a": torch.arange(3)})
    assert torch.equal(copies["a"], torch.arange(3))
    assert not any(event.startswith("copy keeps") for event in streams.log)


def test_a_file_is_written_while_the_device_fills_the_other_buffer(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(safetensors_file, "_CHUNK_BYTES", 16)

    class File(io.BytesIO):
        def write(self, data: object) -> int:
            count = super().write(data)  # type: ignore[arg-type]
            streams.log.append(f"writes {count}")
            return count

    file = File()
    write_tensor_file(file, {"a": on_device(3)})  # 48 bytes: three chunks, two buffers

    begun = [*COPY, "copy records"]
    log = without_shapes(streams.log)[1:]  # after the header
    assert log == [
        "pins 16", "pins 16", *begun, *begun,
        "host waits for copy", "writes 16", *begun,
        "host waits for copy", "writes 16",
        "host waits for copy", "writes 16",
    ]  # fmt: skip


def test_a_stored_tensor_is_read_while_the_device_takes_the_other_buffer(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(safetensors_file, "_CHUNK_BYTES", 16)

    copy_stored(torch.ones(3, 4), on_device(3))

    begun = [*COPY, "copy records"]
    assert without_shapes(streams.log) == [
        "pins 16", "pins 16", *begun, *begun, "host waits for copy", *begun, "compute waits for copy"
    ]  # fmt: skip


def test_a_stored_tensor_of_another_layout_is_copied_as_it_is():
    stored, target = torch.arange(12.0).reshape(3, 4), torch.zeros(4, 3, dtype=torch.float64)
    copy_stored(stored.T, target)
    assert torch.equal(target, stored.T.double())


def test_an_empty_tensor_and_one_of_the_host_need_no_buffer(streams: RecordedStreams):
    file = io.BytesIO()
    write_tensor_file(file, {"none": torch.empty(0, 4, device=DEVICE), "host": torch.arange(4)})
    assert streams.log == []
    assert file.getvalue().endswith(torch.arange(4).numpy().tobytes())
