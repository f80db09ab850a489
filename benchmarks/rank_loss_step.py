"""A step on ranks that could go on without one that is lost, against the same step of ranks that could not.

python benchmarks/rank_loss_step.py ROUNDS SIZE...  # the rows, as JSON on the last line; run.py calls it
python benchmarks/rank_loss_step.py --rank SIZE     # one process: trains for every line that it reads

In the same processes: two jobs of one program differ by 4 % of processor time, whatever they are asked for. The thread
that waits for word of a loss is in both; it takes 5 us a second. Ranks of a replica wait for each other before each
step, which processor time would hide: there the time has a bound, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timing import SHORT, WAITING, Row, ratio_row
from torch import nn
from torch.utils.data import DataLoader

NUM_STEPS = 20


class Size(NamedTuple):
    """A job, by the processor time of a step on each rank, about. `width` is of the model, `num_samples` of a batch."""

    width: int
    num_samples: int
    num_ranks: int = 2
    num_replicas: int = 1
    repeats: int = WAITING
    time_bound: float | None = None


SIZES = {
    "2.5 ms": Size(256, 16),
    "30 ms": Size(1024, 160),
    "HSDP of 30 ms": Size(1024, 160, num_ranks=4, num_replicas=2, repeats=SHORT, time_bound=1.01),
}
SHARDS = {"strategy": "fsdp2", "fsdp": {"wrap_classes": ["Linear"]}}


def serve(size: Size) -> None:
    """Train for every line of the standard input; print the seconds: of the processor, and by a clock.

    A line says whether this rank could go on without the other one.
    """
    from accel_trainer import Accelerator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, num_samples = size.width, size.num_samples
    shards: dict[str, Any] = {**SHARDS, "parallel": {"dp_replicate_size": size.num_replicas}}
    accelerator = Accelerator(cpu=True, config=shards if size.num_replicas > 1 else {})
    model = nn.Sequential(
        nn.Linear(64, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = torch.randn(num_samples * size.num_ranks * NUM_STEPS, 64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, num_samples))
    lost, admit, guarded = accelerator.lost_ranks, loader.admit, vars(model).get("_pre_forward")
    assert lost is not None
    assert lost._votes == (size.num_replicas > 1)
    for line in sys.stdin:
        is_on = line.strip() == "on"
        accelerator.lost_ranks = optimizer.lost_ranks = lost if is_on else None
        loader.admit = admit if is_on else None
        vars(model).pop("_pre_forward", None)
        if is_on and guarded is not None:
            model._pre_forward = guarded
        begin = time.process_time(), time.perf_counter()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        print(json.dumps([time.process_time() - begin[0], time.perf_counter() - begin[1]]), flush=True)


def measure_size(name: str, rounds: int) -> list[Row]:
    """Return the ratios for one of SIZES; that of time without a bound only informs."""
    size = SIZES[name]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environ = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size.num_ranks),
        "LOCAL_WORLD_SIZE": str(size.num_ranks), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
        "ACCEL_TRAINER_LAUNCH__ON_RANK_LOSS": "continue",
    }  # fmt: skip
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, __file__, "--rank", name]
    ranks = [
        start(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size.num_ranks)
    ]
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for index in range(rounds * size.repeats + 1):
        for which in ("on", "off") if index % 2 == 0 else ("off", "on"):
            for rank in ranks:
                print(which, file=rank.stdin, flush=True)
            said = [json.loads(rank.stdout.readline()) for rank in ranks]
            if index > 0:  # the first warms up
                # The job takes as long as its slowest rank: where none waits before a step, one may end early.
                found[which].append((sum(each[0] for each in said), max(each[1] for each in said)))
    for rank in ranks:
        rank.stdin.close()
        rank.wait(60)
    return [
        ratio_row(
            f"on_rank_loss, {name}, {clock}", f"the same without it, {size.num_ranks} processes",
            *([each[kind] for each in found[which]] for which in ("on", "off")), bound,
        )
        for kind, (clock, bound) in enumerate((("processor", 1.01), ("time", size.time_bound)))
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        serve(SIZES[sys.argv[2]])
    else:
        rows = [row for name in sys.argv[2:] for row in measure_size(name, int(sys.argv[1]))]
        print(json.dumps([row.to_dict() for row in rows]))
