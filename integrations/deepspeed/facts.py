"""What a run knows, for a DeepSpeed configuration that leaves values to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Fact", "Facts", "hidden_size_of"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that the run has, whatever the configuration says."""

    value: Any
    where: str
    """What messages call its source: `TrainingArguments(learning_rate=...)`."""
    is_default: bool = False
    """Nobody chose it: it fills an "auto", and a number in the configuration wins without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the run knows. None means that nothing is known, and an "auto" that needs it is an error."""

    world_size: int
    micro_batch_size: Fact | None = None
    """Rows of one batch on one rank."""
    accumulation_steps: Fact | None = None
    max_grad_norm: Fact | None = None
    """None and 0 do not clip."""
    precision: Fact | None = None
    """no, bf16 or fp16."""
    optimizer: Mapping[str, Fact] = field(default_factory=dict)
    """lr, betas, eps, weight_decay, ... of the optimizer that the configuration describes."""
    scheduler: Mapping[str, Fact] = field(default_factory=dict)
    """total_num_steps, warmup_num_steps, warmup_min_lr, warmup_max_lr."""
    hidden_size: Fact | None = None
    given_optimizer: Literal["none", "torch", "dummy"] = "none"
    """What the user prepares: a torch optimizer, a DummyOptim, or nothing (evaluation, or not known yet)."""
    given_scheduler: Literal["none", "torch", "dummy"] = "none"
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where keys of the block came from, as `Resolved.block_origins` has it: {"zero_stage": "train.yaml:7"}."""
    name: str = "the DeepSpeed configuration"


def hidden_size_of(config: Any, where: str = "model.config") -> Fact | None:
    """Return the width of a model from its configuration object, nested ones of multimodal models included.

    Args:
        config: any object or mapping; `hidden_size` or the largest of `hidden_sizes` is taken, then that of the text
            model, then the largest of any nested configuration.
        where: what the message calls it.
    """
    if config is None:
        return None
    own = config if isinstance(config, Mapping) else _attributes(config)
    size = own.get("hidden_size") or getattr(config, "hidden_size", None)
    sizes = own.get("hidden_sizes") or getattr(config, "hidden_sizes", None)
    if isinstance(size, int):
        return Fact(size, f"{where}.hidden_size")
    if isinstance(sizes, list | tuple) and sizes:
        return Fact(max(sizes), f"{where}.hidden_sizes")
    nested = {
        name: found
        for name, item in own.items()
        if (isinstance(item, Mapping) or hasattr(item, "to_dict")) and not name.startswith("_")
        if (found := hidden_size_of(item, f"{where}.{name}")) is not None
    }
    return nested.get("text_config") or max(nested.values(), key=lambda fact: fact.value, default=None)


def _attributes(config: Any) -> Mapping[str, Any]:
    return vars(config) if hasattr(config, "__dict__") else {}
