r"""Several machines: shards within each, replicas between them, and what a script has to know of it, which is little.

On each machine the same command, but for the number of the machine:

    accel-trainer launch --config_file hybrid_shard --num_machines 2 --num_processes 16 --machine_rank 0 \
        --main_process_ip 10.0.0.1 --main_process_port 29500 examples/several_machines.py

Under SLURM one command for all: `accel-trainer launch --submit slurm --config_file slurm examples/several_machines.py`.
Two "machines" on this one: the command twice, at once, with `--cpu --num_processes 2`, the address 127.0.0.1 and the
ranks 0 and 1. `output_dir` is a folder that all machines see; `checkpoint_uri` does without one (examples/spot.py).
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Trainer, TrainingArguments, set_seed

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def prepare_data(folder: Path) -> Path:
    """Write the tokens once on each machine, as a download or a tokenization would."""
    path = folder / "rows.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = Path(argparse.__file__).read_bytes()[: 400 * 64]
        written = path.with_suffix(f".{os.getpid()}")
        torch.save(torch.tensor(list(text)).view(-1, 64), written)
        written.rename(path)  # at once: another job on this disk finds all of it, or nothing
        print(f"{socket.gethostname()}: rank {os.environ.get('RANK', 0)} has written {path}", flush=True)
    return path


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder (default: a tiny llama of bytes)")
    parser.add_argument("--data_dir", default="/tmp/rows", help="on each machine's own disk (default: %(default)s)")
    parser.add_argument("--output_dir", default="outputs/machines", help="that all see (default: %(default)s)")
    parser.add_argument("--global_batch_size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--max_steps", type=int, default=40, help="updates (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    arguments = TrainingArguments(
        options.output_dir,
        max_steps=options.max_steps,
        learning_rate=3e-3 if options.model is None else 1e-5,
        save_steps=20,
        logging_steps=2,
        log_on_each_node=False,
        report_to="none",
        use_cpu=options.cpu,
    )
    # The same samples make an update on any number of machines.
    arguments.per_device_train_batch_size = options.global_batch_size // arguments.world_size
    with arguments.main_process_first(local=True):  # the first rank of each machine, then its others
        rows = torch.load(prepare_data(Path(options.data_dir)))
    if options.model is None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **TINY))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train(resume_from_checkpoint="auto")  # where there is none, from the beginning
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    process = trainer.accelerator.process
    trainer.accelerator.print(
        f"{process.num_nodes} machines of {process.local_world_size}: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    return losses


if __name__ == "__main__":
    main()
