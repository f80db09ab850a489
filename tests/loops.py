"""An update as loops have it, loops over language models, and one that is saved in the middle of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def start(**options: Any) -> Any:
    """Return an Accelerator on the CPU with `sizes` of axes."""
    from accel_trainer import Accelerator, ParallelismConfig

    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**options.pop("sizes")), **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def take_update(loss: Tensor, optimizer: Any, accelerator: Any = None) -> Tensor:
    """Go backward, step and drop the gradients, in the plain loop without an Accelerator; return the loss."""
    (Tensor.backward if accelerator is None else accelerator.backward)(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def tiny_model(kind: str, **changes: Any) -> nn.Module:
    """Return a causal language model of transformers of two layers, without dropout, with the sizes that it has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    base = AutoConfig.for_model(kind)
    known = {name: value for name, value in (sizes | changes).items() if hasattr(base, name)}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known))


def updates(
    model: nn.Module, optimizer: Any, batches: Iterable[Mapping[str, Tensor]], accelerator: Any = None
) -> list[float]:
    """Return the loss and the norm of an update on each batch, of the plain loop without an Accelerator."""
    seen = []
    for batch in batches:
        loss = model(**batch).loss
        (loss.backward if accelerator is None else lambda loss=loss: accelerator.backward(loss))()
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        seen += [loss.item(), clip(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


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


def resume_open_window(
    begin: Callable[[], Any], build: Callable[[], nn.Module], tokens: Tensor, directory: str
) -> tuple[float, dict[str, float]] | None:
    """Train through an open window that is saved, and again from its state; return what differs, and the weights' sums.

    On rank 0; None on the others.
    """
    whole = train_open_window(begin(), build(), tokens, directory)
    resumed = train_open_window(begin(), build(), tokens, directory, load=True)
    if not whole or resumed is None:
        return None
    difference = max((whole[name] - resumed[name]).abs().max().item() for name in whole)
    return difference, {name: value.double().sum().item() for name, value in whole.items()}


def check_open_window(found: tuple[float, dict[str, float]], model: nn.Module, tokens: Tensor) -> None:
    """Compare what `resume_open_window` has returned with the windows of one process."""
    from accel_trainer import Accelerator

    difference, sums = found
    alone = train_open_window(Accelerator(cpu=True, gradient_accumulation_steps=8), model, tokens, None) or {}
    assert difference < 1e-6
    assert sums == pytest.approx({name: value.double().sum().item() for name, value in alone.items()}, abs=1e-4)
