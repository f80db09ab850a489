"""A machine that may go, disk and all: each checkpoint is copied to an address, and the next machine goes on there.

    python examples/spot.py --checkpoint_uri s3://bucket/run
    kill -9 ...; rm -rf spot-run; python examples/spot.py --checkpoint_uri s3://bucket/run

The same command starts a run and goes on with one: samples, random numbers and the schedule are those of a run that was
never killed. `file:///mnt/runs/spot`, on a disk that others see, needs no store; the extra `accel-trainer[stores]` has
the packages for s3, gs and abfs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from accel_trainer import Trainer, TrainingArguments

LENGTH = 64


def build_rows() -> list[dict[str, torch.Tensor]]:
    """Return rows of bytes of Python's own sources."""
    text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("a*.py")))[: 800 * LENGTH]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder (default: a tiny llama of bytes)")
    parser.add_argument("--checkpoint_uri", required=True, help="where checkpoints outlive the machine")
    parser.add_argument("--output_dir", default="spot-run", help="on the machine's own disk; default: %(default)s")
    parser.add_argument("--max_steps", type=int, default=100, help="default: %(default)s")
    options = parser.parse_args()
    set_seed(0)
    if options.model is None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **sizes))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        checkpoint_uri=options.checkpoint_uri,
        save_async=True,  # training goes on while a checkpoint is written and sent
        save_steps=10,
        save_total_limit=2,
        max_steps=options.max_steps,
        logging_steps=10,
        per_device_train_batch_size=8,
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=build_rows())
    result = trainer.train(resume_from_checkpoint="auto")  # on the first machine there is none
    if trainer.is_world_process_zero():
        print(
            f"finished after update {result.global_step}, the last loss is {trainer.state.log_history[-2]['loss']:.6f}"
        )


if __name__ == "__main__":
    main()
