"""An update of 30 ms and more with meters and without, in turn, in processor time; padded rows, whose mask is summed.

One model, and a loader for each; figures are read after ten updates, as where a loop logs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from timing import SHORT, WAITING, Row, interleave, ratio_row
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Accelerator

NUM_BATCHES, ROWS, LENGTH, LOGGING_STEPS = 20, 4, 96, 10


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def measure(rounds: int) -> list[Row]:
    """Compare updates of a tiny llama that an Accelerator counts with those that it does not. On one process."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, use_cache=False)
    torch.manual_seed(0)
    tokens = torch.randint(0, 512, (NUM_BATCHES * ROWS, LENGTH))
    rows = [{"input_ids": row, "attention_mask": (row > 20).long().cummin(0).values, "labels": row} for row in tokens]
    accelerator = Accelerator(cpu=True, config={"meters": True})
    own = AutoModelForCausalLM.from_config(config).train()
    loaders = {name: DataLoader(rows, batch_size=ROWS) for name in ("on", "off")}
    model, optimizer, *prepared = accelerator.prepare(
        own, torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True), *loaders.values()
    )
    meters = accelerator.meters
    prepared[1].watch = None
    batches = dict(zip(loaders, map(_endless, prepared), strict=True))
    num_updates = dict.fromkeys(loaders, 0)

    def update(name: str) -> None:
        accelerator.meters = meters if name == "on" else None
        batch = next(batches[name])
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        num_updates[name] += 1
        if num_updates[name] % LOGGING_STEPS == 0:
            accelerator.perf()

    runs = {name: partial(update, name) for name in loaders}
    # Of an update 0.1 to 0.3 %: seen in thousands of them alone.
    seconds = interleave(runs, 3 * SHORT * WAITING * rounds, clock=time.process_time)
    return [ratio_row("meters", "the same loop without", seconds["on"], seconds["off"], 1.005)]
