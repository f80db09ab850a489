"""How long a Trainer's save holds up training: in the background, against at once, on two CPU processes.

Run by run.py through the launcher. The state is 1.1 GiB: 100 million parameters with AdamW.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from timing import Row, ratio_row
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from two_ranks import print_measured

import accel_trainer

FSDP: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


class _Timed(TrainerCallback):
    """Notes how long each save holds up training; the one before it is over."""

    def __init__(self, trainer: accel_trainer.Trainer) -> None:
        self.trainer, self.seconds, save = trainer, list[float](), trainer._save_checkpoint

        def timed(*args: Any) -> None:
            trainer.finish_save()
            dist.barrier()
            begin = time.perf_counter()
            save(*args)
            self.seconds.append(time.perf_counter() - begin)

        trainer._save_checkpoint = timed


def _stalls(folder: str, rounds: int, save_async: bool, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=11_000, max_position_embeddings=16,
    )  # fmt: skip
    rows = torch.randint(0, 512, (2 * (rounds + 1), 8))
    arguments = accel_trainer.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="steps", save_steps=1,
        save_total_limit=1, per_device_train_batch_size=1, num_train_epochs=1, save_async=save_async,
        **options,
    )  # fmt: skip
    trainer = accel_trainer.Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    timed = _Timed(trainer)
    trainer.train()
    return timed.seconds[1:]  # the first fills pages


def rows(rounds: int) -> list[Row]:
    """Compare whole runs with a save after each update, in turn. Collective."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    found = []
    for name, options in (("DDP", {}), ("FSDP2", FSDP)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for save_async in (True, False, False, True):
            with (
                tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as own,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                folders = [own]
                dist.broadcast_object_list(folders, src=0)
                seconds[save_async] += _stalls(folders[0], (rounds + 1) // 2, save_async, options)
        found.append(ratio_row(f"stall of a background save, {name}", "the Trainer's save", *seconds.values(), 0.12))
    return found


if __name__ == "__main__":
    accel_trainer.Accelerator(cpu=True)
    print_measured(rows)
    dist.destroy_process_group()
