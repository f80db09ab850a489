"""A step under FSDP2 on two CPU processes, against `fully_shard` called by hand, both in the same two processes.

Run by run.py through the launcher.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from timing import WAITING, Row, interleave, ratio_row
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from two_ranks import print_measured

from accel_trainer import Accelerator

STEPS = 5


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def rows(rounds: int) -> list[Row]:
    """Compare STEPS updates of ours with as many of the loop by hand. Collective."""
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    by_hand = _llama()
    for layer in by_hand.model.layers:
        fully_shard(layer)
    fully_shard(by_hand)
    hand_optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-3, fused=True)
    model = _llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    tokens = torch.randint(0, 512, (4, 32))

    def hand_steps() -> None:
        dist.barrier()
        for _ in range(STEPS):
            by_hand(input_ids=tokens, labels=tokens).loss.backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
            hand_optimizer.step()
            hand_optimizer.zero_grad()

    def our_steps() -> None:
        dist.barrier()
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    seconds = interleave({"by hand": hand_steps, "ours": our_steps}, WAITING * rounds)
    return [ratio_row("FSDP2 step, 2 processes", "fully_shard by hand", seconds["ours"], seconds["by hand"], 1.05)]


if __name__ == "__main__":
    print_measured(rows)
    dist.destroy_process_group()
