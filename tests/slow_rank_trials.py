"""Trainers of several ranks, of which one sleeps in a phase of its updates, or all: `python -m tests.slow_rank_trials`.

The bound: 200 ms in each phase on each rank are named right in all of 60 trials; 60 trials in which all
ranks are as slow are silent.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

from tests.ranks import preload, run_ranks

preload("accel_trainer.trainer")

SECONDS = 0.2
PHASES = ("data", "forward", "backward", "optimizer", "save", "evaluation")
_NUM_UPDATES, _LOGGING_STEPS = 41, 10
EVERYONE = -1


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(SECONDS)
        return gradient


class _Model(nn.Module):
    """Some layers and a loss, which may sleep."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.phase = phase

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        if self.training and self.phase == "forward":
            time.sleep(SECONDS)
        if self.training and self.phase == "backward":
            y = _SleepInBackward.apply(y)
        if not self.training and self.phase == "evaluation":
            time.sleep(SECONDS)
        return {"loss": (y - labels).square().mean(), "logits": y}


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num_rows: int, *, sleeps: bool) -> None:
        self.num_rows, self.sleeps = num_rows, sleeps

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.sleeps:
            time.sleep(SECONDS / 2)  # two rows in a batch
        return {"x": torch.full((32,), index / 100), "labels": torch.ones(32)}


class _SlowAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        time.sleep(SECONDS)
        return super().step(closure)


def train(directory: str, slow_rank: int, phase: str, strategy: str, **arguments: Any) -> Any:
    """Train a rank of a trial; return the figures of its logs, the warnings, and the record of all ranks."""
    import logging

    from accel_trainer import Trainer, TrainingArguments

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accel_trainer.runtime.slow_ranks")
    logger.addHandler(handler)
    own = phase if slow_rank in (EVERYONE, int(os.environ["RANK"])) else ""
    model = _Model(own)
    args = TrainingArguments(
        output_dir=directory, use_cpu=True, max_steps=_NUM_UPDATES, per_device_train_batch_size=2,
        logging_steps=_LOGGING_STEPS, report_to=[], disable_tqdm=True, meters=True, seed=0,
        fsdp=True if strategy == "fsdp2" else None,
        save_strategy="steps" if phase == "save" else "no", save_steps=1, save_total_limit=1,
        eval_strategy="steps" if phase == "evaluation" else "no", eval_steps=1,
        **arguments,  # of TrainingArguments
    )  # fmt: skip
    optimizer = (_SlowAdamW if own == "optimizer" else torch.optim.AdamW)(model.parameters(), 1e-3)

    class SlowTrainer(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:  # which every rank does once in a save
            time.sleep(SECONDS)
            super()._save_rng_state(output_dir)

    trainer = (SlowTrainer if own == "save" else Trainer)(
        model, args, train_dataset=_Rows(4 * _NUM_UPDATES, sleeps=own == "data"),
        eval_dataset=_Rows(4, sleeps=False), optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    figures = [
        (log.get("perf/slow_rank"), log.get("perf/slow_phase")) for log in trainer.state.log_history if "loss" in log
    ]
    return figures, warnings, trainer.run_report.to_plain()["ranks"]


def run_trial(slow_rank: int, phase: str, strategy: str = "ddp", world_size: int = 2, **arguments: Any) -> Any:
    """Return what rank 0 does, which warns for all."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(train, world_size, directory, slow_rank, phase, strategy, timeout=300, **arguments)[0]


def main() -> int:
    """Run the trials that are asked for; 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60, help="with a slow rank, and as many without")
    parser.add_argument("--begin", type=int, default=0, help="number of the first one")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--world_size", type=int, default=2)
    asked = parser.parse_args()
    num_wrong = 0
    for number in range(asked.begin, asked.begin + asked.trials):
        phase, slow_rank = PHASES[number % len(PHASES)], number // len(PHASES) % asked.world_size
        for rank, where in ((slow_rank, phase), (EVERYONE, phase)):
            warnings = run_trial(rank, where, asked.strategy, asked.world_size)[1]
            begins = [f"rank {rank} is slow in {where}:"] if rank != EVERYONE else []
            is_right = [text[: text.find(":") + 1] for text in warnings] == begins
            num_wrong += not is_right
            who = "all ranks" if rank == EVERYONE else f"rank {rank}"
            print(f"{number}: {who} in {where}: {'right' if is_right else f'WRONG: {warnings}'}", flush=True)
    print(f"{num_wrong} of {2 * asked.trials} trials are wrong")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
