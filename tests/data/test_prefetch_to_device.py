"""Batches on an accelerator: pinned, and copied in a stream of their own; with the streams of a stand-in device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BatchEncoding

from accel_trainer.data.loader import PreparedDataLoader
from tests import number_sets
from tests.cells import crossed
from tests.waits import DEVICE, RecordedStreams, counting_waits, report, stand_in_device

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
LENGTH = 7


class Rows(Dataset):
    """Rows of their own index; reading one is written down, where it is read in this process."""

    def __init__(self, log: list[str] | None = None, broken: int = -1) -> None:
        self.log, self.broken = log if log is not None else [], broken

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.broken:
            raise ValueError(f"row {index} is broken")
        self.log.append(f"read {index}")
        return {"x": torch.full((index + 1,), float(index))}


class Stream(IterableDataset):
    """The same rows, as a stream."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Rows()[index] for index in range(LENGTH))


def alone(samples: list[Any]) -> Any:
    return samples[0]


def prepare(loader: DataLoader, device: torch.device | None = DEVICE, **options: Any) -> PreparedDataLoader:
    return number_sets.prepare(loader, device=device, **options)


@pytest.fixture
def streams() -> Iterator[RecordedStreams]:
    with stand_in_device() as streams:
        yield streams


def read(loader: PreparedDataLoader, log: list[str]) -> list[str]:
    """Read a pass, and return what happened, with the uses of batches in between."""
    for batch in loader:
        assert batch["x"].device == DEVICE
        log.append(f"use {tuple(batch['x'].shape)}")
    return log


def test_the_next_batch_of_workers_is_being_copied_while_one_is_used(streams: RecordedStreams):
    log = read(prepare(DataLoader(Rows(), 1, collate_fn=alone, num_workers=1)), streams.log)

    assert log[:2] == ["copy records", "copy records"]
    assert log.count("copy records") == log.count("compute waits for copy") == LENGTH
    # Batch i + 1 is on its way before batch i is used; no batch is used before the computation has waited for it.
    for index in range(LENGTH):
        used = log.index(f"use ({index + 1},)")
        assert log[:used].count("copy records") == min(index + 2, LENGTH)
        assert log[used - 2 : used] == ["compute waits for copy", f"compute keeps ({index + 1},)"]


def test_batches_of_this_process_are_copied_beside_the_computation_and_not_made_ahead(streams: RecordedStreams):
    log = read(prepare(DataLoader(Rows(streams.log), 1, collate_fn=alone)), streams.log)

    def step(index: int) -> list[str]:
        shape = f"({index + 1},)"
        return [f"read {index}", "copy records", "compute waits for copy", f"compute keeps {shape}", f"use {shape}"]

    assert log == [event for index in range(LENGTH) for event in step(index)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_copies_wait_for_nothing(streams: RecordedStreams, num_workers: int):
    loader = prepare(DataLoader(Rows(), 1, collate_fn=alone, num_workers=num_workers))
    with counting_waits() as waits:
        read(loader, streams.log)
    assert not waits, report(waits)


def test_without_the_option_batches_are_copied_where_they_are_used(streams: RecordedStreams):
    loader = DataLoader(Rows(), 1, collate_fn=alone, num_workers=1)
    for non_blocking in (False, True):
        with counting_waits() as waits:
            log = read(prepare(loader, prefetch_to_device=False, non_blocking=non_blocking), [])
        assert waits.total() == (0 if non_blocking else LENGTH)
    assert log == [f"use ({index + 1},)" for index in range(LENGTH)]
    assert streams.log == []


@pytest.mark.parametrize(("kind", "num_workers"), crossed([Rows, Stream], [0, 2]))
def test_the_loader_tells_of_the_batch_in_use_and_not_of_the_one_on_its_way(
    streams: RecordedStreams, kind: Any, num_workers: int
):
    def seen(prefetch: bool) -> list[Any]:
        loader = prepare(DataLoader(kind(), 2, collate_fn=len, num_workers=num_workers), prefetch_to_device=prefetch)
        steps = [
            (batch, loader.rows, loader.end_of_dataloader, loader.remaining, loader.state_dict()) for batch in loader
        ]
        return [*steps, loader.state_dict()]

    assert seen(True) == seen(False)


def test_a_pass_that_is_left_goes_on_after_the_batch_that_was_used_last(streams: RecordedStreams):
    def build() -> PreparedDataLoader:
        return prepare(DataLoader(Rows(), 1, collate_fn=alone, num_workers=1), use_stateful_dataloader=True)

    left = build()
    for batch in left:
        if batch["x"].numel() == 3:
            break
    resumed = build()
    resumed.load_state_dict(left.state_dict())
    assert [batch["x"].numel() for batch in resumed] == [4, 5, 6, 7]


def test_an_error_of_the_next_batch_comes_after_the_good_one(streams: RecordedStreams):
    used: list[str] = []
    with pytest.raises(ValueError, match="row 3 is broken") as error:
        read(prepare(DataLoader(Rows(broken=3), 1, collate_fn=alone, num_workers=1)), used)
    assert used == ["use (1,)", "use (2,)", "use (3,)"]
    # It holds the workers in a cycle: collected as one, torch's queues end before the workers hear of it, 5 s later.
    traceback.clear_frames(error.tb)


class Opaque:
    """A batch whose tensors nobody else can find."""

    def __init__(self, samples: Any) -> None:
        self.where = "host"

    def to(self, device: Any, non_blocking: bool = False) -> Opaque:
        """Move it."""
        self.where = str(torch.meta.current_stream().name)
        return self


def test_a_class_of_the_users_own_is_copied_by_the_computing_stream(streams: RecordedStreams):
    assert next(iter(prepare(DataLoader(Rows(), 1, collate_fn=Opaque)))).where == "compute"
    assert streams.log == []


def test_batches_of_a_tokenizer_are_kept_for_the_computation(streams: RecordedStreams):
    loader = prepare(DataLoader(Rows(), 1, collate_fn=lambda rows: BatchEncoding({"ids": rows[0]["x"], "n": 1})))
    batch = next(iter(loader))
    assert isinstance(batch, BatchEncoding)
    assert batch["ids"].device == DEVICE
    assert streams.log == ["copy records", "compute waits for copy", "compute keeps (1,)"]


def test_batches_are_pinned_where_they_are_copied_so(streams: RecordedStreams):
    def pins(pinned: bool = False, device: torch.device | None = DEVICE, **options: Any) -> bool:
        loader = DataLoader(Rows(), 1, pin_memory=pinned, num_workers=1)
        prepared = prepare(loader, device, **options)
        assert loader.pin_memory is pinned, "the user's own loader stays as it is"
        return prepared.pin_memory

    assert pins()
    assert prepare(DataLoader(Stream(), 1, num_workers=1))._source._reader.pin_memory
    assert not pins(pin_memory=False)
    assert pins(True, pin_memory=False)
    assert not pins(prefetch_to_device=False)
    assert not pins(device=None)
    assert not pins(device=torch.device("cpu"))
