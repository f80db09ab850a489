"""Ray Train starts the workers, and a Trainer trains in them.

    python examples/ray/trainer.py --num_workers 2
    python examples/ray/trainer.py --num_workers 2:4 --fsdp "full_shard auto_wrap" --max_failures 3

Each update takes 16 rows on any number of workers. A worker that dies has Ray start them again, up to `--max_failures`
times, and they go on from the newest checkpoint that was reported; of `2:4` as many as find room.
`--storage_path` is where all machines read and write. A run that has ended goes on with the same command and more
`--max_steps`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from accel_trainer import Trainer, TrainingArguments
from accel_trainer.integrations.ray_train import RayReportCallback

GLOBAL_BATCH = 16
LENGTH = 32


def build_rows() -> list[dict[str, torch.Tensor]]:
    """Return rows of bytes of Python's own sources."""
    text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("a*.py")))[: 400 * LENGTH]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def build_trainer(config: dict[str, Any], num_workers: int = 1, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        per_device_train_batch_size=GLOBAL_BATCH // num_workers,
        eval_strategy="steps",
        save_total_limit=2,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        **config,
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
        )
    )
    rows = build_rows()
    return Trainer(model=model, args=arguments, train_dataset=rows[:-32], eval_dataset=rows[-32:], **options)


def train(config: dict[str, Any]) -> None:
    """Train on one of the workers."""
    num_workers = ray.train.get_context().get_world_size()
    trainer = build_trainer(config, num_workers, callbacks=[RayReportCallback()])
    checkpoint = ray.train.get_checkpoint()
    with nullcontext() if checkpoint is None else checkpoint.as_directory() as folder:
        trainer.train(resume_from_checkpoint=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_workers", default="2", metavar="N|MIN:MAX", help="default: %(default)s")
    parser.add_argument("--use_gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--fsdp", default="", help="as in TrainingArguments; default: DDP on several workers")
    parser.add_argument(
        "--storage_path", default="ray-runs", help="a folder that all machines see; default: %(default)s"
    )
    parser.add_argument("--name", default="trainer", help="of the run; default: %(default)s")
    parser.add_argument("--max_steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--save_steps", type=int, default=10, help="of saves and evaluations; default: %(default)s")
    parser.add_argument("--max_failures", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    low, _, high = options.num_workers.partition(":")
    storage = Path(options.storage_path).resolve()
    config = {"output_dir": str(storage / f"{options.name}-output"), "fsdp": options.fsdp}
    config |= {"max_steps": options.max_steps, "save_steps": options.save_steps, "eval_steps": options.save_steps}
    result = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=(int(low), int(high)) if high else int(low), use_gpu=options.use_gpu),
        run_config=RunConfig(
            name=options.name, storage_path=str(storage), failure_config=FailureConfig(options.max_failures)
        ),
    ).fit()
    print(f"{result.metrics}\n{result.checkpoint}")


if __name__ == "__main__":
    main()
