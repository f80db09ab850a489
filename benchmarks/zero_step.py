"""A step under ZeRO-1, 2 and 3 on two CPU processes, against `deepspeed.initialize` by hand, in the same two processes.

Run by run.py through the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_step import STEPS, _llama
from timing import WAITING, Row, interleave, ratio_row
from two_ranks import print_measured

from accel_trainer import Accelerator, DeepSpeedPlugin


def _by_hand(stage: int, tokens: torch.Tensor) -> Callable[[], None]:
    import deepspeed

    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    config.update(zero_allow_untested_optimizer=True, train_micro_batch_size_per_gpu=4, steps_per_print=2**31)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def steps() -> None:
        dist.barrier()
        for _ in range(STEPS):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    return steps


def _ours(stage: int, tokens: torch.Tensor) -> Callable[[], None]:
    config = {"zero_optimization": {"stage": stage}, "zero3_init_flag": False}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config))
    model = _llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    def steps() -> None:
        dist.barrier()
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return steps


def rows(rounds: int) -> list[Row]:
    """Compare STEPS updates of ours with as many of the loop by hand, at each stage. Collective."""
    tokens = torch.randint(0, 512, (4, 32))
    measured = []
    for stage in (1, 2, 3):
        ours = _ours(stage, tokens)  # joins the job
        seconds = interleave({"by hand": _by_hand(stage, tokens), "ours": ours}, WAITING * rounds)
        name = f"ZeRO-{stage} step, 2 processes"
        measured.append(ratio_row(name, "deepspeed.initialize by hand", seconds["ours"], seconds["by hand"], 1.05))
    return measured


if __name__ == "__main__":
    print_measured(rows)
    # Six engines' threads are not worth waiting for: one that still runs would end the process with SIGABRT.
    os._exit(0)
