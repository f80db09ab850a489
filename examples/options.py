"""Command-line options that the examples share, and the TrainingArguments that they ask for."""

from __future__ import annotations

import argparse

from accel_trainer import TrainingArguments


def add_run_options(parser: argparse.ArgumentParser, *, output_dir: str, epochs: int, batch_size: int) -> None:
    """Add what every training run has."""
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", default=output_dir, help="where the model is saved (default: %(default)s)")
    group.add_argument("--epochs", type=int, default=epochs, help="passes over the data (default: %(default)s)")
    group.add_argument("--max_steps", type=int, default=-1, help="stop after this many updates instead of --epochs")
    group.add_argument(
        "--global_batch_size",
        type=int,
        default=batch_size,
        help="samples per update over all ranks together, so that a run means the same on any number of them "
        "(default: %(default)s)",
    )
    group.add_argument("--gradient_accumulation_steps", type=int, help="micro-batches per update (default: 1)")
    group.add_argument("--learning_rate", type=float, help="default: 1e-3, and 2e-5 with --model")
    group.add_argument("--weight_decay", type=float, default=0.01, help="default: %(default)s")
    group.add_argument(
        "--seed", type=int, default=0, help="of the weights and of the order of data (default: %(default)s)"
    )
    group.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")


def add_trainer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of TrainingArguments that choose strategy and precision."""
    group = parser.add_argument_group("strategy", "without these: what the launcher says, and one process or DDP else")
    group.add_argument("--fsdp", metavar="OPTIONS", help='shard the model, for instance "full_shard"')
    group.add_argument("--fsdp_config", metavar="FILE", help="YAML or JSON file, or a packaged name; read with --fsdp")
    group.add_argument("--deepspeed", metavar="FILE", help="JSON or YAML file, or a packaged name such as zero3")
    group.add_argument("--bf16", action="store_true", help="compute in bfloat16 on fp32 weights")
    group.add_argument("--push_to_hub", action="store_true", help="upload what is saved")


def add_model_options(parser: argparse.ArgumentParser, *, vocab_size: int, max_length: int) -> None:
    """Add the size of a model that starts from random weights."""
    group = parser.add_argument_group("size of a model from random weights")
    group.add_argument("--hidden_size", type=int, default=192, help="default: %(default)s")
    group.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    group.add_argument("--vocab_size", type=int, default=vocab_size, help="tokens to learn (default: %(default)s)")
    group.add_argument("--max_length", type=int, default=max_length, help="tokens of a sample (default: %(default)s)")
    group.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="default: %(default)s; each rank draws its own, so with dropout a run depends on their number",
    )


def learning_rate(options: argparse.Namespace) -> float:
    """Return the learning rate: higher for random weights than for pretrained ones."""
    return options.learning_rate or (2e-5 if getattr(options, "model", None) else 1e-3)


def build_arguments(options: argparse.Namespace) -> TrainingArguments:
    """Return the TrainingArguments of a run that keeps its best epoch. Collective: joins the job."""
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        learning_rate=learning_rate(options),
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        gradient_accumulation_steps=options.gradient_accumulation_steps or 1,
        weight_decay=options.weight_decay,
        warmup_steps=0.1,  # below 1: a share of all updates
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=50,
        report_to="none",
        seed=options.seed,
        fsdp=options.fsdp,
        fsdp_config=options.fsdp_config,
        deepspeed=options.deepspeed,
        bf16=options.bf16,
        use_cpu=options.cpu,
        push_to_hub=options.push_to_hub,
    )
    ranks, accumulation = arguments.world_size, arguments.gradient_accumulation_steps
    arguments.per_device_train_batch_size = split_batch(options.global_batch_size, ranks * accumulation)
    arguments.per_device_eval_batch_size = split_batch(2 * options.global_batch_size, ranks)
    return arguments


def split_batch(global_batch_size: int, num_parts: int) -> int:
    """Return the size of one part of the global batch.

    Raises:
        SystemExit: it cannot be split evenly.
    """
    size, rest = divmod(global_batch_size, num_parts)
    if rest or size < 1:
        raise SystemExit(
            f"--global_batch_size {global_batch_size} cannot be shared by {num_parts} (ranks x accumulation steps); "
            f"use a multiple of {num_parts}"
        )
    return size
