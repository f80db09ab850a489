"""Inputs of a Trainer, the model and the datasets: loaded, checked, and adapted before anything starts."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import RemoveColumnsCollator, has_length, unwrap_peft_model

from accel_trainer.checkpoint.weights.into_model import init_empty_weights, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.weight_files import INDEX_NAME, WEIGHTS_NAME, WeightFiles
from accel_trainer.errors import ConfigError
from accel_trainer.trainer.arguments.fsdp_arguments import loads_after_sharding
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

_CAUSAL_MODELS = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


class ColumnFilter(RemoveColumnsCollator):
    """Collator that drops the columns a model does not take, without filtering rows that have none to drop."""

    @classmethod
    def of(cls, collator: RemoveColumnsCollator) -> ColumnFilter:
        """Return a filter with the settings of upstream's."""
        return cls(
            collator.data_collator,
            collator.signature_columns,
            logger=collator.logger,
            model_name=collator.model_name,
            description=collator.description,
        )

    def __call__(self, features: list[Any]) -> Any:
        """Collate the rows of a batch. The collator gets copies: it may change them."""
        wanted = frozenset(self.signature_columns)
        for row in features:  # a loop: a generator costs a call for each row of each batch
            if not isinstance(row, dict) or not wanted.issuperset(row):
                break
        else:
            return self.data_collator(list(map(dict, features)))
        return super().__call__(features)


def padding_collator(collator: Any, multiple: int | None) -> Any:
    """Return a collator that pads to a multiple of a length: a copy of the given one, or that one where none is asked.

    Raises:
        ConfigError: it pads nothing, or to another multiple.
    """
    if multiple is None:
        return collator
    before = getattr(collator, "pad_to_multiple_of", 0)
    if before not in (None, multiple) or multiple < 1:
        name = getattr(collator, "__name__", type(collator).__name__)
        own = f"pads to a multiple of {before}" if before else "has no such option"
        reason = "is no length" if multiple < 1 else f"cannot be asked of {name}, which {own}"
        raise ConfigError(
            f"pad_batches_to_multiple_of={multiple} {reason}; use a collator of transformers that pads, such as "
            "DataCollatorWithPadding(tokenizer), and a length of 1 or more, or leave it out"
        )
    # A copy: the collator is the user's, who may give it to another Trainer as well.
    padding = copy.copy(collator)
    padding.pad_to_multiple_of = multiple
    return padding


class ShiftingLabelSmoother(LabelSmoother):
    """Label smoothing for a model that predicts the next token, with or without virtual tokens before its inputs.

    transformers 5.23 (trainer.py:2186) asks for the model's class name in each step; FSDP2 puts a prefix before it.
    """

    def __call__(self, model_output: Any, labels: Any, shift_labels: bool = True, **kwargs: Any) -> Any:
        """Return the smoothed loss; labels are shifted, whatever the caller says."""
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if num_virtual_tokens := logits.shape[-2] - labels.shape[-1]:
            labels = nn.functional.pad(labels, (num_virtual_tokens, 0), value=self.ignore_index)
        return super().__call__(model_output, labels, shift_labels=True, **kwargs)


_EMPTY: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
"""Models without values that are to be sharded, and the directories of their weights."""


def load_model(model: Any, args: TrainingArguments) -> nn.Module | None:
    """Return `model`, or the model saved under a path or a hub name, of the class that its configuration names.

    One that will be sharded with `fsdp.cpu_ram_efficient_loading`, from a directory of safetensors, has no values yet:
    `fill_empty` loads them once it is sharded.

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
    if loads_after_sharding(args, args.resolved):
        empty = _build_empty(model_class, config, Path(model))
        if empty is not None:
            return empty
    loaded: nn.Module = model_class.from_pretrained(model)
    return loaded


def _build_empty(model_class: Any, config: Any, directory: Path) -> nn.Module | None:
    """Return the model without values, or None where ranks cannot read their shards of its files."""
    if not any((directory / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME)):
        return None
    with init_empty_weights():
        model: Any = model_class._from_config(config)
    if not set(WeightFiles(directory)) <= set(model.state_dict(keep_vars=True)):
        return None  # from_pretrained renames or fuses what is in the files
    # from_pretrained() reads it beside the weights, and _from_config() does not: generate() would have other defaults.
    if (directory / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    _EMPTY[model] = directory
    empty: nn.Module = model.eval()
    return empty


def fill_empty(model: nn.Module) -> None:
    """Load a model that `load_model` has built without values, once it is sharded. Every rank calls it."""
    directory = _EMPTY.pop(model, None)
    if directory is not None:
        load_checkpoint_in_model(model, directory, init_missing=True)


def check_dataset(dataset: Any, name: str) -> None:
    """Raise ConfigError for a dataset, or one of a dict of datasets, that has no samples."""
    if isinstance(dataset, dict):
        for key, item in dataset.items():
            check_dataset(item, f"{name}[{key!r}]")
    elif dataset is not None and has_length(dataset) and len(dataset) == 0:
        raise ConfigError(
            f"{name} is empty (a {type(dataset).__name__} with 0 samples); check its path, split and filters"
        )


def build_smoother(model: Any, factor: float, *, shifts: bool) -> LabelSmoother | None:
    """Return the label smoothing of a model's loss; None where the arguments ask for none, or the loss has none.

    Args:
        shifts: the model is known to predict the next token, by whatever tells.
    """
    problem_type = getattr(getattr(model, "config", None), "problem_type", None)
    if not factor or problem_type == "multi_label_classification":
        return None
    return (ShiftingLabelSmoother if shifts or _predicts_next(model) else LabelSmoother)(epsilon=factor)


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss predicts the next token, so that a row's first label is never a target."""
    # transformers 5.23 (trainer.py:543) asks the model's `loss_type`, which is None for GPT-2 and others that fall back
    # to the causal loss: it then counts one target too many in each row, and scales loss and gradients by it.
    return _predicts_next(model) and not predicts_first_label(model)


def _predicts_next(model: Any) -> bool:
    if not isinstance(model, nn.Module):
        return False
    base = unwrap_peft_model(model)
    class_name = type(base).__name__.removeprefix("FSDP")  # which torch's fully_shard puts before it
    return class_name in _CAUSAL_MODELS and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


def predicts_first_label(model: Any) -> bool:
    """Whether PEFT puts virtual tokens before a causal model's inputs: a row's first label is then a target, too."""
    # transformers 5.23 counts one target too few in each row: with 12 labels in a row it logs a loss 12/11 of the true
    # one, and scales the gradients by as much.
    config: Any = getattr(model, "active_peft_config", None)
    # Prefixes are keys and values of earlier tokens: the labels stay as they are.
    return bool(getattr(config, "is_prompt_learning", False)) and config.peft_type not in ("PREFIX_TUNING", "CARTRIDGE")
