"""Training data of a Trainer: mixtures, packed rows with their collator, and whether a model can be given those."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import DataCollatorWithPadding, default_data_collator
from transformers.trainer_utils import has_length

from accel_trainer.data.mixture import read_mixture
from accel_trainer.data.packing import (
    STRATEGIES,
    PackedDataset,
    PackedStream,
    PackingCollator,
    check_packing,
    pack_dataset,
)
from accel_trainer.errors import ConfigError
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from accel_trainer import Trainer


def asks_for_packing(args: TrainingArguments) -> bool:
    """Whether batches are packed, or freed of padding, here; not by a library whose arguments have fields of that name.

    `trl.SFTConfig` has: its Trainer packs the data by itself.
    """
    own = (args.packing or args.padding_free) and not any(
        "packing" in getattr(base, "__dataclass_fields__", {}) and not issubclass(base, TrainingArguments)
        for base in type(args).__mro__
    )
    return bool(own)


def check_packing_arguments(trainer: Trainer) -> None:
    """Refuse options by which packed batches could not be made or trained on. Not collective."""
    args, comm_strategy = trainer.args, trainer.accelerator.config.parallel.comm_strategy
    if not asks_for_packing(args):
        return
    has_length = isinstance(args.max_length, int) and args.max_length > 0
    is_grouped = str(args.train_sampling_strategy) not in ("random", "sequential")
    for is_wrong, reason in (
        (
            args.packing and args.packing_strategy not in STRATEGIES,
            f"packing_strategy={args.packing_strategy!r} is none of {', '.join(STRATEGIES)}; choose one",
        ),
        (
            args.packing and not has_length,
            f"max_length={args.max_length!r} is no length of a row; give the number of tokens",
        ),
        (
            args.packing and is_grouped,
            f"train_sampling_strategy={args.train_sampling_strategy!r} groups samples, and rows are all as long; leave "
            "it out",
        ),
        (
            not trainer._loss_shifts_labels,
            f"{type(trainer.model).__name__} is no causal language model, whose labels are the next tokens, or has "
            "virtual ones before them; leave it out",
        ),
        (
            comm_strategy == "alltoall",
            "cp_comm_strategy=alltoall is ring attention, which is causal SDPA to all tokens of a row; use allgather",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"{'packing=True' if args.packing else 'padding_free=True'}: {reason}")


def mixed_training_data(trainer: Trainer) -> Any:
    """Return the training set that was given, or the mixture that the arguments describe. Collective."""
    args, given = trainer.args, trainer.train_dataset
    if not (described := args.resolved.config.dataset_mixture):
        return given
    if given is not None:
        raise ConfigError(
            f"dataset_mixture (from {args.resolved.source('dataset_mixture').where}) describes the training data, and "
            f"a train_dataset ({type(given).__name__}) was given as well; leave one of them out"
        )
    accelerator = trainer.accelerator
    ranks = 1 if accelerator.config.data.split_batches else accelerator.readers.world_size
    update = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
    is_reordered = str(args.train_sampling_strategy) != "sequential" or asks_for_packing(args) and args.packing
    with args.main_process_first(desc="mixing the training data"):
        mixture = read_mixture(described, trainer.processing_class)
        if mixture.options.get("schedule") and is_reordered:
            raise ConfigError(
                "the schedule of dataset_mixture is an order of the samples, which shuffling and packing change; "
                "set train_sampling_strategy='sequential' and packing=False"
            )
        return mixture.mix(seed=_data_seed(args), samples_per_update=update, num_updates=args.max_steps)


def _data_seed(args: TrainingArguments) -> int:
    return args.seed if args.data_seed is None else args.data_seed


def packs_rows(args: TrainingArguments, dataset: Any) -> bool:
    """Whether rows are made of a training set here, by the arguments; it may be of packed rows already."""
    return asks_for_packing(args) and args.packing and not isinstance(dataset, (PackedDataset, PackedStream))


def packed_for_training(trainer: Trainer, dataset: Any) -> tuple[Any, Any]:
    """Return the training set with the collator for it, as they are where nothing is packed. Not collective."""
    args = trainer.args
    if not asks_for_packing(args):
        return dataset, trainer.data_collator
    columns = None
    if hasattr(dataset, "remove_columns") and has_length(dataset):
        dataset = trainer._remove_unused_columns(dataset, description="Training")
    elif args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns = trainer._signature_columns
    if packs_rows(args, dataset):
        dataset = pack_dataset(dataset, args.max_length or 0, args.packing_strategy, seed=_data_seed(args))
    return dataset, packing_collator(trainer, columns)


def packing_collator(trainer: Trainer, columns: Any = None) -> Any:
    """Return the collator of packed batches: the user's own, or one that calls the user's for each document.

    Documents are put into one row where the model's attention tells them apart in one alone, as flash attention does.
    """
    given, args = trainer.data_collator, trainer.args
    if isinstance(given, PackingCollator):
        return given
    attention = str(getattr(getattr(trainer.model, "config", None), "_attn_implementation", None))
    has_kernels = "flash" in attention and trainer.accelerator.config.parallel.sequence_size == 1
    is_default = _only_pads(given)
    if not is_default and getattr(given, "pad_to_multiple_of", None):
        given = copy.copy(given)
        given.pad_to_multiple_of = None
    return PackingCollator(
        pad_token_id=getattr(trainer.processing_class, "pad_token_id", None) or 0,
        padding_free=args.padding_free or "flash" in attention,
        return_flash_attn_kwargs=has_kernels,
        pad_to_multiple_of=args.pad_batches_to_multiple_of,
        columns=columns,
        collate_document=None if is_default else given,
    )


def _only_pads(collator: Any) -> bool:
    """Whether a collator is one of those that a Trainer takes by itself."""
    return collator is default_data_collator or type(collator) is DataCollatorWithPadding


def unpacked_collator(trainer: Trainer) -> Any:
    """Return the collator of what is evaluated: the user's own, or one that takes the documents that packing takes."""
    given = trainer.data_collator
    if not (asks_for_packing(trainer.args) and _only_pads(given)):
        return given
    padding = replace(packing_collator(trainer), padding_free=False, return_flash_attn_kwargs=False)
    return partial(_collate_documents, given, padding)


def _collate_documents(given: Any, padding: PackingCollator, samples: Sequence[Mapping[str, Any]]) -> Any:
    """Return a batch of samples, each a row; by the given collator where it can make one with labels."""
    is_labelled = all("labels" in sample for sample in samples)
    is_even = is_labelled and len({len(sample["input_ids"]) for sample in samples}) == 1
    return given(samples) if is_even else padding(samples)


def padding_collator(collator: Any, args: TrainingArguments) -> Any:
    """Return a collator that pads to the length that is asked for: a copy of the given one, or that one without it.

    Raises:
        ConfigError: it pads nothing, or to another multiple.
    """
    multiple = args.pad_batches_to_multiple_of
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


def check_packed_model(trainer: Trainer, model: Any, train_dataloader: Any) -> None:
    """Refuse a prepared model that does not tell packed documents apart, before its first batch. Collective."""
    collator: Any = getattr(train_dataloader, "collate_fn", None)
    while not isinstance(collator, PackingCollator) and hasattr(collator, "data_collator"):
        collator = collator.data_collator  # transformers' RemoveColumnsCollator
    if isinstance(collator, PackingCollator):
        with trainer.compute_loss_context_manager():
            check_packing(model, collator, device=trainer.args.device)
