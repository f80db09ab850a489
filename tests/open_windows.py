"""A window of micro-batches that is saved while it is open, and gone on with in another job."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["train_open_window"]


def train_open_window(
    accelerator: Any, model: nn.Module, tokens: Tensor, directory: str | None, load: bool = False
) -> dict[str, Tensor] | None:
    """Train by logits on rows of tokens, one to a micro-batch, with a save or a load after two; return the weights.

    Args:
        tokens: (rows, length); the windows are the Accelerator's.

    Returns:
        On rank 0; None on the others.
    """
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    loader = accelerator.prepare(torch.utils.data.DataLoader(samples, batch_size=1))
    if load:
        accelerator.load_state(directory)
        loader = accelerator.skip_first_batches(loader, 2)
    for index, batch in enumerate(loader, start=2 * load):
        with accelerator.accumulate(model):
            logits = model(input_ids=batch["input_ids"]).logits
            targets = batch["labels"][:, 1:]
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
            accelerator.backward(accelerator.global_token_mean(loss, targets.numel()))
            optimizer.step()
            optimizer.zero_grad()
        if index == 1 and directory is not None and not load:
            accelerator.save_state(directory)
    return accelerator.get_state_dict(model)
