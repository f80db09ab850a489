"""Tiny models with adapters of every kind that is tested, and the strategies that they are trained with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.loops import take_update
from tests.strategy_configs import zero_section
from tests.trainer_jobs import TokenDataset, arguments, build_model, strategy_arguments

METHODS = ("modules_to_save", "prompt", "checkpointing")
"""LoRA with a layer that is trained in full, prompts, and LoRA alone, whose layers are computed again."""
STRATEGIES = ("single", "ddp", "fsdp", "zero2", "zero3")
RANKS = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}


def _strategy(name: str) -> dict[str, Any]:
    chosen = strategy_arguments("zero3" if name == "zero2" else name)
    if name == "zero2":
        chosen["deepspeed"]["zero_optimization"]["stage"] = 2
    return chosen


def build_accelerator(strategy: str, **options: Any) -> Any:
    """Return an Accelerator on the CPU."""
    from accel_trainer import Accelerator

    if strategy.startswith("zero"):
        block = {"zero_optimization": zero_section(int(strategy[-1]), whole=0), "zero3_init_flag": False}
        return Accelerator(cpu=True, config={"strategy": "deepspeed", "deepspeed": block}, **options)
    return Accelerator(cpu=True, strategy="fsdp2" if strategy == "fsdp" else strategy, **options)


def prepare_loop(strategy: str, build: Callable[[], nn.Module], **options: Any) -> tuple[Any, ...]:
    """Return an Accelerator with a prepared model, its optimizer, and a loader over four updates of eight rows."""
    accelerator = build_accelerator(strategy, **options)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(TokenDataset(32), batch_size=8 // RANKS[strategy])
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train_loop(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, *, save_to: Any = None, load_from: Any = None
) -> list[float]:
    """Train, with a save after two updates, or behind them from such a state; return the losses of all ranks' rows."""
    if load_from:
        accelerator.load_state(load_from)
        loader = accelerator.skip_first_batches(loader, 2)
    losses = []
    for update, batch in enumerate(loader, 1):
        loss = take_update(model(**batch).loss, optimizer, accelerator)
        losses.append(accelerator.reduce(loss.float(), "mean").item())
        if save_to and update == 2:
            accelerator.save_state(save_to)
    return losses


def adapt(model: nn.Module, method: str, **changes: Any) -> Any:
    """Return a causal language model with fresh adapters, equal on all ranks."""
    import peft

    torch.manual_seed(5)
    options: dict[str, Any] = {"task_type": "CAUSAL_LM", **changes}
    if method == "prompt":
        return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=4, **options))
    if method == "reparameterized":
        return peft.get_peft_model(model, peft.PromptEncoderConfig(num_virtual_tokens=4, **options))
    if method == "projected":
        config = peft.PrefixTuningConfig(
            num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16, **options
        )
        return peft.get_peft_model(model, config)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], **options}
    if method == "modules_to_save":
        options["modules_to_save"] = ["lm_head"]
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def build_peft_trainer(output_dir: str | Path, strategy: str, method: str, model: Any = None, **changes: Any) -> Any:
    """Return a Trainer over four updates of eight rows each, on any number of ranks; an epoch has two."""
    from accel_trainer import Trainer

    options: dict[str, Any] = {
        "per_device_train_batch_size": 8 // RANKS[strategy], "num_train_epochs": 2,
        "gradient_checkpointing": method == "checkpointing", **_strategy(strategy), **changes,
    }  # fmt: skip
    model = adapt(build_model(), method) if model is None else model
    args = arguments(output_dir, **options)
    return Trainer(model, args, train_dataset=TokenDataset(16), eval_dataset=TokenDataset(11, seed=1))


def trained_tensors(trainer: Any) -> dict[str, Any]:
    """Return the values of what is trained on rank 0, by name. Collective."""
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    state = trainer.accelerator.get_state_dict(trainer.model)
    return {name: state[name].numpy() for name in names if name in state}


@torch.no_grad()
def batch_loss(model: nn.Module) -> float:
    """Return the loss of the evaluation data in plain PyTorch: its rows are equally long."""
    rows = TokenDataset(11, seed=1).rows
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return model.eval()(**batch).loss.item()
