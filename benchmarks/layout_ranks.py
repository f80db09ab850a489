"""What a rank keeps account of, at 4,096 ranks against 64: an update, a save's plan, and a loader's indices.

Both layouts have 4 shards x sp 2 x tp 4, and 2 or 128 replicas: an axis more would be collectives more. The other ranks
do not exist: collectives move nothing, and what is measured is computation, which is the same, and bookkeeping.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from timing import Row, ratio_row
from torch.utils.data import BatchSampler

from accel_trainer.checkpoint.shards import local_box, own_share
from accel_trainer.config import resolve
from accel_trainer.contrib.planner import fake_job
from accel_trainer.data.sampler import SeedableRandomSampler, ShardedBatchSampler
from accel_trainer.precision import build_precision
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.fsdp2.strategy import FSDP2Strategy

STEPS, BATCH_SIZE, SHARDS, SP, TP = 10, 8, 4, 2, 4
BOUNDS = {"an update": 1.1, "the plan of a save": 1.5, "a loader's indices": 3.0}
"""A loader's step is of microseconds, one of which compares the rows of all readers."""


def _seconds(function: Callable[[], object], times: int) -> float:
    function()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    return time.perf_counter() - begin


def _at(world_size: int) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    replicas = world_size // (SHARDS * SP * TP)
    options = {"dp_replicate_size": replicas, "dp_shard_size": SHARDS, "sp_size": SP, "tp_size": TP}
    resolved = resolve(explicit={f"parallel.{name}": size for name, size in options.items()}, environ={})
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=256))
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with fake_job(world_size, 8) as process:
        strategy = FSDP2Strategy()
        readers = strategy.readers(resolved, process)
        unit = strategy.prepare(TrainJob(model, [], resolved), build_precision("no", process.device), process)
        unit.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=0.0))
        named = dict(model.named_parameters())
        order = SeedableRandomSampler(range(readers.world_size * BATCH_SIZE * (STEPS * 100 + 2)))
        sampler = ShardedBatchSampler(BatchSampler(order, BATCH_SIZE, False), readers.world_size, readers.rank)
        batches = iter(sampler)

        def update() -> None:
            unit.set_gradient_sync(True)
            unit.backward(unit.model(input_ids=tokens, labels=tokens).loss)
            unit.clip_grad_norm(model.parameters(), 1.0)
            unit.step()
            unit.zero_grad()

        def plan_save() -> None:
            own_share(named, process.rank, range(world_size))
            for parameter in named.values():
                local_box(parameter)

        def draw() -> None:
            next(batches)
            sampler.planned[-1].weight(readers.rank)

        return {
            "an update": _seconds(update, STEPS),
            "the plan of a save": _seconds(plan_save, STEPS),
            "a loader's indices": _seconds(draw, STEPS * 50),
        }


def measure(rounds: int) -> list[Row]:
    """Compare both sizes in turn."""
    seconds: dict[int, list[dict[str, float]]] = {64: [], 4096: []}
    for index in range(rounds):
        for world_size in (64, 4096) if index % 2 == 0 else (4096, 64):
            seconds[world_size].append(_at(world_size))
    return [
        ratio_row(
            f"{name}, 4,096 ranks", "64 ranks", [s[name] for s in seconds[4096]], [s[name] for s in seconds[64]], bound
        )
        for name, bound in BOUNDS.items()
    ]


if __name__ == "__main__":
    print(json.dumps([row.to_dict() for row in measure(int(sys.argv[1]))]))
