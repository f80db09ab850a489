"""A resume at batch 100,000 of a stream of 200 parquet files: how long it takes, and the rows that are read again."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import load_dataset
from datasets.utils.logging import disable_progress_bar
from timing import Row, ratio_row
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, DataLoaderConfiguration

NUM_FILES, ROWS_OF_FILE, BATCH_SIZE = 200, 1_200, 2
RESUMED_AT, COMPARED = 100_000, 20
BUFFER = 1_000
BOUND_SECONDS = 1.0

_num_read = torch.zeros((), dtype=torch.int64).share_memory_()
"""Rows that have been read here and in workers."""


def _count(row: dict[str, int]) -> dict[str, int]:
    _num_read.add_(1)
    return row


def _write(folder: str) -> None:
    for index in range(NUM_FILES):
        begin = index * ROWS_OF_FILE
        table = pa.table({"id": pa.array(range(begin, begin + ROWS_OF_FILE))})
        pq.write_table(table, f"{folder}/{index:03}.parquet", row_group_size=400)


def _loader(folder: str, *, shuffles: bool, workers: int) -> Any:
    resumes = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=resumes)
    files = sorted(map(str, Path(folder).glob("*.parquet")))
    stream = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=folder).map(_count)
    stream = stream.shuffle(seed=0, buffer_size=BUFFER) if shuffles else stream
    return accelerator.prepare(DataLoader(stream, BATCH_SIZE, num_workers=workers))


def _ids(reading: Any, count: int) -> list[list[int]]:
    return [next(reading)["id"].tolist() for _ in range(count)]


def _resume(folder: str, options: dict[str, Any], rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds from a state to the first batch, and the rows that were read again, of each round."""
    loader = _loader(folder, **options)
    reading = iter(loader)
    for _ in range(RESUMED_AT):
        next(reading)
    state, expected = loader.state_dict(), _ids(reading, COMPARED)
    del reading, loader
    seconds, again = [], []
    for _ in range(rounds):
        loader = _loader(folder, **options)
        _num_read.zero_()
        begin = time.perf_counter()
        loader.load_state_dict(state)
        reading = iter(loader)
        first = _ids(reading, 1)
        seconds.append(time.perf_counter() - begin)
        if [*first, *_ids(reading, COMPARED - 1)] != expected:
            raise SystemExit(f"a stream with {options} went on elsewhere")
        # What workers have read ahead is not read again: two batches each, and the sample that shows their end.
        workers = options["workers"]
        new = COMPARED * BATCH_SIZE + (workers * (2 * BATCH_SIZE + 1) or 1)
        again.append(float(max(0, int(_num_read) - new)))
        del reading, loader
    return seconds, again


def measure(rounds: int) -> list[Row]:
    """Compare resumes with a second, and rows that are read again with a buffer in each worker."""
    disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _write(folder)
        for workers, shuffles in ((0, False), (0, True), (2, True)):
            name = f"{'buffer, ' if shuffles else ''}{workers} workers"
            seconds, again = _resume(folder, {"workers": workers, "shuffles": shuffles}, rounds)
            rows.append(ratio_row(f"resume, {name}", "1 s", seconds, [BOUND_SECONDS] * rounds, 1.0))
            most = BUFFER * max(1, workers) if shuffles else 1
            rows.append(ratio_row(f"rows read again, {name}", f"{most} rows", again, [float(most)] * rounds, 1.0))
    return rows
