"""An update of some ten milliseconds with meters and without, in processor time; padded rows, whose mask is summed.

One model and one loop; figures are read at the end of each round, as where a loop logs.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from timing import WAITING, Row, interleave, ratio_row
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Accelerator

NUM_UPDATES, ROWS, LENGTH = 20, 4, 32


def measure(rounds: int) -> list[Row]:
    """Compare a loop over a tiny llama whose Accelerator counts with the same one that does not. On one process."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, use_cache=False)
    torch.manual_seed(0)
    tokens = torch.randint(0, 512, (NUM_UPDATES * ROWS, LENGTH))
    rows = [{"input_ids": row, "attention_mask": (row > 20).long().cummin(0).values, "labels": row} for row in tokens]
    accelerator = Accelerator(cpu=True, config={"meters": True})
    own = AutoModelForCausalLM.from_config(config).train()
    model, optimizer, loader = accelerator.prepare(
        own, torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True), DataLoader(rows, batch_size=ROWS)
    )
    meters = accelerator.meters

    def run(is_on: bool) -> None:
        accelerator.meters = meters if is_on else None
        loader.watch = meters.watch if is_on and meters is not None else None
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.perf()

    runs = {name: partial(run, name == "on") for name in ("on", "off")}
    seconds = interleave(runs, WAITING * rounds, clock=time.process_time)
    return [ratio_row("meters", "the same loop without", seconds["on"], seconds["off"], 1.005)]
