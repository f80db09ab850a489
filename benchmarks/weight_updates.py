"""What averages of the weights add to an update, and how many bytes of gradients an update in the backward holds."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from timing import Row, interleave, ratio_row
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Accelerator

TOKENS = 4, 256


class _Loop:
    """Updates of a llama of 18 million parameters. Their number cancels: a step and an average go over all of them."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=32_000, max_position_embeddings=TOKENS[1],
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        self.parameters = list(model.parameters())
        self.most = 0
        for parameter in self.parameters:  # before those of the preparation
            parameter.register_post_accumulate_grad_hook(self._count)
        self.accelerator = Accelerator(cpu=True, config=options)
        optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.unit = self.accelerator.unit_of(self.model)
        self.averages = self.unit.averages
        self.ids = torch.randint(0, 32_000, TOKENS)

    def _count(self, _: Tensor) -> None:
        self.most = max(self.most, sum(p.grad.nbytes for p in self.parameters if p.grad is not None))

    def update(self, averages: Any) -> None:
        """Do an update, with averages or without."""
        self.unit.averages = averages
        self.accelerator.backward(self.model(input_ids=self.ids, labels=self.ids).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(rounds: int) -> list[Row]:
    """Compare updates of one model with and without averages, and the most gradients that two loops hold."""
    torch.set_num_threads(1)
    averaged, early = _Loop(ema_decay=0.999), _Loop(optimizer_in_backward=True)
    runs = {
        "on": partial(averaged.update, averaged.averages),
        "off": partial(averaged.update, None),
        "early": partial(early.update, None),
    }
    seconds = interleave(runs, rounds, clock=time.process_time)
    held = [[float(loop.most)] for loop in (early, averaged)]
    return [
        ratio_row("an update with ema_decay", "without", seconds["on"], seconds["off"], 1.02),
        ratio_row("bytes of gradients, in backward", "of all gradients", *held, 0.5),
        ratio_row("an update in the backward", "after it", seconds["early"], seconds["off"], None),
    ]
