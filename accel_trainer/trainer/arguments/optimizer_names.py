"""Names of `TrainingArguments.optim` that are refused before anything is built, each with the reason."""

from __future__ import annotations

import re

from transformers import TrainingArguments

from accel_trainer.errors import ConfigError

__all__ = ["check_optimizer_name"]

_IN_BACKWARD = re.compile(r"lomo|_layerwise$")
_UNSAVED = {
    re.compile(r"apollo|galore"): "projector objects",
    re.compile(r"grokadamw"): "its parameter groups, by the identity of the parameters",
}
_UNSAVED_SHARDS = {re.compile(r"[48]bit|ademamix"): "blocks or rows that are not those of the parameters"}


def check_optimizer_name(args: TrainingArguments, shards: bool) -> None:
    """Refuse an optimizer that the Trainer cannot train with as it promises.

    Args:
        shards: whether each rank holds a shard of each parameter.

    Raises:
        ConfigError: it updates during the backward, or checkpoints with its state are asked for and cannot be resumed.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if _IN_BACKWARD.search(name):
        raise ConfigError(
            f"optim={name!r} updates each parameter during the backward, before all micro-batches and processes have "
            "given their gradients: accumulation, clipping and its state in checkpoints would not hold; use adafactor "
            "or galore_adamw"
        )
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no" or args.save_only_model:
        return
    for pattern, place in {**_UNSAVED, **(_UNSAVED_SHARDS if shards else {})}.items():
        if pattern.search(name):
            raise ConfigError(
                f"optim={name!r} keeps its state in {place}, which a checkpoint{' of shards' * shards} cannot bring "
                "back: a resumed run would not be the interrupted one; set save_only_model=True or save_strategy='no', "
                "or use an optimizer of torch"
            )
