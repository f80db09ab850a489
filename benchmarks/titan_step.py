"""An update under FSDP2 in bf16 on two CPU processes, beside a loop as torchtitan's, both in the same two processes.

What its loop does for a dense decoder (its `distributed/fsdp.py` and `trainer.py`), in lines of our own: the embedding
is a unit, norm and head are one that stays gathered for the backward, each block is one; parameters compute in bf16 and
gradients are summed in fp32; the loss is a sum, divided by the tokens of all ranks; then clipping and a fused AdamW.
Run by run.py through the launcher.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from fsdp2_step import STEPS, _llama
from timing import SHORT, Row, interleave, ratio_row
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from two_ranks import print_measured

from accel_trainer import Accelerator


def _loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")


def _shard(model: nn.Module) -> nn.Module:
    body = model.model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(body.embed_tokens, mp_policy=policy)
    fully_shard([body.norm, model.lm_head], mp_policy=policy, reshard_after_forward=False)
    for layer in body.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def rows(rounds: int) -> list[Row]:
    """Compare STEPS updates of ours with as many of such a loop. Collective."""
    tokens = torch.randint(0, 512, (4, 32))
    accelerator = Accelerator(cpu=True, strategy="fsdp2", mixed_precision="bf16")
    model = _llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    theirs = _shard(_llama())
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)

    def their_updates() -> None:
        dist.barrier()
        for _ in range(STEPS):
            their_optimizer.zero_grad()
            num_tokens = (tokens[:, 1:] != -100).sum()
            dist.all_reduce(num_tokens)
            # By the number of ranks, which FSDP2 divides by: theirs leaves that out, and gloo cannot.
            (_loss_sum(theirs, tokens) * dist.get_world_size() / num_tokens).backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, foreach=True)
            their_optimizer.step()

    def our_updates() -> None:
        dist.barrier()
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                num_tokens = (tokens[:, 1:] != -100).sum()
                accelerator.backward(accelerator.global_token_mean(_loss_sum(model, tokens), num_tokens))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    functions = {"theirs": their_updates, "ours": our_updates}
    for update in functions.values():
        update()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        # One training: in bf16 the sign of a gradient near zero, and so Adam's step, differs here and there.
        assert (ours.full_tensor() - other.full_tensor()).abs().mean() < 1e-4
    seconds = interleave(functions, SHORT * rounds, clock=time.process_time)
    name, peer = "FSDP2 step in bf16, 2 processes", "a loop as torchtitan's"
    return [ratio_row(name, peer, seconds["ours"], seconds["theirs"], None)]


if __name__ == "__main__":
    print_measured(rows)
    dist.destroy_process_group()
