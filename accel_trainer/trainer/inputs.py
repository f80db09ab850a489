"""What a Trainer is given, checked before anything starts: the model and the datasets."""

from __future__ import annotations

import os
from typing import Any

import transformers
from torch import nn
from transformers.trainer_utils import has_length

from accel_trainer.errors import ConfigError

__all__ = ["check_dataset", "load_model"]


def load_model(model: Any) -> nn.Module | None:
    """Return `model`, or the model that a path or a hub name stands for, of the class that its configuration names.

    Raises:
        ConfigError: it is neither a module nor a path, or its configuration names no class.
    """
    if model is None or isinstance(model, nn.Module):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, or the path or name of a saved model. "
            "Pass a function that builds the model as model_init"
        )
    config = transformers.AutoConfig.from_pretrained(model)
    names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ConfigError(
            f"the configuration of {str(model)!r} names {names or 'no architecture'}, which transformers cannot build; "
            "load the model with the class you want, and pass it"
        )
    loaded: nn.Module = model_class.from_pretrained(model)
    return loaded


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a dataset, or one of a dict of datasets, that has no samples.

    Raises:
        ConfigError: names the dataset.
    """
    if isinstance(dataset, dict):
        for key, item in dataset.items():
            check_dataset(item, f"{name}[{key!r}]")
    elif dataset is not None and has_length(dataset) and len(dataset) == 0:
        raise ConfigError(f"{name} is empty (a {type(dataset).__name__} with 0 samples); check its path, split and filters")
