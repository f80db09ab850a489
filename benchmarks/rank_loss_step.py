"""A step on two ranks that could go on without one that is lost, against the same step of ranks that could not.

python benchmarks/rank_loss_step.py ROUNDS                # the rows, as JSON on the last line; run.py calls it
python benchmarks/rank_loss_step.py --rank WIDTH SAMPLES  # one process: trains for every line that it reads

In the same processes: two jobs of one program differ by 4 % of processor time, whatever they are asked for. The thread
that waits for word of a loss is in both; it takes 5 us a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from timing import WAITING, Row, ratio_row
from torch import nn
from torch.utils.data import DataLoader

NUM_STEPS = 20
SIZES = {"2.5 ms": (256, 16), "30 ms": (1024, 160)}
"""Width of the model and samples of a batch, by the processor time of a step on each rank, about."""


def serve(width: int, num_samples: int) -> None:
    """Train for every line of the standard input; print the seconds: of the processor, and by a clock.

    A line says whether this rank could go on without the other one.
    """
    from accel_trainer import Accelerator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(
        nn.Linear(64, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = torch.randn(num_samples * 2 * NUM_STEPS, 64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, num_samples))
    lost, admit, guarded = accelerator.lost_ranks, loader.admit, vars(model)["_pre_forward"]
    assert lost is not None
    for line in sys.stdin:
        is_on = line.strip() == "on"
        accelerator.lost_ranks = optimizer.lost_ranks = lost if is_on else None
        loader.admit = admit if is_on else None
        vars(model).pop("_pre_forward", None)
        if is_on:
            model._pre_forward = guarded
        begin = time.process_time(), time.perf_counter()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        print(json.dumps([time.process_time() - begin[0], time.perf_counter() - begin[1]]), flush=True)


def measure_size(name: str, rounds: int) -> list[Row]:
    """Return the ratios for one of SIZES; that of time only informs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environ = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
        "ACCEL_TRAINER_LAUNCH__ON_RANK_LOSS": "continue",
    }  # fmt: skip
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, __file__, "--rank", *map(str, SIZES[name])]
    ranks = [start(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for index in range(rounds * WAITING + 1):
        for which in ("on", "off") if index % 2 == 0 else ("off", "on"):
            for rank in ranks:
                print(which, file=rank.stdin, flush=True)
            said = [json.loads(rank.stdout.readline()) for rank in ranks]
            if index > 0:  # the first warms up
                found[which].append((sum(each[0] for each in said), said[0][1]))
    for rank in ranks:
        rank.stdin.close()
        rank.wait(60)
    return [
        ratio_row(
            f"on_rank_loss, {name}, {clock}", "the same without it, 2 processes",
            *([each[kind] for each in found[which]] for which in ("on", "off")), bound,
        )
        for kind, (clock, bound) in enumerate((("processor", 1.01), ("time", None)))
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        serve(*map(int, sys.argv[2:]))
    else:
        rows = [row for name in SIZES for row in measure_size(name, int(sys.argv[1]))]
        print(json.dumps([row.to_dict() for row in rows]))
