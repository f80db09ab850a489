"""Trainer.train under DDP and FSDP2 on two CPU processes, against the same loop by hand in the same two processes.

Run by run.py through the launcher.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from timing import Row, interleave, ratio_row
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator
from two_ranks import print_measured

import accel_trainer

UPDATES, BATCH_SIZE = 40, 4
FSDP: dict[str, Any] = {"fsdp": "full_shard auto_wrap"}


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def _shard(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def _replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def train_by_hand(data: list[dict[str, Tensor]], wrap: Any) -> None:
    """Train as one would by hand, with the update's tokens counted over the ranks, as the Trainer does."""
    model = wrap(_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    sampler: Any = DistributedSampler(data)
    model.train()
    for batch in DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=default_data_collator):
        num_items = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(num_items)
        (model(**batch, num_items_in_batch=num_items).loss * dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def train(data: list[dict[str, Tensor]], options: dict[str, Any], folder: str) -> None:
    """Train with the Trainer, set-up included."""
    arguments = accel_trainer.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", num_train_epochs=1,
        per_device_train_batch_size=BATCH_SIZE, learning_rate=1e-3, weight_decay=0.0, logging_steps=100,
        lr_scheduler_type="constant", ddp_find_unused_parameters=False, **options,
    )  # fmt: skip
    accel_trainer.Trainer(model=_llama(), args=arguments, train_dataset=data).train()


def rows(rounds: int) -> list[Row]:
    """Compare whole runs of UPDATES updates, under each strategy. Collective."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokens = torch.randint(0, 512, (UPDATES * BATCH_SIZE * 2, 32), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for name, wrap, options in (("DDP", _replicate, {}), ("FSDP2", _shard, FSDP)):
            seconds = interleave(
                {
                    "by hand": lambda wrap=wrap: train_by_hand(data, wrap),  # type: ignore[misc]
                    "ours": lambda options=options: train(data, options, folder),  # type: ignore[misc]
                },
                rounds,
                between=dist.barrier,
            )
            what = f"Trainer.train, {name}, 2 processes"
            found.append(ratio_row(what, "the loop by hand", seconds["ours"], seconds["by hand"], 1.08))
    return found


if __name__ == "__main__":
    accel_trainer.Accelerator(cpu=True)
    print_measured(rows)
    dist.destroy_process_group()
