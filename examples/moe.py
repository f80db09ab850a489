r"""Tensor and expert parallelism of a mixture of experts: the layout is a file, and the script says nothing of it.

    python examples/moe.py                                                               # one process
    accel-trainer launch --num_processes 2 --cpu --config_file expert_parallel examples/moe.py
    accel-trainer launch --num_processes 2 --cpu --config_file tensor_parallel examples/moe.py
    accel-trainer launch --num_processes 8 --parallel_ep_size 4 --mixed_precision bf16 examples/moe.py \
        --model Qwen/Qwen3-30B-A3B

Under EP ranks share the experts and send each other tokens; under TP each rank has some experts in full and a part of
every other matrix. The losses are those of one process. `accel-trainer estimate --compare` says which layout fits.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Accelerator, set_seed

LENGTH = 32
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def build_rows(count: int, vocab_size: int) -> torch.Tensor:
    """Return rows that count upwards, each in steps of its own and from another start."""
    starts, steps = torch.randint(vocab_size, (count, 1)), torch.randint(1, 8, (count, 1))
    return (starts + steps * torch.arange(LENGTH)) % vocab_size


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a mixture (default: a tiny Mixtral)")
    parser.add_argument("--output_dir", default="outputs/moe", help="default: %(default)s")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of an update (default: %(default)s)")
    parser.add_argument("--max_steps", type=int, default=40, help="updates (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None)
    if options.model is None:
        config = AutoConfig.for_model("mixtral", vocab_size=128, num_key_value_heads=2, num_local_experts=4, **TINY)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    rows = build_rows(options.batch_size * options.max_steps, min(model.config.vocab_size, 128))
    # Ranks of a TP group read the same rows, those of an EP group others: `readers` are the ranks that count as one.
    loader = DataLoader(list(rows), batch_size=options.batch_size // accelerator.readers.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if options.model is None else 1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    means = accelerator.reduce(torch.stack(losses), "mean").tolist()
    accelerator.save_model(model, options.output_dir)  # whole weights, for from_pretrained
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    share = experts / sum(parameter.numel() for parameter in model.parameters())
    sizes = accelerator.config.parallel
    accelerator.print(
        f"tp_size {sizes.tp_size}, ep_size {sizes.ep_size}: {share:.0%} of the weights are experts; "
        f"loss {means[0]:.3f} to {means[-1]:.3f}"
    )
    accelerator.end_training()
    return means


if __name__ == "__main__":
    main()
