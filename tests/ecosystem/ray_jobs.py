"""Functions that Ray's workers run in tests: the examples, with one that dies; a trial of Tune; shards of Ray Data."""

from __future__ import annotations

import importlib
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.train
import ray.tune
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, Trainer, TrainingArguments
from accel_trainer.integrations.ray_train import RayReportCallback, RayShard
from accel_trainer.utils import gather_object


def train_example(config: dict[str, Any]) -> None:
    """Run `train` of an example; `kill` has the update after which a worker, or its node, dies, once."""
    example = importlib.import_module(config.pop("example"))
    kill = config.pop("kill", None)
    if kill is not None:
        _die_once(**kill)
    example.train(config)


def _die_once(after: int, marker: str, head: str = "") -> None:
    """Let the last worker die, or, given the head's node, with which the job would die, all of the other node."""
    context, is_elsewhere = ray.train.get_context(), ray.get_runtime_context().get_node_id() != head
    count = 0

    def die(*_: Any) -> None:
        nonlocal count
        count += 1
        dies = is_elsewhere if head else context.get_world_rank() == context.get_world_size() - 1
        if count == after and dies and not Path(marker).exists():
            Path(marker).touch()
            for process in _processes_of_node() if head else [os.getpid()]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    register_optimizer_step_post_hook(die)


def _processes_of_node() -> list[int]:
    """Return its raylet, whose children its workers are, and those, with this one at the end."""
    raylet, own = os.getppid(), os.getpid()
    listed = (path.read_text().split() for path in Path(f"/proc/{raylet}/task").glob("*/children"))
    workers = {int(number) for numbers in listed for number in numbers}
    return [raylet, *(workers - {own}), own]


def try_learning_rate(config: dict[str, Any]) -> None:
    """Train in a trial of Tune, with the learning rate that it suggests."""
    example = importlib.import_module("trainer")
    example.build_trainer(config, callbacks=[RayReportCallback(ray.tune.report)]).train()


def read_shard(config: dict[str, Any]) -> None:
    """Write which rows a prepared loader gave in two passes to all workers, and the batches of the first of them."""
    accelerator = Accelerator()
    batches = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=4, device="cpu")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(RayShard(batches), batch_size=None))
    seen: list[list[int]] = []
    sizes: list[int] = []
    ends: list[bool] = []
    for _ in range(2):
        seen.append([])
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["id"][:, None].float()).mean())
                optimizer.step()
            sizes.append(len(batch["id"]))
            ends.append(accelerator.gradient_state.end_of_dataloader)
            seen[-1] += accelerator.gather_for_metrics(batch["id"]).tolist()
    accelerator.free_memory()
    trained = _train_on_rows(config["folder"])
    if accelerator.is_main_process:
        Path(config["folder"], "seen").write_text(json.dumps([seen, sizes, ends, sorted(trained)]))
    accelerator.end_training()


class _Rows(torch.nn.Module):
    """Takes note of the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, id: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += id.tolist()
        return {"loss": self.line(id[:, None].float()).mean()}


def _train_on_rows(folder: str) -> list[int]:
    """Return the rows that the Trainers of all workers have seen in one pass. Collective."""
    rows = RayShard(ray.train.get_dataset_shard("train").iter_rows())
    options = {"max_steps": 2, "per_device_train_batch_size": 6, "save_strategy": "no", "report_to": "none"}
    trainer = Trainer(model=_Rows(), args=TrainingArguments(folder, **options), train_dataset=rows)
    trainer.train()
    rows_seen: list[int] = gather_object(trainer.model.seen)
    return rows_seen
